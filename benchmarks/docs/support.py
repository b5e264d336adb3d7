"""Write docs/support.md: what each backend declares, and where that has run.

python -m benchmarks docs support [--print]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attn_backends.registry.support import Support, all_support
from attn_backends.registry.table import BUILT_IN, backends

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
HEAD = """<!-- Made by `python -m benchmarks docs support`. -->

# Support matrix

What each backend declares. It refuses everything else with reasons: `attn-backends explain` says what was asked, what
is possible and what to change. `python registry.py` prints the same for the machine that it runs on, with backends of
other packages that are installed there."""
FLAGS = {
    "window": "sliding window",
    "soft_cap": "logits soft cap",
    "alibi": "ALiBi slopes",
    "standard_alibi": "ALiBi slopes of the paper alone",
    "rope": "RoPE inside attention",
    "sinks": "sinks",
    "chunks": "chunked local attention",
    "non_causal": "non-causal decoder layers",
    "unequal_head_dims": "values of another width",
    "any_scale": "scales of 0 and below",
    "lse": "LSE",
    "cascade": "shared prefixes attended once",
    "fp8_queries": "queries rounded to fp8 over an fp8 cache",
    "mla": "MLA (and nothing else)",
}
SETS = {
    "devices": "devices",
    "dtypes": "dtypes",
    "cache_dtypes": "cache dtypes",
    "head_dims": "head dims",
    "page_sizes": "page sizes",
    "page_size_multiple": "pages are multiples of",
    "layouts": "layouts",
    "attention_types": "attention types",
    "min_compute_capability": "compute capability from",
    "cuda_graph": "CUDA graphs",
}


def page(found: Sequence[Support]) -> str:
    """The page in Markdown."""
    parts = [HEAD, "## Features", _matrix(found), "## Values", "`any`: no limit is declared."]
    for row in found:
        entry, can = backends[row.name], row.capabilities or {}
        parts.append(f"### {row.name}")
        lines = [f"| {title} | {_words(can[name])} |" for name, title in SETS.items() if _is_told(name, can.get(name))]
        lines.append(f"| install | `{entry.install}` |")
        lines.append(f"| [ran on](what-ran.md) | {row.ran} |")
        parts.append("\n".join(["| | |", "|---|---|", *lines]))
    return "\n\n".join(parts) + "\n"


def _matrix(found: Sequence[Support]) -> str:
    """Features by backend."""
    names = [name for name in FLAGS if any(_declares(row, name) for row in found)]
    lines = [f"| | {' | '.join(row.name.replace('_', ' ') for row in found)} |", "|---" + "|:---:" * len(found) + "|"]
    for name in names:
        lines.append(f"| {FLAGS[name]} | {' | '.join('✓' if _declares(row, name) else '' for row in found)} |")
    return "\n".join(lines)


def _declares(row: Support, name: str) -> bool:
    return bool((row.capabilities or {}).get(name))


def _is_told(name: str, value: Any) -> bool:
    return not (name == "page_size_multiple" and value in (None, 1)) and (
        value is not None or name in ("head_dims", "page_sizes")
    )


def _words(value: Any) -> str:
    if value is None:
        return "any"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def built_in() -> list[Support]:
    """Our own backends, in the registry's order: a plugin that is installed here is none of them."""
    ours = {entry.name for entry in BUILT_IN}
    return [row for row in all_support() if row.name in ours]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="show the page and write nothing")
    text = page(built_in())
    if parser.parse_args().print:
        print(text, end="")
    else:
        PAGE.write_text(text)
        print(f"written to {PAGE}")
