"""A process that runs cases of `attn-backends verify` for `sanitizers.py`, under a tool or without.

Lines of JSON come in, a backend and a seed each, and what became of the case goes back as one. Tensors have no guard
bands: memcheck compares every access with what was allocated, and bands would initialise what initcheck is to find.
The reference is worked out on the CPU, as a GPU under such a tool takes long for it.

    python -m benchmarks correctness sanitizer_cases
        '{"backends": ["TRITON"], "device": "cuda", "size": "medium", "imports": []}'
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import fields, replace
from functools import cache
from typing import IO, Any

import torch

from attn_backends.interface import AttentionBackend
from attn_backends.testing.cases.batches import Batch, MLABatch
from attn_backends.testing.guards import guard
from attn_backends.testing.harness import Expected
from attn_backends.testing.verify.run import Outcome
from attn_backends.testing.verify.worker import Asked, answer_lines, prepare, run_seed, take_standard_output


def without_bands() -> None:
    """What cases are given and allocate is as torch makes it."""
    guards = guard.GuardBands
    guards.watching = lambda self: nullcontext()  # type: ignore[method-assign, assignment]
    guards.place = lambda self, tensor, **_: tensor.clone(memory_format=torch.preserve_format)  # type: ignore[method-assign]
    guards.check = lambda self, what: None  # type: ignore[method-assign]


def expected_on_cpu() -> None:
    """The reference of every batch is worked out on the CPU."""
    for kind in (Batch, MLABatch):
        kind.expected = _on_cpu(kind.expected)  # type: ignore[method-assign]


def _on_cpu(expected: Callable[[Batch], Expected]) -> Callable[[Batch], Expected]:
    return lambda batch: expected(to_cpu(batch))


def to_cpu(batch: Batch) -> Batch:
    """The batch with its rows and weights on the CPU; of its pool the reference asks only whether there is one."""
    rows = tuple(replace(row, query=row.query.cpu(), key=row.key.cpu(), value=row.value.cpu()) for row in batch.rows)
    weights = {
        field.name: value.cpu() for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }  # fmt: skip
    return replace(batch, device=torch.device("cpu"), rows=rows, **weights)


@cache
def _prepared(asked: Asked) -> type[AttentionBackend]:
    return prepare(asked)


def _run(asked: Asked, seed: int) -> Outcome:
    try:
        return run_seed(asked, _prepared(asked), seed)
    except Exception as error:  # a backend that cannot be imported leaves the others to run
        return Outcome(seed, "(not drawn)", finding=f"{type(error).__name__}: {error}")


def serve(given: dict[str, Any], lines: IO[str], answers: IO[str]) -> None:
    """Cases until there are no more lines."""
    imports = tuple(given["imports"])
    all_asked = {name: Asked(name, given["device"], given["size"], None, imports) for name in given["backends"]}
    torch.ones(1, device=given["device"])
    for asked in all_asked.values():
        with suppress(Exception):  # its cases say so
            _prepared(asked)

    answer_lines(lambda case: _run(all_asked[case["backend"]], case["seed"]), given["device"], lines, answers)


def main() -> None:
    torch.set_num_threads(1)
    answers = take_standard_output()
    without_bands()
    expected_on_cpu()
    serve(json.loads(sys.argv[1]), sys.stdin, answers)


if __name__ == "__main__":
    main()
