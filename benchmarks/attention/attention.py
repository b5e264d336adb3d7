"""Time of a layer's attention on a GPU, by our backends and by the bare kernels they use, in one run and in turns.

    python -m benchmarks attention attention [--backend FLASHINFER FLASH_ATTN:flash_attn ...] [--shapes decode|…|all]
        [--no-bare]
    python -m benchmarks attention attention --mla …  # as mla_attention.py, which takes the rest

Every contender is one CUDA graph that attends over several copies of the cache, more than the L2 holds, and its output
is first checked against float64. Ours goes builder → state → impl: for decode through the state's clone for graphs, for
prefill planned eagerly, with the impls' launches captured. A mixed batch has decodes in front of prompts; TRITON, which
has a launch for each, side by side, is also timed with one behind the other, and with all in its prefill kernel. "us"
writes no new keys, as bare kernels do not; "with KV write" does. A backend's ratio is against the fastest bare kernel
of its shape. FLASHINFER's and FLASH_ATTN's is also against their own: the fastest of FlashInfer's (of decodes, those
planned for graphs), and that of the same provider, which follows the backend's name (without one, the best that is
here). Those have their turns next to one another, and the median of all rounds' ratios counts. "of copy" is the
bandwidth (keys and values once a request, queries, outputs) as a share of what a copy within the device reads and
writes; "read us" is what a kernel takes for a decode's keys and values that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from attn_backends import get_backend
from attn_backends.backends.flash_attn.provider import choose
from attn_backends.backends.flash_attn.state import PROVIDERS
from attn_backends.batch.views import without_new_keys
from attn_backends.interface import AttentionStep
from attn_backends.interface.capabilities import CudaGraphSupport
from benchmarks.attention import bare_kernels
from benchmarks.attention.attention_plot import draw_file
from benchmarks.attention.contest import (
    CACHE_DTYPES,
    GQA,
    READ,
    SMALL,
    WITH_WRITE,
    Made,
    calls_us,
    checked,
    our_call,
    parse,
    parts_of,
    run,
    speeds,
    writing_call,
)
from benchmarks.attention.paged_problem import Contender, Problem, Shape, make_contender, make_problem
from benchmarks.attention.plain_read import make_read
from benchmarks.lib.gpu_harness import make_copy, ratio
from benchmarks.lib.processes import Row
from benchmarks.lib.reasons import reason

SHAPES = {
    "decode": [
        Shape((8192,), GQA),
        Shape((4096,) * 16, GQA),
        Shape((4096,) * 64, GQA),
        Shape((1024,) * 256, GQA),
        Shape((8192,) * 128, (64, 8, 128)),
        Shape((4096,) * 64, SMALL),
        Shape((2048,) * 64, (32, 32, 128)),
    ],
    "prefill": [
        Shape((8192,), GQA, is_prefill=True),
        Shape((2048,) * 8, GQA, is_prefill=True),
        Shape((32768,), GQA, is_prefill=True),
    ],
    "mixed": [
        Shape((4096,) * 64 + (2048,), GQA, is_prefill=True, decodes=64),
        Shape((4096,) * 16 + (8192,), GQA, is_prefill=True, decodes=16),
    ],
    "skewed": [Shape((32768,) + (512,) * 63, GQA), Shape((1016,) * 64, GQA)],  # of as many keys
    "unknown": [Shape((4096,) * 64, GQA, capacity=131072)],  # beside 64 x 4096 above
    "dims": [
        Shape((4096,) * 64, (64, 8, 64)),
        Shape((4096,) * 64, (32, 32, 80)),
        Shape((8192,), (16, 8, 256)),
        Shape((4096,) * 64, (16, 8, 256)),
        Shape((8192,), (16, 8, 256), is_prefill=True),
    ],
    "verify": [Shape((4096,) * 64, GQA, query_len=tokens) for tokens in (2, 4, 8, 16)],
    "windows": [
        Shape((32768,) * 16, GQA, window_left=4095),
        Shape((8192,), GQA, is_prefill=True, window_left=1023),
    ],
    "tiny": [  # to see that the script runs
        Shape((40,) * 3, (4, 2, 64)),
        Shape((90, 7, 8), (4, 2, 64)),
        Shape((24, 31), (4, 2, 64), is_prefill=True),
        Shape((60, 24, 31), (4, 2, 64), is_prefill=True, decodes=1),
        Shape((40, 90), (4, 2, 64), window_left=20, capacity=200),
        Shape((40,), (4, 2, 64), is_prefill=True, window_left=20),
        Shape((40, 90), (4, 2, 64), query_len=3),
    ],
    "tiny256": [  # the same for kernels whose pages have 256 slots
        Shape((256, 512), (4, 2, 64)),
        Shape((256,), (4, 2, 64), is_prefill=True),
    ],
}
ONE_LAUNCH, IN_TURN = ", decodes with the prefill", ", decodes behind the prefill"
OTHERWISE = {  # that TRITON can serve a mixed batch, beside side by side
    ONE_LAUNCH: {
        "num_decode_rows": 0,
        "num_decode_row_tokens": 0,
        "num_decode_tokens": 0,
        "prefills_are_prompts": False,
        "prefill_share": None,
        "decode_sms": None,
        "prefill_splits": None,
    },
    IN_TURN: {"prefill_share": None, "decode_sms": None, "prefill_splits": None},
}
BARE = bare_kernels.DECODE | bare_kernels.PREFILL
OWN = {  # bare kernels that are FLASHINFER's, and those of FLASH_ATTN's providers
    "FLASHINFER": [name for name in BARE if name.startswith("FlashInfer") and not name.endswith("fixed lengths")],
    "vllm_fa3": ["FA3"],
    "flash_attn": ["FA2, page 256"],
    "flash_attn_4": ["FA4"],
}


PROVIDER_CAN = {provider.name: provider.capabilities() for provider in PROVIDERS}


def ours(name: str, problem: Problem, options: dict[str, Any], plain: bool = False) -> Made:
    """A backend without and with the write of new keys. It gets the problem as it can serve it.

    Args:
        plain: without the write alone, and of a mixed batch no other way than the backend's own.
    """
    name, _, provider = name.partition(":")
    if name == "FLASH_ATTN":
        provider = provider.lower() or select_provider(problem)
        options = {**options, "provider": provider}
    fitting = problem.fitting(get_backend(name), PROVIDER_CAN.get(provider))
    label = f"{name}:{provider}" if provider else name
    if fitting.cache.page_size != problem.cache.page_size:
        label += f", page {fitting.cache.page_size}"
    backend, builder, state, impl = parts_of(name, fitting, options)

    def captured(step: AttentionStep[Any], writing: AttentionStep[Any], held: object) -> Made:
        calls = {label: our_call(impl, fitting, step)}
        if not plain:
            calls[label + WITH_WRITE] = writing_call(impl, fitting, writing)
        return {name: make_contender(fitting, call, (state, held)) for name, call in calls.items()}

    common = replace(fitting.common, for_graph=True)
    is_capturable = backend.capabilities().cuda_graph > CudaGraphSupport.NEVER and not problem.shape.is_prefill
    if not is_capturable or not builder.can_run_in_cudagraph(common):
        built = [builder.build(0, of) for of in (without_new_keys(fitting.common), fitting.common)]
        step, other = state.begin_forward(built[0]), None if plain else parts_of(name, fitting, options).state
        made = captured(step, step if other is None else other.begin_forward(built[1]), other)  # a state of its own
        side_by_side = label
        for suffix, changes in OTHERWISE.items() if name == "TRITON" and problem.shape.decodes and not plain else ():
            label = side_by_side + suffix
            made |= captured(*(state.begin_forward(replace(of, **changes)) for of in built), None)
        return made
    with state.graph_capture(common.num_reqs):
        clone = state.graph_clone(common.num_reqs, problem.shape.query_len)
        step = clone.begin_forward(builder.build_for_cudagraph_capture(common))
        made = captured(step, step, clone)
    clone.begin_forward(builder.build(0, common))  # as before every replay
    return made


def select_provider(problem: Problem) -> str:
    """The best one of FLASH_ATTN that serves the problem as it is."""
    return choose(PROVIDERS, problem.spec, problem.cache, problem.device).provider.name


def own_bare(name: str) -> list[str]:
    """The bare kernels that a contender of ours may use; none if none is known, or it is one."""
    backend, _, provider = name.partition(",")[0].partition(":")
    return [] if name.endswith(WITH_WRITE) else OWN.get(provider or backend, [])


def all_made(
    problem: Problem, names: Sequence[str], options: dict[str, Any], bare: bool, plain: bool = False
) -> tuple[Made, list[str]]:
    """The contenders for one problem, each warm and captured; and who dropped out why. `plain` is as of `ours`."""
    makers: dict[str, Callable[[], Made]] = {name: partial(ours, name, problem, options, plain) for name in names}
    table = bare_kernels.PREFILL if problem.common.max_query_len > 1 else bare_kernels.DECODE
    if not problem.shape.all_are_new:
        table = {name: kernel for name, kernel in table.items() if "ragged" not in name}
    for name, kernel in table.items() if bare else ():
        makers[name] = lambda name=name, kernel=kernel: {name: kernel.contender(problem)}
    made: Made = {}
    dropped = []
    for name, make in makers.items():
        try:
            made |= make()
        except Exception as error:  # whatever a kernel library raises
            dropped.append(f"{problem.shape.name}: {name}: {reason(error)}")
    return made, dropped


class Prepared(NamedTuple):
    """A shape's contenders, captured, and how wrong those are that are right."""

    problem: Problem
    made: Made
    errors: dict[str, float]
    dropped: list[str]


