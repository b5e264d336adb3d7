"""The prefill kernel in C: what the kit, which runs it in tests/backends/torch/test_torch.py, does not reach."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_backends.backends.torch.backend import TorchBackend
from attn_backends.backends.torch.impl import TorchImpl
from attn_backends.backends.torch.metadata import TorchMetadataBuilder
from attn_backends.backends.torch.native.paged_prefill import PagedPrefill
from attn_backends.backends.torch.options import TorchOptions
from attn_backends.backends.torch.state import TorchStep
from attn_backends.batch.common import SequenceData, SequenceGroup
from attn_backends.cache.kv_cache import KVCache
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, Limits, plan_groups
from attn_backends.testing.cases.batches import Batch
from attn_backends.testing.cases.random_batch import random_batch, with_pool
from attn_backends.testing.harness import assert_matches, assert_pool, make_layer, run_backend
from attn_backends.testing.kit.logits import every_second, levelled
from attn_backends.testing.kit.numerics import interleaved
from tests.helpers.emulated_tiles import emulating, needs_products
from tests.helpers.quick_native import compile_with, forget
from tests.helpers.threads import threads

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 150},
    "gpt_oss": {"window_left": 70, "sinks": True},
    "chunks": {"chunk_size": 128},
    "alibi": {"alibi_slopes": tuple(2.0**-i for i in range(6))},
    "soft_cap": {"logits_soft_cap": 0.7, "scale": 0.5},
    "all": {"logits_soft_cap": 3.0, "window_left": 90, "alibi_slopes": (0.5,) * 6, "sinks": True},
    "both ways": {"causal": False},
    "both ways in a window": {"causal": False, "window_left": 40},
    "both ways in chunks": {"causal": False, "chunk_size": 64},
    "unequal": {"head_dim_vo": 64},
}


def check(batch: Batch, options: TorchOptions | None = None) -> None:
    layer = make_layer(TorchBackend, batch, options=options)
    step = layer.begin(batch)
    assert step.metadata.paged_prefills is not None
    result = layer.forward(batch, step, want_lse=True)
    assert_matches(result, batch)
    assert_pool(result.kv_cache, batch.pool_after())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.sampled
def test_prompts_and_chunks_of_several_tiles(layer: str, dtype: torch.dtype, layout: Any) -> None:
    spec = AttentionSpec(6, 2, 32, dtype=dtype, **LAYERS[layer])
    lengths, queries = (500, 129, 64, 700, 3, 333), (1, 129, 63, 20, 3, 200)
    check(random_batch(TorchBackend, spec, lengths, queries, layout=layout, poison=float("nan")))


@pytest.mark.parametrize(
    ("group", "dtype"),
    [(group, dtype) if (group in (1, 16, 71)) == (dtype is torch.float32) else
     pytest.param(group, dtype, marks=pytest.mark.long)
     for group in (1, 3, 7, 16, 17, 71) for dtype in (torch.float32, torch.bfloat16)],
)  # fmt: skip
def test_any_number_of_query_heads(group: int, dtype: torch.dtype) -> None:
    spec = AttentionSpec(2 * group, 2, 48, dtype=dtype)
    batch = random_batch(TorchBackend, spec, (70, 5, 9), (33, 5, 2), poison=float("nan"))
    check(batch, TorchOptions(native_decode=False))  # which is not compiled then


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))])
@pytest.mark.sampled
def test_random_layers_and_batches(seed: int, dtype: torch.dtype) -> None:
    check_layer(random.Random(f"{seed} {dtype}"), dtype)


@pytest.mark.parametrize("layer", LAYERS)
@needs_products
def test_tiles_of_amx(layer: str, emulated_tiles: None) -> None:
    spec = AttentionSpec(6, 2, 48, dtype=torch.bfloat16, **LAYERS[layer])
    lengths, queries = (500, 129, 64, 700, 3, 333), (1, 129, 63, 20, 3, 200)
    check(random_batch(TorchBackend, spec, lengths, queries, poison=float("nan")))


@pytest.mark.parametrize("seed", [10, 11, 12, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(13, 25))])
@needs_products
def test_tiles_of_amx_in_random_layers(seed: int, emulated_tiles: None) -> None:
    check_layer(random.Random(seed), torch.bfloat16)


@pytest.fixture
def emulated_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels for prompts are compiled for a CPU with AMX, whose instructions are in plain C."""
    compile_with(monkeypatch, emulating())
    yield
    forget()


