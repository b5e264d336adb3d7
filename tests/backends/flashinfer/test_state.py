"""FLASHINFER's state and options: workspaces, plans, and what each wrong use is told."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, KVCacheSpec, Limits, Unsupported, get_backend, plan_groups, select_backend
from attn_backends.backends.flashinfer.library import Library, missing_module
from attn_backends.backends.flashinfer.metadata import FlashInferMetadataBuilder
from attn_backends.backends.flashinfer.options import FlashInferOptions
from attn_backends.backends.flashinfer.plans import DecodePlan
from attn_backends.backends.flashinfer.state import FlashInferStep
from attn_backends.backends.flashinfer.workspace import Need, eager_need, graph_need
from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.cache.kv_cache import KVCache
from attn_backends.interface import AttentionStep
from attn_backends.kernels.flashinfer_package import LOWEST_LOGIT
from attn_backends.registry import validate_options
from attn_backends.spec import AttentionType
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.cases.features import feature
from attn_backends.testing.cases.random_batch import random_batch
from attn_backends.testing.conformance import BackendConformance
from attn_backends.testing.guards.snapshot import differences, snapshot
from attn_backends.testing.harness import assert_matches, make_layer, make_layers, output_error, padded
from attn_backends.testing.kit.base import KitBase
from attn_backends.testing.kit.logits import LEVELS
from tests.emulated import flashinfer
from tests.helpers.flashinfer_emulated import EmulatedFlashInfer, EmulatedState

SPEC = AttentionSpec(4, 2, 64, dtype=torch.float16)
CACHE = KVCacheSpec(64, 16)
LIMITS = Limits(4, 64, 512)
GROUPS = plan_groups({0: SPEC})


class Kit(KitBase):
    backend_name = "FLASHINFER_EMULATED"


def state(limits: Limits = LIMITS, groups: Any = GROUPS, **options: Any) -> EmulatedState:
    return EmulatedState(groups, CACHE, limits, "cpu", options=FlashInferOptions(**options))


def batch(*seq_lens: int, **changes: Any) -> Any:
    shape = BatchShape(seq_lens=seq_lens, query_lens=changes.pop("query_lens", (1,) * len(seq_lens)))
    return Kit().make_batch(Kit().make_spec(**changes), shape, num_pages=CACHE.num_pages)


def step_of(owner: EmulatedState, given: Any) -> FlashInferStep:
    builder = FlashInferMetadataBuilder(owner.groups[0], CACHE, owner.limits, "cpu", options=owner.options)
    return owner.begin_forward(builder.build(0, given.common()))


# Workspaces.


def test_the_workspace_holds_the_largest_need_of_all_groups() -> None:
    wide = AttentionSpec(32, 2, 128, dtype=torch.float16)
    both = state(groups=plan_groups({0: SPEC, 1: wide}))
    needs = [eager_need(spec, LIMITS, 132, None, 16) for spec in (SPEC, wide)]
    assert both.need == needs[0] | needs[1] == needs[1]
    assert both.float_workspace.numel() == both.need.float_bytes


def test_a_workspace_that_could_overflow_is_refused_at_start() -> None:
    need = state().need.float_bytes
    with pytest.raises(ValueError, match=f"workspace_bytes is {need - 1}, and these limits need {need}"):
        state(workspace_bytes=need - 1)
    assert state(workspace_bytes=need + 1).float_workspace.numel() == need + 1


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("num_qo_heads", [2, 4, 16])
@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_no_graph_of_any_size_overflows(num_rows: int, num_qo_heads: int, query_len: int) -> None:
    """The emulated schedulers count bytes as the real ones do, and refuse what does not fit."""
    spec = replace(SPEC, num_qo_heads=num_qo_heads)
    need = graph_need(spec, num_rows, query_len, 132)
    workspace, ints = (torch.zeros(n, dtype=torch.uint8) for n in (need.float_bytes, need.int_bytes))
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    buffers = (starts.clone(), torch.zeros(num_rows * 64, dtype=torch.int32), torch.zeros(num_rows, dtype=torch.int32))
    heads = (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, 16)
    types = {"q_data_type": spec.dtype, "kv_data_type": spec.dtype}
    pages = (starts * 32, torch.zeros(num_rows * 32, dtype=torch.int32), torch.full((num_rows,), 9, dtype=torch.int32))
    if query_len == 1:
        for tensor_cores in (True, False):
            if tensor_cores or spec.group_size <= 8:
                names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
                wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    workspace, use_cuda_graph=True, use_tensor_cores=tensor_cores,
                    **dict(zip(names, buffers, strict=True)),
                )  # fmt: skip
                wrapper.reset_workspace_buffer(workspace, ints)
                wrapper.plan(*pages, *heads, **types)
    names = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace, use_cuda_graph=True, qo_indptr_buf=starts.clone(), backend="fa2",
        **dict(zip(names, buffers, strict=True)),
    )  # fmt: skip
    prefill.reset_workspace_buffer(workspace, ints)
    prefill.plan(starts * query_len, *pages, *heads, causal=True, **types)


@pytest.mark.parametrize("lens", [((1,) * 8, (4000,) * 8), ((300, 1, 211), (4000, 9, 300)), ((512,), (512,))])
@pytest.mark.parametrize("kernels", ["fa2", "fa3"])
def test_no_eager_plan_overflows(kernels: str, lens: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    spec = AttentionSpec(32, 4, 128, dtype=torch.float16)
    need = eager_need(spec, Limits(8, 512, 4096), 132, None, 16)
    workspace, ints = (torch.zeros(n, dtype=torch.uint8) for n in (need.float_bytes, need.int_bytes))
    starts, used = (torch.tensor([0, *of]).cumsum(0).int() for of in (lens[0], [-(-n // 16) for n in lens[1]]))
    last = torch.tensor([(n - 1) % 16 + 1 for n in lens[1]]).int()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, backend=kernels)
    wrapper.reset_workspace_buffer(workspace, ints)
    wrapper.plan(starts, used, torch.zeros(int(used[-1]), dtype=torch.int32), last, 32, 4, 128, 16, causal=True,
                 q_data_type=spec.dtype, kv_data_type=spec.dtype)  # fmt: skip


def test_a_shared_workspace() -> None:
    owner, given = state(), batch(40, 17)
    step_of(owner, given)
    shared = torch.zeros(owner.need.float_bytes + 100, dtype=torch.uint8)
    owner.reset_workspace_buffer(shared)
    assert step_of(owner, given).decode.wrapper._float_workspace_buffer is shared  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=f"these limits need {owner.need.float_bytes}"):
        owner.reset_workspace_buffer(shared[:100])
    with owner.graph_capture(2):
        owner.graph_clone(2)
    with pytest.raises(RuntimeError, match="before graphs are captured"):
        owner.reset_workspace_buffer(shared)


def test_needs_join() -> None:
    assert Need(1, 5) | Need(3, 2) == Need(3, 5)


# Plans.


def test_a_pinned_buffer_is_not_rewritten_while_its_copy_may_run() -> None:
    owner, given = state(), batch(40, 17)
    pinned = []
    for _ in range(2):
        step_of(owner, given)
        pinned.append(owner._ring.slot)
    assert pinned[0] != pinned[1]
    assert owner._ring.hosts_cpu[0].numel() * 4 >= owner.need.int_bytes


@pytest.mark.parametrize("is_hopper", [True, False], ids=["hopper", "ampere"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window_left": 40},
        {"causal": False, "window_left": 9},
        {"causal": False, "attention_type": AttentionType.ENCODER},
        {"causal": False, "attention_type": AttentionType.CROSS},
    ],
    ids=str,
)
def test_kernels_are_chosen_before_traffic(
    changes: dict[str, Any], is_hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan chooses, and loads or compiles, kernels when it is made: random steps make none."""
    monkeypatch.setattr("attn_backends.backends.flashinfer.kernel_choice.is_hopper", lambda device: is_hopper)
    spec, numbers = replace(SPEC, **changes), Random(str(changes))
    given = state(Limits(max_num_requests=16, max_num_tokens=400, max_model_len=500), plan_groups({0: spec}))
    told: list[tuple[int, int]] = []
    given.warm_up(lambda done, total, name: told.append((done, total)))
    assert told == [(1, 1)]
    warm, kinds = set(given._plans), set()
    for _ in range(12):
        lens = [numbers.choice((1, 1, 2, 30, 99)) for _ in range(numbers.randint(1, 4))]
        is_encoder = spec.attention_type is AttentionType.ENCODER
        cached = not is_encoder and (spec.attention_type is AttentionType.CROSS or numbers.random() < 0.7)
        seq_lens = [n + (numbers.randint(0, 300) if cached else 0) for n in lens]
        made = random_batch(EmulatedFlashInfer, spec, seq_lens, lens, page_size=16, cached=cached)
        builder = EmulatedFlashInfer.get_builder_cls()(given.groups[0], made.cache, given.limits, made.device)
        step = given.begin_forward(builder.build(0, made.common()))
        kinds |= {kind for kind in ("decode", "prefill") if getattr(step, kind) is not None}
    assert set(given._plans) == warm
    assert "prefill" in kinds


