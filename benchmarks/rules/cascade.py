"""Decode of requests that share a prefix: attended once for all of them and merged, or with every request.

    python -m benchmarks rules cascade [--backend FLASHINFER] [--requests 64 --prefixes 8192]

The first row is 64 requests over 8192 shared tokens, 128 of their own each; the others show from where sharing pays.
All are planned for their lengths alone and captured as CUDA graphs over several copies of the cache, checked against
float64 and timed in turns (see attention.py). The bare kernels are FlashInfer's plain decode wrapper (tensor cores) and
its `MultiLevelCascadeAttentionWrapper`. "plan us" is the host's time of `build` and `begin_forward`.

Whatever rule a backend has on where sharing pays (a `CASCADE_MIN_…` of its modules) is set to zero first, unless
`--keep-rule`; "prefix used" says what came of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from attn_backends import get_backend
from benchmarks.attention import bare_kernels
from benchmarks.attention.bare_kernels import Bare
from benchmarks.attention.contest import DTYPES, Made, checked, our_call, parts_of
from benchmarks.attention.paged_problem import Problem, Shape, make_contender, make_problem
from benchmarks.lib.gpu_harness import PACKAGES, free_memory, in_turns_us, installed
from benchmarks.lib.harness import report
from benchmarks.lib.reasons import reason

HEADS = (32, 8, 128)
TINY_HEADS = (4, 2, 64)
BARE = {
    "bare plain": bare_kernels.DECODE["FlashInfer tensor-core, fixed lengths"],
    "bare cascade": Bare(bare_kernels.flashinfer_cascade),
}


def forget_rule(name: str) -> None:
    """Set every `CASCADE_MIN_…` of a backend's modules to zero: it then shares whatever it is given."""
    package = get_backend(name).__module__.rsplit(".", 1)[0]
    own = package if package.rsplit(".", 1)[-1] == name.lower() else get_backend(name).__module__
    for module in [module for path, module in sys.modules.items() if path == own or path.startswith(own + ".")]:
        for constant in [constant for constant in vars(module) if constant.startswith("CASCADE_MIN_")]:
            setattr(module, constant, 0)


def ours(name: str, problem: Problem, options: dict[str, Any]) -> tuple[Made, dict[str, Any]]:
    """The prefix with every request, and once; and what planning either takes."""
    fitting = problem.fitting(get_backend(name))
    made: Made = {}
    figures: dict[str, Any] = {}
    for label, prefix_len in (("plain", 0), ("shared", problem.shape.shared_prefix)):
        parts = parts_of(name, fitting, options)
        plan_us = []
        for _ in range(20):
            started = time.perf_counter()
            metadata = parts.builder.build(prefix_len, fitting.common)
            step = parts.state.begin_forward(metadata)
            plan_us.append((time.perf_counter() - started) * 1e6)
            if problem.device.type == "cuda":
                torch.cuda.synchronize()
        made[label] = make_contender(fitting, our_call(parts.impl, fitting, step), (parts, step))
        figures[f"{label} plan us"] = statistics.median(plan_us)
        figures["prefix used"] = metadata.common_prefix_len
    return made, figures


@torch.inference_mode()
def measure(name: str, shape: Shape, arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """A row of one shape, and who dropped out."""
    device = torch.device(arguments.device)
    problem = make_problem(shape, DTYPES[arguments.dtype], arguments.page_size, device)
    made, figures = ours(name, problem, arguments.options)
    dropped = []
    for label, kernel in BARE.items() if arguments.bare else ():
        try:
            made[label] = kernel.contender(problem)
        except Exception as error:  # whatever a kernel library raises
            dropped.append(f"{shape.name}: {label}: {reason(error)}")
    errors, wrong = checked(made)
    times = in_turns_us({label: made[label].replay for label in errors}, arguments.rounds, device)
    us = {label: made[label].us(replay_us) for label, replay_us in times.items()}
    num_requests, prefix = len(shape.seq_lens), shape.shared_prefix
    spec = problem.spec
    saved = prefix * (num_requests - 1) * 2 * spec.num_kv_heads * spec.head_dim * spec.cache_dtype.itemsize
    row = {
        "requests": num_requests,
        "prefix": prefix,
        "saved MiB": saved / 2**20,
        "plain us": us.get("plain"),
        "shared us": us.get("shared"),
        "gain": _ratio(us, "plain", "shared"),
        **{f"{label} us": us.get(label) for label in BARE},
        "bare plain / shared": _ratio(us, "bare plain", "shared"),
        "bare cascade / shared": _ratio(us, "bare cascade", "shared"),
        **figures,
        "error": max(errors.values(), default=None),
    }
    return row, dropped + wrong


def _ratio(us: dict[str, float], of: str, to: str) -> float | None:
    return us[of] / us[to] if of in us and to in us else None


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", type=str.upper, default="FLASHINFER")
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 2, 4, 8, 16])
    parser.add_argument("--prefixes", type=int, nargs="+", default=[8192, 512, 2048])
    parser.add_argument("--own", type=int, default=128, help="tokens of a request beside the prefix")
    parser.add_argument("--bare", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--keep-rule", action="store_true", help="let the backend decide where sharing pays")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--options", type=json.loads, default={}, help="backend_options, as JSON")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    arguments = parser.parse_args(given)
    if not arguments.keep_rule:
        forget_rule(arguments.backend)
    rows, dropped = [], []
    for num_requests in arguments.requests:
        for prefix in arguments.prefixes:
            heads = HEADS if arguments.device == "cuda" else TINY_HEADS
            shape = Shape((prefix + arguments.own,) * num_requests, heads, shared_prefix=prefix)
            row, out = measure(arguments.backend, shape, arguments)
            rows, dropped = [*rows, row], dropped + out
            print(
                f"{num_requests} x {prefix}: plain {row['plain us']} us, shared {row['shared us']} us", *out, flush=True
            )
            free_memory(torch.device(arguments.device))
    title = f"decode over a shared prefix, {arguments.own} own tokens a request, {arguments.dtype}"
    report(f"cascade_{arguments.backend.lower()}", title, rows, installed(*PACKAGES))
    if any(": plain: " in line or ": shared: " in line for line in dropped):
        raise SystemExit(f"{arguments.backend} dropped out")


if __name__ == "__main__":
    main()
