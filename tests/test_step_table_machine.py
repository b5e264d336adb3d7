"""A step table under any sequence of edits and steps (hypothesis), against a dict of page lists."""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attn_backends.step_table import StepTable
from tests.step_walk import CACHE, LIMITS, SIDES, assert_both_sides_equal, assert_step, compiled


class TableMachine(RuleBasedStateMachine):
    """A step table against a dict of page lists."""

    side = "shared"

    @initialize()
    def make(self) -> None:
        self.table = StepTable(LIMITS, CACHE, make_side=SIDES[self.side])
        self.pages: dict[str, list[int]] = {}
        self.num_made = 0
        self.order: list[str] = []

    def fresh(self, data: st.DataObject, name: str, most: int) -> list[int]:
        left = [page for page in range(CACHE.num_pages) if page not in self.pages.get(name, [])]
        room = min(most, self.table.capacity - len(self.pages.get(name, [])))
        return data.draw(st.lists(st.sampled_from(left), max_size=room, unique=True)) if room > 0 else []

    def some(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.pages)))

    @precondition(lambda self: len(self.pages) < LIMITS.max_num_requests)
    @rule(data=st.data())
    def enter(self, data: st.DataObject) -> None:
        name = f"r{self.num_made}"
        self.num_made += 1
        pages = self.fresh(data, name, 12)
        assert self.table.enter(name, pages) == len(self.pages)
        self.pages[name] = pages

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        name = self.some(data)
        pages = self.fresh(data, name, 4)
        self.table.extend(name, pages)
        self.pages[name] += pages

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.pages)), unique=True))
        added = {name: pages[0] for name in names if (pages := self.fresh(data, name, 1))}
        self.table.append([self.table.row_of(name) for name in added], list(added.values()))
        for name, page in added.items():
            self.pages[name].append(page)

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = self.some(data)
        self.table.leave(name)
        del self.pages[name]

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        rows = st.integers(0, len(self.pages) - 1)
        self.table.swap_rows(data.draw(rows), data.draw(rows))

    @precondition(lambda self: any(self.pages.values()))
    @rule(data=st.data(), threshold=st.integers(1, 3), padded=st.integers(0, 2))
    def step(self, data: st.DataObject, threshold: int, padded: int) -> None:
        names = data.draw(
            st.lists(st.sampled_from(sorted(n for n in self.pages if self.pages[n])), min_size=1, unique=True)
        )
        lens = [data.draw(st.integers(1, min(5, len(self.pages[name]) * CACHE.page_size))) for name in names]
        order = self.table.arrange(names, lens, threshold)
        names, lens = [names[i] for i in order], [lens[i] for i in order]
        room = [min(len(self.pages[name]) * CACHE.page_size, LIMITS.max_model_len) for name in names]
        context = [data.draw(st.integers(0, most - n)) for most, n in zip(room, lens, strict=True)]
        padded = min(padded, LIMITS.max_num_requests - len(names))
        step = self.table.step(context, lens, num_padded_reqs=padded)
        assert_step(step, compiled(self.table, context, lens, padded))
        assert_both_sides_equal(self.table)
        ends = [c + n for c, n in zip(context, lens, strict=True)]
        if all(end < most for end, most in zip(ends, room, strict=True)):
            assert_step(self.table.advance(step), compiled(self.table, ends, [1] * len(ends), padded))

    @invariant()
    def rows_are_the_requests(self) -> None:
        assert sorted(self.table.request_ids) == sorted(self.pages)
        for name, pages in self.pages.items():
            assert self.table.request_ids[self.table.row_of(name)] == name
            assert self.table.pages_of(name).tolist() == pages


class CopiedTableMachine(TableMachine):
    side = "copied"


TestSharedTable = TableMachine.TestCase
TestCopiedTable = CopiedTableMachine.TestCase
TestSharedTable.settings = TestCopiedTable.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
