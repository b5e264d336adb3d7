"""The generated pages are what their scripts make, and the site has a page for everything public."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest

import attn_backends
from benchmarks.docs import measured, modules, random_page
from benchmarks.docs.contents import ELSEWHERE, PAGES
from benchmarks.docs.random_page import NEWEST
from benchmarks.docs.tables import Pivot, fastest_bare, figure, pivoted, plain
from tests.helpers.forked import run_python

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
ROWS = [
    {"shape": "a", "contender": "TRITON", "us": 12.34, "read us": 9.0},
    {"shape": "a", "contender": "FA3", "us": 15.0, "read us": 9.0},
    {"shape": "a", "contender": "FLASH_ATTN:vllm_fa3", "us": None, "read us": 9.0},
]


@pytest.mark.parametrize(("name", "text"), measured.pages().items())
def test_measured_pages_are_made_of_results(name: str, text: str) -> None:
    assert (measured.OUT / name).read_text() == text, "run make pages"


def test_no_other_page_is_there() -> None:
    assert {path.name for path in measured.OUT.glob("*.md")} == set(measured.pages())


def test_charts_are_made_of_results(tmp_path: Path) -> None:
    """With the pinned matplotlib to the letter but for the last digits of numbers, which differ from one kind of CPU to
    another; of another version, which draws a little otherwise, the names."""
    drawn = list(measured.draw(tmp_path))
    assert {path.name for path in drawn} == {path.name for path in (measured.OUT / "charts").iterdir()}
    if version("matplotlib") == PINNED["matplotlib"]:
        stale = [path.name for path in drawn if not are_alike(path, measured.OUT / "charts" / path.name)]
        assert not stale, "run make pages"


def are_alike(drawn: Path, kept: Path) -> bool:
    texts, numbers = zip(*map(texts_and_numbers, (drawn, kept)), strict=True)
    return texts[0] == texts[1] and numbers[0] == pytest.approx(numbers[1], rel=0, abs=2e-6)


def texts_and_numbers(chart: Path) -> tuple[list[str], list[float]]:
    parts = re.split(r"(-?\d+\.\d+)", chart.read_text())
    return parts[::2], list(map(float, parts[1::2]))


@pytest.mark.parametrize(("after", "expected"), [("1.000001 a", True), ("1.00001 a", False), ("1.000000 b", False)])
def test_charts_that_are_alike(after: str, expected: bool, tmp_path: Path) -> None:
    drawn, kept = tmp_path / "drawn.svg", tmp_path / "kept.svg"
    drawn.write_text(after)
    kept.write_text("1.000000 a")
    assert are_alike(drawn, kept) is expected


def test_every_result_is_on_a_page() -> None:
    shown = {section.result for page in PAGES for section in page.sections}
    assert shown | ELSEWHERE == {path.stem for path in measured.RESULTS.glob("*.json")} - {*random_page.TITLES}


def test_every_note_stands_somewhere() -> None:
    sections = {section.chart or section.result for page in PAGES for section in page.sections}
    assert {path.stem for path in measured.NOTES.glob("*.md")} <= sections | {*random_page.TITLES}


def test_the_readmes_numbers_are_results() -> None:
    readme = measured.README.read_text()
    assert all(mark in readme for mark in measured.MARKS)
    assert readme == measured.readme(readme), "run make pages"


def test_the_support_matrix_is_the_registrys() -> None:
    """In a process of its own: other tests register backends."""
    done = run_python("-m", "benchmarks", "docs", "support", "--print")
    assert done.returncode == 0, done.stderr
    assert (DOCS / "support.md").read_text() == done.stdout, "run make pages"


def test_the_modules_page_is_the_trees() -> None:
    assert modules.PAGE.read_text() == modules.page(), "run make pages"


def test_the_engines_page_shows_the_example() -> None:
    script = (ROOT / "examples" / "step_table_scheduler.py").read_text()
    assert f"```python\n{script}```" in (DOCS / "use-in-an-engine.md").read_text(), "put the script into the page"


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)", pages, re.MULTILINE)}
    assert set(attn_backends.__all__) <= shown


def test_navigation_names_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = set(re.findall(r"^\s+- (?:[^:\n]+: )?(\S+\.md)$", text, re.MULTILINE)) - {"changelog.md"}
    assert named == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}


@pytest.mark.parametrize(("value", "text"), [
    (None, ""), (0.5, "0.5"), (12.345, "12.3"), (1234.5, "1,230"), (1234, "1,234"), (True, "yes"), (["a", "b"], "a, b"),
])  # fmt: skip
def test_figures_have_three_digits(value: object, text: str) -> None:
    assert figure(value) == text


def test_a_line_a_shape_with_the_fastest_bare_kernel() -> None:
    pivot = Pivot("us", {"TRITON": "TRITON", "FLASH_ATTN:vllm_fa3": "FLASH_ATTN"}, read="read us")
    assert fastest_bare(ROWS, pivot) == (15.0, "FA3")
    assert pivoted(ROWS, pivot).splitlines()[-1] == "| a | 12.3 | 15 (FA3) | 9 |", "FLASH_ATTN has no value"


def test_columns_without_values_are_left_out() -> None:
    assert plain([{"a": 1, "b": None, "c": []}]) == "| a |\n| ---: |\n| 1 |"


def test_the_page_of_random_shapes_is_made_of_the_file(tmp_path: Path) -> None:
    """Without a file it tells how to make one."""
    assert "No result is committed yet" in "".join(random_page.text(tmp_path, NEWEST))
    assert list(random_page.charts(tmp_path, tmp_path)) == []
    each = {
        "id": "1000/0", "seed": 1000, "index": 0, "kind": "decode", "shape": "1 x 40, 4/2, 64", "dtype": "bf16",
        "page": 16, "heads": [4, 2, 64], "requests": 1, "lengths": "equal", "bytes": 1e6, "ratio": 0.5, "low": 0.4,
        "high": 0.6, "us": {"TRITON": 1.0, "FA3": 2.0}, "best other": "FA3", "others": 2, "dropped": [],
    }  # fmt: skip
    where = {"gpu": "A GPU", "date": "2026-11-25", "versions": {"torch": "2"}}
    result = {"of": "TRITON", "seed": [1000], "purpose": "judging", "rows": [each], **where}
    (tmp_path / f"{NEWEST}.json").write_text(json.dumps(result))
    text = "\n".join(random_page.text(tmp_path, NEWEST))
    assert "A GPU, 2026-11-25; torch 2; [random_h200_newest.json]" in text
    assert "**TRITON takes 0.500 times as long" in text
    assert [path.name for path in random_page.charts(tmp_path, tmp_path)] == ["random_h200_newest.svg"]
