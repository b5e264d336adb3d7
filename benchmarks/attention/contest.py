"""What contests of attention share, plain and MLA: parts of a backend, calls to time, what is checked, and options."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attn_backends import plan_groups, select_backend
from attn_backends.cache.kv_cache import gather_slots
from attn_backends.interface import AttentionBackend, AttentionImpl, AttentionStep
from attn_backends.registry import validate_options
from benchmarks.attention.paged_problem import Call, Contender, Problem
from benchmarks.lib.gpu_harness import PACKAGES, Copy, clean_up, installed, rounds_us
from benchmarks.lib.harness import report, write
from benchmarks.lib.processes import Failed, Row, Work, measured
from benchmarks.lib.reasons import reason

GQA, SMALL = (32, 8, 128), (9, 3, 64)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PLAIN = "bf16"
CACHE_DTYPES = DTYPES | {"fp8": torch.float8_e4m3fn}  # with queries of the same dtype, of fp8 in bfloat16
COPY, READ, WITH_WRITE = "copy", "read", " with KV write"
ALL = "all contenders"  # who dropped out

Made = dict[str, Contender]


class Parts(NamedTuple):
    """A backend's builder, state and impl for one problem."""

    backend: type[AttentionBackend]
    builder: Any
    state: Any
    impl: Any


def parts_of(name: str, problem: Problem, options: dict[str, Any], **weights: torch.Tensor) -> Parts:
    """One plan group, whose layers are the copies of the cache; `weights` are what its impl takes of a model's.

    Raises:
        Unsupported: the backend cannot serve it.
    """
    spec, cache, device = problem.spec, problem.cache, problem.device
    backend = select_backend(name, [spec], cache, device).backend
    group = plan_groups(dict.fromkeys(range(len(problem.caches)), spec))[0]
    given = {"options": validate_options(name, options)}
    builder = backend.get_builder_cls()(group, cache, problem.limits, device, **given)
    state = backend.get_state_cls()([group], cache, problem.limits, device, **given)
    return Parts(backend, builder, state, backend.get_impl_cls()(spec, cache, device, **given, **weights))


def our_call(impl: AttentionImpl[Any], problem: Problem, step: AttentionStep[Any]) -> Call:
    queries, caches, outputs = problem.queries, problem.caches, problem.outputs
    return lambda i: impl.forward(queries[i], None, None, caches[i], step, outputs[i])


def writing_call(impl: AttentionImpl[Any], problem: Problem, step: AttentionStep[Any]) -> Call:
    """With new keys and values: those that the cache holds already, so that the answer stays what it is."""
    queries, caches, outputs = problem.queries, problem.caches, problem.outputs
    keys, values = (
        [gather_slots(c, problem.common.slot_mapping).to(problem.spec.dtype) for c in cached]
        for cached in zip(*caches, strict=True)
    )
    return lambda i: impl.forward(queries[i], keys[i], values[i], caches[i], step, outputs[i])


def checked(made: Made) -> tuple[dict[str, float], list[str]]:
    """The error of each contender that is right; and who is not."""
    errors, dropped = {}, []
    for name, contender in made.items():
        try:
            errors[name] = contender.check()
        except Exception as error:  # wrong answers, and without graphs whatever a kernel library raises
            dropped.append(f"{contender.problem.shape.name}: {name}: {reason(error)}")
    return errors, dropped


def calls_us(
    made: Made, copy: Copy, rounds: int, device: torch.device, twins: Mapping[str, str]
) -> tuple[dict[str, list[float]], float]:
    """Time of one call of each contender, in microseconds, in every round (see `rounds_us`); and the bytes that a copy
    reads and writes in a microsecond."""
    replays = {name: contender.replay for name, contender in made.items()} | {COPY: copy.replay}
    taken = rounds_us(replays, rounds, device, twins)
    copied = copy.num_bytes / statistics.median(taken.pop(COPY))
    return {name: [made[name].us(replay_us) for replay_us in times] for name, times in taken.items()}, copied


def speeds(problem: Problem, us: float, copied: float) -> dict[str, float]:
    """What a time of one call comes to, beside a copy's bytes a microsecond."""
    moved = problem.num_bytes / us
    return {
        "TB/s": moved / 1e6,
        "TFLOP/s": problem.shape.flops / us / 1e6,
        "of copy": moved / copied,
        "copy TB/s": copied / 1e6,
    }


