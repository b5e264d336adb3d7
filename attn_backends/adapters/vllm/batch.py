"""vLLM's batch in our words. Its tensors are read where they are; nothing is copied to the device, or read from it."""

from __future__ import annotations

from typing import Any

import torch

from attn_backends.adapters.vllm.reasons import unserved
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.interface.capabilities import Rejection, Unsupported


def batch_of(
    theirs: Any, page_size: int, *, exact: bool = True, for_graph: bool = False, is_mixed: bool = False,
    lens: torch.Tensor | None = None,
) -> CommonAttentionMetadata:  # fmt: skip
    """Our batch of vLLM's `CommonAttentionMetadata`.

    Args:
        exact: the lengths that vLLM has on the host are those on the device, and no upper bounds.
        for_graph: the batch has the padded shape of a graph.
        is_mixed: of a graph of mixed batches.
        lens: [num_reqs] i32 on the host, exact: in the place of vLLM's.
    """
    rows, on_host = theirs.num_reqs, theirs.seq_lens.device.type == "cpu"
    has_exact = on_host or lens is not None or (exact and theirs.seq_lens_cpu_upper_bound is not None)
    if not on_host:
        bounds = theirs.seq_lens_cpu_upper_bound if lens is None else lens
        lens = lens_of_rows(theirs, bounds)
    return CommonAttentionMetadata.from_tensors(
        page_size,
        _first(theirs.query_start_loc, rows + 1),
        _first(theirs.query_start_loc_cpu, rows + 1),
        _first(theirs.seq_lens, rows),
        None if on_host else lens,
        _first(theirs.block_table_tensor, rows),
        theirs.slot_mapping,
        num_tokens=theirs.num_actual_tokens,  # padding included, where vLLM runs a full graph
        exact=has_exact,
        for_graph=for_graph,
        is_mixed=is_mixed,
    )


def lens_of_rows(theirs: Any, lens: torch.Tensor | None) -> torch.Tensor:
    """[num_reqs] i32 of lengths on the host, the longest where there are none. None is below its row's query tokens,
    which vLLM does not see to in the batches that it captures with."""
    rows: int = theirs.num_reqs
    if lens is None:
        return torch.full((rows,), theirs.max_seq_len, dtype=torch.int32, device="cpu")
    return torch.maximum(_first(lens, rows), _first(theirs.query_start_loc_cpu, rows + 1).diff())


def _first(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The first rows of a tensor, which are all of it as a rule: a slice takes the host longer than to see that."""
    return tensor if tensor.shape[0] == count else tensor[:count]


def uniform_query_len(theirs: Any) -> int:
    """The query tokens that every live row of a batch has, if a graph could run it with its padding; else 0."""
    rows, tokens = theirs.num_reqs, theirs.num_actual_tokens
    query_len = int(theirs.max_query_len)
    if query_len < 1 or query_len * rows != tokens:
        return 0
    starts = theirs.query_start_loc_cpu.numpy()
    live, rest = divmod(int(starts[rows]), query_len)
    # No row is longer than the longest: where the first ones have as many tokens as so many rows can, each has all.
    return query_len if not rest and starts[live] == live * query_len else 0


def check_batch(name: str, theirs: Any) -> None:
    """Refuse what a batch of vLLM's can ask for and none of ours serves.

    Raises:
        Unsupported: with the reason.
    """
    found: list[Rejection] = []
    if theirs.causal is not True:
        got = "a tensor" if isinstance(theirs.causal, torch.Tensor) else theirs.causal
        found.append(unserved("causal", got, "True: a token sees those before it"))
    if any((getattr(theirs, "mm_req_doc_ranges", None) or {}).values()):
        found.append(unserved("mm_prefix", "image tokens that see each other", "causal attention"))
    if getattr(theirs, "rswa_prefix_lens", None) is not None:
        found.append(unserved("rswa", "a prefix that all tokens see (R-SWA)", "windows alone"))
    if found:
        raise Unsupported(name, found)