def test_what_is_planned_is_what_runs() -> None:
    """A layer of another group is told what differs: soft cap and window are in the plan, not in the call."""
    owner, given = state(), batch(40, 17)
    step = step_of(owner, given)
    capped = batch(40, 17, logits_soft_cap=1.5, window_left=3)
    impl = get_backend("FLASHINFER_EMULATED").get_impl_cls()(capped.spec, CACHE, "cpu")
    with pytest.raises(ValueError, match="differ from this one in window_left, logits_soft_cap"):
        impl.forward(given.query, given.key, given.value, given.fresh_pool(), step)


def test_running_before_planning() -> None:
    owner, given = state(), batch(40, 17)
    impl = get_backend("FLASHINFER_EMULATED").get_impl_cls()(given.spec, CACHE, "cpu")
    with pytest.raises(TypeError, match="begin_forward before any layer runs"):
        impl.forward(
            given.query, given.key, given.value, given.fresh_pool(), AttentionStep(step_of(owner, given).metadata)
        )


def test_metadata_of_another_backend() -> None:
    given = batch(40, 17)
    torch_builder = get_backend("TORCH").get_builder_cls()(GROUPS[0], CACHE, LIMITS, "cpu")
    impl = get_backend("FLASHINFER_EMULATED").get_impl_cls()(given.spec, CACHE, "cpu")
    with pytest.raises(TypeError, match=r"FlashInferStep, and got a \w+ of TorchMetadata: build the metadata with its"):
        impl.forward(given.query, given.key, given.value, given.fresh_pool(),
                     AttentionStep(torch_builder.build(0, given.common())))  # fmt: skip


