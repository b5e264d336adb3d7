"""FLASH_ATTN_MLA: decode by FlashAttention 3, whose `qv` adds a second product to the logits, and prefill by it too."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field

from attn_backends.backends.mla.backend import MLABackend, reject_other_cache_dtype
from attn_backends.backends.mla.flash_attn_mla.library import DecodeCall, Kernels
from attn_backends.backends.mla.impl import MLAImpl
from attn_backends.backends.mla.metadata import DecodeRows, RaggedRows
from attn_backends.backends.mla.options import MLAOptions
from attn_backends.backends.mla.state import MLAState, MLAStep
from attn_backends.interface.capabilities import Capabilities, CudaGraphSupport, Rejection, reject_newer_gpu
from attn_backends.spec import AttentionSpec, KVCacheSpec, MLASpec

_HALF = frozenset({torch.float16, torch.bfloat16})
_MOST_SPLITS = 128
_KEYS_OF_SPLIT = 256  # at least: what can be cut finer takes a slower kernel to join


class FlashAttnMLAOptions(MLAOptions):
    """The `backend_options` of FLASH_ATTN_MLA."""

    split_bytes: Annotated[int, Field(ge=1)] = 512 << 20
    """What the library may allocate for the parts of rows whose keys it splits: it takes kv_lora_rank + 1 float32 a
    query and split. Fewer splits leave a GPU idle where one row is much longer than all others."""


def partial_bytes(spec: MLASpec, num_tokens: int) -> int:
    """Bytes that the library allocates for one part of every query: an output and an LSE a head, in float32."""
    return num_tokens * spec.num_qo_heads * (spec.kv_lora_rank + 1) * 4


def most_splits(spec: MLASpec, num_tokens: int, longest: int, split_bytes: int) -> int:
    """Into how many parts the library may cut the keys of a row of up to `longest`, so that all fit `split_bytes`."""
    held = split_bytes // partial_bytes(spec, num_tokens)
    return max(1, min(_MOST_SPLITS, held, longest // _KEYS_OF_SPLIT))


class FlashAttnMLABackend(MLABackend):
    """Latent rows of 512 + 64 in half precision, on Hopper."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN_MLA"

    @staticmethod
    def get_impl_cls() -> type[FlashAttnMLAImpl]:
        return FlashAttnMLAImpl

    @staticmethod
    def get_state_cls() -> type[FlashAttnMLAState]:
        return FlashAttnMLAState

    @staticmethod
    def capabilities() -> Capabilities:
        return Capabilities(
            devices=frozenset({"cuda"}),
            dtypes=_HALF,
            cache_dtypes=_HALF,
            # Pages that are whole blocks of its 64 keys are copied as they are, and what lies past a row's end is
            # multiplied by 0: NaN there would reach the output (flash-attention's issues 1745, 1974, 2374).
            page_sizes=frozenset({16, 32}),
            unequal_head_dims=True,
            lse=True,
            cuda_graph=CudaGraphSupport.UNIFORM_BATCH,
            min_compute_capability=(9, 0),
            mla=True,
            kv_lora_ranks=frozenset({512}),
            qk_rope_head_dims=frozenset({64}),
        )

    @classmethod
    def reject(cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str) -> list[Rejection]:
        """Caches of another dtype than the queries', and GPUs after Hopper, too."""
        found = super().reject(spec, cache, device) + reject_other_cache_dtype(spec, _HALF)
        return found + reject_newer_gpu(device, 9, "9.x", "Its kernels are Hopper's: choose another backend.")


class FlashAttnMLAState(MLAState):
    backend_name = "FLASH_ATTN_MLA"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kernels = self.load_kernels()

    @staticmethod
    def load_kernels() -> Kernels:
        from attn_backends.backends.mla.flash_attn_mla.provider import KERNELS

        return KERNELS

    def plan_prefill(self, spec: MLASpec, rows: RaggedRows) -> Kernels:
        return self.kernels

    def plan_decode(self, spec: MLASpec, rows: DecodeRows, held: DecodeCall | None) -> DecodeCall:
        """The library's schedule, made on the device."""
        call = held or self._new_call(spec, rows)
        made = self.kernels.schedule(call, spec, self.cache)
        if held is None:
            return replace(call, schedule=made)
        if made.shape != held.schedule.shape:
            raise RuntimeError(
                f"a schedule of {tuple(held.schedule.shape)} numbers was captured, and the library makes one of "
                f"{tuple(made.shape)} for the same rows: its version changed what a schedule's size follows from"
            )
        held.schedule.copy_(made)
        return held

    def _new_call(self, spec: MLASpec, rows: DecodeRows) -> DecodeCall:
        """A graph keeps its own for all replays."""
        longest = rows.page_table.shape[1] * self.cache.page_size
        if rows.idle is None:  # not in a graph
            longest = min(longest, int(rows.seq_lens_cpu.max()))
        split_bytes = (self.options or FlashAttnMLAOptions()).split_bytes
        starts = torch.arange(rows.num_rows + 1, dtype=torch.int32, device=self.device) * rows.query_len
        return DecodeCall(
            kernels=self.kernels,
            query_starts=starts,
            query_len=rows.query_len,
            page_table=rows.page_table,
            seq_lens=rows.seq_lens,
            max_seq_len=longest,
            num_splits=most_splits(spec, rows.num_tokens, longest, split_bytes),
            schedule=starts,  # until there is one
        )


class FlashAttnMLAImpl(MLAImpl):
    backend_name = "FLASH_ATTN_MLA"
    zeroes_idle_rows = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Of unequal head dims its kernels have these alone: the others take the family's own road.
        self._prefills = 128 < self.spec.head_dim <= 192 and 96 < self.spec.head_dim_vo <= 128

    def _decode(
        self,
        query: torch.Tensor,
        latent_cache: torch.Tensor,
        step: MLAStep,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        spec = self.spec
        q_nope, q_pe = query.flatten(0, 1).split([spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        latent, rope = latent_cache.unsqueeze(2).split([spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        call: DecodeCall = step.plan
        scale = spec.scale * self.k_scale
        lse_by_head = call.kernels.decode(q_pe, q_nope, rope, latent, scale, output.flatten(0, 1), call)
        if self.k_scale != 1.0:
            output.mul_(self.k_scale)
        if lse is not None:
            lse.flatten(0, 1).copy_(lse_by_head.t())

    def _prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: RaggedRows,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        plan: Any,
    ) -> None:
        if not self._prefills:
            super()._prefill(query, key, value, rows, output, lse, plan)
            return
        lse_by_head = plan.prefill(query, key, value, self.spec.scale, output, rows)
        if lse is not None:
            lse.copy_(lse_by_head.t())
