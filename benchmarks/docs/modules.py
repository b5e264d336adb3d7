"""Write docs/modules.md: every module of the package with its first line.

python -m benchmarks docs modules
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "modules.md"
PACKAGE = ROOT / "attn_backends"
HEAD = """<!-- Made by `python -m benchmarks docs modules`. -->

# Modules

Every module with the first line of its docstring. A folder imports from its own floor and those below:
[a test](../tests/test_packaging.py) lists the floors.

After the README's reading order: `batch/common.py` and `batch/page_table.py` have what builders start from,
`backends/torch` is a complete backend, and `testing/kit` has what every backend has to show."""


def page() -> str:
    """The page in Markdown."""
    folders = sorted({path.parent for path in PACKAGE.rglob("*.py")})
    parts = [HEAD]
    for folder in folders:
        modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        name = f"{folder.relative_to(ROOT)}/"
        about = _first_line(folder / "__init__.py") if (folder / "__init__.py").exists() else ""
        if about or modules:
            parts.append(f"## {name}\n\n{about}".rstrip())
        if modules:
            lines = [f"| [{path.name}](../{path.relative_to(ROOT)}) | {_first_line(path)} |" for path in modules]
            parts.append("\n".join(["| module | what it is |", "|---|---|", *lines]))
    return "\n\n".join(parts) + "\n"


def _first_line(path: Path) -> str:
    """The first paragraph of a module's docstring, in one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written to {PAGE}")
