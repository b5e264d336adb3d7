"""A hook of MkDocs: what a page links to outside of docs/ comes into the site, as text beside the pages.

So a link to a source file works on GitHub, in an editor and on the site. A folder has no page: its name stays as text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#\s]*)(?:#[^)\s]*)?\)")


def outside(link: str, page: Path) -> Path | None:
    """The file of the repository that a page links to, from its root; None for a page of docs/ or nothing."""
    target = (page.parent / link).resolve()
    inside = target.is_relative_to(DOCS) or not target.is_relative_to(ROOT)
    return None if inside or not target.exists() else target.relative_to(ROOT)


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the changelog, and the files that pages link to."""
    from mkdocs.structure.files import File

    pages = [Path(file.abs_src_path) for file in files.documentation_pages()]
    linked = {outside(link, page) for page in pages for _, link in LINK.findall(page.read_text())}
    for path in sorted(path for path in linked if path and (ROOT / path).is_file()):
        files.append(File.generated(config, f"source/{path}.txt", content=(ROOT / path).read_bytes()))
    files.append(File.generated(config, "changelog.md", content=(ROOT / "CHANGELOG.md").read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrites a page's links to them."""
    if page.file.src_path == "changelog.md":
        return markdown
    at, up = DOCS / page.file.src_path, "../" * (len(Path(page.file.src_path).parts) - 1)

    def rewritten(link: re.Match[str]) -> str:
        path = outside(link[2], at)
        if path is None:  # MkDocs looks after its own pages, and warns of what is not there
            return link[0]
        return f"[{link[1]}]({up}source/{path}.txt)" if (ROOT / path).is_file() else link[1]

    return LINK.sub(rewritten, markdown)
