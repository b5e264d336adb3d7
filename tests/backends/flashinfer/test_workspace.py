"""What plans take of FLASHINFER's and FLASHINFER_MLA's workspaces: never more than these were sized for."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from attn_backends import AttentionSpec, KVCacheSpec, Limits, MLASpec, SequenceData, SequenceGroup, plan_groups
from attn_backends.backends.flashinfer import plans, workspace
from attn_backends.backends.flashinfer.metadata import FlashInferMetadataBuilder
from attn_backends.backends.flashinfer.options import FlashInferOptions
from attn_backends.backends.flashinfer.workspace import (
    FA3_TILE,
    SAME_SCHEDULE_TILES,
    Kernels,
    Need,
    eager_need,
    graph_need,
    most_parts,
    plan_need,
    tiles_at_once,
)
from attn_backends.backends.mla.flashinfer_mla.plan import float_bytes, int_bytes, most_works
from tests.emulated import flashinfer_schedule as schedule
from tests.helpers.flashinfer_emulated import EmulatedState

# (query heads, KV heads, head dim) of Llama 3, Qwen 3, Gemma 3, Phi 3, StarCoder (one KV head), gpt-oss, SmolLM2.
SHAPES = [(32, 8, 128), (40, 8, 128), (8, 4, 256), (32, 32, 64), (48, 1, 128), (64, 8, 64), (9, 3, 64)]
MULTIPROCESSORS = (1, 2, 16, 46, 78, 108, 114, 132, 142, 148, 160, 192)
KERNELS: tuple[Kernels, ...] = ("cuda_cores", "fa2", "fa3")
MOST_ROWS, MOST_TOKENS = 512, 16
ROOM = 1 << 50


def spec_of(shape: tuple[int, int, int]) -> AttentionSpec:
    return AttentionSpec(*shape, dtype=torch.float16)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sampled
def test_no_plan_takes_more_than_its_limits(shape: tuple[int, int, int]) -> None:
    """Any rows and multiprocessors, each of them with one token a row and every second number of more, held against
    limits of that size and against the largest ones."""
    spec = spec_of(shape)
    for num_sms in MULTIPROCESSORS:
        largest = eager_need(spec, Limits(MOST_ROWS, MOST_ROWS * MOST_TOKENS, 1), num_sms, None, 16)
        for num_rows in range(1, MOST_ROWS + 1):
            for query_len in (1, *range(2 + num_rows % 2, MOST_TOKENS + 1, 2)):
                num_tokens = num_rows * query_len
                own = eager_need(spec, Limits(num_rows, num_tokens, 1), num_sms, None, 16)
                assert own.fits(largest), (num_sms, num_rows, query_len)
                for kernels in KERNELS:
                    need = plan_need(kernels, spec, num_rows, num_tokens, num_sms)
                    assert need.fits(own), (kernels, num_sms, num_rows, query_len)
                need = plan_need("fa2", spec, num_rows, num_tokens, num_sms, in_graph=True)
                assert need.fits(graph_need(spec, num_rows, query_len, num_sms))


def planned(kernels: Kernels, spec: AttentionSpec, lens: list[tuple[int, int]], graph: bool, **how: Any) -> Need:
    """What FlashInfer's own schedulers take for rows of (query tokens, pages of 16)."""
    floats, ints = schedule.WorkspaceAllocator(ROOM), schedule.WorkspaceAllocator(ROOM)
    starts, pages = [0], [0]
    for query_len, num_pages in lens:
        starts.append(starts[-1] + query_len)
        pages.append(pages[-1] + num_pages)
    heads = (spec.num_qo_heads, spec.num_kv_heads)
    if kernels == "cuda_cores":
        schedule.decode_schedule(pages, *heads, 16, spec.head_dim, graph, floats, ints)
    elif kernels == "fa3":
        schedule.fa3_schedule(starts, starts[-1], spec.num_qo_heads, spec.head_dim, graph, ints)
    else:
        split = how.get("split", -1)
        schedule.fa2_schedule(
            starts, pages, starts[-1], *heads, 16, spec.head_dim, graph, -1, split, False, floats, ints
        )  # fmt: skip
    return Need(floats.used, ints.used - schedule.planned_rows_size(len(lens)))  # these are the emulator's own


