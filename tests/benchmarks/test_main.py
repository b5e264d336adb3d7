"""`python -m benchmarks`: what it lists, what it runs, and what it says of names that there are not."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import chosen, listing, scripts
from tests.helpers.forked import run_python


def test_every_script_is_listed_with_its_first_line() -> None:
    assert scripts().keys() == {"attention", "correctness", "docs", "engine", "host", "rules", "tune"}
    lines = listing().splitlines()
    assert len(lines) == sum(1 + len(named) for named in scripts().values())
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)


def test_a_script_runs_as_a_program_with_its_own_arguments() -> None:
    done = run_python("-m", "benchmarks", "correctness", "merge_verify", "--help")
    assert done.returncode == 0, done.stderr
    assert "--out" in done.stdout


@pytest.mark.parametrize(
    ("given", "near"),
    [(["warm_up"], "engine warm_up"), (["host", "linears"], "engine linears"), (["rules", "cascad"], "rules cascade")],
)
def test_a_name_that_there_is_not_is_told_with_those_that_are_near(given: list[str], near: str) -> None:
    with pytest.raises(SystemExit, match=f"did you mean {near}"):
        chosen(given)
