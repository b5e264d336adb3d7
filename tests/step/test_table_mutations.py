"""What pins the step table, its allocator and page copies notices each of these faults."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from attn_backends.adapters.req_to_token import batch as token_batch
from attn_backends.adapters.req_to_token.table import TokenTable
from attn_backends.batch.tensors import BatchTensors
from attn_backends.cache import kv_cache
from attn_backends.engine import page_allocator
from attn_backends.engine.request import Request
from attn_backends.engine.scheduler import Scheduler
from attn_backends.step import device as device_copy, table
from attn_backends.step.rows import PageRows
from attn_backends.step.table import StepTable
from tests.cache import test_kv_cache
from tests.engine import test_page_allocator, test_scheduler
from tests.helpers.edit_walk import EditWalk
from tests.helpers.mutate import mutate
from tests.helpers.step_walk import CACHE, LIMITS, SIDES, copied_at_once, table_of_three
from tests.interface.test_arguments_are_not_kept import (
    test_decode_rows_keep_no_lengths_of_the_engine as check_decode_rows,
    test_nothing_changes_when_arguments_do as check_arguments,
)
from tests.step.test_table import test_rows_that_move_cost_rows_and_not_contexts as check_cost
from tests.step.test_table_refusals import test_no_advance_once_rows_have_moved as check_no_advance


class Mutation(NamedTuple):
    owner: Any
    function: str
    before: str
    after: str
    check: Callable[[], object]


def walk() -> None:
    for side in (SIDES["copied"], copied_at_once):
        EditWalk([StepTable(LIMITS, CACHE, make_side=side)], seed=0).run(300)


def arguments(name: str) -> Callable[[], None]:
    return lambda: [check_arguments(name, seed) for seed in range(5)][-1]


def tables_that_moved() -> None:
    check_no_advance(table_of_three("copied"), lambda table: table.leave("c"))


def copied_pairs() -> None:
    test_kv_cache.test_sources_are_read_before_any_page_is_written("NHD", torch.float32, 0)


def refused_pairs() -> None:
    test_kv_cache.test_pairs_that_are_refused([(0, 3), (2, 3)], "both copied to page 3")
    test_kv_cache.test_pairs_that_are_refused([(0, 1), (-1, 3)], "page -1 is not one of")


SALTED = "request.token_ids, request.cache_salt)"
MUTATIONS: dict[str, Mutation] = {
    # A row's state that stays when its request goes, or does not go along with it.
    "sent pages stay with the row": Mutation(
        PageRows, "leave", "self.num_pages[last] = self.num_sent[last] = 0", "self.num_pages[last] = 0", walk),
    "page sets stay with the row": Mutation(PageRows, "leave", "self._sets.clear(last)", "pass", walk),
    "page sets are not swapped": Mutation(PageRows, "swap_rows", "self._sets.swap(first, second)", "pass", walk),
    "sent pages are not swapped": Mutation(
        PageRows, "swap_rows", "(self.num_pages, self.num_sent, self.", "(self.num_pages, self.", walk),
    "the device's rows are not swapped": Mutation(
        PageRows, "swap_rows", "self.num_sent, self.row_on_device)", "self.num_sent)", walk),
    "rows that left and were not moved are advanced": Mutation(
        PageRows, "leave", "self.num_moves += 1", "pass", tables_that_moved),
    # Moves on the device.
    "moved rows count as moved no more": Mutation(
        PageRows, "_put_in_place", "self.row_on_device[:] = np", "np", walk),
    "moves are as narrow as the first row": Mutation(
        PageRows, "take_moves", "self.num_sent[rows].max()", "self.num_sent[rows[0]]", walk),
    "a row is written before it is read": Mutation(
        device_copy, "move_rows", "leading[rows] = leading[sources]",
        "for row, source in zip(rows, sources): leading[row] = leading[source]", walk),
    "rows move with every copy of a step": Mutation(
        device_copy.DeviceCopy, "step", "moves, runs = None, rows", "_, runs = None, rows", walk),
    "rows without pages on the device move too": Mutation(
        PageRows, "take_moves", " & (self.num_sent[: self.num_rows] > 0)", "",
        lambda: check_cost("leave, and another enters")),
    "rows that moved are sent anew": Mutation(
        PageRows, "swap_rows", "self.has_moved = True", "self.num_sent[pair], self.has_unsent = 0, True",
        lambda: check_cost("swap")),
    # Pages that the device lacks.
    "a row that is cut counts as sent": Mutation(
        PageRows, "take_unsent", "self.num_sent[rows] += starts[1:] - starts[:-1]",
        "self.num_sent[rows] = self.num_pages[rows]", walk),
    "appended pages are not unsent": Mutation(PageRows, "append", "self.has_unsent = True", "pass", walk),
    # Arrays of the caller.
    "the caller's lengths are kept": Mutation(table, "_padded", "context_lens.copy()", "context_lens", walk),
    "the engine's lengths on the host are kept": Mutation(
        BatchTensors, "_on_host", "self.seq_lens_cpu.numpy().astype(np.int32)", "self.seq_lens_cpu.numpy()",
        arguments("TokenTable.self_attention")),
    "the engine's lengths on the device are kept": Mutation(
        token_batch.GivenRows, "with_queries", "torch.int32, copy=True", "torch.int32", check_decode_rows),
    "an encoder's lengths on the device are kept": Mutation(
        TokenTable, "cross_attention", "rows.encoder_lens.clone()", "rows.encoder_lens",
        arguments("TokenTable.cross_attention")),
    "the caller's prompt is kept": Mutation(
        Request, "__post_init__", "self.token_ids = list(self.token_ids)", "pass", arguments("Request.__init__")),
    # Salts.
    "pages are looked for without the salt": Mutation(
        Scheduler, "_hits_if_fits", SALTED, "request.token_ids)",
        test_scheduler.test_prefixes_are_shared_under_one_salt_alone),
    "pages are published without the salt": Mutation(
        Scheduler, "_publish", SALTED, "request.token_ids)",
        test_scheduler.test_prefixes_are_shared_under_one_salt_alone),
    "one salt is as good as another": Mutation(
        page_allocator, "_root", "cache_salt.encode(", '"salt".encode(',
        test_page_allocator.test_a_salt_makes_every_digest_another),
    "a salt can spell tokens": Mutation(
        page_allocator, "_root", ', person=b"cache_salt"', "",
        test_page_allocator.test_a_salt_that_spells_tokens_is_no_page_of_them),
    # Copies.
    "pages are read after some were written": Mutation(
        test_kv_cache, "copy_pages", "_bits(tensor)[destination] = _bits(tensor)[source]",
        "[_bits(tensor)[d].copy_(_bits(tensor)[s]) for s, d in pairs]", copied_pairs),
    "copies go the other way": Mutation(test_kv_cache, "swap_pages", "source, destination = torch",
                                        "destination, source = torch", copied_pairs),
    "a page may be written twice": Mutation(kv_cache, "_check_pairs", "if destination in written:", "if False:",
                                            refused_pairs),
    "pages may be negative": Mutation(kv_cache, "_check_pairs", "if not 0 <= page < count", "if not page < count",
                                      refused_pairs),
}  # fmt: skip


passes = functools.cache(lambda check: check())  # without a fault, once


@pytest.mark.parametrize("name", MUTATIONS)
def test_it_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, function, before, after, check = MUTATIONS[name]
    passes(check)
    mutate(monkeypatch, owner, function, before, after)
    with pytest.raises((AssertionError, ValueError, IndexError, pytest.fail.Exception)):
        check()
