"""Whether two batches say the same of the same rows, field by field, and batches to ask it of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from hypothesis import strategies as st

from attn_backends.batch.common import CommonAttentionMetadata, SequenceData, SequenceGroup

EXACT = {  # by value; tensors by dtype and shape too
    "page_size", "num_reqs", "num_actual_reqs", "num_tokens", "num_actual_tokens", "max_query_len", "max_seq_len",
    "query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu", "context_lens_cpu", "slot_mapping",
    "num_new_kv", "new_kv_start_loc_cpu", "is_profile_run", "seq_lens_are_upper_bounds", "for_graph", "is_mixed",
    "multi_modal_placeholder_index_maps",  # empty here: tests/batch/test_placeholders.py has more
}  # fmt: skip
OTHERWISE = {
    "page_table",  # up to each row's own pages: past them lengths say that nothing is valid
    "csr",  # by its three tensors, stored or worked out
}
CSR = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "paged_kv_indptr_cpu",
       "paged_kv_last_page_len_cpu")  # fmt: skip


def assert_same_batch(got: CommonAttentionMetadata, expected: CommonAttentionMetadata) -> None:
    names = {field.name for field in fields(CommonAttentionMetadata)}
    assert names == EXACT | OTHERWISE, f"say here how to compare {sorted(names ^ (EXACT | OTHERWISE))}"
    for name in (*sorted(EXACT), *CSR):
        one, other = getattr(got, name), getattr(expected, name)
        if isinstance(other, torch.Tensor):
            assert (one.dtype, one.shape, one.tolist()) == (other.dtype, other.shape, other.tolist()), name
        else:
            assert (type(one), one) == (type(other), other), name
    assert got.page_table.dtype == expected.page_table.dtype
    assert len(got.page_table) == got.num_reqs
    assert bool(got.page_table.shape[1]) == bool(expected.page_table.shape[1])
    for row, count in enumerate(expected.paged_kv_indptr_cpu.diff().tolist()):
        assert got.page_table[row, :count].tolist() == expected.page_table[row, :count].tolist(), f"page_table[{row}]"


@dataclass(frozen=True)
class Rows:
    """Sequences, and how to compile any run of them."""

    sequences: tuple[SequenceData, ...]
    page_size: int
    padded_query_len: int = 1
    seq_lens_are_upper_bounds: bool = False
    for_graph: bool = False

    def compiled(self, start: int, stop: int, num_padded: int, device: str = "cpu") -> CommonAttentionMetadata:
        groups = [SequenceGroup(f"r{i}", (self.sequences[i],)) for i in range(start, stop)]
        common = CommonAttentionMetadata.from_sequence_groups(
            groups, self.page_size, device, num_padded, self.padded_query_len
        )
        return replace(common, seq_lens_are_upper_bounds=self.seq_lens_are_upper_bounds, for_graph=self.for_graph)


@st.composite
def rows(draw: st.DrawFn, kinds: Sequence[str] = ("decoder", "cross", "profile"), flags: bool = True) -> Rows:
    """Decodes, chunks, whole prompts and prefix hits with lookahead pages; or cross attention; or a profile run."""
    page_size, kind = draw(st.integers(1, 8)), draw(st.sampled_from(kinds))
    sequences = []
    for row in range(draw(st.integers(1, 5))):
        context_len = 0 if kind == "profile" else draw(st.integers(0, 30))
        query_len = draw(st.one_of(st.just(1), st.integers(1, 12)))
        seq_len = draw(st.integers(0, 20)) if kind == "cross" else context_len + query_len
        new = draw(st.sampled_from([0, seq_len])) if kind == "cross" else query_len
        count = -(-seq_len // page_size) + draw(st.integers(0, 2))
        pages = None if kind == "profile" else [100 * (row + 1) + i for i in draw(st.permutations(range(count)))]
        sequences.append(SequenceData(context_len, query_len, pages, seq_len=seq_len, new_kv_len=new))
    bounds, graph = (draw(st.booleans()) if flags else False for _ in range(2))
    return Rows(tuple(sequences), page_size, draw(st.integers(1, 3)), bounds, graph)
