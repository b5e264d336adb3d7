"""Requests that come, grow and go at random, on step tables that are compared with the plain compiler at every step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.engine.page_allocator import PageAllocator
from attn_backends.spec import KVCacheSpec, Limits
from attn_backends.step.device import DeviceCopy, DeviceSide, SharedMemory
from attn_backends.step.rows import PageRows
from attn_backends.step.table import StepBatch, StepTable
from tests.helpers.same_batch import assert_same_batch

LIMITS = Limits(max_num_requests=7, max_num_tokens=40, max_model_len=46)
CACHE = KVCacheSpec(num_pages=48, page_size=4)
SIDES: dict[str, Callable[[PageRows], DeviceSide]] = {
    "shared": SharedMemory,
    "copied": lambda rows: DeviceCopy(rows, torch.device("cpu"), max_pages_a_copy=5),
}


def copied_at_once(rows: PageRows) -> DeviceSide:
    """All of a step's pages in its one copy."""
    return DeviceCopy(rows, torch.device("cpu"))


def table_of_three(side: str) -> StepTable:
    """Requests a, b and c with 3, 2 and 5 pages; b's first page is a's too; c has lookahead."""
    table = StepTable(LIMITS, CACHE, make_side=SIDES[side])
    table.enter("a", [3, 40, 5])
    table.enter("b", [3, 10])
    table.enter("c", [1, 47, 7, 8, 20])
    return table


def compiled(
    table: StepTable,
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    num_padded_reqs: int = 0,
    padded_query_len: int = 1,
) -> CommonAttentionMetadata:
    """The same step of the same rows by the plain compiler."""
    rows = zip(table.request_ids, context_lens, query_lens, strict=False)
    groups = [SequenceGroup(name, (SequenceData(c, q, table.pages_of(name).copy()),)) for name, c, q in rows]
    return CommonAttentionMetadata.from_sequence_groups(
        groups, table.cache.page_size, "cpu", num_padded_reqs, padded_query_len
    )


def assert_step(step: StepBatch, expected: CommonAttentionMetadata, token_ids: Sequence[int] | None = None) -> None:
    """Every tensor of a step, and that its table is as wide as any row may become, with ids in range everywhere."""
    assert_same_batch(step.common, expected)
    lens = zip(expected.context_lens_cpu.tolist(), expected.query_lens_cpu.tolist(), strict=True)
    rows = [range(c, c + q) for c, q in lens]
    positions = [p for row in rows[: expected.num_actual_reqs] for p in row]
    padding = [0] * (expected.num_tokens - len(positions))
    assert step.positions.tolist() == positions + padding
    if token_ids is not None:
        assert step.token_ids.tolist() == list(token_ids) + padding
    assert step.positions.dtype == step.token_ids.dtype == torch.int64


def assert_both_sides_equal(table: StepTable) -> None:
    """After a step: every page of every row, scheduled or not."""
    on_device = table.side.buffers.page_table.cpu().numpy()
    for row, count in enumerate(table.num_pages[: table.num_rows].tolist()):
        assert on_device[row, :count].tolist() == table.page_table[row, :count].tolist()
    assert on_device.min() >= 0
    assert on_device.max() < table.cache.num_pages


@dataclass(eq=False)
class Walker:
    """One request of the walk."""

    name: str
    token_ids: list[int]
    digests: list[bytes] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0
    is_verifying: bool = False  # its last tokens are drafts
    is_kept: bool = False  # swapped out: what was computed is kept elsewhere

    @property
    def num_pending(self) -> int:
        return len(self.token_ids) - self.num_computed


