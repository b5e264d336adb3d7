"""Planning of steps that are captured and replayed in the engine's CUDA graphs: decode, and verification of drafts."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_backends.adapters.req_to_token.batch import ForwardMode, GivenRows, uniform_query_lens
from attn_backends.adapters.req_to_token.plans import PlannedStep, TokenPlans
from attn_backends.adapters.req_to_token.table import SharedBuffers
from attn_backends.interface.capabilities import CudaGraphSupport, Rejection, Unsupported

SEQ_LEN_FILL_VALUE = 1  # of padded rows: with one key nothing is divided by zero


class TokenGraphs:
    """What was captured, by mode and rows. A graph has no slots: the pool writes to the engine's, inside the graph.

    Which rows are padding, only the engine's slots say.
    """

    def __init__(self, plans: TokenPlans, max_bs: int, max_num_tokens: int, buffers: SharedBuffers) -> None:
        limits = plans.plans.limits
        if not 1 <= max_bs <= limits.max_num_requests or not max_bs <= max_num_tokens <= limits.max_num_tokens:
            raise ValueError(
                f"graphs of up to {max_bs} rows and {max_num_tokens} tokens: this adapter was made for up to "
                f"{limits.max_num_requests} rows (max_req_pool_size) and {limits.max_num_tokens} tokens "
                "(max_num_tokens); raise these, or capture smaller sizes"
            )
        self.token_plans, self.max_bs, self.max_num_tokens, self.buffers = plans, max_bs, max_num_tokens, buffers
        self.captured: dict[tuple[ForwardMode, int], int] = {}  # tokens of each row, by mode and rows

    def capture(self, bs: int, num_tokens: int, mode: ForwardMode, rows: GivenRows) -> PlannedStep:
        """Plan the step that is captured next, with the fill value as every length."""
        if not 1 <= bs <= self.max_bs or num_tokens > self.max_num_tokens:
            raise ValueError(
                f"a graph of {bs} rows and {num_tokens} tokens: init_cuda_graph_state was called for up to "
                f"{self.max_bs} rows and {self.max_num_tokens} tokens; call it with the largest of both"
            )
        query_len = int(uniform_query_lens(mode, bs, num_tokens)[0])
        level = self.token_plans.plans.backend.capabilities().cuda_graph
        needed = CudaGraphSupport.UNIFORM_BATCH if query_len > 1 else CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
        if level < needed:
            rejection = Rejection("cuda_graph", f"a graph of {query_len} tokens a row", level.name,
                                  "Run these steps eager.")  # fmt: skip
            raise Unsupported(self.token_plans.plans.backend.get_name(), [rejection])
        if not self.captured:
            self.token_plans.plans.state.hold_graph_buffers(self.max_bs)
        rows = rows.first(bs)
        lens = torch.full_like(rows.seq_lens, SEQ_LEN_FILL_VALUE)
        lens_cpu = [SEQ_LEN_FILL_VALUE] * len(lens)
        encoder = None if rows.encoder_lens is None else torch.full_like(rows.encoder_lens, SEQ_LEN_FILL_VALUE)
        planned = self._plan(query_len, mode, GivenRows(rows.req_pool_indices, lens, lens_cpu, encoder, lens_cpu))
        self.captured[mode, bs] = query_len
        return planned

    def replay(self, bs: int, mode: ForwardMode, rows: GivenRows) -> PlannedStep:
        """Plan the step that is replayed next."""
        query_len = self.captured.get((mode, bs))
        if query_len is None:
            sizes = sorted(size for other, size in self.captured if other is mode)
            raise ValueError(
                f"no graph of {bs} rows was captured for {mode.name}; captured: {sizes or 'none'}. Pad the batch to "
                "one of these, or call init_forward_metadata_capture_cuda_graph for this size first"
            )
        return self._plan(query_len, mode, rows.first(bs))

    def _plan(self, query_len: int, mode: ForwardMode, rows: GivenRows) -> PlannedStep:
        """Plan a step of a captured size: the one way for capture and replay."""
        bs, longest = len(rows.req_pool_indices), self.token_plans.table.max_context_len
        lens = uniform_query_lens(mode, bs, bs * query_len)
        step = replace(rows.with_queries(mode, lens, longest), for_graph=True)
        return self.token_plans.plan(mode, step, self.buffers)
