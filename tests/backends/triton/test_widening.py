"""Where prefills over an fp8 cache have its keys made 16 bits: where that was faster on an H200."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attn_backends import AttentionSpec
from attn_backends.registry import validate_options
from attn_backends.validation import ConfigError

widening = pytest.importorskip("attn_backends.backends.triton.rules", reason="needs triton")
TritonOptions = pytest.importorskip("attn_backends.backends.triton.tuning").TritonOptions

# By benchmarks/rules/widening.py.
MEASURED = json.loads(Path(__file__).parents[3].joinpath("benchmarks/results/widening.json").read_text())["rows"]
SIZES = ("heads", "rows", "keys of each", "tokens of each")
ROOM = TritonOptions().upcast_bytes
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widening, "num_multiprocessors", lambda device: 132)


def is_faster(spec: AttentionSpec, query_lens: list[int], seq_lens: list[int], num_bytes: int = ROOM) -> bool:
    lens = (np.array(lens, np.int32) for lens in (query_lens, seq_lens))
    return bool(widening.is_faster_upcast(spec, *lens, num_bytes, torch.device("cuda")))


def layer(heads: tuple[int, int], **more: Any) -> AttentionSpec:
    return AttentionSpec(*heads, 128, dtype=torch.bfloat16, cache_dtype=E4M3, **more)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: "-".join(str(row[name]) for name in SIZES))
def test_as_measured(row: dict[str, Any]) -> None:
    heads, num_rows, seq_len, query_len = (row[name] for name in SIZES)
    query_heads, kv_heads = map(int, heads.split("/"))
    chosen = is_faster(layer((query_heads, kv_heads)), [query_len] * num_rows, [seq_len] * num_rows)
    assert chosen is (row["16 bits us"] < row["8 bits us"])


def test_keys_that_few_queries_see_stay_as_they_are() -> None:
    assert not is_faster(layer((32, 8)), [17] * 64, [8192] * 64)
    assert is_faster(layer((32, 8)), [8192], [32768])
    assert is_faster(layer((32, 32)), [32768], [32768])
    assert not is_faster(layer((32, 8), window_left=127), [8192], [32768])  # most of the keys are seen by none


def test_keys_without_room_stay_as_they_are() -> None:
    needed = 8192 * 2 * 128 * 2  # of one head
    assert is_faster(layer((1, 1)), [8192], [8192], needed)
    assert not is_faster(layer((1, 1)), [8192], [8192], needed - 1)


def test_room_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"upcast_bytes .*: got -1; allowed: greater than or equal to 0"):
        validate_options("TRITON", {"upcast_bytes": -1})
