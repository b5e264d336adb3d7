"""The processes of a run under compute-sanitizer: the tools, cases that wait for them, and children whose answers are
waited for no longer than asked."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.correctness.sanitizer_reports import Log

SANITIZER = "compute-sanitizer"
CHILD = Path(__file__).with_name("sanitizer_cases.py")
FIRST_PORT, PORTS = 49152, 32  # a tool and each process that it follows take one; without a free one they end
# Kernels of torch and of cuBLAS, which are not what is checked: parts of their mangled names.
OF_TORCH = ("2at6native", "at_cuda_detail", "cublas", "nvjet", "7Kernel2", "gemv", "gemmSN", "gemmk1", "splitKreduce")


class Kind(NamedTuple):
    """One tool over one kind of cases."""

    tool: str
    eager: bool
    graphs: bool
    cached: bool  # torch's allocator keeps memory, which captures want; a tool then sees its segments alone
    unseen: str  # what the tool does not follow there

    @property
    def cases(self) -> str:
        return " and ".join(name for name in ("eager", "graphs") if getattr(self, name))

    def takes(self, case: Case) -> bool:
        return self.graphs if case.in_graph else self.eager


_RACES = "global memory; what the tensor memory accelerator writes behind an mbarrier"
KINDS = (
    Kind("memcheck", True, False, False, ""),
    Kind("racecheck", True, True, True, _RACES),
    Kind("memcheck", False, True, True, "accesses within a segment of torch's allocator"),
    Kind("initcheck", True, False, False, "shared memory"),
    Kind("synccheck", True, True, True, "mbarriers"),
)


class Case(NamedTuple):
    """A seed of a backend that has run to its end without a tool."""

    backend: str
    seed: int
    in_graph: bool


class Waiting:
    """Cases that processes of one kind are to run: the backend with the fewest so far is next."""

    def __init__(self) -> None:
        self._cases: dict[str, deque[Case]] = {}
        self._taken: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, case: Case) -> None:
        with self._changed:
            self._cases.setdefault(case.backend, deque()).append(case)
            self._changed.notify()

    def close(self) -> None:
        """No more will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self, deadline: float) -> Case | None:
        """None: there is none left, or none has come by the deadline."""
        with self._changed:
            while time.monotonic() < deadline:
                names = [name for name, cases in self._cases.items() if cases]
                if names:
                    name = min(names, key=lambda name: self._taken[name])
                    self._taken[name] += 1
                    return self._cases[name].popleft()
                if self._closed:
                    return None
                self._changed.wait(max(0.0, deadline - time.monotonic()))
        return None


class Child:
    """A process that runs cases, and its answers, which are waited for no longer than asked."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in `end`)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=env,
            start_new_session=True,
        )  # fmt: skip
        self._answers = queue.Queue[str]()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, case: Case) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it died, which its answer says
            self._process.stdin.write(json.dumps({"backend": case.backend, "seed": case.seed}) + "\n")
            self._process.stdin.flush()

    def answer(self, deadline: float) -> dict[str, Any] | None:
        """None: it died, or has said nothing by the deadline."""
        try:
            line = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            answer: dict[str, Any] | None = json.loads(line)
        except (queue.Empty, json.JSONDecodeError):
            return None
        return answer

    def end(self, grace_s: float) -> tuple[int, str]:
        """Its exit status, and the end of what it printed where that is not 0. What does not end is killed."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            status = self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # the tool and the program that it runs
            status = self._process.wait()
        with self._errors:
            self._errors.seek(0)
            said = self._errors.read()[-1000:] if status else ""
        return status, said


@dataclass
class Plan:
    """What all processes of a run have in common."""

    asked: dict[str, Any]  # of `sanitizer_cases`
    deadline: float  # by time.monotonic(): no answer is waited for any longer
    case_s: float  # one case at most
    folder: Path  # of logs
    options: Mapping[str, str]  # more of the tool's, or others in the place of these
    numbers: count[int] = field(default_factory=count)

    def child(self, backends: Sequence[str], kind: Kind | None = None) -> tuple[Child, Log]:
        """A process for these backends, under the kind's tool, and its log."""
        number = next(self.numbers)
        log, env = self.folder / f"{number}.log", dict(os.environ)
        env.pop("PYTORCH_NO_CUDA_MEMORY_CACHING", None)
        if kind is not None and not kind.cached:
            env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        program = [sys.executable, str(CHILD), json.dumps({**self.asked, "backends": list(backends)})]
        under = [] if kind is None else self._under(kind, number, log)
        return Child([*under, *program], env), Log(log)

    def lost(self, case: Case) -> dict[str, Any] | None:
        """What a case without an answer comes to: it was stopped at the deadline, or is wrong."""
        if time.monotonic() >= self.deadline:
            return None
        return {"kinds": {}, "finding": f"seed {case.seed}: the process died, or took more than {self.case_s:.0f} s"}

    def _under(self, kind: Kind, number: int, log: Path) -> list[str]:
        options = {
            "tool": kind.tool, "log-file": str(log), "port": str(FIRST_PORT + number * PORTS % 16000),
            "max-connections": str(PORTS), "launch-timeout": "0", "show-backtrace": "device", "print-limit": "10000",
            **self.options,
        }  # fmt: skip
        # What torch's kernels write must be followed, or what they initialised would be none.
        left_out = [] if kind.tool == "initcheck" else OF_TORCH
        names = [part for name in left_out for part in ("--kernel-name-exclude", f"kns={name}")]
        return [SANITIZER, *(part for name, value in options.items() for part in (f"--{name}", value)), *names]