def test_an_output_that_is_not_contiguous_is_written_all_the_same() -> None:
    owner, given = state(), batch(40, 17)
    impl = get_backend("FLASHINFER_EMULATED").get_impl_cls()(given.spec, CACHE, "cpu")
    spread = torch.full((2, 8, 64), torch.nan, dtype=torch.float16)
    output = spread[:, ::2]
    assert (
        impl.forward(given.query, given.key, given.value, given.fresh_pool(), step_of(owner, given), output) is output
    )
    error = (output.double() - given.expected()[0]).norm() / given.expected()[0].norm()
    assert error < 1e-2
    assert bool(spread[:, 1::2].isnan().all())


@pytest.mark.parametrize("options", [{"tensor_cores": "on"}, {"tensor_cores": "off"}, {"fixed_split_size": 1},
                                     {"prefill_kernels": "fa2"}, {"prefill_kernels": "fa3"}])  # fmt: skip
def test_every_choice_of_kernels_is_right(options: dict[str, Any]) -> None:
    for given in (batch(40, 17, 100), batch(40, 17, 100, query_lens=(1, 5, 70))):
        owner = state(limits=Limits(4, 128, 512), groups=plan_groups({0: given.spec}), **options)
        step = step_of(owner, given)
        impl = get_backend("FLASHINFER_EMULATED").get_impl_cls()(given.spec, CACHE, "cpu")
        out = impl.forward(given.query, given.key, given.value, given.fresh_pool(), step)
        assert_matches(type("R", (), {"output": out, "lse": None})(), given, str(options))  # type: ignore[arg-type]


