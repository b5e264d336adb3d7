"""Cases that several processes make ready at the same time, and that one of them at a time measures, while all others
stand still.

To make a case ready keeps a core busy for seconds: kernels are compiled, graphs captured, answers checked. To time it
takes a fifth of one, and wants the device for itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from benchmarks.lib.reasons import reason

DRAIN_SECONDS = 0.1  # in which a device ends what processes that stand still have queued
MOST_SECONDS = 480.0  # for a case: to make it ready, by nvcc too, or to measure it
MOST_PROCESSES = 14
_OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory")  # of torch, and of CUDA
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG, see prctl(2)
_UP, _READY, _MEASURE = "up", "ready", "measure"

Row = dict[str, Any]


class Work(NamedTuple):
    """What processes run: functions of modules, with which they begin."""

    prepare: Callable[[Any], Any]  # a case; returns what is to be measured
    measure: Callable[[Any], Row]  # what was prepared
    clean_up: Callable[[], bool]  # behind each case; returns whether the process can go on


class Failed(NamedTuple):
    """Why a case has no row."""

    why: str


def processes_to_compile() -> int:
    """How many processes compile at the same time on this machine."""
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) - 2))


def rows_of(
    cases: Sequence[Any], count: int, work: Work, may_begin: Callable[[], bool]
) -> Iterator[tuple[Any, Row | Failed]]:  # fmt: skip
    """Each case with its row, as they come, from `count` processes, or with none from this one; they are begun in their
    order, while `may_begin` says so.

    Raises:
        RuntimeError: this process cannot go on.
    """
    waiting = deque(cases)
    while not count and waiting and may_begin():
        yield waiting[0], _row_of(waiting.popleft(), work)
        if not work.clean_up():
            raise RuntimeError("this process cannot go on, as its device's context is dead: ask for --processes 1")
    workers = [_Worker(work) for _ in range(min(count, len(waiting)))]
    try:
        while True:
            for worker in workers:
                if worker.case is None and waiting and may_begin():
                    worker.begin(waiting.popleft())
            busy = [worker for worker in workers if worker.case is not None]
            if not busy:
                return
            told = wait([worker.connection for worker in busy], timeout=1)
            for worker in busy:
                found = worker.answer(workers) if worker.connection in told else worker.if_late()
                if found is not None:
                    yield worker.take(), found
    finally:
        for worker in workers:
            worker.end()


def measured(
    cases: Sequence[Any], work: Work, processes: int | None, device: str, minutes: float = float("inf")
) -> Iterator[tuple[Any, Row | Failed]]:
    """Each case with its row, whose contenders that dropped out are "dropped", as they come, while there is time. Those
    that lacked memory beside others are measured anew at the end, alone. Without a number there are as many processes
    as cores have work, and on a CPU none but this one.

    Raises:
        SystemExit: there is no such device here.
    """
    _need(device)
    deadline = time.monotonic() + 60 * minutes
    if processes is None:
        processes = 0 if device == "cpu" else processes_to_compile()
    again: list[Any] = []
    for case, found in rows_of(cases, processes, work, lambda: time.monotonic() < deadline):
        dropped = [found.why] if isinstance(found, Failed) else found["dropped"]
        if processes > 1 and any(words in line for line in dropped for words in _OUT_OF_MEMORY):
            again.append(case)
        else:
            yield case, found
    yield from rows_of(again, 1, work, lambda: True)


def _need(device: str) -> None:
    """End with an error where there is no such device: each case would drop out, as if its context were dead."""
    import torch  # which takes long

    if device != "cpu" and not torch.cuda.is_available():
        raise SystemExit(
            "no CUDA device here: run this on a machine with one, or give --device cpu where that is known"
        )


class _Worker:
    """A process, and what it is busy with. One that has ended, or cannot go on, is begun anew."""

    case: Any  # None: it is busy with none
    until: float  # by `time.monotonic`, when it is late
    connection: Connection

    def __init__(self, work: Work) -> None:
        self._work, self.case, self.until = work, None, float("inf")
        self._start()

    def _start(self) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._work), daemon=True)
        self._process.start()
        theirs.close()  # so that its end is seen here
        self._is_up = False

    def begin(self, case: Any) -> None:
        self.case, self.until = case, time.monotonic() + MOST_SECONDS
        if self._is_up:
            try:
                self.connection.send(case)
            except OSError:  # it has ended since its last case
                self._begun_anew("")

    def answer(self, workers: Sequence[_Worker]) -> Row | Failed | None:
        """What it says; where a case is ready its row, measured while the others stand still. None: it only now takes
        its case."""
        try:
            said = self.connection.recv()
            if said == _UP:
                self._is_up = True
                self.connection.send(self.case)
                return None
            if said == _READY:
                with _standing_still([worker for worker in workers if worker is not self]):
                    self.connection.send(_MEASURE)
                    if not self.connection.poll(MOST_SECONDS):
                        return self._late()
                    said = self.connection.recv()
        except (EOFError, OSError):
            self._process.join()
            return self._begun_anew(f"the process ended with {self._process.exitcode}")
        row, is_sound = said
        if not is_sound:
            self._begun_anew("")
        return row  # type: ignore[no-any-return]

    def if_late(self) -> Failed | None:
        return self._late() if time.monotonic() > self.until else None

    def _late(self) -> Failed:
        return self._begun_anew(f"not done after {MOST_SECONDS:.0f} s")

    def _begun_anew(self, why: str) -> Failed:
        self.end()
        self._start()
        return Failed(why)

    def take(self) -> Any:
        """The case, which is done."""
        case, self.case = self.case, None
        return case

    def signal(self, number: int) -> None:
        """To the process, and to compilers that it has begun; none to one that is not up yet, and so has no case."""
        if self._is_up and self._process.is_alive() and self._process.pid is not None:
            os.killpg(self._process.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self.connection.close()


@contextmanager
def _standing_still(workers: Sequence[_Worker]) -> Iterator[None]:
    """For so long none of them is late."""
    began = time.monotonic()
    for worker in workers:
        worker.signal(signal.SIGSTOP)
    try:
        time.sleep(DRAIN_SECONDS)
        yield
    finally:
        for worker in workers:
            worker.signal(signal.SIGCONT)
            worker.until += time.monotonic() - began


def _serve(connection: Connection, work: Work) -> None:
    """Work off cases until the other end is closed."""
    os.setpgid(0, 0)
    if sys.platform == "linux":  # it is not to stand still for ever where the other end is killed
        ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    connection.send(_UP)
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        row = _row_of(case, work, connection)
        connection.send((row, work.clean_up()))


def _row_of(case: Any, work: Work, connection: Connection | None = None) -> Row | Failed:
    """A function of its own, so that what a case held is free behind it."""
    try:
        ready = work.prepare(case)
        if connection is not None:
            connection.send(_READY)
            connection.recv()
        return work.measure(ready)
    except Exception as error:  # no memory, or a kernel that has killed the device's context
        return Failed(reason(error))
