"""Edits of step tables in any order between steps, at random, against a list of names and page lists.

`StepWalk` edits as a scheduler does, and so in few orders. Here every order of public calls may come, and whatever a
call was given is overwritten as soon as it has returned.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.step.table import StepBatch, StepTable
from tests.helpers.step_walk import CACHE, LIMITS, assert_step

CAPACITY = -(-LIMITS.max_model_len // CACHE.page_size)
MUTABLE = ("Array", "Sequence", "Tensor")  # what annotations of arguments that a caller may write to later name


def mutable_arguments(*owners: type) -> set[tuple[str, str]]:
    """(method, parameter) of every public method that takes something a caller could write to afterwards."""
    return {
        (name, parameter.name)
        for owner in owners
        for name, method in inspect.getmembers(owner, inspect.isfunction)
        if not name.startswith("_")
        for parameter in inspect.signature(method).parameters.values()
        if any(word in str(parameter.annotation) for word in MUTABLE)
    }


def overwrite(value: Any) -> None:
    """Fill a list, array or tensor with what is valid and was not meant."""
    if isinstance(value, list):
        value[:] = ["?" if isinstance(item, str) else 0 for item in value]
    elif isinstance(value, np.ndarray):
        value.fill(0)
    elif isinstance(value, torch.Tensor):
        value.zero_()


def assert_bounded(step: StepBatch, exact: CommonAttentionMetadata, bounds: CommonAttentionMetadata) -> None:
    """Lengths on the device are exact, and those on the host bounds: indices that are left over are 0."""
    for name in ("seq_lens", "slot_mapping", "query_start_loc", "paged_kv_indptr", "paged_kv_last_page_len"):
        assert getattr(step.common, name).tolist() == getattr(exact, name).tolist(), name
    for name in ("seq_lens_cpu", "context_lens_cpu", "query_start_loc_cpu", "paged_kv_indptr_cpu"):
        assert getattr(step.common, name).tolist() == getattr(bounds, name).tolist(), name
    indices, used = step.common.paged_kv_indices.tolist(), exact.paged_kv_indices.tolist()
    assert indices == used + [0] * (int(bounds.paged_kv_indptr_cpu[-1]) - len(used))


class EditWalk:
    """Random edits and steps of several tables alike.

    Attributes:
        names: the requests, in the order of their rows.
        pages: what each of them has.
        seen: counts of what happened.
        overwritten: (method, parameter) of arguments that were overwritten after a call.
    """

    def __init__(self, tables: Sequence[StepTable], seed: int) -> None:
        self.tables = tables
        self.random = random.Random(seed)
        self.names: list[str] = []
        self.pages: dict[str, list[int]] = {}
        self.num_made = 0
        self.seen: dict[str, int] = {}
        self.overwritten: set[tuple[str, str]] = set()
        self.steps: list[StepBatch] = []
        self.ends: list[int] = []  # lengths after the last step, if it can be advanced
        self.most: list[int] = []  # what the host takes them for, where it has upper bounds
        self.padding = 0

    def run(self, num_steps: int) -> None:
        """Every 16 steps other edits are frequent, so that runs of few kinds come about as well."""
        edits: list[Callable[[], None]] = [
            self.enter, self.extend, self.append, self.leave, self.swap, self.arrange, self.refused
        ]  # fmt: skip
        for i in range(num_steps):
            if i % 16 == 0:
                weights = [self.random.choice([1, 4] if edit == self.enter else [0.1, 1, 4]) for edit in edits]
            for edit in self.random.choices(edits, weights, k=self.random.choice([0, 1, 1, 2, 2, 3, 5])):
                edit()
            (self.advance if self.ends and self.random.random() < 0.5 else self.step)()

    # Calls.

    def call(self, method: str, **given: Any) -> list[Any]:
        """A method of every table, each time with copies of the arguments, overwritten after the call."""
        results = []
        for table in self.tables:
            copies = {name: self.copy_of(value, table.device) for name, value in given.items()}
            results.append(getattr(table, method)(**copies))
            for name, value in copies.items():
                if isinstance(value, (list, np.ndarray, torch.Tensor)):
                    overwrite(value)
                    self.overwritten.add((method, name))
        self.seen[method] = self.seen.get(method, 0) + 1
        return results

    def copy_of(self, value: Any, device: torch.device) -> Any:
        """What a caller may pass for these numbers: a list, a tuple, an array of either width, or a view of one."""
        if isinstance(value, torch.Tensor):
            return value.to(device, copy=True)
        if not isinstance(value, list) or any(isinstance(item, str) for item in value):
            return list(value) if isinstance(value, list) else value
        form = self.random.choice(["list", "tuple", "int32", "int32", "int64", "view"])
        if form in ("list", "tuple"):
            return list(value) if form == "list" else tuple(value)
        if form == "view":
            return np.repeat(np.array(value, np.int32), 2)[::2]
        return np.array(value, form)

    # Edits.

    def new_pages(self, name: str, most: int) -> list[int]:
        own = self.pages.get(name, [])
        others = [page for page in range(CACHE.num_pages) if page not in own]
        return self.random.sample(others, self.random.randint(0, min(most, CAPACITY - len(own))))

    def enter(self) -> None:
        if len(self.names) == LIMITS.max_num_requests:
            return
        name = f"r{self.random.randrange(12)}"  # also one that was here before
        if name in self.pages:
            return
        pages = self.new_pages(name, self.random.choice([2, CAPACITY]))
        assert self.call("enter", request_id=name, pages=pages) == [len(self.names)] * len(self.tables)
        self.names.append(name)
        self.pages[name] = pages

    def extend(self) -> None:
        if self.names:
            name = self.random.choice(self.names)
            pages = self.new_pages(name, 3)
            self.call("extend", request_id=name, pages=pages)
            self.pages[name] += pages

    def append(self) -> None:
        """To some rows, in order or not; to none of them too."""
        rows = self.random.sample(range(len(self.names)), self.random.randint(0, len(self.names)))
        rows = sorted(rows) if self.random.random() < 0.7 else rows
        added = {row: self.new_pages(self.names[row], 1) for row in rows}
        added = {row: pages for row, pages in added.items() if pages}
        self.call("append", rows=list(added), pages=[page for pages in added.values() for page in pages])
        for row, pages in added.items():
            self.pages[self.names[row]] += pages

    def leave(self) -> None:
        if not self.names:
            return
        row = self.random.choice([len(self.names) - 1, self.random.randrange(len(self.names))])
        assert self.call("leave", request_id=self.names[row]) == [row] * len(self.tables)
        del self.pages[self.names[row]]
        last = self.names.pop()
        if row < len(self.names):
            self.names[row] = last
        self.ends = []

    def swap(self) -> None:
        if self.names:
            first, second = (self.random.randrange(len(self.names)) for _ in range(2))
            self.call("swap_rows", first=first, second=second)
            self.names[first], self.names[second] = self.names[second], self.names[first]
            self.ends = self.ends if first == second else []

    def arrange(self) -> None:
        names = self.random.sample(self.names, self.random.randint(0, len(self.names)))
        lens = [self.random.randint(1, 3) for _ in names]
        orders = self.call("arrange", request_ids=names, query_lens=lens, decode_threshold=2)
        before, self.names = self.names, list(self.tables[0].request_ids)
        assert sorted(before) == sorted(self.names)
        for order in orders:
            assert [names[i] for i in order] == self.names[: len(names)]
        self.ends = self.ends if before == self.names else []

    def refused(self) -> None:
        """A wrong edit changes nothing."""
        if not self.names:
            return
        row = len(self.names) - 1
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("append", {"rows": [row], "pages": [CACHE.num_pages]}),
            ("append", {"rows": [row, row], "pages": [1, 2]}),
            ("append", {"rows": [row + 1], "pages": [1]}),
            ("extend", {"request_id": self.names[row], "pages": [3, 4, 3]}),
            ("enter", {"request_id": self.names[0], "pages": [1]}),
            ("leave", {"request_id": "nobody"}),
            ("swap_rows", {"first": row, "second": row + 1}),
        ]
        method, given = self.random.choice(wrong)
        for table in self.tables:
            try:
                getattr(table, method)(**given)
            except ValueError:
                continue
            raise AssertionError(f"{method}({given}) was not refused")
        self.seen["refused"] = self.seen.get("refused", 0) + 1

    # Steps.

    def step(self) -> None:
        """Of the first rows, as they stand."""
        with_pages = next((row for row, name in enumerate(self.names) if not self.pages[name]), len(self.names))
        if not with_pages:
            return
        count = self.random.randint(1, with_pages)
        room = [min(len(self.pages[name]) * CACHE.page_size, LIMITS.max_model_len) for name in self.names[:count]]
        longest = self.random.choice([1, 4])
        query = [self.random.randint(1, min(longest, most)) for most in room]
        context = [self.random.randint(0, most - n) for most, n in zip(room, query, strict=True)]
        self.padding = self.random.choice([0, 0, min(2, LIMITS.max_num_requests - count)])
        given: dict[str, Any] = {"query_lens": query, "num_padded_reqs": self.padding}
        ids = [self.random.randrange(1000) for _ in range(sum(query))] if self.random.random() < 0.7 else None
        most = context
        if self.random.random() < 0.2:  # the device alone knows them exactly
            given["context_lens_on_device"] = torch.tensor(context, dtype=torch.int32)
            most = [self.random.randint(c, end - n) for c, n, end in zip(context, query, room, strict=True)]
        steps = self.call("step", context_lens=most, token_ids=ids, **given)
        self.check(steps, context, most, query, ids)

    def advance(self) -> None:
        """The last step, if its rows have pages for one token more; they may have got some since."""
        room = [min(len(self.pages[name]) * CACHE.page_size, LIMITS.max_model_len) for name in self.names]
        if any(end >= most for end, most in zip(self.most, room, strict=False)):
            return self.step()
        ids = [self.random.randrange(1000) for _ in self.ends]
        steps = []
        for table, step in zip(self.tables, self.steps, strict=True):
            tokens = torch.tensor(ids, device=table.device)
            steps.append(table.advance(step, tokens))
            overwrite(tokens)
        self.overwritten.add(("advance", "token_ids"))
        self.seen["advance"] = self.seen.get("advance", 0) + 1
        self.check(steps, self.ends, self.most, [1] * len(ids), None)
        assert all(step.token_ids[: len(ids)].tolist() == ids for step in steps)

    def check(
        self, steps: list[StepBatch], context: list[int], most: list[int], query: list[int], ids: list[int] | None
    ) -> None:
        """Both sides' pages, and every tensor of a step. `most` are the context lengths that the host was told."""
        expected, bounds = self.compiled(context, query), self.compiled(most, query)
        for table, step in zip(self.tables, steps, strict=True):
            assert table.request_ids == self.names
            on_the_device = table.side.buffers.page_table.cpu()
            for row, name in enumerate(self.names):
                count = len(self.pages[name])
                assert table.pages_of(name).tolist() == self.pages[name], f"the host's row {row}"
                assert on_the_device[row, :count].tolist() == self.pages[name], f"the device's row {row}"
            assert on_the_device.min() >= 0
            assert on_the_device.max() < CACHE.num_pages
            if step.common.seq_lens_are_upper_bounds:
                assert_bounded(step, expected, bounds)
            else:
                assert_step(step, expected, ids)
        self.steps, self.ends, self.most = (
            steps,
            *([c + n for c, n in zip(at, query, strict=True)] for at in (context, most)),
        )

    def compiled(self, context: list[int], query: list[int]) -> CommonAttentionMetadata:
        groups = [
            SequenceGroup(name, (SequenceData(c, n, self.pages[name]),))
            for name, c, n in zip(self.names, context, query, strict=False)
        ]
        return CommonAttentionMetadata.from_sequence_groups(groups, CACHE.page_size, "cpu", self.padding)
