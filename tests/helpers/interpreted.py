"""Kernels under Triton's interpreter: it decides at its first import whether they are, so a process of their own."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest

triton = pytest.importorskip("triton", reason="needs triton")
SAMPLE = ("-m", "not gpu and not long and not rest")  # what `make test` runs
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
only_interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreted, in a process of its own")


def in_own_process(test: Callable[[], None]) -> Callable[[], None]:
    """Marks the test that starts it."""
    is_that_process = pytest.mark.skipif(INTERPRETED, reason="this is that process")
    too_old = pytest.mark.skipif(
        triton.__version__ < "3.7", reason="the interpreter of triton 3.6 fails with numpy 2.4"
    )
    return pytest.mark.first(is_that_process(too_old(test)))


def interpreted(file: str, keyword: str = "") -> tuple[Callable[[], None], Callable[[], None]]:
    """Two tests that run a file's, as `run_interpreted` does: `make test` runs the first, `make test-rest` the other,
    which has what is marked `rest` or is not among those that are `sampled`."""

    @in_own_process
    def test_interpreted() -> None:
        run_interpreted(file, keyword, *SAMPLE)

    @pytest.mark.rest
    @in_own_process
    def test_more_interpreted() -> None:
        run_interpreted(file, keyword, "-m", "not gpu and rest", "--long")

    return test_interpreted, test_more_interpreted


def run_interpreted(file: str, keyword: str = "", *options: str) -> None:
    """All tests of a file that do not want a GPU, or those that pytest's options select, and of these those that a `-k`
    keyword selects.

    In a process that is forked from one that has imported what all of them want, which takes seconds.
    """
    with pytest.MonkeyPatch.context() as patch, NamedTemporaryFile() as told:
        patch.setenv("TRITON_INTERPRET", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.helpers.interpreted", "attn_backends.testing.conformance"])
        forkserver.ensure_running()  # with this environment
        chosen = ["-k", keyword] if keyword else []
        selected = options or ("-m", "not gpu and not long", "--long")
        arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *selected, *chosen, file]
        process = context.Process(target=_run_pytest, args=(arguments, told.name))
        process.start()
        process.join()
        output = Path(told.name).read_text()
    assert process.exitcode == 0, output
    assert " passed" in output


def _run_pytest(arguments: list[str], told: str) -> None:
    os.chdir(Path(__file__).parents[2])
    to = os.open(told, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(to, descriptor)
    sys.stdin = open(os.devnull)  # noqa: SIM115 (as long as the process)
    try:
        code = int(pytest.main(arguments))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


if INTERPRETED and triton.__version__.startswith("3.7."):  # these are its insides: others are as slow as they are
    from tests.helpers.quick_interpreter import quicken

    quicken()
