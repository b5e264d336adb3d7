"""Random shapes by their ids, and two files of them side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attention import random_shapes
from tests.helpers.quick_native import quick_native

IDS = ["7/3", "12/5", "7/1"]
RUN = "--device cpu --backend TORCH --no-bare --rounds 1 --json"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of these shapes, measured on this CPU."""
    path = tmp_path_factory.mktemp("results") / "before.json"
    with quick_native():
        random_shapes.main([*RUN.split(), str(path), "--ids", *IDS, IDS[0]])
    return path


def changed(path: Path, **to: Any) -> Path:
    """Another file, of what the first has but for this."""
    other = path.with_name("after.json")
    other.write_text(json.dumps(json.loads(path.read_text()) | to))
    return other


def test_shapes_of_several_seeds_are_compared(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(results.read_text())
    assert [row["id"] for row in found["rows"]] == ["7/1", "7/3", "12/5"], "each once, in the order of their numbers"
    assert found["seed"] == [7, 12]
    rows = [row | {"us": {"TORCH": row["us"]["TORCH"] * (2.0 if row["id"] == "7/3" else 0.5)}} for row in found["rows"]]
    capsys.readouterr()
    both = results.with_name("both.json")
    random_shapes.main(["--compare", str(results), str(changed(results, rows=rows)), "--json", str(both)])
    written = json.loads(both.read_text())
    assert [(row["id"], row["ratio"]) for row in written["rows"]] == [("7/1", 0.5), ("7/3", 2.0), ("12/5", 0.5)]
    assert written["versions"] == found["versions"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Ratios are TORCH's time of the second file over that of the first, at 3 shapes."
    assert "| all | 3 | 0.794 | 0.500 | 2.000 | 2.000 | 0.667 |" in lines
    assert [line.split(" | ")[:2] for line in lines if "/" in line.split(" | ")[0]] == [
        ["| 7/1", "0.500"], ["| 12/5", "0.500"], ["| 7/3", "2.000"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("to", "why"),
    [({"rows": []}, "no shape is in both files with a time of TORCH"), ({"of": "TRITON"}, "'TORCH' and 'TRITON'"),
     ({"gpu": "another"}, "None and 'another'")],
)  # fmt: skip
def test_what_has_nothing_in_common_is_refused(results: Path, to: dict[str, Any], why: str) -> None:
    with pytest.raises(SystemExit, match=why):
        random_shapes.main(["--compare", str(results), str(changed(results, **to))])


@pytest.mark.parametrize(
    ("words", "why"),
    [("--ids 7-3 --json a.json", "'7-3' is no shape: give its seed and number"), ("--ids 7/3", "--ids needs a file"),
     ("--ids 7/3 1007/2 --json a.json", "measure them apart"), ("--ids 5000/1 --json a.json", "5000 is for nothing"),
     ("--compare a.json b.json", "there is no file a.json"), ("--merge b.json --json a", "there is no file b.json")],
)  # fmt: skip
def test_bad_words_are_refused(words: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        random_shapes.parse(words.split())
    assert why in capsys.readouterr().err
