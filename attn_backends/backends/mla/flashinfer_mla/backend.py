"""FLASHINFER_MLA: decode by FlashInfer's MLA kernels (package `flashinfer-python`), planned on the host. Prefill is the
family's own."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch

from attn_backends.backends.mla.backend import MLABackend, reject_other_cache_dtype
from attn_backends.backends.mla.flashinfer_mla.plan import (
    MAX_WORKS,
    MLALibrary,
    MLAPlan,
    float_bytes,
    int_bytes,
    most_works,
)
from attn_backends.backends.mla.impl import MLAImpl
from attn_backends.backends.mla.metadata import DecodeRows, MLAMetadata, MLAMetadataBuilder
from attn_backends.backends.mla.options import MLAOptions
from attn_backends.backends.mla.state import MLAState, MLAStep
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.interface.capabilities import Capabilities, CudaGraphSupport, Rejection
from attn_backends.interface.warm_up import plan_all_kinds
from attn_backends.kernels.flashinfer_package import LOWEST_LOGIT
from attn_backends.machine import Progress, is_hopper, num_multiprocessors, refuse_while_capturing
from attn_backends.spec import AttentionSpec, KVCacheSpec, MLASpec, PlanGroup
from attn_backends.step.staging import HostRing

_HALF = frozenset({torch.float16, torch.bfloat16})


class FlashInferMLAOptions(MLAOptions):
    """The `backend_options` of FLASHINFER_MLA."""

    kernels: Literal["auto", "fa2", "fa3"] = "auto"
    """Which of FlashInfer's kernels decode. `auto`: fa3 on a Hopper GPU, else fa2."""


class FlashInferMLABackend(MLABackend):
    """Latent rows of 512 + 64 in pages of any size, in the dtype of the queries."""

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER_MLA"

    @staticmethod
    def get_impl_cls() -> type[FlashInferMLAImpl]:
        return FlashInferMLAImpl

    @staticmethod
    def get_builder_cls() -> type[FlashInferMLAMetadataBuilder]:
        return FlashInferMLAMetadataBuilder

    @staticmethod
    def get_state_cls() -> type[FlashInferMLAState]:
        return FlashInferMLAState

    @staticmethod
    def capabilities() -> Capabilities:
        return Capabilities(
            devices=frozenset({"cuda"}),
            dtypes=_HALF,
            cache_dtypes=_HALF,
            unequal_head_dims=True,
            lse=True,
            cuda_graph=CudaGraphSupport.UNIFORM_BATCH,
            lowest_logit=LOWEST_LOGIT,
            min_compute_capability=(8, 0),
            mla=True,
            kv_lora_ranks=frozenset({512}),
            qk_rope_head_dims=frozenset({64}),
        )

    @classmethod
    def reject(cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str) -> list[Rejection]:
        """The dtype of the cache too."""
        found = super().reject(spec, cache, device)
        return found + (reject_other_cache_dtype(spec, _HALF) if isinstance(spec, MLASpec) else [])

    @classmethod
    def reject_set_up(
        cls, spec: AttentionSpec, cache: KVCacheSpec, device: torch.device | str, options: FlashInferMLAOptions | None
    ) -> list[Rejection]:
        """Its kernels for Hopper, elsewhere."""
        found = cls.reject(spec, cache, device)
        if not found and options is not None and options.kernels == "fa3" and not is_hopper(torch.device(device)):
            hint = "Set backend_options.kernels to auto."
            found.append(Rejection("kernels", "fa3 on another GPU than Hopper", "fa2; on Hopper fa3", hint))
        return found


