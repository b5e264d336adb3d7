"""The MLA kernels by hand, without us: each function plans for one latent problem and returns what attends a copy.

Kernels that take the rope part of queries apart find it in a layer where the model has it, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.attention.bare_kernels import Bare, workspace
from benchmarks.attention.mla_problem import MLAProblem
from benchmarks.attention.paged_problem import Call

Ropes = Sequence[torch.Tensor] | None  # the rope part of each copy's queries


def flashmla(problem: MLAProblem) -> Call:
    """As vLLM ships it. The first call fills the schedule, which holds while lengths stay."""
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

    common, shape, spec = problem.common, problem.shape, problem.spec
    made = get_mla_metadata()
    schedule = made[0] if isinstance(made, tuple) else made

    def call(i: int) -> torch.Tensor:
        query = problem.queries[i].view(len(shape.seq_lens), -1, spec.num_qo_heads, shape.heads[2])
        out, _ = flash_mla_with_kvcache(
            query, problem.caches[i].key[:, :, None], common.page_table, common.seq_lens, spec.kv_lora_rank, schedule,
            None, softmax_scale=spec.scale, causal=True,
        )  # fmt: skip
        return out.flatten(0, 1)

    return call


def flashinfer_mla(problem: MLAProblem, kernel: str, ropes: Ropes = None) -> Call:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    common, spec, rank = problem.common, problem.spec, problem.shape.rank
    wrapper = BatchMLAPagedAttentionWrapper(workspace(problem.device), backend=kernel)
    wrapper.plan(
        common.query_start_loc_cpu, common.paged_kv_indptr_cpu, common.paged_kv_indices.cpu(), common.seq_lens_cpu,
        spec.num_qo_heads, rank, spec.qk_rope_head_dim, problem.cache.page_size, problem.shape.query_len > 1,
        spec.scale, spec.dtype, spec.dtype,
    )  # fmt: skip

    def call(i: int) -> torch.Tensor:
        (nope, rope), rows, out = query_parts(problem, i, ropes), problem.caches[i].key, problem.outputs[i]
        return wrapper.run(nope, rope, rows[..., :rank], rows[..., rank:], out=out)

    return call


def fa3_qv(problem: MLAProblem, ropes: Ropes = None) -> Call:
    """As vLLM ships it; its schedule is made once."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

    common, spec, rank = problem.common, problem.spec, problem.shape.rank
    schedule = get_scheduler_metadata(
        batch_size=common.num_reqs, max_seqlen_q=common.max_query_len, max_seqlen_k=common.max_seq_len,
        num_heads_q=spec.num_qo_heads, num_heads_kv=1, headdim=spec.qk_rope_head_dim, headdim_v=rank,
        cache_seqlens=common.seq_lens, qkv_dtype=spec.dtype, cu_seqlens_q=common.query_start_loc,
        page_size=problem.cache.page_size, causal=True, num_splits=SPLITS,
    )  # fmt: skip

    def call(i: int) -> torch.Tensor:
        (nope, rope), rows, out = query_parts(problem, i, ropes), problem.caches[i].key[:, :, None], problem.outputs[i]
        made: torch.Tensor = flash_attn_varlen_func(
            rope, rows[..., rank:], rows[..., :rank], common.max_query_len, common.query_start_loc,
            common.max_seq_len, seqused_k=common.seq_lens, q_v=nope, softmax_scale=spec.scale, causal=True,
            block_table=common.page_table, out=out, scheduler_metadata=schedule, num_splits=SPLITS, fa_version=3,
        )  # fmt: skip
        return made

    return call


SPLITS = 32  # that FA3 may cut a row into: without a bound it allocates for as many as there are multiprocessors


def query_parts(problem: MLAProblem, i: int, ropes: Ropes) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed queries of a copy, and their rope part: of `ropes`, or behind them."""
    nope, rope = problem.queries[i].tensor_split([problem.shape.rank], dim=-1)
    return nope, rope if ropes is None else ropes[i]


def absorbing(layer: MLAProblem, latent: MLAProblem, kernel: Bare) -> Call:
    """The same kernel with the two products of a layer around it, on the layer's queries."""
    spec: Any = layer.spec
    assert layer.kv_b_proj is not None
    nope, rank = spec.qk_nope_head_dim, spec.kv_lora_rank
    w_uk, w_uv = layer.kv_b_proj.view(spec.num_qo_heads, -1, rank).split([nope, spec.head_dim_vo], dim=1)
    make: Any = kernel.make
    ropes = [query[..., nope:] for query in layer.queries]
    call = make(latent, ropes=ropes) if kernel.takes_ropes else make(latent)

    def run(i: int) -> torch.Tensor:
        query, absorbed = layer.queries[i], latent.queries[i]
        torch.bmm(query[..., :nope].transpose(0, 1), w_uk, out=absorbed[..., :rank].transpose(0, 1))
        if not kernel.takes_ropes:
            absorbed[..., rank:] = ropes[i]
        torch.bmm(call(i).transpose(0, 1), w_uv.mT, out=layer.outputs[i].transpose(0, 1))
        return layer.outputs[i]

    return run


KERNELS: dict[str, Bare] = {
    "FlashMLA, page 64": Bare(flashmla, 64),  # type: ignore[arg-type]
    "FlashInfer MLA fa2": Bare(partial(flashinfer_mla, kernel="fa2"), takes_ropes=True),  # type: ignore[arg-type]
    "FlashInfer MLA fa3": Bare(partial(flashinfer_mla, kernel="fa3"), takes_ropes=True),  # type: ignore[arg-type]
    "FA3 qv": Bare(fa3_qv, takes_ropes=True),  # type: ignore[arg-type]
    "FA3 qv, page 32": Bare(fa3_qv, 32, takes_ropes=True),  # type: ignore[arg-type]
}
