"""Links out of docs/: to a file, which comes into the site as text; to a folder; to another page; to nothing."""

from __future__ import annotations

import importlib
import re
from types import SimpleNamespace

import pytest

from benchmarks.docs.links import DOCS, LINK, on_page_markdown, outside

AT = DOCS / "operations" / "attention.md"


@pytest.mark.parametrize(("link", "text"), [
    ("[spec](../../attn_backends/spec.py)", "[spec](../source/attn_backends/spec.py.txt)"),
    ("[spec](../../attn_backends/spec.py#L3)", "[spec](../source/attn_backends/spec.py.txt)"),
    ("[backends](../../attn_backends/backends)", "backends"),
    ("[page](../kernels.md#prefill)", "[page](../kernels.md#prefill)"),
    ("[gone](../../nothing.py)", "[gone](../../nothing.py)"),
    ("![chart](../measured/charts/x.svg)", "![chart](../measured/charts/x.svg)"),
])  # fmt: skip
def test_links_are_rewritten(link: str, text: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_path="operations/attention.md"))
    assert on_page_markdown(f"See {link}.", page=page) == f"See {text}."


def test_what_a_link_leads_to() -> None:
    assert str(outside("../../attn_backends/spec.py", AT)) == "attn_backends/spec.py"
    assert outside("../../../elsewhere", AT) is None
    assert LINK.findall("[a](../b.py) and ![c](../d.png)") == [("a", "../b.py")]


NAMES = [
    name
    for page in sorted((DOCS / "reference").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)
]


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_names_things_where_they_are(name: str) -> None:
    """The site is built from the modules' text: a name that is imported there is not found."""
    module, _, attribute = name.rpartition(".")
    thing = getattr(importlib.import_module(module), attribute)
    assert getattr(thing, "__module__", module) == module