def show(rows: list[dict[str, Any]], dropped: list[str]) -> None:
    """At once, for whoever waits."""
    lines = [f"{row['shape']}: {row['contender']}: {_us(row):.1f} us" for row in rows]
    print("\n".join([*lines, *(f"dropped out: {line}" for line in dropped)]), flush=True)


def _us(row: Mapping[str, Any]) -> float:
    """What a row is about first."""
    return float(next(row[name] for name in ("us", "decode us", "attention us", "layer us") if row.get(name)))


def parse(
    description: str | None, given: Sequence[str] | None, shapes: Iterable[str], backends: list[str], page_size: int
) -> argparse.Namespace:
    """The options of this script and of mla_attention.py, with their own shapes, backends and page size."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = " ".join(backends) or "all of MLA"
    parser.add_argument("--backend", nargs="*", type=str.upper, default=backends, help=f"{usual} if not given")
    parser.add_argument("--shapes", nargs="+", choices=[*shapes, "all"], default=["all"])
    parser.add_argument("--match", default="", help="only shapes whose name has this in it")
    parser.add_argument("--bare", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dtype", choices=CACHE_DTYPES, default=PLAIN, help="fp8: of the cache alone")
    parser.add_argument("--page-size", type=int, default=page_size)
    parser.add_argument("--options", type=json.loads, default={}, help="backend_options, as JSON")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--processes", type=int, help="that make shapes ready; 0: this one does")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--name", help="of the result; what was asked for if not given")
    return parser.parse_args(given)


def run(
    script: str, title: str, arguments: argparse.Namespace, sets: Mapping[str, Sequence[Any]],
    prepare: Callable[[argparse.Namespace, Any], Any], measure: Callable[[argparse.Namespace, Any], Row],
) -> Path | None:  # fmt: skip
    """Rows of all shapes that were asked for, shown as they come, in their order in the file, which is returned; None:
    there are none.

    Args:
        sets: of shapes; `all` are all but the tiny ones.
        prepare: makes a shape's contenders ready, in a process of several.
        measure: what was prepared, alone; returns its "rows" and who "dropped" out.

    Raises:
        SystemExit: a backend of ours dropped out.
    """
    chosen = [kind for kind in sets if kind in arguments.shapes or ("all" in arguments.shapes and kind[:4] != "tiny")]
    shapes = [shape for kind in chosen for shape in sets[kind] if arguments.match in shape.name]
    name, packages = result_name(script, arguments), installed(*PACKAGES)
    title = f"{title}, {arguments.dtype}, page {arguments.page_size}"
    work = Work(partial(_prepare, prepare, arguments), partial(measure, arguments), partial(clean_up, arguments.device))
    rows: dict[int, list[dict[str, Any]]] = {}
    dropped: list[str] = []
    for (nth, shape), found in measured([*enumerate(shapes)], work, arguments.processes, arguments.device):
        row = {"rows": [], "dropped": [f"{shape.name}: {ALL}: {found.why}"]} if isinstance(found, Failed) else found
        show(row["rows"], row["dropped"])
        rows[nth], dropped = row["rows"], dropped + row["dropped"]
        write(name, title, _in_order(rows), packages)
    written = report(name, title, _in_order(rows), packages) if any(rows.values()) else None
    ours = [f": {name}".lower() for name in (*arguments.backend, ALL)]
    if any(name in line.lower() for name in ours for line in dropped):
        raise SystemExit("a backend of ours dropped out")
    return written


def _prepare(
    prepare: Callable[[argparse.Namespace, Any], Any], arguments: argparse.Namespace, numbered: tuple[int, Any]
) -> Any:  # fmt: skip
    return prepare(arguments, numbered[1])


def _in_order(rows: Mapping[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [row for _, of_shape in sorted(rows.items()) for row in of_shape]


def result_name(script: str, arguments: argparse.Namespace) -> str:
    """Of the file: `--name`, or the backends, and the shapes and the dtype where they are not the usual ones."""
    if arguments.name:
        return f"{script}_{arguments.name}"
    parts = [script, *(backend.lower().replace(":", "_") for backend in arguments.backend)]
    if arguments.shapes != ["all"] or arguments.match:
        parts += [*arguments.shapes, *arguments.match.split()]
    return "_".join([*parts, arguments.dtype] if arguments.dtype != PLAIN else parts)
