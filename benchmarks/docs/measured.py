"""Write docs/measured: a page a subject with tables and charts of benchmarks/results, and the README's three numbers.

python -m benchmarks docs measured
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.attention.random_plot import counted
from benchmarks.attention.random_statistics import summary
from benchmarks.docs import random_page
from benchmarks.docs.contents import PAGES, Page, Section
from benchmarks.docs.tables import Pivot, figure, pivoted, plain

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NOTES = Path(__file__).parent / "notes"
OUT = ROOT / "docs" / "measured"
README = ROOT / "README.md"
MARKS = ("<!-- measured -->", "<!-- /measured -->")
MADE = "<!-- Made by `python -m benchmarks docs measured`; notes are in benchmarks/docs/notes. -->"


@cache
def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def page(which: Page) -> str:
    """One page in Markdown."""
    parts = [MADE, f"# {which.title}", which.about]
    for section in which.sections:
        parts += _section(section)
    return "\n\n".join(parts) + "\n"


def _section(section: Section) -> Iterator[str]:
    found = result(section.result)
    rows = [row for row in found["rows"] if section.keep is None or section.keep(row)]
    yield f"## {section.title}"
    yield _where(section.result, found, section.form.value if isinstance(section.form, Pivot) else "")
    if section.chart:
        yield f"![{section.title}, as a chart; the table below has the values](charts/{section.chart}.svg)"
    yield pivoted(rows, section.form) if isinstance(section.form, Pivot) else plain(rows, section.form)
    if "note" in found:
        yield f"From the file: {found['note']}"
    note = NOTES / f"{section.chart or section.result}.md"
    if note.exists():
        yield note.read_text().strip()
    if section.full:
        yield f"<details markdown><summary>All rows of {section.result}.json</summary>"
        yield plain(found["rows"])
        yield "</details>"


def _where(name: str, found: Mapping[str, Any], value: str) -> str:
    """What was measured, where, when, with which versions, and where the file is."""
    machine = (
        found["gpu"] or f"{found['cores']} cores of an {found['cpu'].replace('(R)', '').removesuffix(' Processor')}"
    )
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    file = f"[{name}.json](../../benchmarks/results/{name}.json)"
    unit = f", in {value.rpartition(' ')[2]}" if value else ""
    return f"{_sentence(found['title'])}{unit}. {machine}, {found['date']}; {versions}; {file}."


def _sentence(title: str) -> str:
    return title if title[1:2].isupper() else title[:1].upper() + title[1:]


def index() -> str:
    """The overview: one chart, three numbers, and what each page has."""
    lines = [
        MADE,
        "# Measured",
        "Scripts in `benchmarks/` write one JSON file a run, with the machine, the versions and the date. These pages "
        "are made of those files; [measuring](../measuring.md) has the commands that measure again.",
        three_numbers("."),
        f"![{PAGES[0].sections[0].title}: each backend beside the fastest bare kernel](charts/attention_decode.svg)",
        "Each dot is a backend; the black line is the fastest kernel that another library offers for the same batch. "
        "[One layer's attention](attention.md) has the numbers.",
        "| page | what it has |\n|---|---|",
    ]
    listed = [(each.title, each.name, each.topics) for each in PAGES]
    listed[1:1] = [(title, name, random_page.TOPICS) for name, title in random_page.TITLES.items()]
    rows = [f"| [{title}]({name}.md) | {topics} |" for title, name, topics in listed]
    lines[-1] += "\n" + "\n".join(rows)
    return "\n\n".join(lines) + "\n"


def three_numbers(folder: str) -> str:
    """The table that README and overview share.

    Args:
        folder: where the pages are, as seen from where the table stands.
    """
    drawn = summary([row["ratio"] for row in counted(result(random_page.NEWEST))])
    text = _row("generate_contest", dtype="bfloat16", requests=16)
    layers = [row for row in result("forward_host_time")["rows"] if row["batch"].startswith("64 x 512")]
    host = {row["contender"]: row["us"] for row in layers}
    other = min(host.keys() - {"TRITON"}, key=host.__getitem__)
    rows = [
        (f"a layer at {drawn.shapes} shapes drawn at random",
         f"TRITON {drawn.geometric_mean:.2f} times the best of all others",
         f"as fast or faster at {drawn.won:.0%}", random_page.NEWEST, f"{random_page.NEWEST}.md"),
        ("text of SmolLM2-135M for 16 requests", f"{figure(text['attn_backends tokens/s'])} tokens/s",
         f"vLLM's CPU build {figure(text['vLLM tokens/s'])} tokens/s", "generate_contest", "cpu.md"),
        ("the host's part of a layer that no graph serves, 64 decodes", f"TRITON {figure(host['TRITON'])} us",
         f"{other} {figure(host[other])} us", "forward_host_time", "host.md"),
    ]  # fmt: skip
    lines = ["| what | takes or makes | beside it | where, when |", "|---|---|---|---|"]
    for what, ours, beside, name, target in rows:
        found = result(name)
        maker = next((name for name in ("Xeon", "EPYC") if name in found["cpu"]), found["cpu"])
        machine = (found["gpu"] or f"two {maker} cores").removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")
        lines.append(f"| [{what}]({folder}/{target}) | {ours} | {beside} | {machine}, {found['date']} |")
    return "\n".join(lines)


def _row(name: str, **where: Any) -> Mapping[str, Any]:
    """The row of a file that has these values."""
    return next(row for row in result(name)["rows"] if where.items() <= row.items())


def pages() -> dict[str, str]:
    """The text of every page, by file name."""
    random = {f"{name}.md": "\n\n".join([MADE, *random_page.text(RESULTS, name)]) + "\n" for name in random_page.TITLES}
    return {"index.md": index(), **random, **{f"{each.name}.md": page(each) for each in PAGES}}


def readme(text: str) -> str:
    """The README with the table between its marks made anew."""
    made = f"{MARKS[0]}\n{three_numbers('docs/measured')}\n{MARKS[1]}"
    return re.sub(f"{MARKS[0]}.*?{MARKS[1]}", lambda _: made, text, flags=re.DOTALL)


def draw(folder: Path) -> Iterator[Path]:
    """Write every chart."""
    for section in (section for each in PAGES for section in each.sections if section.draw):
        found = result(section.result)["rows"]
        path = folder / f"{section.chart}.svg"
        kept = [row for row in found if section.keep is None or section.keep(row)]
        assert section.draw is not None
        section.draw(path, kept, {name: result(name) for name in section.beside})
        yield path
    yield from random_page.charts(RESULTS, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="the folder to write to")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    made = pages()
    for name, text in made.items():
        (out / name).write_text(text)
    charts = list(draw(out / "charts"))
    if out == OUT and MARKS[0] in README.read_text():
        README.write_text(readme(README.read_text()))
    print(f"{len(made)} pages and {len(charts)} charts in {out}")


if __name__ == "__main__":
    main()
