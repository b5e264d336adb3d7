"""A hook of MkDocs: what a page links to outside of docs/ comes into the site, as text beside the pages.

So a link to a source file works on GitHub, in an editor and on the site. A folder has no page: its name stays as text.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")

_linked: set[Path] = set()


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrites a page's links."""
    at = DOCS / page.file.src_path

    def rewritten(link: re.Match[str]) -> str:
        target = (at.parent / link[2]).resolve()
        if target.is_relative_to(DOCS) or not target.exists():
            return link[0]  # MkDocs looks after its own pages, and warns of what is not there
        if target.is_dir():
            return link[1]
        path = target.relative_to(ROOT)
        _linked.add(path)
        up = "../" * (len(Path(page.file.src_path).parts) - 1)
        return f"[{link[1]}]({up}source/{path}.txt){{target=_blank}}"

    return LINK.sub(rewritten, markdown)


def on_post_build(*, config: Any, **_: Any) -> None:
    """Copies the files that pages link to."""
    for path in _linked:
        target = Path(config["site_dir"]) / "source" / f"{path}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, target)
