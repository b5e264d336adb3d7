"""The shipped cases: readable without torch, whole, and batches built from them as they say."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.spec import AttentionSpec
from attn_backends.testing.cases.cases import load_cases
from attn_backends.testing.cases.random_batch import random_batch
from tests.helpers.forked import run_python


def test_every_shape_is_whole() -> None:
    for name, shape in load_cases().batches.items():
        assert len(shape.seq_lens) == len(shape.query_lens), name
        assert all(1 <= q <= s for q, s in zip(shape.query_lens, shape.seq_lens, strict=True)), name


def test_tolerances_by_dtype_or_name() -> None:
    cases = load_cases()
    assert cases.tolerance(torch.float32) == cases.tolerance("float32") == 2e-5
    assert cases.tolerance(torch.bfloat16) > cases.tolerance(torch.float16)
    with pytest.raises(KeyError, match="int8"):
        cases.tolerance(torch.int8)


def test_reading_them_loads_no_torch() -> None:
    code = "from attn_backends.testing.cases.cases import load_cases; load_cases()"
    code += "; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_quick_check_needs_no_pytest() -> None:
    done = run_python("-c", "import sys; import attn_backends.testing.quick_check; assert 'pytest' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_a_random_batch_is_what_it_says() -> None:
    spec = AttentionSpec(4, 2, 8)
    how = {"page_size": 4, "shared_prefix_len": 8, "lookahead": 1, "poison": -3.0, "seed": 5}
    batch, again = (random_batch(TorchBackend, spec, [9, 17], [1, 4], **how) for _ in range(2))
    assert torch.equal(batch.query, again.query)
    pages = [list(row.data.pages) for row in batch.rows]
    assert [len(row_pages) for row_pages in pages] == [4, 6]
    assert pages[0][:2] == pages[1][:2]
    assert not set(pages[0][2:]) & set(pages[1][2:])
    assert 0 not in pages[0] + pages[1]
    assert torch.equal(batch.rows[0].key[:8], batch.rows[1].key[:8])
    for row, row_pages in zip(batch.rows, pages, strict=True):
        cached = batch.pool.key[row_pages].flatten(0, 1)
        assert torch.equal(cached[: row.num_cached], row.key[: row.num_cached])
        assert bool((cached[row.num_cached :] == -3).all())
