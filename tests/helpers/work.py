"""Work for processes of a benchmark: each case says what befalls it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple


class Case(NamedTuple):
    name: str
    folder: Path  # where those that are made ready leave word
    does: str = "well"


def prepare(case: Case) -> Case:
    """A case that counts goes on until another is measured, and one that watches waits for it."""
    if case.does == "ends":
        os._exit(7)
    if case.does == "hangs":
        time.sleep(600)
    if case.does == "waits to be killed":
        (case.folder / "pid").write_text(str(os.getpid()))
    if case.does == "by another":  # what a compiler would be
        command = f"while ! test -e {case.folder}/done; do printf . >> {case.folder}/counted; sleep 0.005; done"
        subprocess.run(["sh", "-c", command], check=True)
    if case.does == "raises":
        raise ValueError("no such shape")
    counted, done = case.folder / "counted", case.folder / "done"
    while case.does == "counts" and not done.exists():
        with counted.open("a") as count:
            count.write(".")
        time.sleep(0.005)
    while case.does == "watches" and not counted.exists():
        time.sleep(0.005)
    while case.does == "kills" and not (case.folder / "pid").exists():
        time.sleep(0.005)
    while case.does == "waits to be killed" and not done.exists():
        time.sleep(0.005)
    return case


def measure(case: Case) -> dict[str, Any]:
    """What another case has counted meanwhile."""
    if case.does == "hangs when measured":
        (case.folder / "pid").write_text(str(os.getpid()))
        time.sleep(600)
    if case.does == "kills":
        os.kill(int((case.folder / "pid").read_text()), signal.SIGKILL)
    counted = case.folder / "counted"
    before = counted.stat().st_size if counted.exists() else 0
    time.sleep(0.1)
    after = counted.stat().st_size if counted.exists() else 0
    (case.folder / "done").touch()
    return {"name": case.name, "counted": after - before, "process": os.getpid()}


def clean_up() -> bool:
    return True


def is_broken() -> bool:
    return False
