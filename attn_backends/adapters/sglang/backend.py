"""SGLang's `AttentionBackend` over any backend of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from attn_backends.adapters.req_to_token.batch import StepRows
from attn_backends.adapters.req_to_token.graphs import SEQ_LEN_FILL_VALUE
from attn_backends.adapters.req_to_token.table import TokenTable
from attn_backends.adapters.sglang.layers import reject_runner, specs_of_model
from attn_backends.adapters.sglang.pools import LayerPool
from attn_backends.adapters.sglang.steps import eager_rows, graph_rows
from attn_backends.interface.capabilities import Rejection, Unsupported
from attn_backends.spec import Limits


class SGLangAttention(AttentionBackend):  # type: ignore[misc]  # SGLang is not here where types are checked
    """One backend of ours for all of a model's layers.

    SGLang's pool writes keys and values, and layers read them there. A step is planned once, on the host, before its
    layers run or its graph is replayed; what a graph reads lies in tensors that are filled then.

    Args:
        name: a backend's name, used or refused; or AUTO.
        runner: SGLang's `ModelRunner`, with its model and pools.
        options: the backend's own.

    Raises:
        Unsupported: the model, its pools or its layers are not served; says why, and what to type.
    """

    needs_cpu_seq_lens = True  # without, a page table would be gathered as wide as the longest context

    def __init__(self, name: str, runner: Any, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        if reasons := list(reject_runner(runner)):
            raise Unsupported(name, reasons)
        self.name = name
        self.topk = getattr(runner.server_args, "speculative_eagle_topk", None) or 1
        self.translate = getattr(runner.token_to_kv_pool, "translate_loc_from_full_to_swa", None)
        self.req_to_token_pool = runner.req_to_token_pool  # SGLang's models ask a backend for it
        self.pools = self._make_pools(runner, options or {})
        self.pool_of = {layer_id: pool for pool in self.pools for layer_id in pool.plans.specs}
        self.max_context_len = self.pools[0].plans.limits.max_model_len
        self.num_tokens = 0  # of the planned step
        self.swa_loc: torch.Tensor | None = None  # [T]: slots of its tokens in the windowed layers' pool
        self.held = (0, 0)  # rows and tokens of the largest graph

    def _make_pools(self, runner: Any, options: Mapping[str, Any]) -> list[LayerPool]:
        """One, or with an SWA pool one more for the layers that live in it."""
        slots, pool = runner.req_to_token_pool.req_to_token, runner.token_to_kv_pool
        specs = specs_of_model(self.name, runner.model, runner.dtype, runner.kv_cache_dtype)
        limits = Limits(len(slots), most_tokens(runner.server_args, *slots.shape), slots.shape[1])
        in_swa = {i: self.translate is not None and pool.layers_mapping[i][1] for i in specs}
        pools = []
        for is_swa in sorted(set(in_swa.values())):
            translate = self.translate if is_swa else None
            table = TokenTable(slots, slots.shape[1], slots.device, runner.page_size, translate)
            layers = {i: spec for i, spec in specs.items() if in_swa[i] is is_swa}
            pools.append(LayerPool(self.name, layers, pool, table, limits, options))
        return pools

    @property
    def token_to_kv_pool(self) -> Any:
        """The pool that layers read and write. SGLang's models ask a backend for it, and a draft model that reads what
        the target has cached (frozen-KV MTP) has the target's put here while it runs.

        Raises:
            Unsupported: (where it is set) another pool, and one of the two has slots of its own for windowed layers.
        """
        return self.pools[0].pool

    @token_to_kv_pool.setter
    def token_to_kv_pool(self, pool: Any) -> None:
        if pool is self.token_to_kv_pool:
            return
        if self.translate is not None or hasattr(pool, "translate_loc_from_full_to_swa"):
            hint = "Draft with a backend of SGLang's own: --speculative-draft-attention-backend triton."
            rejection = Rejection("token_to_kv_pool", "another SWA pool than the model's", "pools of one kind", hint)
            raise Unsupported(self.name, [rejection])
        self.pools[0].pool = pool

    # Planning.

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan an eager step."""
        if forward_batch.forward_mode.is_idle() or not len(forward_batch.seq_lens):
            self.num_tokens = 0
            return
        self._plan(eager_rows(forward_batch, self.name, self.max_context_len, self.topk))
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan the step that is captured or replayed next: the one way for both."""
        self._plan(graph_rows(forward_batch, self.name, self.max_context_len, self.topk))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Look up where windowed layers write, on the device: recorded, and so looked up anew at every replay."""
        loc = getattr(forward_batch, "out_cache_loc", None)
        self.swa_loc = None if self.translate is None or loc is None else self.translate(loc)

    def _plan(self, rows: StepRows) -> None:
        for pool in self.pools:
            pool.plan(rows)
        self.num_tokens = rows.num_tokens

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs of up to so many rows and tokens read. They stay, and grow only before any is captured.

        Raises:
            RuntimeError: larger than before, and graphs were captured.
        """
        asked = (max(max_bs, self.held[0]), max(max_num_tokens, self.held[1]))
        if asked == self.held:
            return
        if any(pool.plans.state.graph_sizes for pool in self.pools):
            raise RuntimeError(
                f"graphs of {max_bs} rows and {max_num_tokens} tokens, and some were captured for up to {self.held}: "
                "their buffers never grow, call init_cuda_graph_state with the largest of both before"
            )
        for pool in self.pools:
            pool.hold(*asked)
        self.held = asked

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """What SGLang puts into `seq_lens` of padded rows."""
        return SEQ_LEN_FILL_VALUE

    # Layers.

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """`forward_extend` or `forward_decode` by the step's mode; the padding of an idle step comes back as zeros."""
        if forward_batch.forward_mode.is_idle():
            return q.new_zeros(len(q), layer.tp_q_head_num * layer.v_head_dim)
        return super().forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)  # type: ignore[no-any-return]

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, sinks: torch.Tensor | None = None, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """One layer of the planned step, whatever its mode.

        Args:
            q: [T, heads * head_dim] or with heads apart; more tokens than the step has come back as zeros.
            k, v: what the step adds to the pool; None: a layer that shares the keys of another.
            sinks: [heads].

        Returns:
            [T, heads * v_head_dim]; zeros of an idle step.

        Raises:
            Unsupported: an argument that this adapter does not honour.
        """
        if unknown := sorted(name for name, value in kwargs.items() if value is not None and value is not False):
            hint = "Serve this model with a backend of SGLang's own: --attention-backend triton."
            raise Unsupported(self.name, [Rejection(each, "given", "left out", hint) for each in unknown])
        pool, query = self.pool_of[layer.layer_id], q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if save_kv_cache and k is not None and v is not None:
            pool.write(layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_loc), k, v)
        if layer.layer_id not in pool.plans.impls:
            pool.bind(layer, sinks)
        output = query.new_empty(len(query), layer.tp_q_head_num, layer.v_head_dim)
        live = self.num_tokens
        output[live:].zero_()
        if live:
            cache = pool.kv_cache(layer.layer_id)
            pool.plans.forward(layer.layer_id, query[:live], None, None, cache, pool.steps, output[:live])
        return output.flatten(1)

    forward_decode = forward_extend


def most_tokens(args: Any, max_rows: int, max_context_len: int) -> int:
    """Query tokens of the largest step: its prompts, with rows that decode among them, or its drafts."""
    prompts = (getattr(args, name, None) or 0 for name in ("chunked_prefill_size", "max_prefill_tokens"))
    drafts = getattr(args, "speculative_num_draft_tokens", None) or 1
    return max(max(max_context_len, *prompts) + max_rows, max_rows * drafts)
