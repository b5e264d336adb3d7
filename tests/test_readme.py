"""The README and the documents say what is so: the table, the tree, the reading order, the links, the examples."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from attn_backends.cli.app import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_LINES = 1000  # of the reading order


def section(title: str) -> str:
    """The README from a heading to the next one."""
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def tree() -> Iterator[Path]:
    """The paths that the README's tree names, two spaces a level."""
    parents: list[str] = []
    for line in section("Where things are").split("```")[1].strip("\n").splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        parents[depth:] = [name]
        yield Path(*parents)


def test_support_table() -> None:
    """Printed on this machine; a plugin installed here would be in it too. Other tests register backends, so apart."""
    done = subprocess.run([sys.executable, "registry.py"], capture_output=True, text=True, cwd=ROOT, check=True)
    shown = README.split("<!-- support-table -->")[1].split("<!-- /support-table -->")[0]
    current = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    assert shown.strip().splitlines() == current, "put what `python registry.py` prints into the README"


@pytest.mark.parametrize("path", list(tree()), ids=str)
def test_tree_names_what_exists(path: Path) -> None:
    assert (ROOT / path).exists()


def test_tree_names_every_module() -> None:
    """By itself, or by a folder that the tree does not open."""
    named = set(tree())
    closed = {path for path in named if (ROOT / path).is_dir() and not any(path in other.parents for other in named)}
    modules = {path.relative_to(ROOT) for path in (ROOT / "attn_backends").rglob("*.py") if path.stem != "__init__"}
    missing = [str(module) for module in sorted(modules - named) if not closed.intersection(module.parents)]
    assert not missing, f"the README's tree lacks {missing}"


def test_reading_order_is_short() -> None:
    steps = re.findall(r"^\d+\. \[.*?\]\((.*?)\)", section("A reading order"), re.MULTILINE)
    assert len(steps) > 4
    lines = {step: len((ROOT / step).read_text().splitlines()) for step in steps}
    assert sum(lines.values()) < MOST_LINES, lines


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", document.read_text())
    assert [link for link in links if "://" not in link and not (document.parent / link).exists()] == []


def test_commands_that_measure_have_their_options() -> None:
    """Of docs/measuring.md: scripts and tests that exist, and options that the scripts know."""
    text = (ROOT / "docs" / "measuring.md").read_text()
    commands = [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("python ")]
    assert len(commands) > 20
    for _, _, _, group, name, *arguments in commands:
        source = (ROOT / "benchmarks" / group / f"{name}.py").read_text()
        source += (ROOT / "benchmarks" / "attention" / "contest.py").read_text() if group == "attention" else ""
        for argument in arguments:
            if argument.startswith("-"):
                assert f'"{argument.replace("--no-", "--")}"' in source, f"{group} {name} has no {argument}"
            assert not argument.endswith(".py") or (ROOT / argument).exists(), argument


def test_python_examples_run() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_commands_exist() -> None:
    """Every option that the README gives to `attn-backends` is one of that command's own."""
    for command in ("generate", "list", "doctor", "explain"):
        lines = re.findall(rf"^attn-backends {command}\b.*", README, re.MULTILINE)
        assert lines, f"the README does not show attn-backends {command}"
        shown = {option for line in lines for option in re.findall(r"--[a-z-]+", line.partition("#")[0])}
        if command == "generate":
            shown |= set(re.findall(r"`?(--[a-z-]+)`", section("On the command line")))
        assert shown <= options_of(command)


def options_of(command: str) -> set[str]:
    params = get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {name for param in params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
