"""An interpreted kernel as on a GPU that holds some of its programs at a time, where the interpreter runs one after the
other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
from triton.runtime.interpreter import GridExecutor, interpreter_builder

PATIENCE_S = 60.0  # after which programs wait for ever


def run_side_by_side(works: list[Callable[[], object]], patience_s: float = PATIENCE_S) -> None:
    """Run each in a process of its own, all at the same time. Tensors that they write have to be in shared memory.

    Raises:
        AssertionError: some failed, or did not end.
    """
    children = {os.fork() or _run(work): nth for nth, work in enumerate(works)}
    failed, ends = [], time.monotonic() + patience_s
    while children and time.monotonic() < ends:
        for child in [*children]:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                nth = children.pop(child)
                failed += [nth] if status else []
        time.sleep(0.001)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not failed, f"{len(failed)} of {len(works)} failed"
    assert not children, f"{len(children)} of {len(works)} wait for ever"


def _run(work: Callable[[], object]) -> int:
    """In the child, which ends here."""
    # Kernels write where tensors are. To copy that over itself, as the interpreter does, undoes what others write.
    GridExecutor._restore_args_dev = lambda *_: None
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class SideBySide:
    """In a kernel's place. Programs are taken in their order, as on a GPU, by so many processes."""

    def __init__(self, kernel: Any, slots: int, seed: int = 0, patience_s: float = PATIENCE_S) -> None:
        self._kernel, self._slots, self._dice, self._patience_s = kernel, slots, Random(seed), patience_s

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid[0])

    def _launch(self, num_programs: int, *given: Any, **options: Any) -> None:
        for each in given:
            if isinstance(each, torch.Tensor) and each.untyped_storage().nbytes():
                each.share_memory_()
        following = multiprocessing.get_context("fork").Value("i", 0)

        def work(seed: int) -> None:
            dice = Random(seed)
            set_dim, set_idx = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx
            interpreter_builder.set_grid_dim = lambda *_: set_dim(num_programs, 1, 1)
            while True:
                with following.get_lock():
                    program, following.value = following.value, following.value + 1
                if program >= num_programs:
                    return
                interpreter_builder.set_grid_idx = lambda *_, program=program: set_idx(program, 0, 0)
                time.sleep(dice.choice((0.0, 0.0, 0.005)))
                self._kernel[(1,)](*given, **options)

        seeds = [self._dice.getrandbits(30) for _ in range(self._slots)]
        run_side_by_side([partial(work, seed) for seed in seeds], self._patience_s)
