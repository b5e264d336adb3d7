"""The README and the documents say what is so: lengths, map, backends, links, examples, commands."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from attn_backends.cli.app import app
from attn_backends.registry.table import BUILT_IN
from tests.helpers.forked import run_python

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").rglob("*.md"))
NOTES = sorted((ROOT / "benchmarks" / "docs" / "notes").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "changelog.d" / "README.md", *PAGES]
MOST_LINES = 1000  # of the reading order
MOST_README_LINES = 150
MOST_FIGURES = 12
ORDER = re.compile(
    r"AUTO`?\s+(?:now\s+)?(?:prefers|takes|picks|tries|chooses)\s+`?(?:TORCH|TRITON|FLASH\w*)|"
    r"`?(?:TORCH|TRITON|FLASH\w*)`?\s+(?:comes|is)\s+(?:first|AUTO)", re.IGNORECASE,
)  # fmt: skip


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def section(title: str) -> str:
    """The README from a heading to the next one."""
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def prose(text: str) -> str:
    """Without code, targets of links, dates and the numbers of lists."""
    for pattern in (r"^```.*?^```", r"`[^`]*`", r"(?<=\])\([^)]*\)", r"\d{4}-\d\d-\d\d", r"^\d+\. "):
        text = re.sub(pattern, "", text, flags=re.MULTILINE | re.DOTALL)
    return text


def figures(text: str) -> list[str]:
    """The numbers that stand by themselves: 1.04 and 8,192, not those of H200 or SmolLM2-135M."""
    return re.findall(r"(?<![\w.,-])\d[\d.,]*(?!\w)", prose(text))


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= MOST_README_LINES
    assert len(figures(README)) <= MOST_FIGURES, figures(README)


@pytest.mark.parametrize(("text", "found"), [
    ("250 us and 1,290 us", ["250", "1,290"]),
    ("on an H200, SmolLM2-135M, `64`, 2026-11-23, [x](a-9.md)", []),
    ("1. one\n2. two at 0.5", ["0.5"]),
])  # fmt: skip
def test_what_counts_as_a_figure(text: str, found: list[str]) -> None:
    assert figures(text) == found


def test_the_map_names_what_exists_and_every_folder() -> None:
    """The top folders of the checkout that are committed, and those of the package."""
    lines = section("Where things are").split("```")[1].strip("\n").splitlines()
    named = {word: line.startswith("  ") for line in lines
             for word in re.match(r"\s*((?:[\w.]+/ )*[\w.]+/)", line)[1].split()}  # type: ignore[index]  # fmt: skip
    assert all((ROOT / "attn_backends" / name if inner else ROOT / name).is_dir() for name, inner in named.items())
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=False).stdout
    tops = {path.split("/")[0] for path in listed.splitlines() if "/" in path and not path.startswith(".")}
    rooms = {path.parent.name for path in (ROOT / "attn_backends").glob("*/__init__.py")}
    assert {name.rstrip("/") for name, inner in named.items() if not inner} >= tops
    assert {name.rstrip("/") for name, inner in named.items() if inner} == rooms


def test_the_table_of_backends_is_the_registrys() -> None:
    rows = re.findall(r"^\| (\w+) \| [^|]+ \| `([^`]+)` \|", section("Backends"), re.MULTILINE)
    assert sorted(rows) == sorted((entry.name, entry.install) for entry in BUILT_IN)


def test_the_registry_prints_its_table() -> None:
    """A plugin installed here is in it too. Other tests register backends, so apart."""
    done = run_python("registry.py")
    names = re.findall(r"^\| ([A-Z_]+) ", done.stdout, re.MULTILINE)
    assert names[: len(BUILT_IN)] == [entry.name for entry in BUILT_IN]


def test_reading_order_is_short() -> None:
    steps = re.findall(r"^\d+\. \[.*?\]\((.*?)\)", section("A reading order"), re.MULTILINE)
    assert len(steps) > 4
    lines = {step: len((ROOT / step).read_text().splitlines()) for step in steps}
    assert sum(lines.values()) < MOST_LINES, lines


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    assert [link for link in links if "://" not in link and not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", [*DOCUMENTS, *NOTES, *sorted((ROOT / "configs").glob("*.yaml"))], ids=name_of)
def test_no_page_states_autos_order(document: Path) -> None:
    """`attn-backends explain` prints it: code decides, by measured times that change."""
    assert not ORDER.search(document.read_text())


@pytest.mark.parametrize("text", ["AUTO prefers FLASHINFER", "`AUTO` takes `TRITON`", "FLASHINFER comes first"])
def test_an_order_is_seen(text: str) -> None:
    assert ORDER.search(text)


def test_commands_that_measure_have_their_options() -> None:
    """Of docs/measuring.md: scripts and tests that exist, and options that the scripts know."""
    text = (ROOT / "docs" / "measuring.md").read_text()
    commands = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("python ")]
    assert len(commands) > 20
    for _, _, _, group, name, *arguments in commands:
        source = (ROOT / "benchmarks" / group / f"{name}.py").read_text()
        for shared in ("contest", "random_runs") if group == "attention" else ():
            source += (ROOT / "benchmarks" / "attention" / f"{shared}.py").read_text()
        for argument in arguments:
            if argument.startswith("-"):
                assert f'"{argument.replace("--no-", "--")}"' in source, f"{group} {name} has no {argument}"
            assert not argument.endswith(".py") or (ROOT / argument).exists(), argument


@pytest.mark.parametrize(("document", "count"), [("README.md", 2), ("docs/quickstart.md", 1)])
def test_python_examples_run(document: str, count: int) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == count
    done = run_python("-c", "\n".join(blocks))
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_exist(document: Path) -> None:
    """Every command of `attn-backends` and `make`, and every option that is given to one, is there."""
    text, targets = document.read_text(), re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in re.findall(r"(?:^|`|\s)attn-backends ((?:[a-z]+)[^`\n]*)", text):
        command = line.split()[0]
        if command in COMMANDS:
            assert set(re.findall(r"--[a-z-]+", line.partition("#")[0])) <= options_of(command), line
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= set(targets)


def test_documents_show_every_command() -> None:
    shown = {name for name in COMMANDS if re.search(rf"^attn-backends {name}\b", README, re.MULTILINE)}
    assert shown == set(COMMANDS)
    quickstart = (ROOT / "docs" / "quickstart.md").read_text()
    assert set(re.findall(r"`?(--[a-z-]+)`", quickstart.split("## The command")[1])) <= (
        options_of("generate") | options_of("bench")
    )


def options_of(command: str) -> set[str]:
    params = COMMANDS[command].params
    return {name for param in params for name in (*param.opts, *param.secondary_opts)} | {"--help"}


COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
