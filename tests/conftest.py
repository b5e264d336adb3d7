"""For all tests."""

from __future__ import annotations

import gc
import inspect
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from _pytest.logging import catching_logs

NOWHERE = Path(__file__).parent / "no such folder"
LATER = ("rest", "long")
_sampled: set[str] = set()  # functions
gc.disable()  # until tests are collected: what that makes stays


def _catch_at_root(catching: Any) -> Any:
    """Six times a test pytest asks all loggers there are whether they pass on what they are told, for those of torch
    that do not. Ours do."""
    handler, root = catching.handler, logging.getLogger()
    if catching.level is not None:
        handler.setLevel(catching.level)
        catching.orig_level = root.level
        root.setLevel(min(root.level, catching.level))
    root.addHandler(handler)
    catching.attached_loggers.append(root)
    return handler


if hasattr(catching_logs, "attached_loggers"):  # others ask no other logger than the root
    catching_logs.__enter__ = _catch_at_root  # type: ignore[method-assign]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run tests marked `rest` or `long` too")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not torch.cuda.is_available():
        terminalreporter.write_line("no CUDA device here: tests that want one were left out")


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Not tests that would all be left out, for want of a GPU or of `--long`, or as another process runs them: they are
    six of ten, and it takes a tenth of the time to list and skip them. Functions of later runs are deselected."""
    is_class = inspect.isclass(obj)
    marks = getattr(obj, "pytestmark", []) if is_class or inspect.isfunction(obj) else []
    left_out = dict.fromkeys(LATER, is_class and not collector.config.getoption("--long"))
    left_out["gpu"] = not torch.cuda.is_available()
    skips = any(left_out.get(mark.name, mark.name == "skipif" and mark.args[0]) for mark in marks)
    return [] if skips else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Of cases that are sampled, or interpreted, three in four are of the rest; of a function the first never is."""
    of_many = item.get_closest_marker("sampled") or os.environ.get("TRITON_INTERPRET") == "1"
    if not of_many or item.get_closest_marker("gpu") or item.get_closest_marker("long"):
        return
    function = item.nodeid.partition("[")[0]
    is_first = function not in _sampled and item.parent is item.getparent(pytest.Module)
    _sampled.add(function)
    if not is_first and crc32(item.name.encode()) % 4:
        item.add_marker("rest")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests begin before the others, which then even out what workers have left to do."""
    if not config.getoption("--long"):
        left_out = [item for item in items if any(map(item.get_closest_marker, LATER))]
        items[:] = [item for item in items if not any(map(item.get_closest_marker, LATER))]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _for_all() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # A shared prefix is attended once however short it is, so that small cases go that way.
        patch.setattr("attn_backends.backends.torch.metadata.CASCADE_MIN_BYTES", 0)
        patch.setattr("attn_backends.backends.flashinfer.metadata.CASCADE_MIN_BYTES", 0)
        patch.setattr("attn_backends.backends.flash_attn.metadata.CASCADE_MIN_BYTES", 0)
        # AUTO's order is not that of whoever ran `attn-backends bench` here.
        patch.setattr("attn_backends.registry.user_table.table_folder", lambda: NOWHERE)
        # What tests are collected of stays frozen: afterwards each collection would look at all of it, a second long.
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
