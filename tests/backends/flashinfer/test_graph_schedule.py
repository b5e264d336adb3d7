"""The schedule of FLASHINFER's graphs of short rows: as FlashInfer's own would be, had it tiles for such rows, and
where they are many, launched to write outputs without partial results."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from attn_backends import AttentionSpec, KVCacheSpec, Limits, plan_groups
from attn_backends.backends.flashinfer import state
from attn_backends.backends.flashinfer.graph_schedule import GraphSchedule, Layout
from attn_backends.backends.flashinfer.metadata import Rows
from attn_backends.backends.flashinfer.options import FlashInferOptions
from attn_backends.backends.flashinfer.plans import PrefillPlan
from attn_backends.testing.cases.cases import BatchShape
from attn_backends.testing.graphs.harness import graph_batch
from attn_backends.testing.harness import output_error, padded
from attn_backends.testing.kit.base import KitBase
from attn_backends.testing.kit.engines import Engines
from attn_backends.testing.kit.graphs import Graphs
from tests.emulated import flashinfer_schedule as schedule
from tests.emulated.flashinfer_kernel import Rows as KernelRows, Rules, _seen
from tests.emulated.flashinfer_schedule import WorkspaceAllocator, fa2_schedule, fa2_tiles
from tests.emulated.flashinfer_work import PlanInfo, WorkList, follow, work_list
from tests.helpers.flashinfer_emulated import EmulatedFlashInfer

ROOM, STALE = 1 << 50, -77
SHAPES = [(32, 8, 128), (8, 8, 64), (8, 4, 256), (64, 8, 64), (16, 1, 128), (9, 3, 64), (40, 8, 128)]
SPEC = AttentionSpec(8, 2, 64, dtype=torch.bfloat16)


def rows_of(query_lens: list[int], num_pages: list[int], page_size: int = 16) -> Rows:
    """Rows as a plan reads them: on the host alone."""
    starts, pages = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (query_lens, num_pages))
    kv_lens = torch.tensor(num_pages).int() * page_size
    return Rows(sum(query_lens), starts, starts, None, pages, pages, kv_lens, int(kv_lens.max()), len(query_lens), True)


def arguments_of(rows: Rows, spec: AttentionSpec, page_size: int, most_tokens: int) -> list[Any]:
    """What FlashInfer's scheduler goes by."""
    return [
        rows.qo_indptr_cpu.tolist(), rows.kv_indptr_cpu.tolist(), most_tokens, spec.num_qo_heads, spec.num_kv_heads,
        page_size, spec.head_dim, True, spec.window_left, -1, False,
    ]  # fmt: skip


def planned(rows: Rows, spec: AttentionSpec, page_size: int) -> tuple[list[int], int]:
    """What it returns, and the bytes of the int workspace."""
    floats, ints = WorkspaceAllocator(ROOM), WorkspaceAllocator(ROOM)
    return fa2_schedule(*arguments_of(rows, spec, page_size, rows.num_tokens), floats, ints), ints.used


