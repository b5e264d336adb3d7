"""Checks what a wheel holds: the package alone, with its types and data. Usage: check_wheel.py dist/NAME.whl"""

import sys
import zipfile
from pathlib import Path

PACKAGE = "attn_backends"


def problems(names: set[str]) -> list[str]:
    tops = {name.partition("/")[0] for name in names}
    found = [
        f"{top} is at the top level of site-packages; setup.cfg must pack {PACKAGE} only"
        for top in sorted(tops)
        if top != PACKAGE and not top.endswith(".dist-info")
    ]
    found += [f"{name} is for tests alone; it belongs in tests/" for name in sorted(names) if "emulated" in name]
    kinds = ("py.typed", "*.json", "*.c", "*.h", "*.py", "*.pyi")
    data = {str(path) for kind in kinds for path in Path(PACKAGE).rglob(kind)}
    found += [f"{path} is missing; see [options.package_data] in setup.cfg" for path in sorted(data - names)]
    return found


if __name__ == "__main__":
    found = problems(set(zipfile.ZipFile(sys.argv[1]).namelist()))
    print("\n".join(found) or f"{sys.argv[1]}: the package, its types and its data, and nothing else")
    sys.exit(bool(found))
