"""What a caller writes into its arrays after a call changes nothing, at any entry that takes one.

The entries are found, not listed: one that nobody says here how to call fails. Those of `StepTable` are called by
`EditWalk`, in any order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from attn_backends.adapters.req_to_token import batch as token_batch, table as token_table
from attn_backends.adapters.req_to_token.batch import StepRows
from attn_backends.adapters.req_to_token.table import SharedBuffers, TokenTable
from attn_backends.batch import common as batch, page_table
from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup
from attn_backends.engine import page_allocator, request, scheduler
from attn_backends.engine.config import SamplingParams, SchedulerConfig
from attn_backends.engine.page_allocator import PageAllocator
from attn_backends.engine.request import Request, ScheduledBatch
from attn_backends.engine.scheduler import Scheduler
from attn_backends.testing.guards.snapshot import differences, snapshot

MODULES = (page_table, batch, token_table, page_allocator, request, scheduler)
TAKES = ("Array", "Sequence", "Tensor", "list[", "StepRows")  # in an annotation: the caller could write there later


class Call(NamedTuple):
    function: Callable[..., Any]
    arguments: dict[str, Any]
    kept_in: Any = None  # what the call may change: it must not hold the arguments either
    in_out: tuple[str, ...] = ()  # arguments that the call is to change


def entries(module: ModuleType) -> set[str]:
    """Public functions and methods of a module that take arrays or lists; records, which hold what they name, aside."""
    found = set()
    for name, member in vars(module).items():
        if name.startswith("_") or getattr(member, "__module__", None) != module.__name__:
            continue
        is_record = is_dataclass(member) and member is not Request
        functions = {name: member} if inspect.isfunction(member) else {}
        if inspect.isclass(member):
            functions = {f"{name}.{key}": value for key, value in inspect.getmembers(member, inspect.isfunction)
                         if not key.startswith("_") or (key == "__init__" and not is_record)}  # fmt: skip
        for key, function in functions.items():
            annotations = [str(parameter.annotation) for parameter in inspect.signature(function).parameters.values()]
            if any(word in annotation for annotation in annotations for word in TAKES):
                found.add(key)
    return found


def overwrite(value: Any) -> None:
    """Everything that can be written to, at any depth."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        value[...] = 1
    elif isinstance(value, (list, tuple)):
        for item in value:
            overwrite(item)
        if isinstance(value, list):
            value[:] = [type(item)() if isinstance(item, (int, str, bytes)) else item for item in value]
    elif isinstance(value, (SequenceGroup, SequenceData, StepRows)):
        for field in fields(value):
            if not (isinstance(value, StepRows) and field.name == "seq_lens"):  # `decode_rows` has made it for the step
                overwrite(getattr(value, field.name))


def lens(random: Random, count: int, least: int = 2) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array([random.randint(least, 9) for _ in range(count)], np.int32)


def pages(random: Random, count: int) -> Any:
    found = random.sample(range(2, 60), count)
    return random.choice([found, np.array(found, np.int32), np.array(found)])


def step_rows(random: Random) -> StepRows:
    encoder, count = random.random() < 0.5, random.randint(1, 4)
    seq, queries, for_graph = lens(random, count, 3), lens(random, count, 1).clip(max=3), random.random() < 0.5
    queries = np.full_like(queries, queries[0]) if for_graph else queries
    before = torch.tensor([2] * count, dtype=torch.int32)
    return StepRows(
        torch.tensor(random.sample(range(5), count)), torch.from_numpy(seq.copy()), seq, queries, int(queries.sum()),
        encoder_lens=before if encoder else None, encoder_lens_cpu=before.numpy().copy() if encoder else None,
        for_graph=for_graph,
    )  # fmt: skip


def token_rows(random: Random, cross: bool) -> Call:
    table = TokenTable(torch.arange(100, dtype=torch.int32).view(5, 20), 20, torch.device("cpu"))
    rows = step_rows(random)
    while cross and rows.encoder_lens is None:
        rows = step_rows(random)
    return Call(table.cross_attention if cross else table.self_attention,
                {"rows": rows} | ({} if cross else {"buffers": SharedBuffers()}), table)  # fmt: skip


def allocator_with(random: Random) -> tuple[PageAllocator, list[int], list[bytes]]:
    allocator, digests = PageAllocator(8, 2), list[bytes]()
    allocator.extend_digests(digests, [random.randrange(5) for _ in range(6)])
    found = allocator.allocate(3).tolist()
    for page, digest in zip(found, digests, strict=True):
        allocator.publish(page, digest)
    return allocator, found, digests


def scheduled(random: Random) -> tuple[Scheduler, ScheduledBatch]:
    engine = Scheduler(SchedulerConfig(), PageAllocator(32, 2), 40)
    for name in "abc":
        engine.add(Request(name, lens(random, random.randint(1, 5)).tolist(), SamplingParams(max_tokens=4)))
    made = engine.schedule()
    assert made is not None
    return engine, made


def groups(random: Random) -> list[SequenceGroup]:
    return [SequenceGroup(name, (SequenceData(5, 3, pages(random, 3)),)) for name in "abc"]


