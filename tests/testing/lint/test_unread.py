"""What lint reads in a backend's code: a plugin with one thing in it that nobody reads, and the same plugin without."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_backends.testing.lint.finding import Finding
from attn_backends.testing.lint.subject import KINDS, Subject
from attn_backends.testing.lint.unread import Trace, check_code, check_options

PLUGIN = Path(__file__).parents[3] / "examples" / "plugin" / "attn_backends_naive.py"
FAULTS = {  # what stands where, what is put there, and what lint says
    "an option that nobody reads": (
        'accumulate: Literal["float32", "float64"] = "float64"',
        'num_splits: int = 4\n    accumulate: Literal["float32", "float64"] = "float64"',
        "option-unread: NaiveOptions.num_splits",
    ),
    "an option that only its model reads": (
        'accumulate: Literal["float32", "float64"] = "float64"',
        'num_splits: int = 4\n\n    def most(self) -> int:\n        return 2 * self.num_splits\n\n'
        '    accumulate: Literal["float32", "float64"] = "float64"',
        "option-unread: NaiveOptions.num_splits",
    ),
    "options that are replaced": (
        "(self.options or NaiveOptions()).accumulate", '"float64"', "option-unread: NaiveOptions.accumulate",
    ),
    "slopes kept and never used": (
        "    def attend(\n",
        "    def __init__(self, *args: Any, **kwargs: Any) -> None:\n        super().__init__(*args, **kwargs)\n"
        "        self.slopes = self.spec.alibi_slopes\n\n    def attend(\n",
        "attribute-unread: attn_backends_{name}.py:\\d+ NaiveImpl.slopes",
    ),
    "a parameter that nobody reads": (
        "def _attend(self, query: Tensor,", "def _attend(self, sinks: Tensor, query: Tensor,",
        r"parameter-unread: attn_backends_{name}.py:\d+ _attend\(sinks\)",
    ),
    "an argument of __init__ that stops there": (
        "    def attend(\n",
        "    def __init__(self, *args: Any, k_scale: float = 1.0, **kwargs: Any) -> None:\n"
        "        super().__init__(*args, **kwargs)\n\n    def attend(\n",
        r"parameter-unread: attn_backends_{name}.py:\d+ __init__\(k_scale\)",
    ),
    "a field that only the views read": (
        "    rows: tuple[Row, ...]  # without padding\n",
        "    rows: tuple[Row, ...]  # without padding\n    longest: int\n",
        "field-unread: NaiveMetadata.longest",
    ),
}  # fmt: skip


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a module of the plugin's source, changed, and forgets it."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name: str, before: str = "", after: str = "") -> Any:
        source = PLUGIN.read_text().replace("@ab.register_backend", "# @ab.register_backend")
        assert not before or source.count(before) == 1, f"{source.count(before)} of {before!r}"
        (tmp_path / f"attn_backends_{name}.py").write_text(source.replace(before, after) if before else source)
        return importlib.import_module(f"attn_backends_{name}")

    yield make
    for module in [module for module in sys.modules if module.startswith("attn_backends_")]:
        del sys.modules[module]


def findings(module: Any) -> list[Finding]:
    """The code's, and those of options that two steps read."""
    backend, trace = module.NaiveBackend, Trace(module.NaiveOptions)
    found = [*check_code(backend)]
    if not any((each.code == "parameter-unread" and "_attend" in each.where) or each.code == "field-unread"
               for each in found):  # fmt: skip
        subject = Subject(backend, options=trace.options())
        for kind in KINDS[:2]:
            subject.run(subject.batch(subject.spec(), kind, subject.numbers(kind.name)))
    return [*found, *check_options(backend, trace)]


@pytest.mark.parametrize("fault", FAULTS)
def test_lint_finds(plugin: Any, fault: str) -> None:
    before, after, told = FAULTS[fault]
    name = f"broken_{list(FAULTS).index(fault)}"
    found = findings(plugin(name, before, after))
    assert len(found) == 1, list(map(str, found))
    assert re.match(told.format(name=name), str(found[0])), str(found[0])


def test_it_finds_nothing_in_the_plugin(plugin: Any) -> None:
    assert findings(plugin("whole")) == []


def test_options_that_are_taken_as_a_whole_are_read(plugin: Any) -> None:
    trace = Trace(plugin("dumped").NaiveOptions)
    options = trace.options()
    assert trace.read == set()
    assert isinstance(options, trace.model)
    assert {options: 1}[options] == 1, "a cache by options reads none"
    assert trace.read == set()
    assert options.model_dump() == {"accumulate": "float64"}
    assert trace.read == {"accumulate"}