@pytest.mark.parametrize("seed", range(8))
def test_plans_take_what_is_said(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any lengths by chance, with few or many, even or not."""
    numbers = Random(seed)
    for _ in range(60):
        spec, num_sms = spec_of(numbers.choice(SHAPES)), numbers.choice(MULTIPROCESSORS)
        monkeypatch.setattr(schedule, "NUM_SMS", num_sms)
        num_rows, most = int(2 ** numbers.uniform(0, 9)), numbers.choice((1, 3, 16, 300))
        lens = [
            (numbers.randint(1, most), int(2 ** numbers.uniform(0, numbers.choice((2, 11))))) for _ in range(num_rows)
        ]
        num_tokens = sum(query_len for query_len, _ in lens)
        for kernels in KERNELS[most > 1 :]:
            said = plan_need(kernels, spec, num_rows, num_tokens, num_sms)
            assert planned(kernels, spec, lens, False).fits(said), (kernels, spec, num_sms, lens)
        query_len = numbers.randint(1, MOST_TOKENS)
        alike = [(query_len, num_pages) for _, num_pages in lens]
        said = graph_need(spec, num_rows, query_len, num_sms)
        for kernels in KERNELS[query_len > 1 : 2]:
            assert planned(kernels, spec, alike, True).fits(said), (kernels, spec, num_sms, alike)


def test_a_smaller_step_of_fa3_may_take_more() -> None:
    """As all its heads have a schedule each: limits above are no bound of what is below."""
    spec = spec_of(SHAPES[0])
    large, small = Limits(SAME_SCHEDULE_TILES + 2, 8192, 1), (SAME_SCHEDULE_TILES - 64, 64 * FA3_TILE)
    rows, tokens = small
    lens = [(tokens - rows + 1, 1)] + [(1, 1)] * (rows - 1)
    assert planned("fa3", spec, lens, False).fits(eager_need(spec, large, 132, None, 16))


def state_of(
    spec: AttentionSpec, num_rows: int, most_tokens: int, longest: int = 16384, **options: Any
) -> tuple[Any, Any]:
    place = (KVCacheSpec(4096, 16), Limits(num_rows, most_tokens, longest), "cpu")
    groups, given = plan_groups({0: spec}), FlashInferOptions(**options)
    return EmulatedState(groups, *place, options=given), FlashInferMetadataBuilder(groups[0], *place, options=given)


def groups_of(lens: list[tuple[int, int]]) -> list[SequenceGroup]:
    """(context, query tokens) of each."""
    return [
        SequenceGroup(str(nth), (SequenceData(context, query, list(range(-(-(context + query) // 16)))),))
        for nth, (context, query) in enumerate(lens)
    ]


@pytest.mark.parametrize("shape", [(32, 8, 128), (64, 8, 128), (16, 1, 128)], ids=str)
@pytest.mark.parametrize("num_rows", [100, 300, 512])
def test_uneven_rows_are_split_as_far_as_the_workspace_goes(shape: tuple[int, int, int], num_rows: int) -> None:
    state, builder = state_of(spec_of(shape), num_rows, num_rows)
    lens = [(63, 1)] * (num_rows - 3) + [(15999, 1)] * 3
    for _ in range(2):  # the first goes by the public function
        step = state.begin_forward(builder.build_from_groups(groups_of(lens)))
    assert step.decode is not None
    most = most_parts(spec_of(shape), num_rows, 132, state.float_workspace.numel())
    is_left = num_rows <= tiles_at_once(spec_of(shape), 132) or most <= num_rows
    assert (step.decode._split_of_uneven(step.metadata.decode) is None) == is_left


def test_parts_of_a_chosen_size_are_as_many_keys_of_prompts() -> None:
    state, builder = state_of(spec_of((32, 8, 128)), 4, 512, 512, fixed_split_size=4)
    for _ in range(2):
        step = state.begin_forward(builder.build_from_groups(groups_of([(0, 400), (0, 112)])))
    assert step.prefill is not None
    assert step.prefill.split_size * step.prefill.page_size == 64


@pytest.mark.parametrize("seed", range(4))
def test_plans_of_parts_of_a_chosen_size(seed: int) -> None:
    numbers = Random(seed)
    for _ in range(50):
        spec, split = spec_of(numbers.choice(SHAPES)), numbers.choice((1, 4, 16))
        lens = [(numbers.choice((1, 1, 5, 70)), numbers.randint(1, 60)) for _ in range(numbers.randint(1, 40))]
        num_tokens, longest = sum(query_len for query_len, _ in lens), 16 * max(pages for _, pages in lens)
        parts = -(-longest // (16 * split))
        said = plan_need("fa2", spec, len(lens), num_tokens, 132, num_splits=parts)
        assert planned("fa2", spec, lens, False, split=split).fits(said), (spec, split, lens)
        assert said.fits(eager_need(spec, Limits(len(lens), num_tokens, longest), 132, split, 16))


@pytest.mark.parametrize("which", ["_float_workspace_buffer", "_int_workspace_buffer"])
def test_a_plan_that_its_workspaces_do_not_hold_is_refused(which: str) -> None:
    state, builder = state_of(spec_of((32, 8, 128)), 8, 64)
    groups = groups_of([(100, 1), (40, 1), (30, 9)])
    step = state.begin_forward(builder.build_from_groups(groups))
    setattr(step.decode.wrapper, which, torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match=r"a plan of 2 rows and 2 tokens takes up to .* raise max_num_requests"):
        state.begin_forward(builder.build_from_groups(groups))


def test_latent_schedules_hold_what_they_are_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of FlashInfer's MLA: its partial results are as large whatever the batch, and its tiles are counted."""
    from tests.emulated import flashinfer_mla

    for num_sms in MULTIPROCESSORS:
        monkeypatch.setattr(flashinfer_mla, "NUM_SMS", num_sms)
        for heads in (1, 8, 16, 20, 40, 64, 128):
            spec = MLASpec(heads, dtype=torch.float16)
            floats, ints = (
                torch.zeros(n, dtype=torch.uint8, device="meta")
                for n in (float_bytes(spec, num_sms), int_bytes(num_sms))
            )
            module = object.__new__(flashinfer_mla.MLAModule)
            for cluster in (1, 2):
                module._allocate(floats, ints, cluster, spec.kv_lora_rank)
            for num_rows in range(1, MOST_ROWS + 1):
                for query_len in range(1, MOST_TOKENS + 1):
                    packed = query_len * heads
                    tile = 128 if packed > 64 else 64
                    real = num_rows * -(-packed // tile) + num_sms // (tile // 64)
                    assert real <= most_works(num_rows, query_len, heads, num_sms)


def narrower(name: str, change: Any) -> Any:
    """A function of `workspace` that gives something else."""
    made = getattr(workspace, name)
    return lambda patch: patch.setattr(workspace, name, lambda *given, **how: change(made, *given, **how))


def one_schedule_for_all_heads(made: Any, spec: AttentionSpec, num_rows: int, num_tokens: int) -> Need:
    tiles = -(-num_tokens // FA3_TILE) + num_rows - 1
    return Need(0, 28 * tiles * (1 if tiles > SAME_SCHEDULE_TILES else spec.num_qo_heads) + 8192)


BY_CHANCE = lambda patch: [test_plans_take_what_is_said(seed, patch) for seed in range(4)]  # noqa: E731
FAULTS: dict[str, tuple[Any, Any]] = {
    "tiles of a mean row in graphs": (
        narrower("graph_tile", lambda made, *given: workspace._mean_tile(*given)), BY_CHANCE
    ),
    "a tile less a row": (
        narrower("_num_tiles", lambda made, spec, tokens, rows, tile: -(-tokens * spec.group_size // tile)), BY_CHANCE
    ),
    "half of the blocks": (narrower("tiles_at_once", lambda made, *given: made(*given) // 2), BY_CHANCE),
    "outputs without LSEs": (
        narrower("_partial_bytes", lambda made, spec, tile: spec.num_qo_heads * tile * spec.head_dim_vo * 4), BY_CHANCE
    ),
    "limits alone for fa3": (
        narrower("_fa3_need", one_schedule_for_all_heads), lambda patch: test_a_smaller_step_of_fa3_may_take_more()
    ),
    "uneven rows as in graphs": (
        lambda patch: patch.setattr(
            plans, "most_parts", lambda spec, rows, sms, held: workspace.graph_tiles(spec, rows, 1, sms)
        ),
        lambda patch: test_uneven_rows_are_split_as_far_as_the_workspace_goes((32, 8, 128), 512),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_workspaces_of_another_size_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, case = FAULTS[fault]
    change(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        case(monkeypatch)