class FlashInferMLAMetadataBuilder(MLAMetadataBuilder):
    """Kernels see the lengths that were planned on the host, and no others."""

    needs_exact_lengths = True

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLAMetadata:
        self.check_lengths(common_attn_metadata)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class FlashInferMLAState(MLAState):
    """One float workspace for all layers, as they run one after the other; a schedule and a wrapper a plan.

    Raises:
        ValueError: the limits are more than one schedule holds, or `kernels` cannot run here.
    """

    backend_name = "FLASHINFER_MLA"
    make_library: ClassVar[Any] = MLALibrary  # another one in tests

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.library: MLALibrary = self.make_library()
        self._kernels: str = (self.options or FlashInferMLAOptions()).kernels
        if self._kernels == "fa3" and not is_hopper(self.device):
            raise ValueError("kernels is fa3, which needs a Hopper GPU: set it to auto")
        num_sms = num_multiprocessors(self.device)
        for spec in self.specs.values():
            self._check_works(spec, num_sms)
        self._check_slots()
        num_bytes = max(float_bytes(spec, num_sms) for spec in self.specs.values())
        self.float_workspace = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        at_once = len(self.groups)  # plans of a step: one event guards their pinned buffers
        self._ring = HostRing(-(-int_bytes(num_sms) // 4), self.device, depth=4 * at_once, group=at_once)
        # Made now: nothing may be allocated once graphs were captured.
        self._eager = {spec: self._new_plan(spec, None) for spec in self.specs.values()}

    def plan_decode(self, spec: MLASpec, rows: DecodeRows, held: Any) -> MLAPlan:
        refuse_while_capturing(self.device, self.backend_name)
        plan: MLAPlan = held or (self._eager[spec] if rows.idle is None else self._new_plan(spec, rows))
        plan(rows)
        return plan

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile what is launched beside the library, and plan a decode, whereupon the library loads or compiles its
        kernels."""
        super().warm_up(progress)

        def plan(group: PlanGroup[Any], batch: CommonAttentionMetadata) -> None:
            builder = FlashInferMLAMetadataBuilder(group, self.cache, self.limits, self.device, options=self.options)
            decode = builder.build(0, batch).decode
            if decode is not None:
                self.plan_decode(self.specs[group.index], decode, None)

        plan_all_kinds(self, (1,), plan, progress)

    def _new_plan(self, spec: MLASpec, graph: DecodeRows | None) -> MLAPlan:
        workspaces = (self.float_workspace, self._ring)
        return MLAPlan(self.library, spec, self.cache.page_size, self._kernels, *workspaces, graph)

    def _check_works(self, spec: MLASpec, num_sms: int) -> None:
        limits, heads = self.limits, spec.num_qo_heads
        lens = range(1, MLAMetadataBuilder.decode_threshold + 1)
        rows = [min(limits.max_num_requests, limits.max_num_tokens // n) for n in lens]
        works = max(most_works(many, n, heads, num_sms) for many, n in zip(rows, lens, strict=True))
        if works > MAX_WORKS:
            raise ValueError(
                f"a step of max_num_requests {limits.max_num_requests} and max_num_tokens {limits.max_num_tokens} over "
                f"{heads} heads takes up to {works} tiles, and FlashInfer's MLA schedules hold {MAX_WORKS}: lower "
                "max_num_requests"
            )

    def _check_slots(self) -> None:
        """Kernels number the slots of a whole page table, in 32 bits, and its pages in 31."""
        limits, page_size = self.limits, self.cache.page_size
        num_pages = limits.max_num_requests * -(-limits.max_model_len // page_size)
        if num_pages >= 2**31 or num_pages * page_size >= 2**32:
            raise ValueError(
                f"max_num_requests {limits.max_num_requests} times max_model_len {limits.max_model_len} is more than "
                "FlashInfer's MLA kernels can number (32 bits): lower one of them"
            )


class FlashInferMLAImpl(MLAImpl):
    backend_name = "FLASHINFER_MLA"
    zeroes_idle_rows = True

    def _decode(
        self,
        query: torch.Tensor,
        latent_cache: torch.Tensor,
        step: MLAStep,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        flat_lse = None if lse is None else lse.flatten(0, 1)
        scale = self.spec.scale * self.k_scale
        step.plan.run(query.flatten(0, 1), latent_cache, scale, output.flatten(0, 1), flat_lse)
        if self.k_scale != 1.0:
            output.mul_(self.k_scale)
        if lse is not None:
            lse.mul_(math.log(2))
