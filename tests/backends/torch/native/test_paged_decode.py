"""The decode kernel in C: what the kit, which runs it in tests/backends/torch/test_torch.py, does not reach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.backends.torch.impl import TorchImpl
from attn_backends.backends.torch.metadata import TorchMetadataBuilder
from attn_backends.backends.torch.native.paged_decode import PagedDecode
from attn_backends.backends.torch.native.paged_rows import PagedRows
from attn_backends.backends.torch.options import TorchOptions
from attn_backends.backends.torch.state import TorchStep
from attn_backends.batch.common import SequenceData, SequenceGroup
from attn_backends.cache.kv_cache import KVCache, write_slots
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, Limits, plan_groups
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.harness import assert_matches, assert_pool, make_layer, run_backend
from tests.helpers.threads import threads

CPU = torch.device("cpu")
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 700},
    "gpt_oss": {"window_left": 1100, "sinks": True},
    "chunks": {"chunk_size": 1024},
    "alibi": {"alibi_slopes": tuple(2.0**-i for i in range(6))},
    "soft_cap": {"logits_soft_cap": 0.7, "scale": 0.5},
    "unequal": {"head_dim_vo": 64},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.sampled
def test_long_rows_in_pieces_beside_short_ones(layer: str, dtype: torch.dtype, layout: Any) -> None:
    spec = AttentionSpec(6, 2, 32, dtype=dtype, **LAYERS[layer])
    lengths = (1900, 1, 64, 257, 2048)
    batch = random_batch(TorchBackend, spec, lengths, (1,) * len(lengths), layout=layout, poison=float("nan"))
    assert make_layer(TorchBackend, batch).begin(batch).metadata.paged_rows is not None
    result = run_backend(TorchBackend, batch, want_lse=True)
    assert_matches(result, batch)
    assert_pool(result.kv_cache, batch.pool_after())


def test_mixed_batches_decode_by_the_kernel_and_write_every_token() -> None:
    batch = random_batch(TorchBackend, AttentionSpec(6, 2, 32), (40, 300, 17, 33), (1, 1, 17, 5))
    metadata = make_layer(TorchBackend, batch).begin(batch).metadata
    assert (len(metadata.paged_rows.seq_lens), len(metadata.paged_prefills.seq_lens)) == (2, 2)
    result = run_backend(TorchBackend, batch, want_lse=True)
    assert_matches(result, batch)
    assert_pool(result.kv_cache, batch.pool_after())


@pytest.mark.parametrize("group", [1, 3, 8, 12, 16, 17])
def test_any_number_of_query_heads(group: int) -> None:
    batch = random_batch(TorchBackend, AttentionSpec(2 * group, 2, 48), (70, 5), (1, 1))
    layer = make_layer(TorchBackend, batch, options=TorchOptions(native_prefill=False))  # which is not compiled then
    step = layer.begin(batch)
    assert step.metadata.paged_rows is not None
    assert_matches(layer.forward(batch, step), batch)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 24},
        {"head_dim_vo": 8},
        {"dtype": torch.float64},
        {"cache_dtype": torch.float8_e4m3fn},
        {"cache_dtype": torch.bfloat16},
        {"attention_type": AttentionType.CROSS, "causal": False},
        {"num_qo_heads": 2048},
    ],
)
def test_what_it_does_not_serve(changes: dict[str, Any]) -> None:
    spec = AttentionSpec(**{"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 32, **changes})
    assert not PagedDecode.serves(spec, CPU)
    assert not PagedDecode.serves(AttentionSpec(4, 2, 32), torch.device("cuda"))
    assert PagedDecode.serves(AttentionSpec(4, 2, 32), CPU)


@pytest.mark.parametrize("changes", [{"scale": 6.0}, {"logits_soft_cap": 0.05}], ids=str)
def test_logits_far_below_the_highest(changes: dict[str, Any]) -> None:
    """By some 90, as by some hundreds: they weigh nothing. And logits far beyond a soft cap. In both kernels."""
    batch = random_batch(TorchBackend, AttentionSpec(4, 2, 32, **changes), (300, 140), (1, 30))
    assert_matches(run_backend(TorchBackend, batch, want_lse=True), batch)


def test_page_tables_of_other_strides() -> None:
    batch = random_batch(TorchBackend, AttentionSpec(4, 2, 32), (40, 300, 70, 33), (1, 1, 17, 5))
    layer, common = make_layer(TorchBackend, batch), batch.common()
    table = torch.stack([common.page_table, common.page_table.flip(1)], 2)[..., 0]
    step = layer.state.begin_forward(layer.builder.build(0, replace(common, page_table=table)))
    assert_matches(layer.forward(batch, step), batch)


def made(spec: AttentionSpec, lengths: tuple[int, ...], **changes: Any) -> dict[str, Any]:
    """Arguments of `PagedDecode.attend`, and the kernel."""
    torch.manual_seed(0)
    num_rows, num_pages = len(lengths), -(-max(lengths) // 16)
    cache = (num_rows * num_pages, 16, spec.num_kv_heads, spec.head_dim)
    table = torch.randperm(cache[0]).int().view(num_rows, -1)
    last = torch.tensor(lengths) - 1
    pages = table[torch.arange(num_rows), (last // 16).clamp(min=0)].long()
    new = (num_rows, spec.num_kv_heads, spec.head_dim)
    return {
        "kernel": PagedDecode.of(spec, CPU, None, 1.0, 1.0),
        "query": torch.randn(num_rows, spec.num_qo_heads, spec.head_dim, dtype=spec.dtype),
        "key": torch.randn(new, dtype=spec.dtype),
        "value": torch.randn(new, dtype=spec.dtype),
        "kv_cache": KVCache(*(torch.randn(cache, dtype=spec.dtype) for _ in range(2))),
        "slots": torch.where(last < 0, -1, pages * 16 + last % 16),
        "rows": PagedRows.of(table, torch.tensor(lengths, dtype=torch.int32)),
        **changes,
    }


def attend(given: dict[str, Any]) -> tuple[torch.Tensor, int]:
    arguments = {**given, "output": given["query"].new_full(given["query"].shape, torch.nan)}
    num_threads = arguments.pop("kernel").attend(**arguments)
    return arguments["output"], num_threads


def test_as_many_threads_as_torch_has() -> None:
    for count in (1, 2, 3):
        with threads(count):
            assert attend(made(AttentionSpec(8, 4, 64), (900, 900)))[1] == count
            assert attend(made(AttentionSpec(8, 4, 64), (3, 2)))[1] == 1  # not worth it


def test_only_torchs_openmp_is_loaded() -> None:
    """A second one would have threads of its own, that wait for work while the first one's do it."""
    attend(made(AttentionSpec(8, 4, 64), (900, 900)))
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "gomp" in line}
    assert len(loaded) <= 1


