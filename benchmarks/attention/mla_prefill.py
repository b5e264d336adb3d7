"""Time of a layer's MLA prefill on a GPU, by our backends and by bare kernels over the same expanded keys and values.

    python -m benchmarks attention mla_prefill [--backend TRITON_MLA ...] [--shapes short long behind | all | tiny]
        [--no-bare]

Every contender is one CUDA graph, and a part of its heads is first checked against float64. "attention us" is the
attention alone, over keys and values that are expanded already: of a backend what it calls for new tokens, of a bare
kernel one call over all of a row's keys. "layer us" is `forward` without new rows: the latent rows are gathered,
expanded, attended, and behind a prefix merged chunk by chunk, for which there is no "attention us". "row by row" is
plain torch, a call a row. TFLOP/s are those of the attention alone, a causal row's own keys by half.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from attn_backends import KVCacheSpec, MLASpec, get_backend
from attn_backends.backends.mla.impl import MLAImpl
from attn_backends.backends.mla.metadata import ExpandedTensors
from attn_backends.batch.views import without_new_keys
from attn_backends.cache.kv_cache import gather_pages
from attn_backends.registry import validate_options
from benchmarks.attention.bare_kernels import workspace
from benchmarks.attention.contest import CACHE_DTYPES, calls_us, parse, parts_of, run
from benchmarks.attention.mla_attention import all_backends
from benchmarks.attention.mla_problem import MLAProblem, latent_cache
from benchmarks.attention.paged_problem import Answer, Call, Contender, Shape, common_of, make_contender, reference
from benchmarks.lib.gpu_harness import make_copy
from benchmarks.lib.processes import Row
from benchmarks.lib.reasons import reason

LAYER, CHECKED_HEADS = " layer", 1
MANY, FEW = (128, 128, 192), (16, 16, 192)


@dataclass(frozen=True)
class PromptShape(Shape):
    """Prefills alone, with DeepSeek's head dims."""

    is_prefill: bool = True
    dim_vo: int = 128

    @property
    def flops(self) -> float:
        heads, _, dim = self.heads
        lens = zip(self.query_lens, self.seq_lens, strict=True)
        return 2 * heads * (dim + self.dim_vo) * sum(self._seen(queries, n) for queries, n in lens)


SHAPES = {
    "short": [
        PromptShape((200,) * 64, FEW),
        PromptShape((200,) * 64, MANY),
        PromptShape((1000,) * 16, FEW),
        PromptShape((17, 4000, 90, 230, 1100, 33, 700, 2100), FEW),
    ],
    "long": [PromptShape((8192,), MANY), PromptShape((4096,) * 4, FEW), PromptShape((32768,), FEW)],
    "behind": [
        PromptShape((8192,) * 4, FEW, chunk_lens=(1024,) * 4),
        PromptShape((8192,), MANY, chunk_lens=(2048,)),
        PromptShape((9000, 300, 20000, 1200) * 4, FEW, chunk_lens=(100, 200, 400, 50) * 4),
    ],
    "tiny": [PromptShape((40, 9), (2, 2, 192)), PromptShape((40, 30), (2, 2, 192), chunk_lens=(12, 9))],
}


@dataclass(frozen=True, eq=False)
class PromptProblem(MLAProblem):
    """One copy: prompts multiply far longer than they read."""

    passes = 1

    @cached_property
    def expanded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all rows, one row behind the other, as a layer expands them."""
        spec = self.spec
        assert isinstance(spec, MLASpec)
        assert self.kv_b_proj is not None
        size, lens = self.cache.page_size, zip(self.shape.seq_lens, self.common.page_table, strict=True)
        latents = torch.cat([gather_pages(self.caches[0].key, pages[: -(-n // size)])[:n] for n, pages in lens])
        latents = latents.to(spec.dtype)
        both = F.linear(latents[:, : spec.kv_lora_rank], self.kv_b_proj).unflatten(1, (spec.num_qo_heads, -1))
        nope, value = both.split([spec.qk_nope_head_dim, spec.head_dim_vo], dim=-1)
        rope = latents[:, None, spec.kv_lora_rank :].expand(-1, spec.num_qo_heads, -1)
        return torch.cat([nope, rope], dim=-1), value

    @cached_property
    def answers(self) -> list[Answer]:
        heads = slice(0, CHECKED_HEADS)
        key, value = (part[:, heads].split(self.shape.seq_lens) for part in self.expanded)
        queries = self.queries[0][:, heads].split(self.shape.query_lens)
        rows = [reference(*row, self.spec.scale) for row in zip(queries, key, value, strict=True)]
        return [Answer(0, slice(None), heads, torch.cat(rows))]


def make_problem(shape: PromptShape, dtype: torch.dtype, page_size: int, device: torch.device) -> PromptProblem:
    cache_dtype, dtype = dtype, torch.bfloat16 if dtype.itemsize == 1 else dtype
    spec = MLASpec(shape.heads[0], dtype=dtype, cache_dtype=cache_dtype)
    cache = KVCacheSpec(sum(-(-seq_len // page_size) for seq_len in shape.seq_lens), page_size)
    made = {"device": device, "dtype": dtype}
    rows = torch.randn(cache.num_pages, page_size, spec.latent_dim, **made).to(cache_dtype)
    query = torch.randn(sum(shape.query_lens), spec.num_qo_heads, spec.head_dim, **made)
    output = query.new_empty(len(query), spec.num_qo_heads, spec.head_dim_vo)
    num_rows = spec.num_qo_heads * (spec.qk_nope_head_dim + spec.head_dim_vo)
    weight = torch.randn(num_rows, spec.kv_lora_rank, **made) / math.sqrt(spec.kv_lora_rank)
    common = common_of(shape, cache, device)
    return PromptProblem(shape, spec, cache, common, [latent_cache(rows)], [query], [output], kv_b_proj=weight)


# Bare kernels: one call over expanded keys and values, of which queries are the last.


def key_starts(problem: PromptProblem) -> torch.Tensor:
    return torch.tensor([0, *problem.shape.seq_lens]).cumsum(0).int()


def fa3(problem: PromptProblem) -> Call:
    """As vLLM ships it."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    (key, value), common = problem.expanded, problem.common
    starts = key_starts(problem).to(problem.device)

    def call(i: int) -> torch.Tensor:
        made: torch.Tensor = flash_attn_varlen_func(
            problem.queries[i], key, value, common.max_query_len, common.query_start_loc, common.max_seq_len,
            cu_seqlens_k=starts, softmax_scale=problem.spec.scale, causal=True, out=problem.outputs[i], fa_version=3,
        )  # fmt: skip
        return made

    return call


