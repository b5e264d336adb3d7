"""`from_tensors`: a batch of tensors that an engine has already, beside one that is compiled from page lists."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from attn_backends import CommonAttentionMetadata, SequenceData, SequenceGroup

PAGE_SIZE = 4


def drawn(random: Random) -> CommonAttentionMetadata:
    """A batch of some rows, as page lists compile to."""
    rows = []
    for i in range(random.randint(1, 6)):
        context, query = random.randint(0, 30), random.choice((1, 1, 1, 3, 9))
        pages = random.sample(range(500), -(-(context + query) // PAGE_SIZE))
        rows.append(SequenceGroup(str(i), (SequenceData(context, query, pages),)))
    return CommonAttentionMetadata.from_sequence_groups(rows, PAGE_SIZE)


def given(common: CommonAttentionMetadata, **changes: Any) -> dict[str, Any]:
    names = ("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu", "page_table", "slot_mapping")
    return {"page_size": PAGE_SIZE, **{name: getattr(common, name).clone() for name in names}, **changes}


def assert_same(one: CommonAttentionMetadata, other: CommonAttentionMetadata) -> None:
    for name, value in vars(other).items():
        got = getattr(one, name)
        if name == "csr":
            for mine, theirs in zip(vars(one.paged_kv).values(), vars(other.paged_kv).values(), strict=True):
                assert torch.equal(mine, theirs)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(got, value), name
        else:
            assert got == value, name


@pytest.mark.parametrize("seed", range(40))
def test_it_says_what_page_lists_say(seed: int) -> None:
    common = drawn(Random(seed))
    assert_same(CommonAttentionMetadata.from_tensors(**given(common)), common)


@pytest.mark.parametrize("seed", range(40))
def test_rows_of_zero_tokens_leave_it(seed: int) -> None:
    """Wherever they stand, whatever their lengths and pages; tokens of no row stay."""
    random = Random(seed)
    common = drawn(random)
    num_rows = common.num_reqs + random.randint(0, 4)
    places, tail = sorted(random.sample(range(num_rows), common.num_reqs)), random.randint(0, 3)
    lens, seq_lens = torch.zeros(num_rows, dtype=torch.int32), torch.randint(0, 99, (num_rows,), dtype=torch.int32)
    table = torch.randint(-9, 2**30, (num_rows, common.page_table.shape[1]), dtype=torch.int32)
    lens[places], seq_lens[places], table[places] = common.query_lens_cpu, common.seq_lens_cpu, common.page_table
    starts = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    made = CommonAttentionMetadata.from_tensors(
        PAGE_SIZE, starts, starts, seq_lens, None, table, common.slot_mapping, num_tokens=common.num_tokens + tail
    )
    assert (made.num_tokens, made.num_actual_tokens) == (common.num_tokens + tail, common.num_tokens)
    assert_same(made, replace(common, num_tokens=made.num_tokens))


@pytest.mark.parametrize("seed", range(20))
def test_host_tensors_are_copied_and_device_tensors_are_not(seed: int) -> None:
    common = drawn(Random(seed))
    arguments = given(common)
    made = CommonAttentionMetadata.from_tensors(**arguments)
    for name, value in arguments.items():
        if name.endswith("_cpu"):
            value.fill_(77)
    assert_same(made, common)
    for name in ("seq_lens", "page_table", "slot_mapping", "query_start_loc"):
        assert getattr(made, name).data_ptr() == arguments[name].data_ptr(), name


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_graphs_batch_keeps_its_padding(query_len: int) -> None:
    """Starts that stop growing, as engines pad, become rows of equal lengths, and the padding's slots stay."""
    starts = torch.tensor([0, query_len, 2 * query_len, 2 * query_len, 2 * query_len], dtype=torch.int32)
    lens = torch.tensor([5, 9, 0, 0], dtype=torch.int32)
    table, slots = torch.zeros(4, 3, dtype=torch.int32), torch.full((20,), -1)
    made = CommonAttentionMetadata.from_tensors(
        PAGE_SIZE, starts, starts, lens, None, table, slots, num_tokens=4 * query_len, for_graph=True
    )
    assert (made.num_reqs, made.num_actual_reqs, made.num_new_kv) == (4, 2, 2 * query_len)
    assert made.query_start_loc.tolist() == [query_len * i for i in range(5)]
    assert len(made.slot_mapping) == 4 * query_len
    without = CommonAttentionMetadata.from_tensors(
        PAGE_SIZE, starts, starts, lens, None, table, num_tokens=4 * query_len, for_graph=True
    )
    assert without.slot_mapping.tolist() == [-1] * (4 * query_len)
    assert without.num_new_kv == 0


