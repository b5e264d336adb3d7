"""One layer of the family: write the new latent rows, decode on the latent cache, prefill on expanded keys and values.

With c a cached latent row, r its shared key, and W_UK, W_UV the two parts of `kv_b_proj` for a head (DeepSeek-V2, arXiv
2405.04434, equations 9 to 19), a logit is

    scale · (q_nope · (W_UK c) + q_pe · r)  =  scale · ((W_UKᵀ q_nope) · c + q_pe · r)

and an output Σ p W_UV c = W_UV Σ p c. Decode rows take the right sides: every head reads the same rows, as in MQA, and
none is expanded. Prefill rows take the left ones, which cost less arithmetic a key once many queries share it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from attn_backends.backends.mla.absorption import absorb, suits_kernels, up_project
from attn_backends.backends.mla.attend import attend as attend_in_torch
from attn_backends.backends.mla.metadata import DecodeRows, ExpandedTensors, PrefillRows, RaggedRows
from attn_backends.backends.mla.state import MLAStep
from attn_backends.cache.kv_cache import KVCache, dequantise, gather_slots, write_latent
from attn_backends.interface import AttentionImpl
from attn_backends.interface.refusals import missing_keys, refuse_gradients
from attn_backends.kernels.merge_state import merge
from attn_backends.spec import AttentionSpec, KVCacheSpec, MLASpec


class LatentTensors(NamedTuple):
    """What decode rows read, and where they write."""

    query: torch.Tensor  # [num_rows, query_len, num_qo_heads, latent_dim], absorbed
    latent_cache: torch.Tensor  # [num_pages, page_size, latent_dim] of spec.cache_dtype
    output: torch.Tensor  # [num_rows, query_len, num_qo_heads, kv_lora_rank], written in place
    lse: torch.Tensor | None  # [num_rows, query_len, num_qo_heads] f32, written in place


class MLAImpl(AttentionImpl[MLAStep]):
    """The base of the family's impls. `forward` takes and returns what the model has, before and after absorption:
    queries are q_nope and then q_pe after RoPE, `key` [num_new_kv, kv_lora_rank] the latent rows after their norm, and
    `value` [num_new_kv, qk_rope_head_dim] the shared keys after RoPE.

    Args:
        kv_b_proj: [num_qo_heads * (qk_nope_head_dim + head_dim_vo), kv_lora_rank] of `spec.dtype` on the device, the
            weight of the model's layer of that name: head by head W_UK, then W_UV. It is kept, not copied.
        k_scale: of whole latent rows: real value = stored value * k_scale. There is no other scale (v_scale is 1.0).
        the others as for every impl.
    """

    step_cls = MLAStep
    zeroes_idle_rows: ClassVar[bool] = False  # `_decode` gives zeros, and an LSE of -inf, where seq_len is 0
    # Decode's kernels start before the one in front has ended, where a GPU can, and all their programs wait for that:
    # the kernels around decode may do so too.
    starts_early: ClassVar[bool] = False
    spec: MLASpec

    def __init__(
        self,
        spec: AttentionSpec,
        cache: KVCacheSpec,
        device: torch.device | str,
        *,
        kv_b_proj: torch.Tensor | None = None,
        **constants: Any,
    ) -> None:
        super().__init__(spec, cache, device, **constants)
        if not isinstance(spec, MLASpec):
            raise TypeError(f"{type(self).__name__} serves layers of MLASpec, and this is {type(spec).__name__}")
        heads, nope = spec.num_qo_heads, spec.qk_nope_head_dim
        needed = (heads * (nope + spec.head_dim_vo), spec.kv_lora_rank)
        if kv_b_proj is None or kv_b_proj.shape != needed or kv_b_proj.dtype is not spec.dtype:
            got = "none" if kv_b_proj is None else f"{kv_b_proj.dtype} {list(kv_b_proj.shape)}"
            raise ValueError(
                f"kv_b_proj: got {got}; pass the weight of the model's kv_b_proj, {spec.dtype} {list(needed)}"
            )
        if self.v_scale != 1.0:
            raise ValueError(f"v_scale is {self.v_scale}: a latent row has one scale; pass it as k_scale")
        self.kv_b_proj = kv_b_proj.detach()
        by_head = self.kv_b_proj.view(heads, nope + spec.head_dim_vo, spec.kv_lora_rank)
        self.w_uk = by_head[:, :nope]  # [num_qo_heads, qk_nope_head_dim, kv_lora_rank]
        self.w_uv = by_head[:, nope:].mT  # [num_qo_heads, kv_lora_rank, head_dim_vo]
        self._by_kernel = suits_kernels(spec, self.kv_b_proj, self.device)

    # What a backend has of its own.

    @abstractmethod
    def _decode(self, given: LatentTensors, step: MLAStep) -> None:
        """MQA over latent rows: logits with `spec.scale` over all of a row's columns, values its first `kv_lora_rank`.

        `step.metadata.decode` has page table and lengths, `step.plan` is what the state planned. A token of a row with
        `seq_len` 0 may get anything, NaN too, unless `zeroes_idle_rows`. Tensors are contiguous.
        Raises `Unsupported` for an LSE that the kernel does not give.
        """

    def _prefill(self, given: ExpandedTensors, rows: RaggedRows, plan: Any) -> None:
        """Attention of ragged rows over expanded keys and values, by `attend` of what the state's `plan_prefill` made
        for them; row by row where that is None."""
        if plan is not None:
            plan.attend(given)
            return
        query, key, value, output, lse = given
        edges = zip(rows.query_starts_cpu.tolist(), rows.key_starts_cpu.tolist(), strict=True)
        for (query_start, key_start), (query_end, key_end) in pairwise(edges):
            queries, keys = slice(query_start, query_end), slice(key_start, key_end)
            q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query[queries], key[keys], value[keys]))
            is_causal = rows.causal and query_end - query_start > 1
            out, part_lse = attend_in_torch(q, k, v, self.spec.scale, is_causal=is_causal)
            output[queries] = out[0].transpose(0, 1)
            if lse is not None:
                lse[queries] = part_lse[0].T

    # What all share.

    def write(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, step: MLAStep) -> None:
        refuse_gradients(key, value)
        write_latent(key, value, kv_cache.key, step.metadata.slot_mapping, self.k_scale)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: KVCache | None,
        step: MLAStep,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        refuse_gradients(query, key, value)
        metadata = step.metadata
        if metadata.decode is not None:
            if kv_cache is None:
                raise missing_keys(reads_cache=True)
            tokens = slice(0, metadata.num_decode_tokens)
            part = None if lse is None else lse[tokens]
            self._attend_decodes(query[tokens], kv_cache.key, step, metadata.decode, output[tokens], part)
        if metadata.prefill is not None:
            first = metadata.num_decode_tokens
            tokens = slice(first, first + metadata.num_prefill_tokens)
            part = None if lse is None else lse[tokens]
            brought = None
            if key is not None and value is not None:
                new_kv = slice(metadata.num_decode_new_kv, metadata.num_new_kv)
                brought = key[new_kv], value[new_kv]
            self._attend_prefills(query[tokens], brought, kv_cache, step, metadata.prefill, output[tokens], part)

    def _attend_decodes(
        self,
        query: torch.Tensor,
        latent_cache: torch.Tensor,
        step: MLAStep,
        rows: DecodeRows,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Absorb, attend among latent rows, and project up by W_UV."""
        spec, shape = self.spec, (rows.num_rows, rows.query_len, self.spec.num_qo_heads)
        absorbed = query.new_empty(*query.shape[:2], spec.latent_dim)
        how = {"by_kernel": self._by_kernel, "starts_early": self.starts_early}
        absorb(query, self.w_uk, absorbed, **how)
        attended = query.new_empty(*query.shape[:2], spec.kv_lora_rank)
        row_lse = None if lse is None else torch.empty(shape, dtype=torch.float32, device=query.device)
        given = LatentTensors(absorbed.view(*shape, -1), latent_cache, attended.view(*shape, -1), row_lse)
        self._decode(given, step)
        up_project(attended, self.w_uv, output, **how)
        if lse is not None and row_lse is not None:
            lse.copy_(row_lse.flatten(0, 1))
        if rows.idle is not None and not self.zeroes_idle_rows:
            output.masked_fill_(rows.idle[:, None, None], 0)
            if lse is not None:
                lse.masked_fill_(rows.idle[:, None], -math.inf)

    def _attend_prefills(
        self,
        query: torch.Tensor,
        brought: tuple[torch.Tensor, torch.Tensor] | None,  # the prefill tokens' parts of `key` and `value`
        kv_cache: KVCache | None,
        step: MLAStep,
        rows: PrefillRows,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """New tokens among themselves, then each chunk of context, joined by their LSEs in float32 or wider."""
        if step.metadata.is_profile_run:  # a full chunk of context, so that the run shows the most memory of any step
            self._expand(*self._parts(dequantise(step.workspace.zero_(), self.spec.dtype, self.k_scale)))
        if rows.new_slots is not None and kv_cache is not None:
            brought = self._parts(self._gather(kv_cache.key, rows.new_slots, None))
        reads_cache = rows.new_slots is not None or bool(rows.chunks)
        if brought is None or (reads_cache and kv_cache is None):
            raise missing_keys(reads_cache=reads_cache and kv_cache is None)
        plan, *chunk_plans = step.prefill_plans
        if not rows.chunks or kv_cache is None:
            self._prefill(ExpandedTensors(query, *self._expand(*brought), output, lse), rows.new, plan)
            return
        work = torch.promote_types(query.dtype, torch.float32)
        total_lse = torch.empty(query.shape[:2], dtype=work, device=query.device)
        self._prefill(ExpandedTensors(query, *self._expand(*brought), output, total_lse), rows.new, plan)
        wide_output = output.to(work, copy=True)
        for chunk, chunk_plan in zip(rows.chunks, chunk_plans, strict=True):
            key, value = self._expand(*self._parts(self._gather(kv_cache.key, chunk.slots, step.workspace)))
            part, part_lse = torch.empty_like(output[chunk.tokens]), torch.empty_like(total_lse[chunk.tokens])
            given = ExpandedTensors(query[chunk.tokens], key, value, part, part_lse)
            self._prefill(given, chunk.rows, chunk_plan)
            merge(wide_output[chunk.tokens], total_lse[chunk.tokens], part, part_lse)
        output.copy_(wide_output)
        if lse is not None:
            lse.copy_(total_lse)

    def _gather(self, latent_cache: torch.Tensor, slots: torch.Tensor, room: torch.Tensor | None) -> torch.Tensor:
        """Cached rows by slot, [len(slots), latent_dim] of spec.dtype."""
        return dequantise(gather_slots(latent_cache, slots, room), self.spec.dtype, self.k_scale)

    def _parts(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return latents[:, : self.spec.kv_lora_rank], latents[:, self.spec.kv_lora_rank :]

    def _expand(self, latent: torch.Tensor, rope_key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Every head's keys [N, num_qo_heads, head_dim] and values [N, num_qo_heads, head_dim_vo] of N latent rows."""
        spec = self.spec
        expanded = F.linear(latent, self.kv_b_proj).view(len(latent), spec.num_qo_heads, -1)
        nope, value = expanded.split([spec.qk_nope_head_dim, spec.head_dim_vo], dim=-1)
        key = torch.cat([nope, rope_key[:, None].expand(-1, spec.num_qo_heads, -1)], dim=-1)
        return key, value
