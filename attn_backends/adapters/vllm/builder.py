"""vLLM's metadata builder over `Plans`: one for the layers that share a page table, whatever else they differ in."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from attn_backends.adapters.vllm.batch import batch_of, check_batch
from attn_backends.adapters.vllm.graphs import CapturedGraphs
from attn_backends.adapters.vllm.reasons import unserved
from attn_backends.adapters.vllm.settings import options_from
from attn_backends.adapters.vllm.versions import layout_of
from attn_backends.interface import AttentionStep, CudaGraphSupport, Plans, Unsupported
from attn_backends.registry import explain_for, get_backend, validate_options
from attn_backends.spec import AttentionSpec, KVCacheSpec, Limits

logger = logging.getLogger("vllm.attn_backends")


@dataclass
class ServedMetadata:
    """What vLLM hands to every layer of a group: each finds its own step. MLA's base class reads the counts, by which
    all rows are prefills, so that the whole of a layer's attention is ours."""

    num_actual_tokens: int  # padding included, where vLLM runs a full graph
    steps: dict[str, AttentionStep[Any]]  # by layer
    num_prefills: int
    num_decodes: int = 0
    num_decode_tokens: int = 0
    prefill: None = None
    decode: None = None


class ServedBuilder(AttentionMetadataBuilder[ServedMetadata]):  # type: ignore[misc]
    """Makes `Plans` of a group's layers, and each layer's impl: weights are loaded by now, and page sizes known."""

    ours: ClassVar[str]  # the backend's name in our registry, set on the class

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = {name: vllm_config.compilation_config.static_forward_context[name] for name in layer_names}
        specs = {name: layer.impl.spec_of(layer) for name, layer in layers.items()}
        cache = KVCacheSpec(None, kv_cache_spec.block_size, layout_of(vllm_config))
        options = options_from(vllm_config)
        self._check(specs, cache, device, options)
        backend = get_backend(self.ours)
        self.plans = Plans(backend, specs, cache, limits_of(vllm_config), device, validate_options(self.ours, options))
        self.exact = not has_upper_bounds(vllm_config)
        if self.plans.needs_exact_lengths and not self.exact:
            hint = "Pass --no-async-scheduling."
            raise Unsupported(self.ours, [unserved("async_scheduling", "speculation with it", "exact lengths", hint)])
        for name, layer in layers.items():
            layer.impl.bind(layer, self.plans, name)
        self.graphs = CapturedGraphs(self.plans.state)
        self.reorder_batch_threshold = max(builder.decode_threshold for builder in self.plans.builders)
        if device.type == "cuda":
            self.plans.state.warm_up()
        logger.info(
            "attn_backends: %s serves %d layers in %d plan groups, pages of %d, %s", self.ours, len(layers),
            len(self.plans.groups), cache.page_size, cache.layout,
        )  # fmt: skip

    def _check(
        self, specs: dict[str, AttentionSpec], cache: KVCacheSpec, device: torch.device, options: dict[str, Any]
    ) -> None:
        for spec in dict.fromkeys(specs.values()):
            if reasons := explain_for(self.ours, spec, cache, device, options):
                layer = next(name for name, other in specs.items() if other == spec)
                raise NotImplementedError(f"{self.ours} cannot serve {layer} in vLLM: " + "; ".join(reasons))

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Our level is vLLM's, by number."""
        level = get_backend(cls.ours).capabilities().cuda_graph
        on_cpu = str(vllm_config.device_config.device_type) == "cpu"
        return AttentionCGSupport(int(CudaGraphSupport.NEVER if on_cpu else level))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> ServedMetadata:
        theirs = common_attn_metadata
        check_batch(self.ours, theirs)
        size = self.graphs.size_of(theirs)
        if size is not None:
            self.plans.state.move_to_current_stream()  # captures have a stream of their own
            steps = self.plans.replanned(*size)
            if steps is not None:
                return ServedMetadata(theirs.num_actual_tokens, steps, num_prefills=theirs.num_reqs)
        return self._plan(theirs, size is not None, fast_build)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> ServedMetadata:
        self.graphs.capture(common_attn_metadata)
        return self._plan(common_attn_metadata, True)

    def _plan(self, theirs: Any, for_graph: bool, fast_build: bool = False) -> ServedMetadata:
        common = batch_of(theirs, self.plans.cache.page_size, exact=self.exact, for_graph=for_graph)
        self.plans.state.move_to_current_stream()
        steps = self.plans.plan(common, fast_build=fast_build)
        return ServedMetadata(common.num_tokens, steps, num_prefills=theirs.num_reqs)


def limits_of(vllm_config: Any) -> Limits:
    """The most that one step of vLLM's scheduler holds."""
    scheduler = vllm_config.scheduler_config
    return Limits(
        scheduler.max_num_seqs, max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs),
        vllm_config.model_config.max_model_len,
    )  # fmt: skip


def has_upper_bounds(vllm_config: Any) -> bool:
    """Whether the host's lengths may be longer than the device's: it does not wait to hear which drafts were taken."""
    return bool(vllm_config.scheduler_config.async_scheduling and vllm_config.speculative_config is not None)
