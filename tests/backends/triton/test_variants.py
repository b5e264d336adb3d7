"""What TRITON's steps launch is among what `warm_up` compiles: drawn layers, machines, limits and traffic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch

from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.cache import kv_cache
from attn_backends.cache.kv_cache import KVCache
from attn_backends.spec import AttentionSpec, AttentionType, KVCacheSpec, Limits, plan_groups

launching = pytest.importorskip("attn_backends.kernels.launch", reason="needs triton")
examples = pytest.importorskip("attn_backends.kernels.examples")
Pdl = pytest.importorskip("attn_backends.kernels.pdl").Pdl
HopperConstants = pytest.importorskip("attn_backends.kernels.prefill.arguments").HopperConstants
variants = pytest.importorskip("attn_backends.kernels.variants")
triton_state = pytest.importorskip("attn_backends.backends.triton.state")
triton_impl = pytest.importorskip("attn_backends.backends.triton.impl")
triton_metadata = pytest.importorskip("attn_backends.backends.triton.metadata")
tuning = pytest.importorskip("attn_backends.backends.triton.tuning")

pytestmark = pytest.mark.skipif(launching.INTERPRETED, reason="interpreted kernels are not compiled")

CPU = torch.device("cpu")
MACHINES = {
    "H200": launching.Machine(132, 227 << 10, True, True, True),
    "H200, another Triton": launching.Machine(132, 227 << 10, True, False, True),
    "A100": launching.Machine(108, 163 << 10, False, False, False),
    "RTX 4090": launching.Machine(128, 99 << 10, False, False, False),
    "B200": launching.Machine(148, 227 << 10, True, False, True),
}
HEADS = (  # of queries, of keys and values, and their dim: of models that are in use
    (9, 3, 64), (32, 8, 128), (64, 8, 128), (28, 4, 128), (12, 2, 128), (8, 4, 256), (16, 16, 256), (71, 1, 64),
    (48, 1, 128), (32, 32, 96), (16, 16, 72), (32, 32, 80), (25, 25, 64), (64, 8, 64), (96, 8, 128), (40, 10, 128),
)  # fmt: skip
FEATURES: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"window_left": 127}, {"window_left": 4095}, {"logits_soft_cap": 30.0}, {"sinks": True},
    {"window_left": 127, "sinks": True}, {"chunk_size": 8192}, {"scale": -0.5}, {"causal": False},
    {"attention_type": AttentionType.ENCODER, "causal": False},
    {"attention_type": AttentionType.CROSS, "causal": False},
)  # fmt: skip


@dataclass
class Engine:
    """One state of some layers, as an engine would hold it on a machine."""

    groups: Any
    cache: KVCacheSpec
    limits: Limits
    state: Any
    options: Any


def draw_spec(numbers: Random, feature: dict[str, Any]) -> AttentionSpec:
    qo_heads, kv_heads, dim = numbers.choice(HEADS)
    dtype = numbers.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    cached = numbers.choice((dtype, dtype, torch.float8_e4m3fn, torch.float8_e5m2))
    if "alibi" in feature:
        feature = {"alibi_slopes": (0.5,) * qo_heads}
    return AttentionSpec(qo_heads, kv_heads, dim, dtype=dtype, cache_dtype=cached, **feature)


def draw_engine(numbers: Random, feature: dict[str, Any], spec: AttentionSpec | None = None) -> Engine:
    spec = spec or draw_spec(numbers, feature)
    specs = {0: spec}
    if spec.attention_type is AttentionType.DECODER and numbers.random() < 0.4:  # layers of another kind beside it
        specs[1] = replace(spec, window_left=spec.window_left + 64 if spec.chunk_size is None else -1)
    limits = Limits(numbers.choice((1, 5, 32, 132, 200)), numbers.choice((16, 256, 2048)), 4096)
    cache = KVCacheSpec(64, numbers.choice((1, 8, 16, 16, 32, 64, 256)), numbers.choice(("NHD", "HND")))
    options = None
    if numbers.random() < 0.5:
        options = tuning.TritonOptions(upcast_bytes=1 << numbers.randint(18, 24))
    groups = plan_groups(specs)
    return Engine(groups, cache, limits, triton_state.TritonState(groups, cache, limits, CPU, options=options), options)


def draw_rows(numbers: Random, limits: Limits) -> tuple[list[int], list[int]]:
    """Query lengths, decodes first, and contexts of a step within the limits."""
    kind = numbers.choice(("decode", "verify", "prompts", "chunks", "mixed", "mixed"))
    most = min(limits.max_num_requests, limits.max_num_tokens)
    num_rows = min(most, int(2 ** numbers.uniform(0, 8)))
    room = limits.max_num_tokens // num_rows
    longest = {"decode": 1, "verify": min(16, room)}.get(kind, min(300, room))
    queries = [numbers.randint(1, longest)] * num_rows
    if kind in ("prompts", "chunks", "mixed"):
        queries = [numbers.randint(1, longest) if numbers.random() < 0.5 else 1 for _ in range(num_rows)]
    contexts = [0 if kind == "prompts" else numbers.randint(0, 3000) for _ in queries]
    if kind == "mixed" and numbers.random() < 0.5:  # new prompts beside decodes
        contexts = [0 if query > 1 else context for query, context in zip(queries, contexts, strict=True)]
    return sorted(queries), contexts


def draw_common(numbers: Random, engine: Engine, spec: AttentionSpec) -> CommonAttentionMetadata:
    queries, contexts = draw_rows(numbers, engine.limits)
    cached, rows = numbers.random() < 0.9, []
    for query_len, context in zip(queries, contexts, strict=True):
        pages = range(-(-(context + query_len) // engine.cache.page_size)) if cached else None
        if spec.attention_type is AttentionType.CROSS:
            rows.append(SequenceData(0, query_len, pages, seq_len=context, new_kv_len=context))
        else:
            rows.append(SequenceData(context if cached else 0, query_len, pages))
    groups = [SequenceGroup(str(i), (row,)) for i, row in enumerate(rows)]
    free = min(engine.limits.max_num_requests - len(rows), engine.limits.max_num_tokens - sum(queries))
    padding = numbers.randint(0, min(3, free)) if cached else 0
    return CommonAttentionMetadata.from_sequence_groups(groups, engine.cache.page_size, CPU, padding)


def draw_tensors(numbers: Random, spec: AttentionSpec, num_tokens: int, num_new: int) -> Any:
    """Query, key and value as an engine brings them."""

    def lying(heads: int, num: int, dim: int, way: str) -> torch.Tensor:
        if way == "by head":
            return examples.empty(heads, num, dim, dtype=spec.dtype).transpose(0, 1)
        return examples.empty(num, heads, dim, dtype=spec.dtype)

    sizes = ((spec.num_qo_heads, num_tokens, spec.head_dim), (spec.num_kv_heads, num_new, spec.head_dim),
             (spec.num_kv_heads, num_new, spec.head_dim_vo))  # fmt: skip
    way = numbers.choice(("apart", "by head"))
    given = [lying(*size, way) for size in sizes[:2]] + [lying(*sizes[2], numbers.choice((way, "apart")))]
    if num_tokens == num_new and numbers.random() < 0.4:
        columns = [heads * dim for heads, _, dim in sizes]
        parts = examples.empty(num_tokens, sum(columns), dtype=spec.dtype).split(columns, 1)
        given = [part.unflatten(1, (size[0], size[2])) for part, size in zip(parts, sizes, strict=True)]
    return given


def draw_pool(numbers: Random, spec: AttentionSpec, cache: KVCacheSpec) -> KVCache:
    page = (cache.page_size, spec.num_kv_heads)
    page = page if cache.layout == "NHD" else page[::-1]
    key, value = (examples.empty(7, *page, spec.head_dim, dtype=spec.cache_dtype) for _ in range(2))
    if numbers.random() < 0.5:
        key, value = examples.empty(7, 2, *page, spec.head_dim, dtype=spec.cache_dtype).unbind(1)
    return KVCache(*((key, value) if cache.layout == "NHD" else (key.transpose(1, 2), value.transpose(1, 2))))


def run_step(numbers: Random, engine: Engine, group: Any, state: Any, common: CommonAttentionMetadata) -> None:
    """A layer's step, from the builder to its launches."""
    spec = group.spec
    builder = triton_metadata.TritonMetadataBuilder(group, engine.cache, engine.limits, CPU, options=engine.options)
    scale = numbers.choice((1.0, 0.5))
    sinks = torch.zeros(spec.num_qo_heads) if spec.sinks else None
    impl = triton_impl.TritonImpl(
        spec, engine.cache, CPU, sinks=sinks, k_scale=scale, v_scale=scale, options=engine.options
    )
    metadata = builder.build(0, common)
    view = metadata.prefill_metadata
    is_view = view is not None and spec.head_dim % 16 == 0 and not common.is_profile_run and numbers.random() < 0.3
    step = state.begin_forward(view if is_view else metadata)
    is_cross = spec.attention_type is AttentionType.CROSS
    num_tokens = step.metadata.num_tokens
    num_keys = max(1, step.metadata.num_new_kv) if is_cross else num_tokens
    query, key, value = draw_tensors(numbers, spec, num_tokens, num_keys)
    uses_cache = not common.is_profile_run and spec.attention_type is not AttentionType.ENCODER
    if uses_cache and not step.metadata.prefills_are_prompts and numbers.random() < 0.2:
        key = value = None  # the engine has written them
    pool = draw_pool(numbers, spec, engine.cache) if uses_cache else None
    lse = None
    if numbers.random() < 0.5:
        lse = torch.empty(step.metadata.num_tokens + 1, spec.num_qo_heads, device="meta")[1:]  # at any address
    output = None
    if numbers.random() < 0.5:
        output = examples.empty(num_tokens, spec.num_qo_heads, spec.head_dim_vo, dtype=spec.dtype)
    impl.forward(query, key, value, pool, step, output, lse=lse)


