"""The kernel libraries by hand, without us: each function plans for one problem and returns what attends over a copy.

Plans get inputs on the CPU and the dtypes by name; outputs are written in place where the library can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from attn_backends import AttentionSpec, CommonAttentionMetadata
from attn_backends.backends.flash_attn.call import window_of
from attn_backends.backends.flash_attn.fa3 import FlashAttention3
from attn_backends.cache.kv_cache import gather_slots
from benchmarks.attention.bare_tensorrt import fmha_v2_prefill, xqa_decode
from benchmarks.attention.paged_problem import Call, Contender, Problem, make_contender

WORKSPACE_BYTES = 512 << 20  # of FlashInfer; its own advice is 128 MB, which graphs of many rows overflow


@lru_cache(maxsize=1)
def workspace(device: torch.device) -> torch.Tensor:
    """One for all wrappers: they run one after the other. [num_bytes] u8, zeros"""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class FlashInferInputs:
    """What every plan of FlashInfer is given; tensors i32, on the CPU unless moved."""

    indptr: torch.Tensor  # [num_reqs + 1]
    indices: torch.Tensor  # [num_pages of all rows]
    last_page_len: torch.Tensor  # [num_reqs]
    heads: tuple[int, int, int]  # query heads, KV heads, head dim
    page_size: int
    keywords: dict[str, Any]

    def moved(self, device: torch.device) -> FlashInferInputs:
        tensors = (t.to(device) for t in (self.indptr, self.indices, self.last_page_len))
        return FlashInferInputs(*tensors, self.heads, self.page_size, self.keywords)

    def graph_buffers(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Keyword arguments of a decode wrapper for a CUDA graph."""
        return {
            "paged_kv_indptr_buffer": torch.zeros_like(self.indptr, device=device),
            "paged_kv_indices_buffer": torch.zeros_like(self.indices, device=device),
            "paged_kv_last_page_len_buffer": torch.zeros_like(self.last_page_len, device=device),
        }

    def plan_decode(self, wrapper: Any) -> None:
        wrapper.plan(self.indptr, self.indices, self.last_page_len, *self.heads, self.page_size, **self.keywords)


def flashinfer_inputs(common: CommonAttentionMetadata, spec: AttentionSpec) -> FlashInferInputs:
    window = {"window_left": spec.window_left} if spec.window_left >= 0 else {}
    return FlashInferInputs(
        common.paged_kv_indptr_cpu,
        common.paged_kv_indices.cpu(),
        common.paged_kv_last_page_len_cpu,
        (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim),
        common.page_size,
        {"q_data_type": spec.dtype, "kv_data_type": spec.cache_dtype, "sm_scale": spec.scale} | window,
    )


def decode_wrapper(inputs: FlashInferInputs, tensor_cores: bool, graph: bool, device: torch.device) -> Any:
    """A wrapper that nothing is planned for yet.

    Args:
        graph: for any later lengths, as a captured decode step needs it; else for those that are planned alone.
    """
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    buffers = inputs.graph_buffers(device) if graph else {}
    return BatchDecodeWithPagedKVCacheWrapper(
        workspace(device), "NHD", use_cuda_graph=graph, use_tensor_cores=tensor_cores, **buffers
    )


def flashinfer_decode(problem: Problem, tensor_cores: bool, graph: bool) -> Call:
    inputs = flashinfer_inputs(problem.common, problem.spec)
    wrapper = decode_wrapper(inputs, tensor_cores, graph, problem.device)
    inputs.plan_decode(wrapper)
    return _runs(problem, wrapper)


def flashinfer_prefill(problem: Problem, kernel: str) -> Call:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    inputs = flashinfer_inputs(problem.common, problem.spec)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(problem.device), "NHD", backend=kernel)
    wrapper.plan(
        problem.common.query_start_loc_cpu, inputs.indptr, inputs.indices, inputs.last_page_len,
        *inputs.heads, inputs.page_size, causal=True, **inputs.keywords,
    )  # fmt: skip
    return _runs(problem, wrapper)