def of_allocator(method: str) -> Callable[[Random], Call]:
    def make(random: Random) -> Call:
        allocator, found, digests = allocator_with(random)
        given = {"match": {"digests": digests}, "extend_digests": {"digests": [], "token_ids": [1, 2, 3, 4, 5]}}
        changed = ("digests",) if method == "extend_digests" else ()
        return Call(getattr(allocator, method), given.get(method, {"pages": found}), allocator, changed)

    return make


def adding(random: Random) -> Call:
    made = Request("r", [1, 2], SamplingParams())
    return Call(made.add_pages, {"pages": np.array(random.sample(range(50), 12), np.int32)}, made)


def updating(random: Random) -> Call:
    engine, made = scheduled(random)
    sampled = [random.randint(2, 9) for _ in made.sample_rows]
    return Call(engine.update, {"batch": made, "sampled_token_ids": sampled, "eos_token_ids": frozenset()}, engine)


CALLS: dict[str, Callable[[Random], Call]] = {
    "starts_of": lambda r: Call(page_table.starts_of, {"counts": lens(r, 4)}),
    "token_positions": lambda r: Call(page_table.token_positions, {"starts": lens(r, 4), "counts": lens(r, 4)}),
    "compile_page_table": lambda r: Call(
        page_table.compile_page_table,
        {"pages": [np.array(pages(r, 5), np.int32) for _ in range(3)], "seq_lens": lens(r, 3),
         "new_kv_lens": lens(r, 3).clip(max=2), "page_size": 2, "num_padded_rows": r.randint(0, 2)},
    ),
    "check_pages": lambda r: Call(
        page_table.check_pages,
        {"request_ids": list("abc"), "pages": [np.array(pages(r, 5), np.int32) for _ in range(3)],
         "seq_lens": lens(r, 3), "page_size": 2, "num_pages": r.choice((None, 60))},
    ),
    "common_prefix_len": lambda r: Call(
        page_table.common_prefix_len,
        {"page_lists": [pages(r, 5) for _ in range(3)], "context_lens": lens(r, 3), "page_size": 2},
    ),
    "CommonAttentionMetadata.from_sequence_groups": lambda r: Call(
        CommonAttentionMetadata.from_sequence_groups, {"groups": groups(r), "page_size": 3}
    ),
    "SharedBuffers.csr": lambda r: Call(
        SharedBuffers(torch.zeros(9, dtype=torch.int32)).csr,
        {"page_table": torch.arange(40, dtype=torch.int32).view(4, 10), "seq_lens": torch.from_numpy(lens(r, 4)),
         "page_size": 1, "num_indices": 36},
    ),
    "TokenTable.self_attention": lambda r: token_rows(r, False),
    "TokenTable.cross_attention": lambda r: token_rows(r, True),
    **{f"PageAllocator.{name}": of_allocator(name)
       for name in ("extend_digests", "free", "match", "num_available_beside", "take")},
    "Request.__init__": lambda r: Call(
        Request, {"request_id": "r", "token_ids": lens(r, 5).tolist(), "sampling": SamplingParams()}
    ),
    "Request.add_pages": adding,
    "salts_for": lambda r: Call(request.salts_for, {"cache_salt": ["a", None, "b"], "num_prompts": 3}),
    "ScheduledBatch.from_rows": lambda r: Call(
        ScheduledBatch.from_rows, {"rows": [(each, 1) for each in scheduled(r)[1].requests]}
    ),
    "ScheduledBatch.in_order": lambda r: Call(
        scheduled(r)[1].in_order, {"order": np.array(r.sample(range(3), 3))}
    ),
    "Scheduler.update": updating,
}  # fmt: skip
LENT = {
    "TokenTable.__init__": "the engine's own table, which it goes on writing to",
    "CommonAttentionMetadata.from_tensors": "the engine's tensors on the device; those on the host "
    "are overwritten in tests/batch/test_tensors.py",
}


def test_every_entry_is_called_here() -> None:
    assert set().union(*map(entries, MODULES)) == {*CALLS, *LENT}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CALLS)
def test_nothing_changes_when_arguments_do(name: str, seed: int) -> None:
    call = CALLS[name](Random(seed))
    result = call.function(**call.arguments)
    before = snapshot([result, state_of(call.kept_in)])
    for key, value in call.arguments.items():
        if key not in call.in_out:
            overwrite(value)
    assert differences(before, snapshot([result, state_of(call.kept_in)])) == []


def test_decode_rows_keep_no_lengths_of_the_engine() -> None:
    given = torch.tensor([5, 9], dtype=torch.int32)
    rows = token_batch.GivenRows(torch.tensor([0, 1]), given, given.clone(), None, None).with_queries(
        token_batch.ForwardMode.DECODE, np.array([1, 1], np.int32), 20
    )
    given.fill_(1)
    assert rows.seq_lens.tolist() == [5, 9]


def state_of(owner: Any) -> Any:
    if isinstance(owner, Scheduler):
        return [vars(owner), [snapshot(each) for each in owner.running]]
    return owner if owner is None or is_dataclass(owner) else vars(owner)
