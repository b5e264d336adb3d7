"""Run a benchmark, or list them all.

python -m benchmarks [GROUP NAME ...]
"""

from __future__ import annotations

import ast
import runpy
import sys
from difflib import get_close_matches
from pathlib import Path

HERE = Path(__file__).parent


def scripts() -> dict[str, dict[str, Path]]:
    """By group and name: the modules that run as a program."""
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(HERE.glob("*/*.py")):
        if '\nif __name__ == "__main__":' in path.read_text():
            found.setdefault(path.parent.name, {})[path.stem] = path
    return found


def listing() -> str:
    """Each group with what it is for, and each of its scripts with its first line."""
    lines = []
    for group, named in scripts().items():
        lines.append(f"{group}: {_first_line(HERE / group / '__init__.py')}")
        lines += [f"  {name:18} {_first_line(path)}" for name, path in named.items()]
    return "\n".join(lines)


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def chosen(given: list[str]) -> str:
    """The module of a group and a name.

    Raises:
        SystemExit: there is none; says which are near.
    """
    known = {f"{group} {name}" for group, named in scripts().items() for name in named}
    wanted = " ".join(given[:2])
    if wanted in known:
        return f"{__package__}.{wanted.replace(' ', '.')}"
    near = sorted(each for each in known if each.split()[1] in given[:2]) or get_close_matches(wanted, known)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise SystemExit(f"there is no benchmark {wanted!r}; {hint}python -m benchmarks lists them")


def main() -> None:
    if len(sys.argv) == 1:
        print(listing())
        return
    module = chosen(sys.argv[1:])
    sys.argv[1:] = sys.argv[3:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
