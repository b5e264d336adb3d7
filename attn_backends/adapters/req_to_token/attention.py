"""Any backend by name, in the calling convention of engines with a token-granular `req_to_token` (pymllm, SGLang).

An engine plans each step by `init_forward_metadata`, or by one of the two for CUDA graphs, and its layers then call
`forward_extend`, `forward_decode`, or `forward`. New keys and values are written by the engine's own pool, to the slots
that the step names, padding to slot 0; the backend reads them there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from attn_backends.adapters.req_to_token.batch import ForwardBatchLike, ForwardMode
from attn_backends.adapters.req_to_token.kv_pool import KVPool, page_size_of
from attn_backends.adapters.req_to_token.layers import AttentionLayer, LayerKinds
from attn_backends.adapters.req_to_token.planner import StepPlanner
from attn_backends.adapters.req_to_token.plans import TokenPlans, share_workspace
from attn_backends.adapters.req_to_token.table import SharedBuffers, TokenTable
from attn_backends.interface.contract import check_contract
from attn_backends.spec import Limits

check_contract("the req_to_token adapter", (1, 0))


class ReqToTokenAttention(StepPlanner):
    """One backend, one state, and a plan for each kind of layer: `StepPlanner` has the methods that plan.

    Args:
        name: a backend's name, used or refused; or AUTO.
        num_heads, num_kv_heads, head_dim: of every layer, on this device.
        kv_cache_dtype, q_dtype: of what the pool stores, and of queries and outputs.
        max_context_len: most tokens of one row.
        req_to_token: [max_reqs, max_context_len or more] i32: the slot of every token of every request. It is read at
            every step, and holds slots of the pool everywhere.
        max_req_pool_size: most rows of a step.
        kv_pool: where keys and values are; its slot 0 is for padding, and slots come in pages of its `page_size`, if it
            has one. None: each batch brings it, as `token_to_kv_pool`, with up to `max_req_pool_size` whole contexts.
        page_size: slots of a page, where no `kv_pool` says it: that of the pools that batches bring, or a divisor.
        layers: every layer that will call. None: layers of the usual scale without a soft cap, with a window of
            `sliding_window_size` if it is given, and without one; layer 0 is one of them.
        sliding_window_size: keys to the left, self excluded, as one of the layers has it.
        max_num_tokens: most new tokens of a step; as many as the pool has slots if None.
        skip_prefill: serve steps of one token a row alone.
        kv_indptr_buf, kv_last_page_len_buf: [max_req_pool_size + 1] and [max_req_pool_size] i32, filled at every step
            with the CSR of its decoder tokens. Adapters may share them: they hold the last step that any has planned.
        init_new_workspace: have a float workspace alone. False: all adapters of a device share one, if their backend
            has such, and run on one stream.
        options: the backend's own.

    Raises:
        Unsupported: the backend refuses a layer; the reasons say why.
        ValueError: arguments that do not go together.
    """

    def __init__(
        self,
        name: str,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        kv_cache_dtype: torch.dtype,
        q_dtype: torch.dtype,
        max_context_len: int,
        req_to_token: torch.Tensor,
        device: torch.device | str,
        max_req_pool_size: int,
        kv_pool: KVPool | None,
        page_size: int = 1,
        layers: Iterable[AttentionLayer] | None = None,
        sliding_window_size: int | None = None,
        max_num_tokens: int | None = None,
        skip_prefill: bool = False,
        kv_indptr_buf: torch.Tensor | None = None,
        kv_last_page_len_buf: torch.Tensor | None = None,
        init_new_workspace: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        declared = None if layers is None else list(layers)
        heads = (num_heads, num_kv_heads, head_dim)
        kinds = LayerKinds(heads, q_dtype, kv_cache_dtype, declared, sliding_window_size)
        page_size = page_size_of(kv_pool, page_size)
        table = TokenTable(req_to_token, max_context_len, torch.device(device), page_size)
        num_slots = (max_req_pool_size * -(-max_context_len // page_size) + 1) * page_size
        if kv_pool is not None:
            num_slots = len(kv_pool.get_kv_buffer(declared[0].layer_id if declared else 0)[0])
        usual = max_req_pool_size if skip_prefill else max(num_slots, max_req_pool_size)
        limits = Limits(max_req_pool_size, max_num_tokens or usual, max_context_len)
        plans = TokenPlans(name, kinds.specs, num_slots, limits, table, options or {})
        if not init_new_workspace:
            share_workspace(plans.plans.state)
        super().__init__(plans, SharedBuffers(kv_indptr_buf, kv_last_page_len_buf), skip_prefill)
        self.kv_pool, self.kinds = kv_pool, kinds
        if kv_pool is not None:
            for layer in declared or []:
                plans.check_buffers(*kv_pool.get_kv_buffer(layer.layer_id), kinds.group(layer))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: AttentionLayer,
        forward_batch: ForwardBatchLike, save_kv_cache: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """One layer of the planned step, whatever its mode.

        Args:
            q: [T, num_heads * head_dim] or [T, num_heads, head_dim].
            k, v: what the step adds to the pool, [slots, num_kv_heads * head_dim] or with heads apart; None: nothing.
            forward_batch: its slots are where k and v go: `out_cache_loc`, or `encoder_out_cache_loc` for cross
                attention.
            save_kv_cache: False where k and v are in the pool already.

        Returns:
            [T, num_heads * v_head_dim]; zeros of an idle step, and for rows without keys.

        Raises:
            RuntimeError: nothing is planned.
            ValueError: a layer that was not declared, a pool that is not its own, or shapes other than the plan's.
        """
        planned = self.planned
        if planned is None:
            raise RuntimeError("no step is planned: call init_forward_metadata(forward_batch) before its layers run")
        group = self.kinds.group(layer)
        if planned.mode is ForwardMode.IDLE:
            return q.new_zeros(len(q), layer.tp_q_head_num * layer.v_head_dim)
        wide, dtype = layer.tp_q_head_num * layer.qk_head_dim, self.kinds.dtype
        if q.dtype is not dtype or len(q) != planned.num_tokens or q[0].numel() != wide:
            raise ValueError(
                f"q is {list(q.shape)} {q.dtype}; the planned step and layer {layer.layer_id} need "
                f"[{planned.num_tokens}, {wide}] {dtype}: call init_forward_metadata for this batch, and pass q so"
            )
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if save_kv_cache and (k is not None or v is not None):
            self._write(k, v, layer, forward_batch)
        key, value = self._pool(forward_batch).get_kv_buffer(layer.layer_id)
        return self.plans.attend(query, key, value, group, planned).flatten(1)

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: AttentionLayer,
        forward_batch: ForwardBatchLike, save_kv_cache: bool = True, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """`forward` of an EXTEND, MIXED or TARGET_VERIFY step."""
        self._expect({ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY})
        return self.forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: AttentionLayer,
        forward_batch: ForwardBatchLike, save_kv_cache: bool = True, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """`forward` of a DECODE step."""
        self._expect({ForwardMode.DECODE})
        return self.forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def _expect(self, modes: set[ForwardMode]) -> None:
        if self.planned is not None and self.planned.mode not in modes | {ForwardMode.IDLE}:
            names = ", ".join(each.name for each in ForwardMode if each in modes)
            raise ValueError(
                f"the planned step is {self.planned.mode.name}, and this call is for {names}: call "
                "init_forward_metadata for this batch, or forward, which serves every mode"
            )

    def _write(
        self, k: torch.Tensor | None, v: torch.Tensor | None, layer: AttentionLayer, forward_batch: ForwardBatchLike
    ) -> None:
        """Put new keys and values into the pool."""
        name = "encoder_out_cache_loc" if layer.is_cross_attention else "out_cache_loc"
        slots = getattr(forward_batch, name, None)
        if k is None or v is None or slots is None or not len(k) == len(v) == len(slots):
            given = [None if tensor is None else list(tensor.shape) for tensor in (k, v, slots)]
            raise ValueError(
                f"layer {layer.layer_id} was given k {given[0]}, v {given[1]} and {name} {given[2]}: need one k, v and "
                "slot a token, or k and v None to write nothing"
            )
        k = k.reshape(len(k), layer.tp_k_head_num, layer.qk_head_dim)
        v = v.reshape(len(v), layer.tp_k_head_num, layer.v_head_dim)
        self._pool(forward_batch).set_kv_buffer(layer.layer_id, slots, k, v)

    def _pool(self, forward_batch: ForwardBatchLike) -> KVPool:
        """Where keys and values of a step are."""
        pool: KVPool | None = self.kv_pool or getattr(forward_batch, "token_to_kv_pool", None)
        if pool is None:
            raise ValueError("the batch has no token_to_kv_pool: pass one, or make the adapter with kv_pool")
        planned = self.plans.table.page_size
        size = page_size_of(pool, planned)
        if self.kv_pool is None and size % planned:
            raise ValueError(
                f"the batch's pool has pages of {size} slots, and the step is planned for pages of {planned}: give "
                "init_forward_metadata the batch that brings this pool, or make the adapter with its page_size"
            )
        return pool