def test_inputs_of_other_strides() -> None:
    given = made(AttentionSpec(4, 2, 32), (40, 0, 9))
    expected, _ = attend({**given, "kv_cache": KVCache(*(t.clone() for t in given["kv_cache"]))})
    assert bool((expected[1] == 0).all())  # padding
    names = ("query", "key", "value")
    wide = {name: torch.stack([given[name]] * 2, 2).flatten(1, 2)[:, ::2] for name in names}
    across = {name: given[name].mT.contiguous().mT for name in names}
    for strided in (wide, across):
        assert not strided["query"].is_contiguous()
        cache = KVCache(*(t.clone() for t in given["kv_cache"]))
        assert torch.equal(attend({**given, **strided, "kv_cache": cache})[0], expected)


def test_not_a_number_is_not_hidden() -> None:
    for name, row in (("query", 0), ("key", 1), ("value", 2)):
        given = made(AttentionSpec(4, 2, 32), (40, 70, 9))
        given[name][row] = torch.nan
        out, _ = attend(given)
        assert out[row].isnan().any()
        assert out[[i for i in range(3) if i != row]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scaled_writes_are_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    spec = AttentionSpec(4, 2, 32, dtype=dtype)
    given = made(spec, (40, 17, 9), kernel=PagedDecode.of(spec, CPU, None, 3.0, 0.7))
    expected = KVCache(*(t.clone() for t in given["kv_cache"]))
    write_slots(given["key"], given["value"], expected, given["slots"], 3.0, 0.7)
    attend(given)
    assert all(torch.equal(*pair) for pair in zip(given["kv_cache"], expected, strict=True))


def test_the_operator_is_the_kernel() -> None:
    given = made(AttentionSpec(4, 2, 32, sinks=True), (40, 0, 9), kernel=None)
    given["kernel"] = PagedDecode.of(AttentionSpec(4, 2, 32, sinks=True), CPU, torch.arange(4), 0.5, 2.0)
    cache = KVCache(*(t.clone() for t in given["kv_cache"]))
    expected, _ = attend({**given, "kv_cache": cache})
    rows, kernel, output = given["rows"], given["kernel"], torch.full_like(expected, torch.nan)
    inputs = (given["query"], given["key"], given["value"], *given["kv_cache"], given["slots"], rows.pages,
              rows.first_pages, rows.seq_lens, *kernel.constants, output)  # fmt: skip
    torch.library.opcheck(kernel.into, inputs, test_utils="test_schema")
    assert kernel.into(*inputs) >= 1
    assert torch.equal(output, expected)
    assert all(torch.equal(*pair) for pair in zip(given["kv_cache"], cache, strict=True))


def test_options_that_differ() -> None:
    spec, cache = AttentionSpec(4, 2, 32), KVCacheSpec(8, 4)
    builder = TorchMetadataBuilder(plan_groups({0: spec})[0], cache, Limits(4, 4, 16), "cpu")
    metadata = builder.build_from_groups([SequenceGroup("0", (SequenceData(3, 1, [0]),))])
    impl = TorchImpl(spec, cache, "cpu", options=TorchOptions(native_decode=False))
    pool = KVCache(*(torch.zeros(8, 4, 2, 32) for _ in range(2)))
    with pytest.raises(ValueError, match="native_decode"):
        impl.forward(
            torch.zeros(1, 4, 32), torch.zeros(1, 2, 32), torch.zeros(1, 2, 32), pool, TorchStep(metadata, None)
        )