def written(ints: np.ndarray[Any, Any], info: PlanInfo, num_rows: int) -> tuple[WorkList, int]:
    """The list that lies in a workspace, and its number of tokens. All of it counts where there is no mask."""
    count = info.padded
    if info.split:
        valid = ints.view(np.uint8)[info.valid_at : info.stop].tolist()
        assert set(valid) <= {0, 1}
        count = sum(valid)
        assert valid == [1] * count + [0] * (info.padded - count)

    def at(offset: int, size: int) -> list[int]:
        assert offset % 4 == 0
        return [int(n) for n in ints[offset // 4 : offset // 4 + size]]

    (num_tokens,) = at(info.num_tokens_at, 1)
    items = (at(of, count) for of in (info.requests_at, info.qo_tiles_at, info.kv_tiles_at))
    indptrs = at(info.merge_at, num_tokens + 1), at(info.o_indptr_at, num_rows + 1)
    return WorkList(*items, *indptrs, *at(info.chunk_at, 1)), num_tokens


class Case:
    """Rows of a graph by chance: what it is planned for first, and rows that it is filled with later."""

    def __init__(self, seed: int, most_rows: float = 8) -> None:  # log2
        numbers = self.numbers = Random(seed)
        self.num_sms = numbers.choice((1, 16, 46, 108, 132, 148))
        self.spec = replace(AttentionSpec(*numbers.choice(SHAPES)), window_left=numbers.choice((-1, -1, 0, 60, 1000)))
        self.page_size, self.query_len = numbers.choice((1, 8, 16, 64, 256)), numbers.randint(2, 16)
        self.num_rows = int(2 ** numbers.uniform(1, most_rows))
        self.first = rows_of([self.query_len] * self.num_rows, [1] * self.num_rows, self.page_size)
        self.info, self.num_bytes = planned(self.first, self.spec, self.page_size)
        self.schedule = GraphSchedule.replacing(self.info, self.first, self.spec, self.page_size, self.num_sms)

    @property
    def is_whole(self) -> bool:
        """Whether rows are as many as tiles that run at once: two a multiprocessor."""
        return self.num_rows >= 2 * self.num_sms // self.spec.num_kv_heads

    def rows(self) -> Rows:
        numbers, some_idle, most = self.numbers, self.numbers.random() < 0.5, self.numbers.choice((2, 6, 11))
        lens, pages = [], []
        for _ in range(self.num_rows):
            kind = numbers.random() if some_idle else 1.0
            lens.append(0 if kind < 0.1 else numbers.randint(1, self.query_len) if kind < 0.3 else self.query_len)
            pages.append(0 if 0.05 < kind < 0.2 else int(2 ** numbers.uniform(0, most)))
        return rows_of(lens, pages, self.page_size)


def as_flashinfer(seed: int, patch: pytest.MonkeyPatch) -> tuple[bool, bool]:
    """Whether the case has tiles of its own, in lists that FlashInfer would write for such tiles, or of whole rows."""
    case = Case(seed)
    patch.setattr(schedule, "NUM_SMS", case.num_sms)
    case = Case(seed)
    tile = schedule.cta_tile_q(case.query_len * case.spec.group_size, case.spec.head_dim)
    assert (case.schedule is not None) == (tile < case.info[3])
    if case.schedule is None:
        return False, False
    info = PlanInfo(*case.schedule.layout)
    assert info == PlanInfo(*case.info)._replace(tile_q=tile, **changed_for_whole(case))
    for _ in range(3):
        rows, ints = case.rows(), np.full(-(-case.num_bytes // 4), STALE, dtype=np.int32)
        case.schedule.fill(ints, rows)
        work, num_tokens = written(ints, info, case.num_rows)
        assert num_tokens == rows.num_tokens
        if case.is_whole:
            assert_whole(case, rows, work)
        else:
            tiles = fa2_tiles(*arguments_of(rows, case.spec, case.page_size, info.most_tokens), tile_q=tile)
            expected = work_list(rows.qo_indptr_cpu.tolist(), tiles)
            assert work == expected._replace(chunk=tiles.chunk * case.page_size)
            assert_covered(case, rows, work, tile)
        assert (ints[info.requests_at // 4 + len(work.requests) : info.qo_tiles_at // 4] == STALE).all()
    return not case.is_whole, case.is_whole


def changed_for_whole(case: Case) -> dict[str, int]:
    return {"padded": case.num_rows, "split": 0} if case.is_whole else {}


def assert_whole(case: Case, rows: Rows, work: WorkList) -> None:
    """A block a row, also where it has no tokens, which writes outputs to where its queries are."""
    assert case.num_rows <= case.info[0]
    assert work.requests == list(range(case.num_rows))
    assert set(work.qo_tiles) == set(work.kv_tiles) == {0}
    assert work.o_indptr == rows.qo_indptr_cpu.tolist()
    assert work.chunk > 0
    assert int(rows.qo_indptr_cpu.diff().max()) * case.spec.group_size <= case.schedule.layout.cta_tile_q  # type: ignore[union-attr]


def assert_covered(case: Case, rows: Rows, work: WorkList, tile: int) -> None:
    """Every page that a row's tile sees is in one of its parts, and each part has a place of its own."""
    assert set(work.qo_tiles) <= {0}
    assert work.chunk % case.page_size == 0
    pages, tokens = rows.kv_indptr_cpu.diff().tolist(), rows.qo_indptr_cpu.diff().tolist()
    window = case.spec.window_left
    for row in range(case.num_rows):
        parts = [kv_tile for request, kv_tile in zip(work.requests, work.kv_tiles, strict=True) if request == row]
        seen = pages[row] if window < 0 else min(pages[row], -(-(window + tile) // case.page_size))
        length = work.chunk // case.page_size
        covered = [page for part in parts for page in range(part * length, min((part + 1) * length, seen))]
        assert covered == (list(range(seen)) if tokens[row] else [])
        assert len(parts) == (max(1, -(-seen // length)) if tokens[row] else 0)
        assert work.o_indptr[row + 1] - work.o_indptr[row] == tokens[row] * len(parts)
    assert work.merge_indptr[-1] == work.o_indptr[-1]
    assert len(work.requests) <= case.info[0]
    slots = (case.info[11] - case.info[10]) // (4 * case.spec.num_qo_heads * case.spec.head_dim)
    assert work.o_indptr[-1] <= slots


@pytest.mark.parametrize("seed", range(12))
def test_lists_are_those_of_flashinfer(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    split, whole = zip(*(as_flashinfer(100 * seed + nth, monkeypatch) for nth in range(20)), strict=True)
    assert sum(split) > 1
    assert sum(whole) > 1


def reach_of(case: Case) -> bool:
    """Whether the case has a schedule, and is small; if so, a kernel that follows it reaches every key that tokens may
    see, and writes the results of every token."""
    given = case.rows()
    if case.schedule is None or given.num_tokens * int(given.kv_lens_cpu.sum()) > 1 << 21:
        return False
    info, page_size, window = PlanInfo(*case.schedule.layout), case.page_size, case.spec.window_left
    ints = np.full(-(-case.num_bytes // 4), STALE, dtype=np.int32)
    case.schedule.fill(ints, given)
    starts, pages = given.qo_indptr_cpu.long(), given.kv_indptr_cpu.long()
    kv_lens = torch.tensor([case.numbers.randint(max(0, n - page_size + 1), n) for n in given.kv_lens_cpu.tolist()])
    rows = KernelRows(starts, pages * page_size, kv_lens, kv_lens, starts.diff())
    query = torch.zeros(given.num_tokens, case.spec.num_qo_heads, 1)
    key_shape = (int(pages[-1]) * page_size, case.spec.num_kv_heads)
    found = follow(torch.from_numpy(ints), info, rows, query, key_shape, case.spec.head_dim, window)
    assert not found.broken.any()
    assert found.merged.all()
    visible, _ = _seen(*found.keys.shape, rows, Rules(1.0, True, window, 0.0))
    assert (found.keys | ~visible).all()
    return True


@pytest.mark.parametrize("whole", [False, True], ids=["split", "whole"])
def test_blocks_reach_every_key(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows with padding and without, whatever a workspace held before."""
    count, seed = 0, 0
    while count < 40:
        num_sms = Case(seed).num_sms
        monkeypatch.setattr(schedule, "NUM_SMS", num_sms)
        case, seed = Case(seed, most_rows=5), seed + 1
        count += case.is_whole == whole and reach_of(case)


def test_parts_of_few_pages_are_as_small_as_may_be() -> None:
    """Pages of as many keys as the smallest part: few of them, so that bounds of the search lie next to each other."""
    numbers = Random(0)
    layout = Layout(*range(len(Layout._fields)))
    for _ in range(3000):
        lens = [numbers.randint(0, 12) for _ in range(numbers.randint(1, 6))]
        q_tiles, most = [numbers.choice((0, 1, 1, 1)) for _ in lens], numbers.randint(1, 20)
        expected, _ = schedule._prefill_chunk(q_tiles, lens, most, 128, True, -1, False)
        pages, has_tokens = np.maximum(lens, 1), np.array(q_tiles) > 0
        assert GraphSchedule(layout, 1, 128, most, None)._chunk_pages(pages, has_tokens) == expected, (
            lens,
            q_tiles,
            most,
        )


# What falls back to FlashInfer's own.


def test_tiles_as_small_as_flashinfers_are_left_to_it() -> None:
    for query_len, num_rows, shape in ((2, 1, (32, 8, 128)), (16, 64, (64, 8, 128)), (4, 2, (8, 8, 64))):
        rows = rows_of([query_len] * num_rows, [1] * num_rows)
        spec = AttentionSpec(*shape)
        assert GraphSchedule.replacing(planned(rows, spec, 16)[0], rows, spec, 16, 132) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_cuda_graph": 0}, {"split_kv": 0}, {"cta_tile_q": 64}, {"total_num_rows": 9}, {"padded_batch_size": 7},
        {"padded_batch_size": 1000}, {"merge_indptr_offset": 0}, {"qo_tile_indices_offset": 2},
        {"o_indptr_offset": 2}, {"block_valid_mask_offset": 16}, {"kv_chunk_size_ptr_offset": 6013},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_are_not_as_expected_are_left_to_flashinfer(changes: dict[str, int]) -> None:
    rows = rows_of([2] * 64, [1] * 64)
    spec = AttentionSpec(32, 8, 128)
    info = planned(rows, spec, 16)[0]
    found = GraphSchedule.replacing(info, rows, spec, 16, 132)
    assert found is not None
    assert found.layout == Layout(*info)._replace(cta_tile_q=16, padded_batch_size=64, split_kv=0)
    changed = Layout(*info)._replace(**changes)
    assert GraphSchedule.replacing(changed, rows, spec, 16, 132) is None
    for other in ([*info, 0], info[:-1]):
        assert GraphSchedule.replacing(other, rows, spec, 16, 132) is None


def test_rows_that_a_graph_has_no_tiles_for_are_refused() -> None:
    rows, spec = rows_of([2] * 64, [1] * 64), AttentionSpec(32, 8, 128)
    info, num_bytes = planned(rows, spec, 16)
    found, ints = GraphSchedule.replacing(info, rows, spec, 16, 132), np.zeros(num_bytes, dtype=np.int32)
    assert found is not None
    found.fill(ints, rows_of([4] * 32 + [0] * 32, [1] * 64))
    with pytest.raises(RuntimeError, match=r"tiles of 16 packed queries, got rows of up to 5 tokens, 128 in all"):
        found.fill(ints, rows_of([5] + [2] * 60 + [1] * 3, [1] * 64))
    with pytest.raises(RuntimeError, match=r"got rows of up to 3 tokens, 192 in all: capture one for rows as long"):
        found.fill(ints, rows_of([3] * 64, [1] * 64))


# In graphs.


class Kit(KitBase):
    backend_name = EmulatedFlashInfer.name


class GpuKit(KitBase):
    backend_name, device = "FLASHINFER", "cuda"


ON_GPU = pytest.param(GpuKit, marks=pytest.mark.gpu, id="gpu")
KITS = [pytest.param(Kit, id="emulated"), ON_GPU]


class Verified:
    """A graph of rows of some verified tokens each, and its layer."""

    def __init__(
        self, query_len: int, num_rows: int, spec: AttentionSpec = SPEC, kit: type[KitBase] = Kit, num_pages: int = 256
    ) -> None:
        if kit.device == "cuda":
            if not torch.cuda.is_available():
                pytest.skip("no CUDA device here")
            pytest.importorskip("flashinfer")
        self.spec, self.query_len, self.num_rows, self.kit = spec, query_len, num_rows, kit()
        backend, groups, self.cache = self.kit.backend, plan_groups({0: spec}), KVCacheSpec(num_pages, 16)
        given = self.cache, Limits(num_rows, num_rows * query_len, 2048), torch.device(kit.device)
        self.owner = backend.get_state_cls()(groups, *given, options=FlashInferOptions())
        self.builder = backend.get_builder_cls()(groups[0], *given)
        self.impl = backend.get_impl_cls()(spec, self.cache, torch.device(kit.device))
        with self.owner.graph_capture(num_rows):
            self.graph = self.owner.graph_clone(num_rows, query_len)

    def error(self, *seq_lens: int) -> float:
        """How far the outputs of rows with so many keys are from the reference; missing rows are padded."""
        shape = BatchShape(seq_lens=seq_lens, query_lens=(self.query_len,) * len(seq_lens))
        given = self.kit.make_batch(self.spec, shape, num_pages=self.cache.num_pages)
        missing = self.num_rows - len(seq_lens)
        common = graph_batch(given, self.num_rows, self.query_len)
        metadata = self.builder.build(0, common)
        self.step, self.rows = self.graph.begin_forward(metadata), metadata.prefill
        brought = [padded(tensor, missing * self.query_len) for tensor in (given.query, given.key, given.value)]
        out = self.impl.forward(*brought, given.fresh_pool(), self.step)  # type: ignore[arg-type]
        return float(output_error(out[: len(given.query)], given.expected()[0]))

    @property
    def plan(self) -> PrefillPlan:
        assert isinstance(self.step.prefill, PrefillPlan)
        return self.step.prefill


def pretend(num_sms: int, patch: pytest.MonkeyPatch) -> None:
    """Another GPU, as FLASHINFER and the emulated library see it."""
    patch.setattr(state, "num_multiprocessors", lambda device: num_sms)
    patch.setattr(schedule, "NUM_SMS", num_sms)


@pytest.mark.parametrize(("query_len", "tile", "theirs"), [(2, 16, 64), (4, 16, 128), (16, 64, 128)])
@pytest.mark.parametrize("window", [-1, 40])
@pytest.mark.parametrize("num_sms", [10, 11, 132])  # SPEC has two KV heads: one row a multiprocessor runs at once
@pytest.mark.sampled
def test_verified_tokens_take_small_tiles(
    query_len: int, tile: int, theirs: int, window: int, num_sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first plan and at later ones, of long rows, short ones, few and many. Whole rows have no other blocks."""
    pretend(num_sms, monkeypatch)
    verified = Verified(query_len, 10, replace(SPEC, window_left=window))
    for lens in ((900, 20), (16,) * 10, (300, 17, 500, 64, 400)):
        assert verified.error(*lens) < 1e-2
        info = PlanInfo(*verified.plan.wrapper._plan_info)
        assert info.tile_q == tile
        assert schedule.cta_tile_q(SPEC.group_size * (10 * query_len - 9), 64) == theirs
        assert (info.split, info.graph) == (int(num_sms > 10), 1)
        assert info.padded == 10 if num_sms == 10 else info.padded > 10
    if num_sms == 132:
        ints = verified.plan.wrapper._int_workspace_buffer
        assert int(ints[info.valid_at : info.stop].sum()) > (10 if window < 0 else 0)  # some are split


READY = [(8, 2, 64, -1), (8, 2, 64, 40), (16, 4, 128, -1), (16, 4, 128, 40), (4, 2, 256, -1)]  # kernels on a GPU
CASES = [
    *(pytest.param(Kit, shape, id=f"emulated {shape}") for shape in [*READY, (4, 2, 256, 40)]),
    *(pytest.param(GpuKit, shape, marks=pytest.mark.gpu, id=f"gpu {shape}") for shape in READY),
]


@pytest.mark.parametrize("whole", [False, True], ids=["split", "whole"])
@pytest.mark.parametrize(("kit", "shape"), CASES)
@pytest.mark.sampled
def test_kernels_follow_the_lists(
    shape: tuple[int, int, int, int], whole: bool, kit: type[KitBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of FlashInfer on a GPU, over more rows than it attends at once, and over few."""
    *heads, window = shape
    spec, num_rows = AttentionSpec(*heads, dtype=torch.bfloat16, window_left=window), 6
    if kit.device == "cuda":
        num_rows = 150 if whole else 20
    elif whole:
        pretend(2, monkeypatch)
    for query_len, tile in ((2, 16), (3, 16), (15, 64)):
        verified = Verified(query_len, num_rows, spec, kit, num_pages=20 * num_rows)
        for lens in ((290, 20), (16,) * num_rows, (100, 17, 300, 64, 200), (*[250] * (num_rows - 1), 40)):
            assert verified.error(*lens) < 1e-2
            info = PlanInfo(*verified.plan.wrapper._plan_info)
            ours = verified.plan.graph_schedule is not None
            assert (info.tile_q, info.split) == (tile, int(not (whole and ours)))
        assert ours or spec.head_dim == 256  # where FlashInfer's own tiles may be as small


@pytest.mark.parametrize("kit", KITS)
@pytest.mark.parametrize("window", [-1, 40])
def test_flashinfers_own_lists_are_as_transcribed(
    window: int, kit: type[KitBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its arrays lie and what they say, without a schedule of ours."""
    monkeypatch.setattr(GraphSchedule, "replacing", lambda *given: None)
    spec = replace(SPEC, window_left=window)
    verified = Verified(2, 12, spec, kit)
    monkeypatch.setattr(schedule, "NUM_SMS", verified.owner.library.num_sms)
    for lens in ((290, 20), (17,) * 12, (900, 600, 30)):
        assert verified.error(*lens) < 1e-2
        wrapper, rows = verified.plan.wrapper, verified.rows
        info, ints = PlanInfo(*map(int, wrapper._plan_info)), wrapper._int_workspace_buffer.cpu()
        ints = ints[: ints.numel() // 4 * 4].view(torch.int32).numpy()
        work, num_tokens = written(ints, info, 12)
        tiles = fa2_tiles(*arguments_of(rows, spec, 16, 24))
        assert work == work_list(rows.qo_indptr_cpu.tolist(), tiles)._replace(chunk=tiles.chunk * 16)
        assert (num_tokens, info.tile_q, len(wrapper._plan_info)) == (24, 64, 15)


def test_long_rows_are_flashinfers() -> None:
    verified = Verified(40, 3)
    assert verified.error(900, 60) < 1e-2
    assert verified.plan.graph_schedule is None


def test_a_buffer_whose_copy_may_run_is_left_alone() -> None:
    """Each plan takes a buffer that is not the last one's; the first, FlashInfer's and ours, takes two."""
    verified = Verified(2, 10)
    ring = verified.owner._ring
    before = ring.slot
    verified.error(900, 20)
    first = ring.slot
    assert (first - before) % len(ring.hosts_cpu) == 2
    kept = ring.hosts_cpu[first].clone()
    verified.error(30, 20)
    assert (ring.slot - first) % len(ring.hosts_cpu) == 1
    assert ring.hosts_cpu[first].equal(kept)


def test_whole_rows_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later plans write nothing and copy nothing, unless rows have other numbers of tokens than the list says."""
    pretend(10, monkeypatch)
    verified = Verified(2, 10)
    ring = verified.owner._ring
    before = ring.slot
    assert verified.error(900, 20) < 1e-2
    assert (ring.slot - before) % len(ring.hosts_cpu) == 2
    kept, ints = [host.clone() for host in ring.hosts_cpu], verified.plan.wrapper._int_workspace_buffer
    listed, after = ints.clone(), ring.slot
    for lens in ((30, 20), (5,) * 10, (1700, 3, 400)):
        assert verified.error(*lens) < 1e-2
    assert ring.slot == after
    assert all(map(torch.equal, ring.hosts_cpu, kept))
    assert ints.equal(listed)
    starts = verified.rows.qo_indptr_cpu.clone()
    starts[-3:] -= 1
    for num_tokens, given in ((19, starts), (20, verified.rows.qo_indptr_cpu)):
        verified.plan(replace(verified.rows, num_tokens=num_tokens, qo_indptr_cpu=given))
        info = PlanInfo(*verified.plan.wrapper._plan_info)
        assert ints[info.o_indptr_at :][: 4 * 11].view(torch.int32).equal(given)


def test_starts_that_a_caller_overwrites_are_compared_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's tensors on the host may be a buffer that the next one is written into."""
    pretend(10, monkeypatch)
    verified = Verified(2, 10)
    assert verified.error(900, 20) < 1e-2
    starts = verified.rows.qo_indptr_cpu.clone()
    starts[-1] -= 1
    rows = replace(verified.rows, num_tokens=19, qo_indptr_cpu=starts)
    verified.plan(rows)
    assert verified.plan._serves(rows)
    starts[-1] += 1
    assert not verified.plan._serves(rows)


class GraphKit(Graphs):
    backend_name, dtypes = EmulatedFlashInfer.name, (torch.bfloat16,)


class EngineKit(Engines):
    backend_name, dtypes = EmulatedFlashInfer.name, (torch.bfloat16,)


@pytest.mark.parametrize("num_sms", [1, 132])
def test_the_kits_graphs_pass(num_sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of several tokens a row; on a GPU of one multiprocessor all of them have whole rows."""
    pretend(num_sms, monkeypatch)
    made, splits = GraphSchedule.replacing, []

    def replacing(*given: Any) -> GraphSchedule | None:
        found = made(*given)
        splits.append(None if found is None else found.splits)
        return found

    monkeypatch.setattr(GraphSchedule, "replacing", replacing)
    monkeypatch.setattr(Graphs, "query_lens", (3,))
    kit, engine = GraphKit(), EngineKit()
    for name in ("plain", "window_15", "soft_cap", "alibi"):
        kit.test_replays_equal_the_reference(name)
    kit.test_replays_with_scales("plain")
    kit.test_replays_over_caches_of_8_bits(torch.float8_e4m3fn)
    kit.test_replays_over_a_step_table("window_15")
    kit.test_replays_of_cross_attention()
    kit.test_verbs()
    kit.test_filling_reads_nothing_from_the_device()
    engine.test_graphs_over_an_engines_tensors("plain")
    engine.test_a_size_is_made_over_a_batch_that_is_there("plain")
    assert Counter(splits) == {num_sms > 1: 14, None: 4}  # FlashInfer's tiles for one row or two are as small


# What is broken, and is seen.


def broken_fill(change: Any) -> Any:
    made = GraphSchedule.fill

    def fill(self: GraphSchedule, ints: Any, rows: Rows) -> None:
        made(self, ints, rows)
        change(ints, PlanInfo(*self.layout), rows)

    return lambda patch: patch.setattr(GraphSchedule, "fill", fill)


def all_valid(ints: Any, info: PlanInfo, rows: Rows) -> None:
    ints.view(np.uint8)[info.valid_at : info.stop] = 1


def later_merges(ints: Any, info: PlanInfo, rows: Rows) -> None:
    ints[info.merge_at // 4 + 1 :][: rows.num_tokens] += 1


def pages_for_keys(ints: Any, info: PlanInfo, rows: Rows) -> None:
    ints[info.chunk_at // 4] //= 16


def fewer_tokens(ints: Any, info: PlanInfo, rows: Rows) -> None:
    ints[info.num_tokens_at // 4] -= 1


def next_row(ints: Any, info: PlanInfo, rows: Rows) -> None:
    ints[info.requests_at // 4 : info.requests_at // 4 + 2] = [1, 0]


def one_part(ints: Any, info: PlanInfo, rows: Rows) -> None:
    ints[info.kv_tiles_at // 4 :][: info.padded] = 0


def first_row(ints: Any, info: PlanInfo, rows: Rows) -> None:
    ints[info.requests_at // 4 + 9] = 0


def second_tile(ints: Any, info: PlanInfo, rows: Rows) -> None:
    ints[info.qo_tiles_at // 4 + 9] = 1


def later_outputs(ints: Any, info: PlanInfo, rows: Rows) -> None:
    ints[info.o_indptr_at // 4 + 2] += 1


def of_parts(ints: Any, info: PlanInfo, rows: Rows) -> None:
    ints[info.o_indptr_at // 4 :][:11] *= 2


NOTHING = "nothing filled"
FAULTS = {
    "all valid": broken_fill(all_valid),
    "merges one later": broken_fill(later_merges),
    "a chunk in pages": broken_fill(pages_for_keys),
    "a token less": broken_fill(fewer_tokens),
    "rows exchanged": broken_fill(next_row),
    "the first part alone": broken_fill(one_part),
    NOTHING: lambda patch: patch.setattr(GraphSchedule, "fill", lambda *given: None),
}
FAULTS_OF_WHOLE = {
    "a row twice": broken_fill(first_row),
    "a second tile": broken_fill(second_tile),
    "outputs one later": broken_fill(later_outputs),
    "outputs of two parts": broken_fill(of_parts),
    "a block less": lambda patch: patch.setattr(
        Layout, "of_whole_rows", lambda self, rows: self._replace(padded_batch_size=rows - 1, split_kv=0)
    ),
    "a block an item": lambda patch: patch.setattr(
        Layout, "of_whole_rows", lambda self, rows: self._replace(split_kv=0)
    ),
    NOTHING: FAULTS[NOTHING],
}


def is_found(verified: Verified) -> bool:
    try:
        return not verified.error(1700, 200, 600, *[20] * 7) < 1e-2
    except (RuntimeError, IndexError):
        return True


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_schedule_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what graphs attend, the emulated kernel following the list."""
    verified = Verified(2, 10)
    assert verified.error(900, 20, 300) < 1e-2
    FAULTS[fault](monkeypatch)
    assert is_found(verified)


@pytest.mark.parametrize("fault", FAULTS_OF_WHOLE)
def test_a_broken_schedule_of_whole_rows_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise. The grid must not be larger than the list, of which a mask says nothing."""
    pretend(9, monkeypatch)
    FAULTS_OF_WHOLE[fault](monkeypatch)
    verified = Verified(2, 10)
    verified.owner._ring.hosts_cpu[:] = [torch.full_like(host, 1 << 30) for host in verified.owner._ring.hosts_cpu]
    assert is_found(verified)


def test_what_whole_rows_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask, no partial results, and no number of tokens: anything may stand there."""

    def overwrite(ints: Any, info: PlanInfo, rows: Rows) -> None:
        for at, size in ((info.merge_at, info.most_tokens + 1), (info.num_tokens_at, 1), (info.kv_tiles_at, 10)):
            ints[at // 4 :][:size] = STALE
        ints.view(np.uint8)[info.valid_at :][: info.padded] = 0

    pretend(9, monkeypatch)
    broken_fill(overwrite)(monkeypatch)
    verified = Verified(2, 10)
    for lens in ((900, 20, 300), (30,) * 10):
        assert verified.error(*lens) < 1e-2
        verified.plan.wrapper._float_workspace_buffer.fill_(255)  # NaN
