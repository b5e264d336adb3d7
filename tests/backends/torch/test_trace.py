"""What TORCH gives a compiler to trace is its forward without a kernel of its own, run here without a compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_backends.backends.torch.impl import TorchImpl
from attn_backends.backends.torch.metadata import TorchMetadata, TorchMetadataBuilder
from attn_backends.backends.torch.options import TorchOptions
from attn_backends.backends.torch.state import TorchStep
from attn_backends.batch.common import SequenceData, SequenceGroup
from attn_backends.cache.kv_cache import KVCache
from attn_backends.spec import AttentionSpec, KVCacheSpec, Limits, plan_groups

HEADS, KV_HEADS, DIM, PAGES, PAGE_SIZE = 4, 2, 16, 12, 4
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 3},
    "soft_cap": {"logits_soft_cap": 2.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)},
    "cache of another dtype": {"cache_dtype": torch.float16},
}


def decode(context_len: int, first_page: int, query_len: int = 1) -> SequenceData:
    return SequenceData(context_len, query_len, list(range(first_page, first_page + 4)))


def made(
    rows: list[SequenceData],
    num_padded: int = 0,
    prefix: int = 0,
    scale: float = 1.0,
    native: bool = False,
    **changes: Any,
) -> tuple[TorchImpl, TorchMetadata]:
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, dtype=torch.float32, **changes)
    cache, limits = KVCacheSpec(PAGES, PAGE_SIZE), Limits(8, 32, 64)
    sinks = torch.arange(HEADS) / 2 if spec.sinks else None
    options = TorchOptions(native_decode=native)
    impl = TorchImpl(spec, cache, "cpu", sinks=sinks, k_scale=scale, v_scale=scale**2, options=options)
    groups = [SequenceGroup(str(index), (row,)) for index, row in enumerate(rows)]
    builder = TorchMetadataBuilder(plan_groups({0: spec})[0], cache, limits, "cpu", options=options)
    return impl, builder.build_from_groups(groups, num_padded, prefix)


def new_cache(impl: TorchImpl) -> KVCache:
    torch.manual_seed(0)
    shape = (PAGES, PAGE_SIZE, KV_HEADS, DIM)
    return KVCache(*(torch.randn(shape).to(impl.spec.cache_dtype) for _ in range(2)))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("rows", "num_padded"), [([decode(9, 0), decode(5, 4), decode(6, 8)], 0), ([decode(9, 3)], 1), ([decode(4, 0)], 3)]
)
def test_as_forward(rows: list[SequenceData], num_padded: int, layer: str, scale: float, native: bool) -> None:
    impl, metadata = made(rows, num_padded, scale=scale, native=native, **LAYERS[layer])
    query, key, value = (torch.randn(len(rows) + num_padded, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    expected_cache, cache = new_cache(impl), new_cache(impl)
    plain, its_metadata = made(rows, num_padded, scale=scale, **LAYERS[layer])
    expected = plain.forward(query, key, value, expected_cache, TorchStep(its_metadata, None))
    inputs = impl.trace_inputs(metadata)
    assert inputs is not None
    got = impl.trace(query, key, value, cache, inputs)
    torch.testing.assert_close(got[: len(rows)], expected[: len(rows)])
    assert got.isfinite().all()
    assert all(torch.equal(*pair) for pair in zip(cache, expected_cache, strict=True))


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        ([decode(4, 0), decode(4, 4, query_len=2)], {}),  # a prompt
        ([decode(4, 0)], {}),  # one token: sizes are 2 or more
        ([decode(4, 0), decode(5, 4)], {"window_left": 0}),  # one key
        ([decode(15, 0), decode(1, 4), decode(1, 8)], {}),  # lengths too far apart to gather together
        ([decode(4, 0), decode(4, 4)], {"cache_dtype": torch.float8_e4m3fn}),
    ],
)
def test_steps_that_are_not_traced(rows: list[SequenceData], changes: dict[str, Any]) -> None:
    impl, metadata = made(rows, **changes)
    assert impl.trace_inputs(metadata) is None


@pytest.mark.parametrize(
    ("rows", "prefix"),
    [([decode(4, 0), decode(4, 4, query_len=2)], 0), ([decode(4, 0)], 0), ([decode(5, 0), decode(6, 0)], 4)],
)
def test_steps_that_are_not_traced_by_the_kernel(rows: list[SequenceData], prefix: int) -> None:
    """A prompt, one token, a shared prefix."""
    impl, metadata = made(rows, prefix=prefix, native=True)
    assert impl.trace_inputs(metadata) is None
