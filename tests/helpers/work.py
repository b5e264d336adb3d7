"""Work for processes of a benchmark: each case says what befalls it."""

from __future__ import annotations

import os
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
    if case.does == "raises":
        raise ValueError("no such shape")
    counted, done = case.folder / "counted", case.folder / "done"
    while case.does == "counts" and not done.exists():
        with counted.open("a") as count:
            count.write(".")
        time.sleep(0.005)
    while case.does == "watches" and not counted.exists():
        time.sleep(0.005)
    return case


def measure(case: Case) -> dict[str, Any]:
    """What another case has counted meanwhile."""
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
