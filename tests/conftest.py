"""For all tests."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

NOWHERE = Path(__file__).parent / "no such folder"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run tests marked `long` too")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not torch.cuda.is_available():
        terminalreporter.write_line("no CUDA device here: classes of tests that want one were left out")


def pytest_pycollect_makeitem(obj: object) -> list[pytest.Item] | None:
    """Not classes whose tests would all be skipped, for want of a GPU or as another process runs them: they have four
    of ten tests, and it takes a tenth of the time to list and skip them."""
    marks = getattr(obj, "pytestmark", []) if inspect.isclass(obj) else []
    without_gpu = not torch.cuda.is_available()
    skips = any(without_gpu if mark.name == "gpu" else mark.name == "skipif" and mark.args[0] for mark in marks)
    return [] if skips else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests begin before the others, which then even out what workers have left to do."""
    if not config.getoption("--long"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


@pytest.fixture(autouse=True)
def _cascade_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared prefix is attended once however short it is, so that small cases go that way."""
    monkeypatch.setattr("attn_backends.backends.torch.metadata.CASCADE_MIN_BYTES", 0)
    monkeypatch.setattr("attn_backends.backends.flashinfer.metadata.CASCADE_MIN_BYTES", 0)
    monkeypatch.setattr("attn_backends.backends.flash_attn.metadata.CASCADE_MIN_BYTES", 0)


@pytest.fixture(autouse=True)
def _no_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """AUTO's order is not that of whoever ran `attn-backends bench` here."""
    monkeypatch.setattr("attn_backends.registry.user_table.table_folder", lambda: NOWHERE)