def run_graph(numbers: Random, engine: Engine) -> None:
    """A captured size: the clone's own step, and the batch that fills it."""
    most = min(engine.limits.max_num_requests, engine.limits.max_num_tokens)
    with engine.state.graph_capture(most):
        num_rows = numbers.randint(1, most)
        query_len = numbers.randint(1, min(16, engine.limits.max_num_tokens // num_rows))
        clone = engine.state.graph_clone(num_rows, query_len)
        groups = [SequenceGroup(str(i), (SequenceData(9, query_len, range(64)),)) for i in range(num_rows)]
        common = CommonAttentionMetadata.from_sequence_groups(groups, engine.cache.page_size, CPU)
        num_tokens = numbers.randint(num_rows, engine.limits.max_num_tokens)
        mixed = engine.state.mixed_graph_clone(num_rows, num_tokens)
        for group in engine.groups:
            run_step(numbers, engine, group, clone, replace(common, for_graph=True))
            tokens = {"num_tokens": num_tokens, "slot_mapping": torch.full((num_tokens,), -1)}
            run_step(numbers, engine, group, mixed, replace(common, for_graph=True, is_mixed=True, **tokens))


@pytest.fixture(autouse=True)
def writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are written by the kernel, as on a GPU."""
    monkeypatch.setattr(kv_cache, "_has_kernel", lambda *tensors: True)


def keys_of_traffic(numbers: Random, engine: Engine, machine: Any, num_steps: int) -> Iterator[Any]:
    with variants.listing(machine) as asked:
        for _ in range(num_steps):
            group = numbers.choice(engine.groups)
            run_step(numbers, engine, group, engine.state, draw_common(numbers, engine, group.spec))
        if engine.groups[0].spec.attention_type is AttentionType.DECODER:
            run_graph(numbers, engine)
    yield from asked.variants.values()


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.sampled
def test_traffic_asks_for_what_was_listed(seed: int, machine: Any) -> None:
    numbers = Random(f"{seed} {machine}")
    feature = numbers.choice((*FEATURES, {"alibi": True}))
    with variants.listing(machine):
        engine = draw_engine(numbers, feature)
        listed = {variant.key for variant in engine.state.variants()}
    asked = [*keys_of_traffic(numbers, engine, machine, 25)]
    assert asked
    missing = [variant.key for variant in asked if variant.key not in listed]
    assert not missing, f"{engine.groups[0].spec} over {engine.cache} within {engine.limits}: {missing[0]}"


@pytest.mark.parametrize("is_upcast", [False, True])
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.sampled
def test_traffic_for_the_kernel_for_hopper(
    cached: torch.dtype, is_upcast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that it serves: decodes run beside it, and keys of 8 bits are read so, or are made 16 bits, by some heads
    at a time."""
    monkeypatch.setattr(triton_metadata, "is_faster_upcast", lambda *_: is_upcast)
    numbers, machine, asked = Random(0), MACHINES["H200"], {}
    for _ in range(12):
        heads = numbers.choice([given for given in HEADS if given[2] in (64, 128, 256)])
        spec = AttentionSpec(*heads, dtype=torch.bfloat16, cache_dtype=cached)
        with variants.listing(machine):
            engine = draw_engine(numbers, {}, spec)
            listed = {variant.key for variant in engine.state.variants()}
        found = {variant.key: variant for variant in keys_of_traffic(numbers, engine, machine, 40)}
        assert set(found) <= listed, f"{spec} over {engine.cache} within {engine.limits}"
        asked |= found
    of_hopper = [variant for variant in asked.values() if variant.name == "prefill_hopper_kernel"]
    sizes = [HopperConstants._make(each.given[-len(HopperConstants._fields) :]) for each in of_hopper]
    halves = [each.GROUPS == 1 and each.DIM <= 128 and not each.RAW_STAGES for each in sizes]  # of two beside another
    assert [each.options.get("maxnreg") for each in of_hopper] == [128 if of else None for of in halves]
    assert cached is not torch.bfloat16 or {(1, 1), (2, 0), (2, 1)} <= {(each.GROUPS, each.SPLIT) for each in sizes}
    starts = {variant.given[-1] for variant in asked.values() if variant.name == "decode_kernel"}
    assert {each.LAUNCH_DEPENDENTS for each in sizes} == {0, 1}
    assert {each.RAW_STAGES > 0 for each in sizes} == {cached is not torch.bfloat16, False}
    if cached is torch.bfloat16 or not is_upcast:
        assert int(Pdl.WAIT_LAST) in starts
    else:
        assert len({variant.given[-7] for variant in asked.values() if variant.name == "upcast_kernel"}) > 1  # heads


@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("group_size", [1, 8, 24, 49, 64])
def test_builders_say_what_graphs_do(group_size: int, cached: torch.dtype) -> None:
    """Of rows of the longest length and of short ones, by drawn numbers of rows and of tokens: a capture serves all
    lengths, so none decides."""
    numbers = Random(f"{group_size} {cached}")
    for _ in range(12):
        heads, dim = numbers.choice((1, 2, 8)), numbers.choice((64, 96, 128, 256))
        spec = AttentionSpec(group_size * heads, heads, dim, dtype=torch.bfloat16, cache_dtype=cached)
        num_rows, query_len = numbers.choice((1, 2, 9)), numbers.randint(1, 16)
        groups, limits = plan_groups({0: spec}), Limits(9, 256, 1 << 15)
        with variants.listing(MACHINES["H200"]):
            cache = KVCacheSpec(64, 256)
            state = triton_state.TritonState(groups, cache, limits, CPU)
            builder = triton_metadata.TritonMetadataBuilder(groups[0], cache, limits, CPU)
            state.hold_graph_buffers(num_rows)
            done = state.graph_clone(num_rows, query_len).steps[0].metadata
            for context in (0, (1 << 15) - query_len):
                rows = [SequenceData(context, query_len, range(128))] * num_rows
                of_rows = [SequenceGroup(str(i), (row,)) for i, row in enumerate(rows)]
                common = CommonAttentionMetadata.from_sequence_groups(of_rows, 256, CPU)
                said = builder.build(0, replace(common, for_graph=True))
                both = (
                    state.mixed_graph_clone(num_rows, 99).steps[0].metadata,
                    builder.build(0, replace(common, for_graph=True, is_mixed=True, num_tokens=99)),
                )
                for name in ("num_decode_rows", "num_decode_row_tokens", "max_decode_len", "num_upcast_keys",
                             "prefill_splits", "short_tile", "hopper_tile", "prefill_share"):  # fmt: skip
                    assert getattr(said, name) == getattr(done, name), (name, spec, num_rows, query_len, context)
                    assert len({getattr(each, name) for each in both}) == 1, name


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_blocks_are_loaded_by_a_tensor_engine_where_there_is_one(machine: Any) -> None:
    """By descriptors of keys and values, which a kernel for another GPU has none of."""
    spec = AttentionSpec(8, 2, 128, dtype=torch.float16)
    with variants.listing(machine):
        state = triton_state.TritonState(plan_groups({0: spec}), KVCacheSpec(64, 64), Limits(4, 256, 4096), CPU)
        described = [each.given[:2] != (None, None) for each in state.variants() if each.name == "prefill_kernel"]
    assert described
    assert any(described) == machine.has_tensor_engine


def test_the_list_is_short() -> None:
    """Of a layer that most models are made of; what is listed is compiled before the first request."""
    spec = AttentionSpec(32, 8, 128, dtype=torch.bfloat16)
    with variants.listing(MACHINES["H200"]):
        state = triton_state.TritonState(plan_groups({0: spec}), KVCacheSpec(64, 16), Limits(257, 8192, 8192), CPU)
        assert len(state.variants()) < 100