def test_a_step_is_of_one_plan_of_its_rows() -> None:
    """Decodes and prefills have plans of their own, so do groups; views of a step may be planned side by side."""
    given, other = batch(40, 17, 50, query_lens=(1, 1, 9)), batch(30, 17)
    layer, beside = make_layers(EmulatedFlashInfer, [given, batch(30, 17, window_left=5)], other)
    metadata = layer.builder.build(0, given.common())
    decodes, prefills = (
        layer.state.begin_forward(view) for view in (metadata.decode_metadata, metadata.prefill_metadata)
    )
    beside.begin(batch(30, 17, window_left=5))
    decodes.check_plan()
    prefills.check_plan()
    whole, pool = layer.begin(given), given.fresh_pool()
    for step in (decodes, prefills):
        with pytest.raises(RuntimeError, match=r"of an earlier plan of its group \(0\), and FLASHINFER holds one plan"):
            step.check_plan()
    assert_matches(layer.forward(given, whole), given)
    layer.begin(other)
    with pytest.raises(RuntimeError, match="give each micro-batch a state of its own"):
        layer.forward(given, whole, kv_cache=pool)
    assert not differences(snapshot(given.fresh_pool()), snapshot(pool))


def test_a_graphs_step_is_of_whatever_is_planned_last() -> None:
    """It is one object, over tensors that every plan fills; eager plans do not touch it."""
    given, other = batch(40, 17), batch(30, 25)
    layer = make_layer(EmulatedFlashInfer, given, other)
    with layer.state.graph_capture(2):
        first, eager = layer.plan(replace(given.common(), for_graph=True)), layer.begin(given)
        assert layer.plan(replace(other.common(), for_graph=True)) is first
        assert_matches(layer.forward(other, first), other)
        assert_matches(layer.forward(given, eager), given)


def test_steps_end_with_their_workspace() -> None:
    owner = state()
    step = step_of(owner, batch(40, 17))
    owner.reset_workspace_buffer(owner.float_workspace)
    with pytest.raises(RuntimeError, match="of an earlier plan"):
        step.check_plan()


@pytest.mark.parametrize(
    ("changes", "options", "told"),
    [({"num_qo_heads": 7, "num_kv_heads": 1}, {"tensor_cores": "off"},
      "tensor_cores: got off with 7 query heads a KV head; supported: off with 1, 2, 3, 4, 8"),
     ({"num_qo_heads": 10}, {"tensor_cores": "off"}, "tensor_cores: got off with 5 query heads a KV head"),
     ({}, {"tensor_cores": "off", "fixed_split_size": 4}, "tensor_cores: got off with fixed_split_size"),
     ({"pos_encoding_mode": "ROPE_LLAMA"}, {"prefill_kernels": "fa3"}, "prefill_kernels: got fa3; supported: fa2"),
     ({"cache_dtype": torch.float8_e4m3fn}, {"prefill_kernels": "fa3"}, "prefill_kernels: got fa3; supported: fa2"),
     ({}, {"prefill_kernels": "fa3", "fixed_split_size": 4}, "prefill_kernels: got fa3; supported: fa2")],
)  # fmt: skip
def test_selection_refuses_what_the_state_would(changes: dict[str, Any], options: dict[str, Any], told: str) -> None:
    spec = replace(SPEC, **changes)
    with pytest.raises(Unsupported) as refused:
        select_backend("FLASHINFER_EMULATED", [spec], CACHE, "cpu", options=options)
    assert told in str(refused.value)
    with pytest.raises(ValueError, match="supported: ") as of_state:
        state(groups=plan_groups({0: spec}), **options)
    assert str(of_state.value) in str(refused.value)
    select_backend("FLASHINFER_EMULATED", [spec], CACHE, "cpu", options={name: "auto" for name in options
                                                                         if name != "fixed_split_size"})  # fmt: skip


