"""SGLang's batches as rows of known lengths, by what a step does."""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_backends.adapters.req_to_token.batch import StepRows, host_lens
from attn_backends.batch.page_table import IntArray
from attn_backends.interface.capabilities import Rejection, Unsupported

EXTENDS = ("EXTEND", "MIXED", "SPLIT_PREFILL", "DRAFT_EXTEND_V2")  # rows of any lengths, which the host knows
IN_GRAPHS = ("DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "IDLE")  # rows of equal lengths; an idle step is padding


def eager_rows(batch: Any, name: str, max_context_len: int, topk: int) -> StepRows:
    """The rows of a step that no graph runs.

    Raises:
        Unsupported: a mode that is not served, or drafts that are a tree.
        ValueError: lengths that such a step needs are missing.
    """
    mode, num_rows = batch.forward_mode.name, len(batch.seq_lens)
    if mode in EXTENDS:
        query_lens = host_lens("extend_seq_lens_cpu", batch.extend_seq_lens_cpu, num_rows)
        lens = batch.seq_lens_cpu
        if lens is None:
            lens = query_lens + host_lens("extend_prefix_lens_cpu", batch.extend_prefix_lens_cpu, num_rows)
        return _rows(batch, query_lens, host_lens("seq_lens_cpu", lens, num_rows), 0, max_context_len)
    if mode not in ("DECODE", "TARGET_VERIFY"):
        served = ", ".join((*EXTENDS, "DECODE", "TARGET_VERIFY", "IDLE"))
        raise _refusal(name, "forward_mode", mode, served, "Serve it with a backend of SGLang's own.")
    return _uniform(batch, name, max_context_len, topk)


def graph_rows(batch: Any, name: str, max_context_len: int, topk: int) -> StepRows:
    """The rows of a step that is captured or replayed, padding included: all of equal query lengths.

    Raises:
        Unsupported: a mode that graphs do not have, or drafts that are a tree.
    """
    mode = batch.forward_mode.name
    if mode not in IN_GRAPHS:
        hint = "Run these steps eager: --cuda-graph-backend-prefill disabled (or --disable-piecewise-cuda-graph)."
        raise _refusal(name, "forward_mode", f"{mode} in a CUDA graph", ", ".join(IN_GRAPHS), hint)
    return _uniform(batch, name, max_context_len, topk, for_graph=True)


def _uniform(batch: Any, name: str, max_context_len: int, topk: int, for_graph: bool = False) -> StepRows:
    """Rows of equal query lengths: one token, or as many drafts. A verify's `seq_lens` come without its drafts."""
    mode, num_rows = batch.forward_mode.name, batch.batch_size
    query_len = 1 if mode in ("DECODE", "IDLE") else _drafts_of(batch, num_rows)
    drafts = query_len if mode == "TARGET_VERIFY" else 0
    topk = getattr(batch.spec_info, "topk", None) or topk  # drafts that follow each token of a draft
    if drafts and topk > 1:  # 1 is a chain, whatever mask comes with it
        hint = "Draft a chain: --speculative-eagle-topk 1, or --speculative-ngram-max-bfs-breadth 1."
        raise _refusal(name, "topk", f"a tree of drafts, topk {topk}", "a chain, topk 1", hint)
    lens_cpu = batch.seq_lens_cpu
    if lens_cpu is not None:
        lens_cpu = host_lens("seq_lens_cpu", lens_cpu[:num_rows], num_rows) + drafts
    query_lens = np.full(num_rows, query_len, np.int32)
    return _rows(batch, query_lens, lens_cpu, drafts, max_context_len, for_graph)


def _drafts_of(batch: Any, num_rows: int) -> int:
    """Tokens of each row. A replay of drafts that are extended has padded rows, and tokens without padding."""
    told = getattr(batch.spec_info, "num_tokens_per_req", None) or 0
    if batch.forward_mode.name == "DRAFT_EXTEND_V2" and told > 0:
        return int(told)
    return len(batch.input_ids) // num_rows


def _rows(
    batch: Any, query_lens: IntArray, lens_cpu: IntArray | None, drafts: int, max_context_len: int,
    for_graph: bool = False,
) -> StepRows:  # fmt: skip
    """Lengths come in i64 or i32, and those of a graph's padding may lie below its query length."""
    lens = batch.seq_lens[: len(query_lens)]  # a replay's tensors may be those of the largest graph
    lens = (lens + drafts).int() if drafts else lens.int()
    known = np.full(len(query_lens), max_context_len, np.int32) if lens_cpu is None else lens_cpu.astype(np.int32)
    if for_graph:
        longest = int(query_lens[0])
        lens, known = lens.clamp_min(longest), np.maximum(known, longest)
    return StepRows(
        batch.req_pool_indices[: len(query_lens)], lens, known, query_lens, int(query_lens.sum()),
        are_upper_bounds=lens_cpu is None, for_graph=for_graph,
    )  # fmt: skip


def _refusal(name: str, code: str, got: str, served: str, hint: str) -> Unsupported:
    return Unsupported(name, [Rejection(code, got, served, hint)])
