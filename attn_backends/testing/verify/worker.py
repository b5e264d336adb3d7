"""A process that runs cases one after the other: seeds come as lines of JSON, alone or with a row of declared values.

What became of a case goes back as JSON.

What a kernel does to the process (a segmentation fault, a dead CUDA context, a hang) ends this process alone: the
parent knows which seed it ran, and starts another.

    python -m attn_backends.testing.verify.worker '{"name": "TORCH", "device": "cpu", ...}'
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from pydantic import TypeAdapter

from attn_backends.interface import AttentionBackend
from attn_backends.registry.table import get_backend
from attn_backends.testing.verify.cases import Case, draw_case
from attn_backends.testing.verify.declared import draw_declared
from attn_backends.testing.verify.factors import EAGER
from attn_backends.testing.verify.pairs import Row
from attn_backends.testing.verify.run import Outcome, run_case
from attn_backends.testing.verify.sizes import SIZES

SHORT_CONTEXT = 512
_NO_MEMORY = "out of memory"  # as torch, CUDA and libraries say it
_FAILED_ALLOCATION = '"aten::new_empty", "", stack.data(), TORCH_ABI_VERSION) API call failed'  # and do not say why
EXIT_DEAD_DEVICE = 3  # the last case left the device unusable; it was reported


@dataclass(frozen=True)
class Asked:
    """What every case of a run has in common."""

    name: str
    device: str
    size: str
    multiprocessors: int | None  # None: drawn for each case
    imports: tuple[str, ...]  # modules that register backends
    declared: bool = False  # cases of a covering array, and not random ones
    where: tuple[str, ...] = ()  # of an array: the values that factors may have, as `name=value,value`


def prepare(asked: Asked) -> type[AttentionBackend]:
    """The backend, once the modules that may register it are imported."""
    for module in asked.imports:
        importlib.import_module(module)
    return get_backend(asked.name)


def cases_of(asked: Asked, backend: type[AttentionBackend], seed: int, row: Row | None) -> Iterator[Case]:
    """The case of a seed. Of a row that asks for a graph, then one of short requests, as some graphs hold no others."""
    size = SIZES[asked.size]
    if row is None:
        yield draw_case(backend, seed, size, asked.device, asked.multiprocessors)
        return
    yield draw_declared(backend, row, seed, size, asked.device, asked.multiprocessors)
    if row["run"] != EAGER:
        short = replace(size, max_context=min(size.max_context, SHORT_CONTEXT))
        yield draw_declared(backend, row, seed, short, asked.device, asked.multiprocessors)


def run_seed(asked: Asked, backend: type[AttentionBackend], seed: int, row: Row | None = None) -> Outcome:
    """Draw and run one case, with the values of a row if there is one. Whatever it raises is the finding.

    A case that memory may have been too little for runs once more when this process has given back what it kept: other
    processes take of the device's memory too. If it says again that memory is out, it is refused, and no finding.
    """
    outcome = _run_seed(asked, backend, seed, row)
    if may_lack_memory(outcome.finding):
        gc.collect()
        _give_back(asked.device)
        outcome = _run_seed(asked, backend, seed, row)
        if _NO_MEMORY in (outcome.finding or ""):
            outcome = Outcome(seed, outcome.kind)
            outcome.refused["too little device memory"] += 1
    _give_back(asked.device)
    return outcome


def may_lack_memory(finding: str | None) -> bool:
    """Whether nothing but memory may have been wrong, by the words of a finding."""
    return any(words in (finding or "") for words in (_NO_MEMORY, _FAILED_ALLOCATION))


def _run_seed(asked: Asked, backend: type[AttentionBackend], seed: int, row: Row | None) -> Outcome:
    kind = "(not drawn)"
    try:
        for case in cases_of(asked, backend, seed, row):
            kind = case.kind
            outcome = run_case(backend, case, asked.device)
            if not outcome.refused["graph of a batch"]:
                break
        return outcome
    except Exception as error:
        # The error, and the lines of ours that lead to it.
        frames = [f"{Path(f.filename).name}:{f.lineno} ({f.name})" for f in traceback.extract_tb(error.__traceback__)]
        what = f"{type(error).__name__}: {str(error)[:2000]}\n  in {' > '.join(frames[-4:])}"
        return Outcome(seed, kind, finding=what)


def _give_back(device: str) -> None:
    """Memory that torch keeps for later is others' until the next case."""
    if device.startswith("cuda") and is_usable(device):
        torch.cuda.empty_cache()


def is_usable(device: str) -> bool:
    """Whether the device still runs anything: after an illegal access a CUDA context does not."""
    if not device.startswith("cuda"):
        return True
    try:
        torch.cuda.synchronize(device)
    except Exception:  # whatever the driver says, the context is gone
        return False
    return True


def answer_lines(run: Callable[[Any], Outcome], device: str, lines: IO[str], answers: IO[str]) -> None:
    """Says that the process is ready, then runs the case of each line of JSON and answers with its outcome.

    The process ends with `EXIT_DEAD_DEVICE` behind the answer of a case that left the device unusable.
    """

    def answer(values: dict[str, Any]) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    answer({"ready": True})
    for line in lines:
        outcome = run(json.loads(line))
        usable = is_usable(device)
        answer(vars(outcome))
        if not usable:
            os._exit(EXIT_DEAD_DEVICE)  # destructors would talk to the dead context


def take_standard_output() -> IO[str]:
    """Standard output, for answers alone: what libraries print goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def main() -> None:
    torch.set_num_threads(1)
    answers, asked = take_standard_output(), TypeAdapter(Asked).validate_json(sys.argv[1])
    backend = prepare(asked)
    answer_lines(lambda case: run_seed(asked, backend, *case), asked.device, sys.stdin, answers)


if __name__ == "__main__":
    main()