def test_options_that_cannot_be_served() -> None:
    odd = plan_groups({0: AttentionSpec(10, 2, 64, dtype=torch.float16)})
    with pytest.raises(ValueError, match="got off with 5 query heads a KV head; supported: off with 1, 2, 3, 4, 8;"):
        state(groups=odd, tensor_cores="off")
    with pytest.raises(ValueError, match="tensor_cores: got off with fixed_split_size"):
        state(tensor_cores="off", fixed_split_size=4)
    fp8 = plan_groups({0: replace(SPEC, cache_dtype=torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match="prefill_kernels: got fa3; supported: fa2; with a Hopper GPU, a 16-bit cache"):
        state(groups=fp8, prefill_kernels="fa3")
    with pytest.raises(Unsupported, match="fixed_split_size: got 4; supported: None in CUDA graphs"):
        state(fixed_split_size=4).graph_capture(2).__enter__()
    with pytest.raises(ValueError, match=r"tensor_core\b.*tensor_cores"):
        validate_options("FLASHINFER_EMULATED", {"tensor_core": "on"})


@pytest.mark.parametrize("in_graph", [False, True])
def test_long_rows_among_many_short_ones_are_split(in_graph: bool) -> None:
    """Parts as small as the grid has room for; even batches, and few rows, are FlashInfer's to split."""
    spec = AttentionSpec(128, 32, 64, dtype=torch.float16)
    limits, lens = Limits(12, 12, 512), (500, *[20] * 11)
    kit = Kit()
    uneven, even, few = (
        kit.make_batch(spec, BatchShape(seq_lens=of, query_lens=(1,) * len(of)), num_pages=128)
        for of in (lens, (60,) * 12, (500, 20))
    )
    groups = plan_groups({0: spec})
    owner = EmulatedState(groups, uneven.cache, limits, "cpu", options=FlashInferOptions())
    builder = FlashInferMetadataBuilder(groups[0], uneven.cache, limits, "cpu")
    impl = get_backend("FLASHINFER_EMULATED").get_impl_cls()(spec, uneven.cache, "cpu")
    with owner.graph_capture(12):
        planner = owner.graph_clone(12) if in_graph else owner
    few_parts = 11 if in_graph else None  # padded to as many rows, it is uneven too
    for given, expected in ((uneven, 11), (even, None), (uneven, 11), (few, few_parts)):
        num_padded = 12 - len(given.rows)
        metadata = builder.build(0, replace(given.common(num_padded), for_graph=in_graph))
        step = planner.begin_forward(metadata)
        assert isinstance(step.decode, DecodePlan)
        assert metadata.decode is not None
        assert step.decode._split_of_uneven(metadata.decode) == expected
        brought = [padded(tensor, num_padded) for tensor in (given.query, given.key, given.value)]
        out = impl.forward(*brought, given.fresh_pool(), step)  # type: ignore[arg-type]
        assert output_error(out[: len(given.rows)], given.expected()[0]) < 1e-2


# What the package may be.


@pytest.mark.parametrize("version", ["0.4.1", "0.8.0", "1.0"])
def test_unknown_versions_are_refused(version: str) -> None:
    module = type("Module", (), {"__version__": version})
    with pytest.raises(
        ImportError, match=f"flashinfer-python {version} is installed; this backend knows 0.5.0 to below"
    ):
        Library(132, module)


@pytest.mark.parametrize(
    ("version", "count"), [("0.5.0", 2), ("0.5.3", 3), ("0.6.12", 3), ("0.6.16.post4", 4), ("0.7.2", 4)]
)
def test_split_arguments_by_version(version: str, count: int) -> None:
    library = Library(132, type("Module", (), {"__version__": version}))
    assert library.split_arguments(None) == (-1, False, 0, 0)[:count]
    assert library.split_arguments(8)[0] == 8


def test_a_missing_compiler_says_what_to_install() -> None:
    told = r"no kernels ready for head_dim 64.*Install the CUDA toolkit"
    with pytest.raises(RuntimeError, match=told) as raised, missing_module(SPEC):
        raise RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist")
    assert "nvcc" in str(raised.value.__cause__)
    with pytest.raises(RuntimeError, match="something else"), missing_module(SPEC):
        raise RuntimeError("something else")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"head_dim": 80}, "head_dim: got 80; supported: 64, 128, 256"),
        ({"dtype": torch.float32}, "dtype: got float32; supported: bfloat16, float16"),
        ({"alibi_slopes": (0.5, 0.25, 0.1, 0.2)}, "alibi: got alibi_slopes"),
        ({"cache_dtype": torch.bfloat16}, "cache_dtype: got bfloat16; supported: float16, float8_e4m3fn"),
    ],
)
def test_layers_that_cannot_be_served(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(Unsupported, match=told):
        select_backend(
            "FLASHINFER_EMULATED",
            [replace(SPEC, **({"head_dim_vo": 80} if "head_dim" in changes else {}), **changes)],
            CACHE,
            "cpu",
        )


@pytest.mark.gpu
def test_planning_during_capture_is_refused() -> None:
    pytest.importorskip("flashinfer")
    backend = get_backend("FLASHINFER")
    owner = backend.get_state_cls()(GROUPS, CACHE, LIMITS, "cuda")
    builder = backend.get_builder_cls()(GROUPS[0], CACHE, LIMITS, "cuda")
    given = batch(40, 17)
    metadata = builder.build(0, replace(given, device=torch.device("cuda")).common())
    owner.begin_forward(metadata)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="call begin_forward before the capture"), torch.cuda.graph(graph):
        owner.begin_forward(metadata)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_fixed_split_gives_a_row_the_same_bits_in_any_batch() -> None:
    """Alone and among others, whose number and lengths would otherwise move where its keys are split."""
    pytest.importorskip("flashinfer")
    backend, spec = get_backend("FLASHINFER"), AttentionSpec(8, 2, 128, dtype=torch.bfloat16)
    cache, limits, group = KVCacheSpec(256, 16), Limits(16, 64, 2048), plan_groups({0: spec})[0]
    options = validate_options("FLASHINFER", {"fixed_split_size": 8})
    owner = backend.get_state_cls()([group], cache, limits, "cuda", options=options)
    builder = backend.get_builder_cls()(group, cache, limits, "cuda", options=options)
    impl = backend.get_impl_cls()(spec, cache, "cuda", options=options)
    pool = KVCache(*(torch.randn(shape, device="cuda", dtype=spec.dtype)
                     for shape in backend.get_kv_cache_shapes(spec, cache)))  # fmt: skip
    queries = torch.randn(16, 8, 128, device="cuda", dtype=spec.dtype)

    def attended(lens: list[int]) -> torch.Tensor:
        rows = [SequenceData(n - 1, 1, range(-(-n // 16))) for n in lens]
        groups = [SequenceGroup(str(i), (row,)) for i, row in enumerate(rows)]
        common = CommonAttentionMetadata.from_sequence_groups(groups, 16, "cuda")
        return impl.forward(queries[: len(lens)], None, None, pool, owner.begin_forward(builder.build(0, common)))

    alone = attended([1900])[0]
    for others in ([1900], [40] * 15, [2000, 3, 700]):
        assert attended([1900, *others])[0].equal(alone)


class AnyLevel(BackendConformance):
    """Decode and prefill by fa2, whose products of queries and keys may be low if the logits are what is declared."""

    backend_name = "FLASHINFER_EMULATED"
    dtypes = (torch.float16,)

    def levels(self, spec: AttentionSpec) -> list[float]:
        return [level for level in LEVELS if 2 * level / spec.scale > LOWEST_LOGIT]


@pytest.mark.parametrize("name", ["plain", "sinks", "cross"])
def test_low_lses_of_kernels_are_kept(name: str) -> None:
    """One below -5e4 in base 2 is that of a row with keys: rows without any are told by their pages."""
    assert min(AnyLevel().levels(replace(SPEC, scale=8.0))) / math.log(2) < -5e4
    AnyLevel().test_logits_far_from_zero(feature(name), 8.0)
    if name == "sinks":
        AnyLevel().test_replays_of_logits_far_from_zero()


def test_no_row_of_a_causal_layer_lacks_keys_but_padding() -> None:
    """So that nothing is launched to find them."""
    kit = AnyLevel()
    layer = make_layer(kit.backend, kit.make_batch(kit.make_spec(), "mixed_small"), num_padded_reqs=2)
    step = layer.begin(kit.make_batch(kit.make_spec(), "mixed_small"), num_padded_reqs=2)
    assert step.metadata.decode is not None
    assert step.metadata.prefill is not None
    assert not step.metadata.decode.some_may_lack_keys
    assert not step.metadata.prefill.some_may_lack_keys


@pytest.mark.parametrize(
    ("window", "causal", "refused"), [(7, False, True), (0, False, True), (7, True, False), (-1, False, False)]
)
def test_windows_without_a_causal_mask_are_refused(window: int, causal: bool, refused: bool) -> None:
    """Where its scheduler splits keys, it counts those of the window and of a tile alone; the others were left out on
    an H200."""
    spec = AttentionSpec(8, 2, 128, dtype=torch.bfloat16, window_left=window, causal=causal)
    codes = [each.code for each in EmulatedFlashInfer.reject(spec, KVCacheSpec(16, 16), "cpu")]
    assert ("window" in codes) is refused