@torch.inference_mode()
def prepare(arguments: argparse.Namespace, shape: Shape) -> Prepared:
    problem = make_problem(shape, CACHE_DTYPES[arguments.dtype], arguments.page_size, torch.device(arguments.device))
    made, dropped = all_made(problem, arguments.backend, arguments.options, arguments.bare)
    errors, wrong = checked(made)
    return Prepared(problem, made, errors, dropped + wrong)


@torch.inference_mode()
def measure(arguments: argparse.Namespace, prepared: Prepared) -> Row:
    """Rows of one shape, and who dropped out."""
    problem, made, errors, dropped = prepared
    shape, device = problem.shape, problem.device
    right = {name: made[name] for name in errors}
    twins = {each: bare[0] for name in errors if (bare := own_bare(name)) for each in (name, *bare)}
    reads = {}
    if not shape.is_prefill and shape.window_left < 0:
        reads[READ] = Contender(problem, make_read(problem), [], None)
    each, copied = calls_us(right | reads, make_copy(device), arguments.rounds, device, twins)
    read_us = statistics.median(each.pop(READ)) if reads else None
    us = {name: statistics.median(times) for name, times in each.items()}
    best = min((time for name, time in us.items() if name in BARE), default=None)
    rows = []
    for name, time in us.items():
        if not name.endswith(WITH_WRITE):
            figures = {"us": time, "with KV write us": us.get(name + WITH_WRITE)} | speeds(problem, time, copied)
            figures["read us"] = read_us
            own = min((bare for bare in own_bare(name) if bare in us), key=us.__getitem__, default=None)
            against = {
                "vs best bare": best and time / best,
                "vs own bare": None if own is None else ratio(each[name], each[own]),
                "error": errors[name],
            }
            rows.append({"shape": shape.name, "contender": name, **figures, **against})
    return {"rows": rows, "dropped": dropped}


def main(given: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if given is None else given)
    if "--mla" in given:
        from benchmarks.attention.mla_attention import main as mla_main  # it imports this module

        mla_main([argument for argument in given if argument != "--mla"])
        return
    arguments = parse(__doc__, given, SHAPES, ["FLASHINFER"], 16)
    written = run("attention", "attention of one layer", arguments, SHAPES, prepare, measure)
    if written and find_spec("matplotlib"):
        print(f"drawn to {draw_file(written).name} beside it")


if __name__ == "__main__":
    main()