def flashinfer_ragged(problem: PromptProblem) -> Call:
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    spec, (key, value) = problem.spec, (part.contiguous() for part in problem.expanded)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace(problem.device), "NHD", backend="fa3")
    wrapper.plan(
        problem.common.query_start_loc_cpu, key_starts(problem), spec.num_qo_heads, spec.num_qo_heads, spec.head_dim,
        head_dim_vo=spec.head_dim_vo, causal=True, sm_scale=spec.scale, q_data_type=spec.dtype,
    )  # fmt: skip
    return lambda i: wrapper.run(problem.queries[i], key, value, out=problem.outputs[i])


KERNELS: dict[str, Callable[[PromptProblem], Call]] = {"FA3": fa3, "FlashInfer ragged fa3": flashinfer_ragged}
ROWS = "row by row"


def ours(name: str, given: PromptProblem, options: dict[str, Any]) -> dict[str, Contender]:
    """A backend's attention of new tokens, where there is no context, and its layer."""
    problem = given.fitting(get_backend(name))
    assert problem.kv_b_proj is not None
    backend, builder, state, _ = parts_of(name, problem, options, kv_b_proj=problem.kv_b_proj)
    more = {"options": validate_options(name, options), "kv_b_proj": problem.kv_b_proj}
    impl: Any = backend.get_impl_cls()(problem.spec, problem.cache, problem.device, **more)
    step = state.begin_forward(builder.build(0, without_new_keys(problem.common)))
    query, cache, output = problem.queries[0], problem.caches[0], problem.outputs[0]
    whole = make_contender(problem, lambda i: impl.forward(query, None, None, cache, step, output), state)
    made, rows = {name + LAYER: whole}, step.metadata.prefill
    if not rows.chunks:

        def attend(i: int) -> torch.Tensor:
            impl._prefill(ExpandedTensors(query, *problem.expanded, output, None), rows.new, step.prefill_plans[0])
            return output

        def by_rows(i: int) -> torch.Tensor:
            MLAImpl._prefill(impl, ExpandedTensors(query, *problem.expanded, output, None), rows.new, None)
            return output

        made |= {name: make_contender(problem, attend, state), ROWS: make_contender(problem, by_rows, state)}
    return made


def all_made(
    problem: PromptProblem, names: Sequence[str], arguments: argparse.Namespace
) -> tuple[dict[str, Contender], list[str]]:
    """The contenders that are right; and who dropped out why."""
    made: dict[str, Contender] = {}
    dropped = []
    for name in [*names, *(KERNELS if arguments.bare else ())]:
        try:
            found = (
                {name: make_contender(problem, KERNELS[name](problem))}
                if name in KERNELS
                else ours(name, problem, arguments.options)
            )
            for contender in found.values():
                contender.check()
            made = found | made
        except Exception as error:  # whatever a kernel library raises, and wrong answers
            dropped.append(f"{problem.shape.name}: {name}: {reason(error)}")
    return made, dropped


class Prepared(NamedTuple):
    problem: PromptProblem
    made: dict[str, Contender]
    dropped: list[str]


@torch.inference_mode()
def prepare(arguments: argparse.Namespace, shape: PromptShape) -> Prepared:
    problem = make_problem(shape, CACHE_DTYPES[arguments.dtype], arguments.page_size, torch.device(arguments.device))
    return Prepared(problem, *all_made(problem, arguments.backend or all_backends(), arguments))


@torch.inference_mode()
def measure(arguments: argparse.Namespace, prepared: Prepared) -> Row:
    """Rows of one shape, and who dropped out."""
    problem, made, dropped = prepared
    shape, device = problem.shape, problem.device
    each, _ = calls_us(made, make_copy(device), arguments.rounds, device, {})
    us = {name: statistics.median(times) for name, times in each.items()}
    best = min((us[name] for name in KERNELS if name in us), default=None)
    rows = []
    for name in dict.fromkeys(each.removesuffix(LAYER) for each in made):
        time = us.get(name)
        rows.append({
            "shape": shape.name,
            "contender": name,
            "attention us": time,
            "attention vs best bare": time and best and time / best,
            "layer us": us.get(name + LAYER),
            "TFLOP/s": time and shape.flops / time / 1e6,
            "error": max(made[each].worst_error() for each in (name, name + LAYER) if each in made),
        })  # fmt: skip
    return {"rows": rows, "dropped": dropped}


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse(__doc__, given, SHAPES, [], 64)
    run("mla_prefill", "MLA prefill of one layer", arguments, SHAPES, prepare, measure)


if __name__ == "__main__":
    main()
