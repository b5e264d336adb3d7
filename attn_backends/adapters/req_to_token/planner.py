"""Plans of steps in the convention of `req_to_token`: eager ones, and those of the engine's CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_backends.adapters.req_to_token.batch import ForwardBatchLike, ForwardMode, GivenRows, HostLens, step_rows
from attn_backends.adapters.req_to_token.graphs import SEQ_LEN_FILL_VALUE, TokenGraphs
from attn_backends.adapters.req_to_token.plans import PlannedStep, TokenPlans
from attn_backends.adapters.req_to_token.table import SharedBuffers
from attn_backends.machine import Progress


class StepPlanner:
    """Plans each step by the methods that engines of this convention call, before its layers run.

    Args:
        buffers: filled at every step with the CSR of its decoder tokens.
        skip_prefill: serve steps of one token a row alone.

    Attributes:
        planned: what the layers of the step receive; None where nothing is planned.
        graphs: what was captured; None before `init_cuda_graph_state`.
    """

    def __init__(self, plans: TokenPlans, buffers: SharedBuffers, skip_prefill: bool) -> None:
        self.plans, self.buffers, self.skip_prefill = plans, buffers, skip_prefill
        self.planned: PlannedStep | None = None
        self.graphs: TokenGraphs | None = None

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every kernel that steps within the limits can launch, before the first step. See
        `AttentionState.warm_up`."""
        self.plans.plans.state.warm_up(progress)

    # Eager steps.

    def init_forward_metadata(self, forward_batch: ForwardBatchLike) -> None:
        """Plan a step, once before its layers run.

        Raises:
            ValueError: a mode, lengths or sizes that cannot be served; says what to pass.
        """
        self.planned = None
        mode = ForwardMode.of(forward_batch.forward_mode)
        if mode is ForwardMode.IDLE or not len(forward_batch.req_pool_indices):
            self.planned = PlannedStep(ForwardMode.IDLE, 0, {})
            return
        self._check_mode(mode, {*ForwardMode})
        rows = step_rows(forward_batch, self.plans.table.max_context_len)
        self.planned = self.plans.plan(mode, rows, self.buffers)

    # CUDA graphs.

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """What engines put into `seq_lens` of padded rows. Such a row may name any request; its output is nobody's."""
        return SEQ_LEN_FILL_VALUE

    def init_cuda_graph_state(
        self, max_bs: int, max_num_tokens: int, kv_indices_buf: torch.Tensor | None = None
    ) -> None:
        """Say, before any is captured, how large graphs will be: `max_bs` padded rows, `max_num_tokens` tokens.

        Args:
            kv_indices_buf: [as many as any step has keys] i32, filled with the CSR's indices at every replay.

        Raises:
            ValueError: larger than the adapter's limits.
            RuntimeError: graphs were captured.
        """
        if self.graphs is not None and self.graphs.captured:
            raise RuntimeError("graphs were captured, and their buffers never grow: call init_cuda_graph_state before")
        self.graphs = TokenGraphs(self.plans, max_bs, max_num_tokens, replace(self.buffers, indices=kv_indices_buf))

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        forward_mode: object,
        *,
        encoder_lens: torch.Tensor | None = None,
    ) -> None:
        """Plan the step that is captured next: `bs` rows of `num_tokens // bs` tokens, DECODE or TARGET_VERIFY.

        What stands in `seq_lens` and `encoder_lens` does not matter: rows are planned with the fill value.

        Raises:
            ValueError: a mode or size that graphs do not have.
            Unsupported: the backend cannot run in such a graph.
        """
        self.planned = None
        rows = GivenRows(req_pool_indices, seq_lens, None, encoder_lens, None)
        self.planned = self._graphs().capture(bs, num_tokens, self._graph_mode(forward_mode), rows)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        forward_mode: object,
        seq_lens_cpu: HostLens | None,
        *,
        encoder_lens: torch.Tensor | None = None,
        encoder_lens_cpu: HostLens | None = None,
    ) -> None:
        """Plan the step that is replayed next, padded to the captured `bs`. `seq_lens_sum` is not read.

        Raises:
            ValueError: no such graph was captured, or the backend plans with lengths and `seq_lens_cpu` is missing.
        """
        self.planned = None
        rows = GivenRows(req_pool_indices, seq_lens, seq_lens_cpu, encoder_lens, encoder_lens_cpu)
        self.planned = self._graphs().replay(bs, self._graph_mode(forward_mode), rows)

    def _graphs(self) -> TokenGraphs:
        if self.graphs is None:
            raise RuntimeError("no graphs: call init_cuda_graph_state(max_bs, max_num_tokens) first")
        return self.graphs

    def _graph_mode(self, forward_mode: object) -> ForwardMode:
        """A graph's mode; an idle step replays a decode of padded rows."""
        mode = ForwardMode.of(forward_mode)
        mode = ForwardMode.DECODE if mode is ForwardMode.IDLE else mode
        self._check_mode(mode, {ForwardMode.DECODE, ForwardMode.TARGET_VERIFY})
        return mode

    def _check_mode(self, mode: ForwardMode, served: set[ForwardMode]) -> None:
        if self.skip_prefill:
            served = {ForwardMode.DECODE}
        if mode not in served:
            names = ", ".join(each.name for each in ForwardMode if each in served)
            why = "this adapter was made with skip_prefill" if self.skip_prefill else "this is for a CUDA graph"
            hint = "make it without" if self.skip_prefill else "run this step eager"
            raise ValueError(f"forward_mode is {mode.name}, and {why}, which serves {names}: {hint}")
