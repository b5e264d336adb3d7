"""A process that runs cases one after the other: seeds come as lines, and what became of them goes back as JSON.

What a kernel does to the process (a segmentation fault, a dead CUDA context, a hang) ends this process alone: the
parent knows which seed it ran, and starts another.

    python -m attn_backends.testing.verify.worker '{"name": "TORCH", "device": "cpu", ...}'
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch

from attn_backends.entries import get_backend
from attn_backends.interface import AttentionBackend
from attn_backends.testing.verify.cases import draw_case
from attn_backends.testing.verify.outcome import Outcome
from attn_backends.testing.verify.run import run_case
from attn_backends.testing.verify.sizes import SIZES

EXIT_DEAD_DEVICE = 3  # the last case left the device unusable; it was reported


@dataclass(frozen=True)
class Asked:
    """What every case of a run has in common."""

    name: str
    device: str
    size: str
    multiprocessors: int | None  # None: drawn for each case
    imports: tuple[str, ...]  # modules that register backends

    @staticmethod
    def from_json(text: str) -> Asked:
        given = json.loads(text)
        return Asked(**{**given, "imports": tuple(given["imports"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def prepare(asked: Asked) -> type[AttentionBackend]:
    """The backend, once the modules that may register it are imported."""
    for module in asked.imports:
        importlib.import_module(module)
    return get_backend(asked.name)


def run_seed(asked: Asked, backend: type[AttentionBackend], seed: int) -> Outcome:
    """Draw and run one case. Whatever it raises is the finding."""
    kind = "(not drawn)"
    try:
        case = draw_case(backend, seed, SIZES[asked.size], asked.device, asked.multiprocessors)
        kind = case.kind
        return run_case(backend, case, asked.device)
    except torch.OutOfMemoryError:
        outcome = Outcome(seed, kind)
        outcome.refused["too little device memory"] += 1
        return outcome
    except Exception as error:
        return Outcome(seed, kind, finding=_described(error))


def _described(error: BaseException) -> str:
    """The error and the lines of ours that lead to it."""
    frames = [f"{Path(f.filename).name}:{f.lineno} ({f.name})" for f in traceback.extract_tb(error.__traceback__)]
    return f"{type(error).__name__}: {str(error)[:2000]}\n  in {' > '.join(frames[-4:])}"


def is_usable(device: str) -> bool:
    """Whether the device still runs anything: after an illegal access a CUDA context does not."""
    if not device.startswith("cuda"):
        return True
    try:
        torch.cuda.synchronize(device)
    except Exception:  # whatever the driver says, the context is gone
        return False
    return True


def _serve(asked: Asked, lines: IO[str], answers: IO[str]) -> None:
    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    backend = prepare(asked)
    answer(ready=True)
    for line in lines:
        outcome = run_seed(asked, backend, int(line))
        usable = is_usable(asked.device)
        answer(**outcome.as_dict())
        if not usable:
            os._exit(EXIT_DEAD_DEVICE)  # destructors would talk to the dead context


def main() -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    _serve(Asked.from_json(sys.argv[1]), sys.stdin, answers)


if __name__ == "__main__":
    main()