def check_layer(draw: random.Random, dtype: torch.dtype) -> None:
    """Shapes and features that nobody chose, over caches of all strides, in pages beside NaN."""
    heads, group = draw.randint(1, 3), draw.choice([1, 2, 3, 4, 5, 7, 8])
    head_dim = draw.choice([16, 48, 64, 80, 128])
    features: dict[str, Any] = {
        "head_dim_vo": draw.choice([head_dim, 16 * draw.randint(1, 8)]),
        "window_left": draw.choice([-1, -1, 0, draw.randint(1, 200)]),
        "logits_soft_cap": draw.choice([None, None, draw.uniform(1, 50)]),
        "alibi_slopes": draw.choice([None, None, tuple(draw.random() for _ in range(heads * group))]),
        "sinks": draw.random() < 0.3,
        "scale": draw.choice([head_dim**-0.5, draw.uniform(0.05, 0.5), draw.uniform(-0.2, 0.0), 0.0]),
    }
    if features["window_left"] < 0 and draw.random() < 0.3:
        features["chunk_size"] = draw.randint(1, 200)
    queries = [draw.choice([1, draw.randint(2, 20), draw.randint(2, 400)]) for _ in range(draw.randint(1, 5))]
    lengths = [n + draw.choice([0, draw.randint(1, 300)]) for n in queries]
    layout = draw.choice(["NHD", "HND"])
    batch = random_batch(
        TorchBackend, AttentionSpec(heads * group, heads, head_dim, dtype=dtype, **features), lengths, queries,
        page_size=draw.choice([1, 7, 16, 32]), layout=layout, poison=float("nan"), seed=draw.getrandbits(30),
        k_scale=draw.choice([1.0, 0.5]), v_scale=draw.choice([1.0, 2.0]),
    )  # fmt: skip
    pool = batch.fresh_pool()
    assert pool is not None
    for how in ({}, {"kv_cache": interleaved(pool, layout)}):
        result = run_backend(TorchBackend, batch, want_lse=True, **how)
        assert_matches(result, batch)
        assert_pool(result.kv_cache, batch.pool_after())


