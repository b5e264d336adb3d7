"""Full CUDA graphs, which vLLM captures: over its persistent tensors, with our clones' steps."""

from __future__ import annotations

from typing import Any

from attn_backends.adapters.vllm.batch import uniform_query_len
from attn_backends.graphs.inputs import HeldTensors
from attn_backends.interface import AttentionState


class PersistentTensors(HeldTensors):
    """vLLM's tensors of a batch, as the largest graph sees them."""

    @classmethod
    def of(cls, theirs: Any) -> PersistentTensors:
        return cls(theirs.block_table_tensor, theirs.seq_lens, theirs.slot_mapping, theirs.query_start_loc)

    def holds(self, theirs: Any, is_mixed: bool) -> bool:
        """Whether a batch lies in these tensors, of which graphs of equal rows do not read query starts."""
        return bool(
            self.page_table.data_ptr() == theirs.block_table_tensor.data_ptr()
            and self.seq_lens.data_ptr() == theirs.seq_lens.data_ptr()
            and self.slot_mapping.data_ptr() == theirs.slot_mapping.data_ptr()
            and (not is_mixed or self.query_start_loc.data_ptr() == theirs.query_start_loc.data_ptr())
        )


class CapturedGraphs:
    """Which batches have a graph. vLLM does not say whether a replay or an eager pass follows, so a batch of a captured
    shape gets the clone's step always: it serves both."""

    def __init__(self, state: AttentionState[Any]) -> None:
        self._state = state
        self._inputs: PersistentTensors | None = None
        self._sizes: set[tuple[int, int]] = set()  # rows, and query tokens of each
        self._mixed_rows: dict[int, int] = {}  # of graphs of mixed batches, by their tokens
        self.are_mixed = False  # there are no others

    def capture(self, theirs: Any, is_mixed: bool) -> None:
        """A graph of this batch's shape is about to be captured. vLLM begins with the largest.

        Raises:
            Unsupported: the backend has no graphs.
        """
        if self._inputs is None:
            self._inputs = PersistentTensors.of(theirs)
            self._state.hold_graph_buffers(theirs.num_reqs, self._inputs)
        self.are_mixed = is_mixed
        rows, tokens = theirs.num_reqs, theirs.num_actual_tokens
        if is_mixed:
            self._mixed_rows[tokens] = rows
        else:
            self._sizes.add((rows, tokens // rows))

    def size_of(self, theirs: Any) -> tuple[int, int] | None:
        """The rows and their query tokens of the captured graph that a batch has the shape of, if it lies where that
        graph reads; else None. Of mixed batches the rows, of which the batch may have fewer, and the tokens of all:
        behind a batch's own rows vLLM's tensors have rows without tokens."""
        if self._inputs is None or not self._inputs.holds(theirs, self.are_mixed):
            return None
        if self.are_mixed:
            rows = self._mixed_rows.get(theirs.num_actual_tokens, 0)
            return (rows, theirs.num_actual_tokens) if theirs.num_reqs <= rows else None
        size = theirs.num_reqs, uniform_query_len(theirs)
        return size if size in self._sizes else None


def are_mixed(compilation: Any) -> bool:
    """Whether full graphs are of mixed batches, decodes among them, by vLLM's `CompilationConfig`: with
    `cudagraph_mode=FULL` there are no others. It is settled by the time that graphs are captured, and not before."""
    mode = compilation.cudagraph_mode
    return mode is not None and bool(mode.mixed_mode().name == "FULL")