def flashinfer_ragged(problem: Problem, kernel: str) -> Call:
    """Over the prompt's keys as they were made, in the order of the batch: for prompts without a cached beginning."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    inputs = flashinfer_inputs(problem.common, problem.spec)
    starts = problem.common.query_start_loc_cpu
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace(problem.device), "NHD", backend=kernel)
    wrapper.plan(starts, starts, *inputs.heads, causal=True, **inputs.keywords)
    slots = problem.common.slot_mapping
    fresh = [tuple(gather_slots(cached, slots) for cached in cache) for cache in problem.caches]
    return lambda i: wrapper.run(problem.queries[i], *fresh[i], out=problem.outputs[i])


def _runs(problem: Problem, wrapper: Any) -> Call:
    return lambda i: wrapper.run(problem.queries[i], tuple(problem.caches[i]), out=problem.outputs[i])


def flashinfer_cascade(problem: Problem) -> Call:
    """The shared prefix as one level, each request's own tokens as the other. It allocates its outputs itself."""
    from flashinfer import MultiLevelCascadeAttentionWrapper

    inputs, num_reqs = flashinfer_inputs(problem.common, problem.spec), problem.common.num_reqs
    shared = problem.shape.shared_prefix // inputs.page_size
    rows = [pages[shared:] for pages in inputs.indices.split(inputs.indptr.diff().tolist())]
    own_indptr = inputs.indptr - shared * torch.arange(num_reqs + 1, dtype=torch.int32)
    wrapper = MultiLevelCascadeAttentionWrapper(2, workspace(problem.device), "NHD")
    wrapper.plan(
        [_int32(0, num_reqs), torch.arange(num_reqs + 1, dtype=torch.int32)],
        [_int32(0, shared), own_indptr],
        [inputs.indices[:shared].clone(), torch.cat(rows)],
        [_int32(inputs.page_size), inputs.last_page_len],
        *inputs.heads, inputs.page_size, causal=False, **inputs.keywords,
    )  # fmt: skip
    return lambda i: wrapper.run(problem.queries[i], tuple(problem.caches[i]))


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def fa3(problem: Problem, scheduled: bool) -> Call:
    """FlashAttention 3 as vLLM builds it, with queries of the cache's dtype.

    Args:
        scheduled: its schedule is made once, not by every call.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    common, spec = problem.common, problem.spec
    lens: dict[str, Any] = {"max_seqlen_q": common.max_query_len, "max_seqlen_k": common.max_seq_len,
                            "window_size": window_of(spec, causal=True)}  # fmt: skip
    schedule = None
    if scheduled:
        schedule = get_scheduler_metadata(
            batch_size=common.num_reqs, **lens, num_heads_q=spec.num_qo_heads, num_heads_kv=spec.num_kv_heads,
            headdim=spec.head_dim, cache_seqlens=common.seq_lens, qkv_dtype=spec.cache_dtype,
            cu_seqlens_q=common.query_start_loc, page_size=problem.cache.page_size, causal=True, num_splits=0,
        )  # fmt: skip
    queries = [query.to(spec.cache_dtype) for query in problem.queries]
    return lambda i: flash_attn_varlen_func(
        queries[i], *problem.caches[i], **lens, cu_seqlens_q=common.query_start_loc,
        seqused_k=common.seq_lens, block_table=common.page_table, softmax_scale=spec.scale, causal=True,
        out=problem.outputs[i], scheduler_metadata=schedule, num_splits=0, fa_version=3,
    )  # fmt: skip


def fa2_decode(problem: Problem) -> Call:
    from flash_attn import flash_attn_with_kvcache

    common = problem.common
    return lambda i: flash_attn_with_kvcache(
        problem.queries[i][:, None], *problem.caches[i], cache_seqlens=common.seq_lens,
        block_table=common.page_table, softmax_scale=problem.spec.scale, causal=True,
        window_size=window_of(problem.spec, causal=True),
    )  # fmt: skip


def fa2_prefill(problem: Problem) -> Call:
    from flash_attn import flash_attn_varlen_func

    common = problem.common
    starts = torch.cat([common.seq_lens.new_zeros(1), common.seq_lens.cumsum(0, dtype=torch.int32)])
    return lambda i: flash_attn_varlen_func(
        problem.queries[i], *problem.caches[i], common.query_start_loc, starts, common.max_query_len,
        common.max_seq_len, softmax_scale=problem.spec.scale, causal=True, block_table=common.page_table,
        window_size=window_of(problem.spec, causal=True),
    )  # fmt: skip


def fa4(problem: Problem) -> Call:
    """FlashAttention 4, whose outputs are its own."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    common, spec = problem.common, problem.spec
    window = tuple(size if size >= 0 else None for size in window_of(spec, causal=True))
    return lambda i: flash_attn_varlen_func(
        problem.queries[i], *problem.caches[i], cu_seqlens_q=common.query_start_loc, seqused_k=common.seq_lens,
        max_seqlen_q=common.max_query_len, max_seqlen_k=common.max_seq_len, page_table=common.page_table,
        softmax_scale=spec.scale, causal=True, window_size=window,
    )[0]  # fmt: skip


