"""Put the fragments of changelog.d/ under the unreleased version of CHANGELOG.md, and remove them.

python changelog.d/collect.py [--draft]
"""

from __future__ import annotations

import argparse
import re
import textwrap
from pathlib import Path

HERE = Path(__file__).parent
CHANGELOG = HERE.parent / "CHANGELOG.md"
KINDS = ("added", "changed", "deprecated", "removed", "fixed", "security")
UNRELEASED = re.compile(r"^## \[[^\]]+\] - unreleased\n", re.MULTILINE)


def fragments(folder: Path) -> list[Path]:
    """The fragments, by name.

    Raises:
        SystemExit: a file has no kind, or nothing in it; says which.
    """
    found = [path for path in sorted(folder.glob("*.md")) if path.name != "README.md"]
    for path in found:
        if kind_of(path) not in KINDS:
            raise SystemExit(f"{path.name}: name it <name>.<kind>.md, with a kind of {', '.join(KINDS)}")
        if not path.read_text().strip():
            raise SystemExit(f"{path.name} is empty: say what a user can do now, or what no longer goes wrong")
    return found


def kind_of(path: Path) -> str:
    return path.name.removesuffix(".md").rpartition(".")[2]


def entry(text: str) -> str:
    """One line of the list, wrapped."""
    return textwrap.fill(" ".join(text.split()), 120, initial_indent="- ", subsequent_indent="  ",
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def collected(changelog: str, paths: list[Path]) -> str:
    """The changelog with the fragments in front of what stands under each kind of the unreleased version."""
    start = UNRELEASED.search(changelog)
    if start is None:
        raise SystemExit("CHANGELOG.md has no unreleased version: begin one, `## [0.2.0] - unreleased`")
    end = changelog.find("\n## ", start.end())
    head, body, tail = changelog[: start.end()], changelog[start.end() :], ""
    if end >= 0:
        body, tail = changelog[start.end() : end + 1], changelog[end + 1 :]
    parts = {
        title.lower(): text.strip() for title, text in re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", body, re.M | re.S)
    }
    for kind in KINDS:
        new = "\n".join(entry(path.read_text()) for path in paths if kind_of(path) == kind)
        if new:
            parts[kind] = f"{new}\n{parts[kind]}" if kind in parts else new
    sections = [f"### {kind.capitalize()}\n\n{parts[kind]}\n" for kind in KINDS if kind in parts]
    return head + "\n" + "\n".join(sections) + ("\n" + tail if tail else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", action="store_true", help="show the entries and change nothing")
    found = fragments(HERE)
    if parser.parse_args().draft:
        for path in found:
            print(f"{kind_of(path)}: {entry(path.read_text())}")
        return
    CHANGELOG.write_text(collected(CHANGELOG.read_text(), found))
    for path in found:
        path.unlink()
    print(f"{len(found)} fragments are in {CHANGELOG.name}")


if __name__ == "__main__":
    main()
