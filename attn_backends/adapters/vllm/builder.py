"""vLLM's metadata builder over `Plans`: one for the layers that share a page table, whatever else they differ in."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from attn_backends.adapters.vllm.batch import batch_of, check_batch
from attn_backends.adapters.vllm.graphs import CapturedGraphs, are_mixed
from attn_backends.adapters.vllm.reasons import options_from, unserved
from attn_backends.adapters.vllm.versions import layout_of
from attn_backends.batch.common import CommonAttentionMetadata
from attn_backends.interface import (
    AttentionMetadataBuilder as OurBuilder,
    AttentionStep,
    CudaGraphSupport,
    Plans,
    Unsupported,
)
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
        # The host's lengths may be longer than the device's where it does not wait to hear which drafts were taken.
        self.exact = not (vllm_config.scheduler_config.async_scheduling and vllm_config.speculative_config is not None)
        self._set_up()
        if self.plans.needs_exact_lengths and not self.exact and device.type != "cpu":
            logger.warning(
                "attn_backends: %s plans with exact lengths, and vLLM has upper bounds alone while it schedules "
                "asynchronously with speculation: every step waits for the device. --no-async-scheduling, or another "
                "backend, does not", self.ours,
            )  # fmt: skip

    def _set_up(self) -> None:
        """For `layer_names`, which vLLM adds a draft model's other layers to once the builder is made."""
        context = self.vllm_config.compilation_config.static_forward_context
        layers = {name: context[name] for name in self.layer_names}
        specs = {name: layer.impl.spec_of(layer) for name, layer in layers.items()}
        cache = KVCacheSpec(None, self.kv_cache_spec.block_size, layout_of(self.vllm_config))
        scheduler, options = self.vllm_config.scheduler_config, options_from(self.vllm_config)
        num_tokens = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        limits = Limits(scheduler.max_num_seqs, num_tokens, self.vllm_config.model_config.max_model_len)
        self._check(specs, cache, self.device, options)
        backend = get_backend(self.ours)
        self.plans = Plans(backend, specs, cache, limits, self.device, validate_options(self.ours, options))
        for name, layer in layers.items():
            layer.impl.bind(layer, self.plans, name)
        self.graphs = CapturedGraphs(self.plans.state)
        self.reorder_batch_threshold = decode_threshold_of(self.plans)
        if self.device.type == "cuda":
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
        return self._serve(common_attn_metadata, fast_build, self.exact)

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> ServedMetadata:
        """A batch of a draft model's. vLLM takes tokens that were rejected off its lengths on the device alone."""
        return self._serve(common_attn_metadata, True, False)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> ServedMetadata:
        is_mixed = are_mixed(self.vllm_config.compilation_config)
        self._check_graph(batch_of(common_attn_metadata, self.plans.cache.page_size, for_graph=True, is_mixed=is_mixed))
        self.graphs.capture(common_attn_metadata, is_mixed)
        return self._plan(common_attn_metadata, True, False, self.exact)

    def _check_graph(self, common: CommonAttentionMetadata) -> None:
        """vLLM replays a graph for every batch of its shape: what is captured has to serve the longest rows."""
        longest = self.plans.limits.max_model_len
        if not self.plans.can_run_in_cudagraph(replace(common, max_seq_len=longest)):
            got = f"rows of {common.max_query_len} tokens and up to {longest} keys in a full graph"
            hint = """Pass --compilation-config '{"cudagraph_mode": "PIECEWISE"}'."""
            raise Unsupported(self.ours, [unserved("cuda_graph", got, "fewer of either: see its options", hint)])

    def _serve(self, theirs: Any, fast_build: bool, exact: bool) -> ServedMetadata:
        check_batch(self.ours, theirs)
        if len(self.layer_names) != len(self.plans.specs):
            self._set_up()
        size = self.graphs.size_of(theirs)
        if size is not None:
            self.plans.state.move_to_current_stream()  # captures have a stream of their own
            replanned = self.plans.replanned_mixed if self.graphs.are_mixed else self.plans.replanned
            steps = replanned(*size)
            if steps is not None:
                return ServedMetadata(theirs.num_actual_tokens, steps, num_prefills=theirs.num_reqs)
        return self._plan(theirs, size is not None, fast_build, exact)

    def _plan(self, theirs: Any, for_graph: bool, fast_build: bool, exact: bool) -> ServedMetadata:
        plans, page_size = self.plans, self.plans.cache.page_size
        is_mixed = for_graph and self.graphs.are_mixed
        common = batch_of(theirs, page_size, exact=exact, for_graph=for_graph, is_mixed=is_mixed)
        if common.seq_lens_are_upper_bounds and plans.needs_lengths_of(common):  # waits for the device
            lens = theirs.seq_lens[: theirs.num_reqs].cpu()
            common = batch_of(theirs, page_size, for_graph=for_graph, is_mixed=is_mixed, lens=lens)
        plans.state.move_to_current_stream()
        steps = plans.plan(common, fast_build=fast_build)
        return ServedMetadata(common.num_tokens, steps, num_prefills=theirs.num_reqs)


def decode_threshold_of(plans: Plans[str]) -> int | None:
    """The query tokens of a row up to which vLLM is to bring it to the front of a batch: what all builders decode, as a
    longer row in front has the decodes behind it prefilled. None where builders take rows in any order, as an order
    costs the host time at each step."""
    wanting = [each for each in plans.builders if type(each).reorder_batch is not OurBuilder.reorder_batch]
    return min((each.decode_threshold for each in wanting), default=None)