@dataclass(frozen=True)
class Bare:
    """One way to call a library."""

    make: Callable[[Problem], Call]
    page_size: int | None = None  # that it needs; None takes the problem's
    fp8_queries: bool = False  # over a cache in fp8
    head_dims: frozenset[int] | None = None  # that it runs; None: it says so itself
    takes_ropes: bool = False  # `make` takes `ropes`, of MLA: the rope part of queries where the model has it

    def contender(self, problem: Problem) -> Contender:
        head_dim = problem.spec.head_dim
        if self.head_dims is not None and head_dim not in self.head_dims:
            raise ValueError(f"head dim {head_dim} is none of {sorted(self.head_dims)}")
        problem = problem.repaged(self.page_size or problem.cache.page_size)
        problem = problem.rounded if self.fp8_queries else problem
        return make_contender(problem, self.make(problem))


DECODE = {
    "FlashInfer tensor-core": Bare(partial(flashinfer_decode, tensor_cores=True, graph=True)),
    "FlashInfer tensor-core, fixed lengths": Bare(partial(flashinfer_decode, tensor_cores=True, graph=False)),
    "FlashInfer CUDA-core": Bare(partial(flashinfer_decode, tensor_cores=False, graph=True)),
    "FlashInfer CUDA-core, fixed lengths": Bare(partial(flashinfer_decode, tensor_cores=False, graph=False)),
    "FA3": Bare(partial(fa3, scheduled=False), fp8_queries=True, head_dims=FlashAttention3.head_dims),
    "FA3, scheduled once": Bare(partial(fa3, scheduled=True), fp8_queries=True, head_dims=FlashAttention3.head_dims),
    "FA2, page 256": Bare(fa2_decode, 256),
    "FA4": Bare(fa4),
    "XQA": Bare(xqa_decode, fp8_queries=True),
}
PREFILL = {
    "FlashInfer fa2": Bare(partial(flashinfer_prefill, kernel="fa2")),
    "FlashInfer fa3": Bare(partial(flashinfer_prefill, kernel="fa3")),
    "FlashInfer fa2, ragged": Bare(partial(flashinfer_ragged, kernel="fa2")),
    "FlashInfer fa3, ragged": Bare(partial(flashinfer_ragged, kernel="fa3")),
    "FA3": Bare(partial(fa3, scheduled=False), fp8_queries=True, head_dims=FlashAttention3.head_dims),
    "FA2, page 256": Bare(fa2_prefill, 256),
    "FA4": Bare(fa4),
    "fmha_v2": Bare(fmha_v2_prefill),
}
