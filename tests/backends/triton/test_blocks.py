"""TRITON's prefill by blocks of the tensor memory accelerator, from pages and from prompts' keys as they came."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, get_backend
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import Layer, Result, assert_matches, assert_pool, make_layer
from tests.helpers.interpreted import in_own_process, only_interpreted, run_interpreted

tuning = pytest.importorskip("attn_backends.backends.triton.tuning", reason="needs triton")
launch = pytest.importorskip("attn_backends.kernels.prefill.launch")

TILE = tuning.PrefillTile(rows=32, keys=32, warps=4, stages=2)
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = [pytest.param("cpu", marks=only_interpreted), ON_GPU]
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}  # the interpreter multiplies no bfloat16


@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the tensors that were loaded by blocks."""
    shapes: list[tuple[int, ...]] = []
    made = launch.kv_descriptors

    def kv_descriptors(key: torch.Tensor, value: torch.Tensor, block_n: int) -> Any:
        shapes.extend([tuple(key.shape), tuple(value.shape)])
        return made(key, value, block_n)

    monkeypatch.setattr(launch, "kv_descriptors", kv_descriptors)
    return shapes


def a_batch(device: str, seq_lens: list[int], query_lens: list[int], dim: int = 32, **more: Any) -> Batch:
    spec = AttentionSpec(4, 2, dim, dtype=DTYPES[device])
    return random_batch(get_backend("TRITON"), spec, seq_lens, query_lens, device=device, **more)


def a_layer(batch: Batch) -> Layer:
    options = tuning.TritonOptions(prefill_tile=TILE, prompt_tile=TILE)
    return make_layer(get_backend("TRITON"), batch, options=options, num_padded_reqs=3)


def check(batch: Batch) -> None:
    """NaN rows behind the query, keys and values: what a block reads beyond a row must not matter."""
    layer = a_layer(batch)
    result = layer.forward(batch, layer.begin(batch, 0, 3), num_padded_reqs=3, want_lse=True)
    assert_matches(result, batch)
    assert_pool(result.kv_cache, batch.pool_after())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [32, 64])
def test_pages_of_whole_blocks(device: str, page_size: int, layout: Any, loaded: list[tuple[int, ...]]) -> None:
    batch = a_batch(device, [150, 90, 40], [30, 90, 17], page_size=page_size, layout=layout)
    check(batch)
    assert [shape[1:] for shape in loaded] == [(page_size, 2, 32)] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_prompts_are_read_as_they_came(device: str, loaded: list[tuple[int, ...]]) -> None:
    """Behind decodes, in small pages; a batch with a chunk of a longer row reads its pages."""
    check(a_batch(device, [70, 90, 33, 100], [1, 90, 33, 100], page_size=16))
    assert [len(shape) for shape in loaded] == [3, 3]
    check(a_batch(device, [70, 90, 120], [1, 90, 30], page_size=16))
    assert len(loaded) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_without_keys_of_its_own(device: str, loaded: list[tuple[int, ...]]) -> None:
    """It shares the cache of one that has written them: a prompt is then read from the pages."""
    batch = a_batch(device, [70, 90], [1, 90], page_size=16)
    layer, pool = a_layer(batch), batch.fresh_pool()
    step = layer.begin(batch)
    first = layer.forward(batch, step, kv_cache=pool)
    assert len(loaded) == 2
    second = layer.impl.forward(batch.query, None, None, pool, step)
    assert_matches(first, batch)
    assert_matches(Result(second, None, pool), batch)
    assert len(loaded) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_one_projection(device: str, loaded: list[tuple[int, ...]]) -> None:
    """Keys and values that lie side by side in a wider tensor; and where an odd one in front makes them unaligned."""
    batch = a_batch(device, [80, 90], [80, 90])
    for odd, expected in ((0, 2), (1, 2)):  # none more of the second
        wide = torch.empty(170, 2 * 64 + odd, dtype=batch.spec.dtype, device=device)
        key, value = (wide[:, odd + at : odd + at + 64].view(170, 2, 32) for at in (0, 64))
        key.copy_(batch.key), value.copy_(batch.value)
        layer, pool = a_layer(batch), batch.fresh_pool()
        output = layer.impl.forward(batch.query, key, value, pool, layer.begin(batch))
        assert_matches(Result(output, None, pool), batch)
        assert len(loaded) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_one_key_for_all_tokens(device: str, loaded: list[tuple[int, ...]]) -> None:
    """A view whose rows are all the same: there is no row to step to."""
    batch = a_batch(device, [80], [80])
    key, value = (of[:1].expand(80, -1, -1) for of in (batch.key, batch.value))
    layer, pool = a_layer(batch), batch.fresh_pool()
    got = layer.impl.forward(batch.query, key, value, pool, layer.begin(batch))
    heads = torch.arange(4, device=device) // 2
    assert torch.allclose(got.float(), value[:, heads].float(), atol=2e-2)
    assert not loaded


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lacking", ["dim", "dtype", "block"])
def test_what_no_block_can_be_of(device: str, lacking: str, loaded: list[tuple[int, ...]]) -> None:
    """Dims to pad, an 8-bit cache, and pages that end within a block are read by pointers."""
    dim, page_size = 48 if lacking == "dim" else 32, 48 if lacking == "block" else 32
    batch = a_batch(device, [150, 90], [40, 80], dim=dim, page_size=page_size)
    if lacking == "dtype":
        spec = replace(batch.spec, cache_dtype=torch.float8_e4m3fn)
        batch = random_batch(get_backend("TRITON"), spec, [150, 90], [40, 80], page_size=32, device=device)
    check(batch)
    assert not loaded
