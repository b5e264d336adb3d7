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
        return cls(theirs.block_table_tensor, theirs.seq_lens, theirs.slot_mapping)

    def holds(self, theirs: Any) -> bool:
        """Whether a batch lies in these tensors."""
        return bool(
            self.page_table.data_ptr() == theirs.block_table_tensor.data_ptr()
            and self.seq_lens.data_ptr() == theirs.seq_lens.data_ptr()
            and self.slot_mapping.data_ptr() == theirs.slot_mapping.data_ptr()
        )


class CapturedGraphs:
    """Which batches have a graph. vLLM does not say whether a replay or an eager pass follows, so a batch of a captured
    shape gets the clone's step always: it serves both."""

    def __init__(self, state: AttentionState[Any]) -> None:
        self._state = state
        self._inputs: PersistentTensors | None = None
        self._sizes: set[tuple[int, int]] = set()  # rows, and query tokens of each

    def capture(self, theirs: Any) -> None:
        """A graph of this batch's shape is about to be captured. vLLM begins with the largest.

        Raises:
            Unsupported: the backend has no graphs.
        """
        if self._inputs is None:
            self._inputs = PersistentTensors.of(theirs)
            self._state.hold_graph_buffers(theirs.num_reqs, self._inputs)
        self._sizes.add((theirs.num_reqs, theirs.num_actual_tokens // theirs.num_reqs))

    def size_of(self, theirs: Any) -> tuple[int, int] | None:
        """The rows and their query tokens of the captured graph that a batch has the shape of, if it lies where that
        graph reads; else None."""
        if self._inputs is None:
            return None
        size = theirs.num_reqs, uniform_query_len(theirs)
        return size if size in self._sizes and self._inputs.holds(theirs) else None