@pytest.mark.parametrize("beyond", [-1, 2**30])
def test_pages_behind_a_rows_end_are_not_read(beyond: int) -> None:
    batch = random_batch(TorchBackend, AttentionSpec(4, 2, 32), (40, 70, 64, 5), (1, 30, 64, 2))
    layer, common = make_layer(TorchBackend, batch), batch.common()
    table = torch.full((len(batch.rows), 9), beyond, dtype=torch.int32)
    for i, row in enumerate(batch.rows):
        used = -(-row.data.seq_len // 16)
        table[i, :used] = common.page_table[i, :used]
    step = layer.state.begin_forward(layer.builder.build(0, replace(common, page_table=table)))
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
        {"head_dim": 576, "head_dim_vo": 512},
    ],
)
def test_what_it_does_not_serve(changes: dict[str, Any]) -> None:
    spec = AttentionSpec(**{"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 32, **changes})
    assert not PagedPrefill.serves(spec, CPU)
    assert not PagedPrefill.serves(AttentionSpec(4, 2, 32), torch.device("cuda"))
    assert PagedPrefill.serves(AttentionSpec(4, 2, 32), CPU)


def test_as_many_threads_as_torch_has() -> None:
    batch = random_batch(TorchBackend, AttentionSpec(8, 4, 64), (300, 300), (300, 300))
    layer = make_layer(TorchBackend, batch)
    metadata, kernel = layer.begin(batch).metadata, PagedPrefill.of(batch.spec, CPU, None, 1.0, 1.0)
    pool, output = batch.fresh_pool(), torch.empty_like(batch.query)
    assert kernel is not None
    assert pool is not None
    rows, slots = metadata.paged_prefills, metadata.slot_mapping
    for count in (1, 2, 3):
        with threads(count):
            assert kernel.attend(batch.query, batch.key, batch.value, pool, slots, rows, output) == count


def test_strided_outputs_and_queries() -> None:
    batch = random_batch(TorchBackend, AttentionSpec(4, 2, 32), (40, 70, 9), (1, 30, 9))
    layer = make_layer(TorchBackend, batch)
    step = layer.begin(batch)
    expected = layer.impl.forward(batch.query, batch.key, batch.value, batch.fresh_pool(), step)
    assert_matches(layer.forward(batch, step), batch)
    wide = [torch.stack([each] * 2, 2).flatten(1, 2)[:, ::2] for each in (batch.query, batch.key, batch.value)]
    output = torch.full((*expected.shape[:2], 64), torch.nan)[..., :32]
    layer.impl.forward(*wide, batch.fresh_pool(), step, output)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("level", [3e9, -3e9])
def test_logits_whose_neighbours_are_hundreds_apart(level: float, emulated_tiles: None) -> None:
    """In bfloat16, whose products a factor makes logits: the highest stays the highest, to the last bit."""
    spec = AttentionSpec(4, 2, 64, dtype=torch.bfloat16, scale=0.11)
    batch = levelled(random_batch(TorchBackend, spec, (300, 290), (30, 40)), level, every_second)
    assert_matches(run_backend(TorchBackend, with_pool(batch, TorchBackend, float("nan"))), batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_not_a_number_is_not_hidden(dtype: torch.dtype) -> None:
    batch = random_batch(TorchBackend, AttentionSpec(4, 2, 32, dtype=dtype), (90, 70), (90, 70))
    layer = make_layer(TorchBackend, batch)
    step = layer.begin(batch)
    for name in ("query", "key", "value"):
        given = {each: getattr(batch, each) for each in ("query", "key", "value")}
        given[name][100] = torch.nan
        out = layer.impl.forward(**given, kv_cache=batch.fresh_pool(), step=step)
        assert out[:90].isfinite().all()
        assert out[100].isnan().any()


def test_options_that_differ() -> None:
    spec, cache = AttentionSpec(4, 2, 32), KVCacheSpec(8, 4)
    builder = TorchMetadataBuilder(plan_groups({0: spec})[0], cache, Limits(4, 4, 16), "cpu")
    metadata = builder.build_from_groups([SequenceGroup("0", (SequenceData(0, 2, [0]),))])
    pool = KVCache(*(torch.zeros(8, 4, 2, 32) for _ in range(2)))
    query, new = torch.zeros(2, 4, 32), torch.zeros(2, 2, 32)
    impl = TorchImpl(spec, cache, "cpu", options=TorchOptions(native_prefill=False))
    with pytest.raises(ValueError, match="native_prefill"):
        impl.forward(query, new, new, pool, TorchStep(metadata, None))
    with pytest.raises(ValueError, match="pass kv_cache"):
        TorchImpl(spec, cache, "cpu").forward(query, new, new, None, TorchStep(metadata, None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", ["plain", "window", "gpt_oss", "alibi"])
@pytest.mark.sampled
def test_few_blocks_in_pieces(layer: str, dtype: torch.dtype) -> None:
    """More threads than blocks: each block's keys are attended by several, and joined."""
    spec = AttentionSpec(6, 2, 32, dtype=dtype, **{**LAYERS[layer], "window_left": -1 if layer == "plain" else 1200})
    with threads(5):
        check(random_batch(TorchBackend, spec, (1900, 40), (18, 2), poison=float("nan")))
        check(random_batch(TorchBackend, spec, (1400,), (40,), poison=float("nan")))
