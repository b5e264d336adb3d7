"""What outlives a step of FLASHINFER_MLA: the float workspace, and plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from attn_backends.backends.mla.flashinfer_mla.metadata import FlashInferMLAMetadataBuilder
from attn_backends.backends.mla.flashinfer_mla.options import FlashInferMLAOptions
from attn_backends.backends.mla.flashinfer_mla.plan import (
    MAX_WORKS,
    MLALibrary,
    MLAPlan,
    float_bytes,
    int_bytes,
    most_works,
)
from attn_backends.backends.mla.metadata import DecodeRows, MLAMetadata, MLAMetadataBuilder
from attn_backends.backends.mla.state import MLAState, MLAStep
from attn_backends.interface.plans import plan_all_kinds, replaced_plan
from attn_backends.machine import Progress, is_hopper, num_multiprocessors, refuse_while_capturing
from attn_backends.spec import MLASpec
from attn_backends.step.staging import HostRing


@dataclass(frozen=True)
class FlashInferMLAStep(MLAStep):
    """A step whose decode rows are planned as the group's wrapper holds it."""

    plan: MLAPlan | None
    _number: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_number", 0 if self.plan is None else self.plan.number)

    def check_plan(self) -> None:
        if self.plan is not None and self.plan.number != self._number:
            raise replaced_plan(FlashInferMLAState.backend_name, self.metadata.group_index)


class FlashInferMLAState(MLAState):
    """One float workspace for all layers, as they run one after the other; a schedule and a wrapper a plan.

    Raises:
        ValueError: the limits are more than one schedule holds, or `kernels` cannot run here.
    """

    backend_name = "FLASHINFER_MLA"
    step_cls = FlashInferMLAStep
    make_library: ClassVar[Any] = MLALibrary  # another one in tests

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.library: MLALibrary = self.make_library()
        self._kernels: str = (self.options or FlashInferMLAOptions()).kernels
        if self._kernels == "fa3" and not is_hopper(self.device):
            raise ValueError("kernels is fa3, which needs a Hopper GPU: set it to auto")
        num_sms = num_multiprocessors(self.device)
        for spec in self.specs.values():
            limits, heads = self.limits, spec.num_qo_heads
            lens = range(1, MLAMetadataBuilder.decode_threshold + 1)
            rows = [min(limits.max_num_requests, limits.max_num_tokens // n) for n in lens]
            works = max(most_works(many, n, heads, num_sms) for many, n in zip(rows, lens, strict=True))
            if works > MAX_WORKS:
                raise ValueError(
                    f"a step of max_num_requests {limits.max_num_requests} and max_num_tokens {limits.max_num_tokens} "
                    f"over {heads} heads takes up to {works} tiles, and FlashInfer's MLA schedules hold {MAX_WORKS}: "
                    "lower max_num_requests"
                )
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

        def plan(metadata: MLAMetadata) -> None:
            if metadata.decode is not None:
                self.plan_decode(self.specs[metadata.group_index], metadata.decode, None)

        plan_all_kinds(self, FlashInferMLAMetadataBuilder, (1,), plan, progress)

    def _new_plan(self, spec: MLASpec, graph: DecodeRows | None) -> MLAPlan:
        ints = torch.empty(self._ring.hosts_cpu[0].numel() * 4, dtype=torch.uint8, device=self.device)
        wrapper = self.library.wrapper(spec, self.float_workspace, ints, self._kernels, graph)
        return MLAPlan(wrapper, spec, self.cache.page_size, self._ring, graph is not None)

    def _check_slots(self) -> None:
        """Kernels number the slots of a whole page table, in 32 bits, and its pages in 31."""
        limits, page_size = self.limits, self.cache.page_size
        num_pages = limits.max_num_requests * -(-limits.max_model_len // page_size)
        if num_pages >= 2**31 or num_pages * page_size >= 2**32:
            raise ValueError(
                f"max_num_requests {limits.max_num_requests} times max_model_len {limits.max_model_len} is more than "
                "FlashInfer's MLA kernels can number (32 bits): lower one of them"
            )
