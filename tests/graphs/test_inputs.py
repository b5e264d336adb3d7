"""What graphs read: own tensors, or those of a step table that is large enough and on the same device."""

from __future__ import annotations

import pytest
import torch

from attn_backends.batch.page_table import PAD_SLOT
from attn_backends.graphs.inputs import GraphInputs, fill_together
from attn_backends.spec import KVCacheSpec, Limits
from attn_backends.testing.graphs.harness import step_table

CACHE = KVCacheSpec(num_pages=16, page_size=4)
LIMITS = Limits(max_num_requests=4, max_num_tokens=8, max_model_len=30)
CPU = torch.device("cpu")


def test_own_tensors_are_as_large_as_the_limits() -> None:
    inputs = GraphInputs(CACHE, LIMITS, CPU, 3, None)
    assert not {"page_table", "seq_lens"} & set(vars(inputs))  # FLASHINFER reads neither
    assert inputs.page_table.shape == (3, 8)
    assert inputs.page_table is inputs.page_table
    assert inputs.seq_lens.tolist() == [0, 0, 0]
    assert inputs.slot_mapping.tolist() == [PAD_SLOT] * 8
    assert not inputs.holds(torch.zeros(8, dtype=torch.int64))
    assert inputs.serves(3, None)
    assert not inputs.serves(4, None)


def test_a_table_is_read_where_it_is() -> None:
    table, other = (step_table(LIMITS, CACHE, CPU).side.buffers for _ in range(2))
    inputs = GraphInputs(CACHE, LIMITS, CPU, 3, table)
    assert inputs.page_table is table.page_table
    assert inputs.holds(table.slot_mapping[:3])
    with pytest.raises(ValueError, match="not of that table: make it by the step table's step or advance"):
        inputs.holds(other.slot_mapping[:3])
    assert inputs.serves(3, table)
    assert not inputs.serves(3, other)
    assert not inputs.serves(3, None)


@pytest.mark.parametrize(
    ("limits", "device"),
    [
        (Limits(2, 8, 30), "cpu"),
        (LIMITS, "meta"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(limits: Limits, device: str) -> None:
    table = step_table(limits, CACHE, CPU).side.buffers
    with pytest.raises(ValueError, match=f"need 3 on {device}: make them with the same limits and device"):
        GraphInputs(CACHE, LIMITS, torch.device(device), 3, table)


def test_a_size_of_more_tokens_than_were_given_is_refused() -> None:
    inputs = GraphInputs(CACHE, LIMITS, CPU, 3, step_table(Limits(4, 7, 30), CACHE, CPU).side.buffers)
    assert len(inputs.slots(7)) == 7
    with pytest.raises(ValueError, match="has 7 tokens, and this size has 8"):
        inputs.of(4, 8)


def test_rows_of_mixed_batches_may_be_more_than_tokens() -> None:
    inputs = GraphInputs(CACHE, LIMITS, CPU, 3, step_table(Limits(4, 2, 30), CACHE, CPU).side.buffers)
    assert {name: len(each) for name, each in inputs.of(3, 2, is_mixed=True).items()} == {
        "slot_mapping": 2, "seq_lens": 3, "page_table": 3, "query_start_loc": 4
    }  # fmt: skip
    with pytest.raises(ValueError, match="has 2 tokens, and this size has 3"):
        inputs.of(3, 3)


def test_query_starts_are_read_where_they_are() -> None:
    """For graphs of mixed batches; where an engine gives none they are copied."""
    table = step_table(LIMITS, CACHE, CPU).side.buffers
    inputs, own = (GraphInputs(CACHE, LIMITS, CPU, 3, shared) for shared in (table, None))
    assert "query_start_loc" not in inputs.of(3, 8)
    read, held = (each.of(2, 8, is_mixed=True)["query_start_loc"] for each in (inputs, own))
    assert read.data_ptr() == table.query_start_loc.data_ptr()
    inputs.fill_starts(read, table.query_start_loc[:3])
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    own.fill_starts(held, starts)
    assert own.query_start_loc.tolist() == [0, 3, 5, 0]
    with pytest.raises(ValueError, match="its query_start_loc is another tensor"):
        inputs.fill_starts(read, starts)
    table.query_start_loc = table.query_start_loc[:3]
    with pytest.raises(ValueError, match="has 3 numbers, and graphs of 3 rows need one more"):
        GraphInputs(CACHE, LIMITS, CPU, 3, table).of(2, 8, is_mixed=True)
    assert table.query_start_loc.tolist() == [0, 0, 0]


def test_tensors_of_32_and_64_bits_are_filled_together() -> None:
    slots, lens = torch.zeros(3, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32)
    fill_together([slots, lens[:, :1]], [torch.tensor([-1, 1 << 40, 7]), torch.tensor([[5], [6]], dtype=torch.int32)])
    assert slots.tolist() == [-1, 1 << 40, 7]
    assert lens.tolist() == [[5, 0], [6, 0]]