def test_a_mixed_graphs_batch_keeps_its_rows() -> None:
    """Those without tokens too, wherever they stand, and the slots of tokens behind all rows."""
    starts = torch.tensor([0, 0, 7, 7, 8], dtype=torch.int32)
    lens = torch.tensor([3, 9, 0, 5], dtype=torch.int32)
    table, slots = torch.zeros(4, 3, dtype=torch.int32), torch.full((20,), -1)
    given = (PAGE_SIZE, starts, starts, lens, None, table, slots)
    made = CommonAttentionMetadata.from_tensors(*given, num_tokens=12, for_graph=True, is_mixed=True)
    assert (made.num_reqs, made.num_tokens, made.num_actual_tokens, made.num_new_kv) == (4, 12, 8, 8)
    assert made.query_start_loc is starts
    assert made.query_lens_cpu.tolist() == [0, 7, 0, 1]
    assert (made.max_query_len, len(made.slot_mapping)) == (7, 12)
    eager = CommonAttentionMetadata.from_tensors(*given, num_tokens=12, is_mixed=True)
    assert (eager.num_reqs, eager.is_mixed) == (2, False)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("page_table has shape", {"page_table": torch.zeros(9, 3, dtype=torch.int32)}),
    (
        r"page_table has shape \(3,\); it must have 2 dimensions, \[rows, pages a row\]",
        {"page_table": torch.zeros(3, dtype=torch.int32)},
    ),
    (r"seq_lens has shape \(\); it must have 1 dimension, \[rows\]", {"seq_lens": torch.tensor(5)}),
    ("page_size is 0; it must be at least 1", {"page_size": 0}),
    ("in torch.int64", {"seq_lens": torch.zeros(2, dtype=torch.int64)}),
    ("last stride of 1", {"page_table": torch.zeros(3, 2, dtype=torch.int32).t()}),
    ("page_table holds 1 pages", {"page_table": torch.zeros(2, 1, dtype=torch.int32)}),
    ("slot_mapping has 1 slots", {"slot_mapping": torch.zeros(1, dtype=torch.int64)}),
    (r"slot_mapping is \[9, 1\] in torch.int64", {"slot_mapping": torch.zeros(9, 1, dtype=torch.int64)}),
    (r"slot_mapping is \[9\] in torch.int32", {"slot_mapping": torch.zeros(9, dtype=torch.int32)}),
    ("begin at 0", {"query_start_loc_cpu": torch.tensor([1, 2, 5], dtype=torch.int32)}),
    ("some row has tokens", {"query_start_loc_cpu": torch.zeros(3, dtype=torch.int32)}),
    ("tokens and", {"num_tokens": 2}),
    ("rows behind the actual ones have none", {"num_actual_reqs": 1}),
    ("counts this step's tokens", {"seq_lens_cpu": torch.tensor([5, 2], dtype=torch.int32)}),
    ("rows of equal lengths", {"for_graph": True}),
    ("max_query_len is 2, and a row has 3: raise it", {"max_query_len": 2}),
    ("max_seq_len is 8, and a row has 9", {"max_seq_len": 8}),
]


def small() -> dict[str, Any]:
    """The arguments of a right batch of two rows."""
    lens, starts = torch.tensor([5, 9], dtype=torch.int32), torch.tensor([0, 1, 4], dtype=torch.int32)
    return {
        "page_size": PAGE_SIZE, "query_start_loc": starts, "query_start_loc_cpu": starts, "seq_lens": lens,
        "seq_lens_cpu": lens, "page_table": torch.zeros(2, 3, dtype=torch.int32), "slot_mapping": torch.arange(4),
    }  # fmt: skip


@pytest.mark.parametrize(("told", "changes"), WRONG, ids=[told for told, _ in WRONG])
def test_what_does_not_go_together_is_refused(told: str, changes: dict[str, Any]) -> None:
    CommonAttentionMetadata.from_tensors(**small())
    with pytest.raises(ValueError, match=told):
        CommonAttentionMetadata.from_tensors(**(small() | changes))


NAMES = ("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu", "page_table", "slot_mapping")


@pytest.mark.parametrize("name", [*NAMES, "context_lens_cpu"])
def test_what_is_no_tensor_is_refused_by_name(name: str) -> None:
    right = small() | {"context_lens_cpu": torch.zeros(2, dtype=torch.int32)}
    for given, kind in ((right[name].numpy(), "numpy.ndarray"), (right[name].tolist(), "list")):
        with pytest.raises(TypeError, match=rf"{name} is a {kind}; .* torch.as_tensor\({name}\)"):
            CommonAttentionMetadata.from_tensors(**(right | {name: given}))
    if name in ("query_start_loc", "query_start_loc_cpu", "page_table"):
        with pytest.raises(TypeError, match=f"{name} is None; it must be a torch.Tensor"):
            CommonAttentionMetadata.from_tensors(**(right | {name: None}))
