"""FLASHMLA: DeepSeek's kernel for decode on Hopper GPUs. Prefill is the family's own."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch

from attn_backends.backends.mla.backend import MLABackend, reject_other_cache_dtype
from attn_backends.backends.mla.flashmla.library import (
    FilledSchedule,
    Kernels,
    MadeSchedule,
    RefilledSchedule,
    Schedule,
    load_kernels,
)
from attn_backends.backends.mla.impl import MLAImpl
from attn_backends.backends.mla.metadata import DecodeRows
from attn_backends.backends.mla.options import MLAOptions
from attn_backends.backends.mla.state import MLAState, MLAStep
from attn_backends.interface.capabilities import Capabilities, CudaGraphSupport, Rejection, reject_newer_gpu
from attn_backends.spec import AttentionSpec, KVCacheSpec, MLASpec
from attn_backends.step.buffers import StepBuffers

_HALF = frozenset({torch.float16, torch.bfloat16})
# Queries times heads of a row take tiles of 64, and each a multiprocessor of the 78 and more that a Hopper GPU has:
# so many fit with 8 verified tokens.
MAX_HEADS = 512


class FlashMLAOptions(MLAOptions):
    """The `backend_options` of FLASHMLA."""

    provider: Literal["auto", "flash_mla", "vllm", "sgl_kernel"] = "auto"
    """Who brings the kernels: DeepSeek's package, vLLM's copy (vllm.third_party.flashmla) or SGLang's
    (sgl_kernel.flash_mla). `auto`: the first of them that imports."""


class FlashMLABackend(MLABackend):
    """Latent rows of 512 + 64 in pages of 64 tokens, in the dtype of the queries."""

    @staticmethod
    def get_name() -> str:
        return "FLASHMLA"

    @staticmethod
    def get_impl_cls() -> type[FlashMLAImpl]:
        return FlashMLAImpl

    @staticmethod
    def get_state_cls() -> type[FlashMLAState]:
        return FlashMLAState

    @staticmethod
    def capabilities() -> Capabilities:
        return Capabilities(
            devices=frozenset({"cuda"}),
            dtypes=_HALF,
            cache_dtypes=_HALF,
            page_sizes=frozenset({64}),
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
        """Its one kind of GPU, the dtype of the cache and the number of heads too."""
        found = super().reject(spec, cache, device)
        if isinstance(spec, MLASpec):
            found += reject_other_cache_dtype(spec, _HALF)
            if spec.num_qo_heads > MAX_HEADS:
                hint = "Choose a backend that takes so many heads, or split the heads over GPUs."
                found.append(Rejection("num_qo_heads", str(spec.num_qo_heads), f"1 to {MAX_HEADS}", hint))
        return found + reject_newer_gpu(device, 9, "9.0 (Hopper)", "Use a Hopper GPU or another backend.")

    @classmethod
    def reject_set_up(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str, options: FlashMLAOptions | None
    ) -> list[Rejection]:
        """The provider that is named, where it does not import."""
        found = cls.reject(spec, cache, device)
        if options is not None and not found:
            try:
                cls.get_state_cls().load_kernels(options.provider)
            except ImportError as error:
                hint = "Install it, or set backend_options.provider to auto."
                found.append(Rejection("provider", f"{options.provider} ({error})", "one that imports", hint))
        return found


class FlashMLAState(MLAState):
    backend_name = "FLASHMLA"
    load_kernels: ClassVar[Any] = staticmethod(load_kernels)  # others in tests

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.options or FlashMLAOptions()
        self.kernels: Kernels = self.load_kernels(options.provider)
        self._can_refill = False  # not asked before graphs are captured

    def hold_inputs(self, max_batch_size: int, inputs: StepBuffers | None) -> None:
        super().hold_inputs(max_batch_size, inputs)
        self._can_refill = self.kernels.can_refill(self.device)

    def plan_decode(self, spec: MLASpec, rows: DecodeRows, held: Any) -> Schedule:
        schedule: Schedule = held or self._new_schedule(rows)
        schedule.plan(rows, spec.num_qo_heads)
        return schedule

    def _new_schedule(self, rows: DecodeRows) -> Schedule:
        if not self.kernels.fills_schedules:
            return MadeSchedule(self.kernels)
        if rows.idle is None or not self._can_refill:
            return FilledSchedule(self.kernels, in_graph=rows.idle is not None)
        return RefilledSchedule(self.kernels)


class FlashMLAImpl(MLAImpl):
    backend_name = "FLASHMLA"
    zeroes_idle_rows = True

    def _decode(
        self,
        query: torch.Tensor,
        latent_cache: torch.Tensor,
        step: MLAStep,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        rows, schedule = step.metadata.decode, step.plan
        assert rows is not None  # there is something to decode
        scale = self.spec.scale * self.k_scale
        lse_by_head = schedule.kernels.run(query, latent_cache, rows, schedule.of(self), scale, output)
        if self.k_scale != 1.0:
            output.mul_(self.k_scale)
        if lse is not None:
            lse.copy_(lse_by_head.transpose(1, 2))
            lse.masked_fill_(lse == math.inf, -math.inf)