class StepWalk:
    """Random scheduler steps over a small pool. Counts of what happened are in `seen`."""

    def __init__(self, tables: Sequence[StepTable], seed: int) -> None:
        self.tables = tables
        self.table = tables[0]
        self.random = random.Random(seed)
        self.allocator = PageAllocator(CACHE.num_pages, CACHE.page_size)
        self.running: dict[str, Walker] = {}
        self.waiting: list[Walker] = []
        self.num_made = 0
        self.seen: dict[str, int] = {}

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for event in (self.admit, self.preempt, self.abort, self.swap_out, self.swap_rows):
                if self.random.random() < (0.5 if event == self.admit else 0.06):
                    event()
            if rows := self.schedule():
                self.step(rows)

    def count(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    def admit(self) -> None:
        """A new request, or one that waits: after a preemption from the prefix cache, after a swap with all it had."""
        if not self.waiting:
            prompt = [self.random.randrange(2)] * CACHE.page_size * self.random.randint(0, 4)
            prompt += [self.random.randrange(1000) for _ in range(self.random.randint(1, 9))]
            self.waiting.append(Walker(f"r{self.num_made}", prompt))
            self.num_made += 1
        walker = self.waiting[0]
        hits: list[int] = []
        if not walker.is_kept:
            self.allocator.extend_digests(walker.digests, walker.token_ids)
            hits = self.allocator.match(walker.digests[: (len(walker.token_ids) - 1) // CACHE.page_size])
        missing = self.allocator.pages_for(len(walker.token_ids)) - len(hits)
        room = len(self.running) < LIMITS.max_num_requests
        if not room or missing > self.allocator.num_available_beside(hits):
            return
        self.count("resume" if walker.num_computed or walker.is_kept else "prefix hit" if hits else "admit")
        self.allocator.take(hits)
        walker.pages = hits + self.allocator.allocate(missing).tolist()
        if not walker.is_kept:
            walker.num_computed, walker.num_published = len(hits) * CACHE.page_size, len(hits)
        walker.is_kept = False
        self.running[walker.name] = self.waiting.pop(0)
        split = self.random.randint(0, len(walker.pages))
        for table in self.tables:
            table.enter(walker.name, walker.pages[:split])
            table.extend(walker.name, walker.pages[split:])

    def leave(self, what: str, name: str | None = None) -> Walker | None:
        if not self.running:
            return None
        self.count(what)
        walker = self.running.pop(name or self.random.choice(list(self.running)))
        self.allocator.free(walker.pages)
        walker.pages = []
        for table in self.tables:
            table.leave(walker.name)
        return walker

    def preempt(self) -> None:
        if walker := self.leave("preempt"):
            self.waiting.append(walker)

    def abort(self) -> None:
        self.leave("abort")

    def swap_out(self) -> None:
        """Pages go elsewhere and come back as others, what was computed stays."""
        if walker := self.leave("swap"):
            walker.is_kept, walker.num_published = True, CACHE.num_pages
            self.waiting.append(walker)

    def swap_rows(self) -> None:
        if self.running:
            first, second = (self.random.randrange(self.table.num_rows) for _ in range(2))
            for table in self.tables:
                table.swap_rows(first, second)

    def schedule(self) -> list[tuple[Walker, int]]:
        """Some of the running requests with a decode, a chunk or drafts to verify, in any order, their pages there."""
        rows, budget = [], LIMITS.max_num_tokens - 2 * LIMITS.max_num_requests
        one_page: list[Walker] = []
        for walker in self.random.sample(list(self.running.values()), len(self.running)):
            query_len = self.random.randint(1, walker.num_pending) if self.random.random() < 0.3 else walker.num_pending
            if walker.num_pending == 1:
                query_len += self.random.choice([0, 0, 0, 1, 3])
            query_len = min(query_len, budget)
            length = walker.num_computed + query_len
            if not query_len or length > LIMITS.max_model_len or self.random.random() < 0.1:
                continue
            lookahead = self.random.choice([0, 0, 0, 1]) if length + CACHE.page_size <= LIMITS.max_model_len else 0
            missing = max(0, self.allocator.pages_for(length) + lookahead - len(walker.pages))
            if missing > self.allocator.num_available:
                continue
            pages = self.allocator.allocate(missing).tolist()
            walker.pages += pages
            if missing == 1:
                one_page.append(walker)
            else:
                for table in self.tables:
                    table.extend(walker.name, pages)
            rows.append((walker, query_len))
            budget -= query_len
        for table in self.tables:
            at = [table.row_of(walker.name) for walker in one_page]
            table.append(at, [walker.pages[-1] for walker in one_page])
        return rows

    def step(self, rows: list[tuple[Walker, int]]) -> None:
        lens = np.array([query_len for _, query_len in rows], np.int32)
        threshold = self.random.choice([1, 1, 4])
        for table in self.tables:
            order = table.arrange([walker.name for walker, _ in rows], lens, threshold)
        rows, lens = [rows[i] for i in order], lens[order]
        assert table.request_ids[: len(rows)] == [walker.name for walker, _ in rows]
        assert [n > threshold for n in lens.tolist()] == sorted(n > threshold for n in lens.tolist())
        context = np.array([walker.num_computed for walker, _ in rows], np.int32)
        for walker, query_len in rows:
            drafts = walker.num_computed + query_len - len(walker.token_ids)
            self.count("verify" if drafts > 0 else "decode" if walker.num_pending == 1 else "chunk")
            walker.is_verifying = drafts > 0
            walker.token_ids += [self.random.randrange(1000) for _ in range(drafts)]
        spans = [walker.token_ids[walker.num_computed : walker.num_computed + n] for walker, n in rows]
        token_ids = [token for span in spans for token in span]
        padding = self.random.choice([0, 0, min(2, LIMITS.max_num_requests - len(rows))])
        padded_query_len = self.random.randint(1, 2)
        expected = compiled(self.table, context.tolist(), lens.tolist(), padding, padded_query_len)
        steps = []
        for table in self.tables:
            made = table.step(context, lens, token_ids, num_padded_reqs=padding, padded_query_len=padded_query_len)
            assert_step(made, expected, token_ids)
            assert_both_sides_equal(table)
            steps.append(made)
        if self.random.random() < 0.3:
            self.advance(steps, (context + lens).tolist(), padding)
        for walker, query_len in rows:
            self.accept(walker, query_len)

    def advance(self, steps: list[StepBatch], context: list[int], padding: int) -> None:
        """As long as all rows have pages: without the host, and the same as with it."""
        pages = self.table.num_pages[: len(context)].tolist()
        while all(c < min(n * CACHE.page_size, LIMITS.max_model_len) for c, n in zip(context, pages, strict=True)):
            self.count("advance")
            expected = compiled(self.table, context, [1] * len(context), padding)
            steps = [table.advance(step) for table, step in zip(self.tables, steps, strict=True)]
            for step in steps:
                assert_step(step, expected)
            context = [c + 1 for c in context]

    def accept(self, walker: Walker, query_len: int) -> None:
        """What the step computed counts, but for rejected drafts; the last known token brings a new one."""
        num_pending = walker.num_pending
        if query_len == num_pending > 1 and walker.is_verifying:
            query_len = self.random.randint(1, query_len)
        is_last = query_len == num_pending or walker.is_verifying
        walker.num_computed += query_len
        if is_last:
            walker.token_ids = [*walker.token_ids[: walker.num_computed], self.random.randrange(1000)]
        walker.is_verifying = False
        self.allocator.extend_digests(walker.digests, walker.token_ids[: walker.num_computed])
        for i in range(walker.num_published, walker.num_computed // CACHE.page_size):
            self.allocator.publish(walker.pages[i], walker.digests[i])
            walker.num_published = i + 1
        if len(walker.token_ids) == LIMITS.max_model_len:
            self.leave("finish", walker.name)
