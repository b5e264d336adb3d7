"""The shape of the project: what is packed, one owner per key, and which module may import which."""

from __future__ import annotations

import ast
import configparser
import graphlib
import tomllib
from pathlib import Path

import pytest

import attn_backends
import attn_backends.registry
import registry

ROOT = Path(__file__).parent.parent
PACKAGE = "attn_backends"

FLOORS = [  # a room imports from its own floor and those above it in this list
    {"spec", "machine", "validation", "layer_kinds", "yaml_values"},
    {"batch", "kernels"},
    {"step", "cache"},
    {"graphs", "interface"},
    {"backends", "registry"},
    {"engine", "adapters", "testing"},
    {"cli"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
KNOW_TRANSFORMERS = (f"{PACKAGE}.engine.models.hf", f"{PACKAGE}.adapters.transformers")  # beginnings of names
FACADES = {  # rooms that may be imported by their own name
    f"{PACKAGE}.interface",
    f"{PACKAGE}.registry",
    f"{PACKAGE}.adapters.transformers",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): ast.parse(path.read_text(), str(path))
    for path in sorted((ROOT / PACKAGE).rglob("*.py"))
    if path != ROOT / PACKAGE / "__init__.py"  # its lazy table names every floor, and no module may import it
}


def imports(module: str) -> set[str]:
    """Modules that a module imports, at any depth of its code."""
    found = set()
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} line {node.lineno}: relative import; write the full name"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
            found |= submodules or {str(node.module)}
    return found


def inner_imports(module: str) -> set[str]:
    return {name for name in imports(module) if name.partition(".")[0] == PACKAGE}


def part(module: str, depth: int = 1) -> str:
    """ "engine" of "attn_backends.engine.models.hf"; at depth 2, "hf"."""
    return [*module.split("."), "", ""][depth]


def test_the_top_level_holds_rooms_and_what_all_of_them_need() -> None:
    assert {part(module) for module in MODULES} == set(FLOOR)
    assert {path.stem for path in (ROOT / PACKAGE).glob("*.py")} == {"__init__", *FLOORS[0]}


@pytest.mark.parametrize("room", sorted({path.parent for path in (ROOT / PACKAGE).rglob("*.py")}), ids=lambda p: p.name)
def test_every_room_says_what_it_is_for(room: Path) -> None:
    """And does no more, but for the package's own table and those that offer their modules' names."""
    module = ast.parse((room / "__init__.py").read_text())
    assert ast.get_docstring(module), f"{room}/__init__.py has no docstring"
    if room != ROOT / PACKAGE and module_name(room / "__init__.py") not in FACADES:
        assert len(module.body) == 1, f"{room}/__init__.py has more than a docstring"


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str) -> None:
    for target in inner_imports(module):
        assert target != PACKAGE, f"{module} imports {PACKAGE} itself; name the module"
        is_room = (ROOT / target.replace(".", "/")).is_dir()
        assert not is_room or target in FACADES, f"{module} imports the folder {target}; name the module"
        assert FLOOR[part(target)] <= FLOOR[part(module)], f"{module} imports {target}, which is above it"


def test_no_circle() -> None:
    """Neither of modules nor of rooms."""
    graph = {module: inner_imports(module) for module in MODULES}
    list(graphlib.TopologicalSorter(graph).static_order())
    rooms: dict[str, set[str]] = {}
    for module, targets in graph.items():
        rooms.setdefault(part(module), set()).update({part(target) for target in targets} - {part(module)})
    list(graphlib.TopologicalSorter(rooms).static_order())


@pytest.mark.parametrize("module", MODULES)
def test_parts_reach_each_other_by_the_agreed_doors(module: str) -> None:
    own = part(module)
    for target in inner_imports(module):
        other = part(target)
        if other == "backends":
            same_backend = own == "backends" and part(module, 2) == part(target, 2)
            assert same_backend, f"{module} imports {target}; backends are reached through the registry"
        if {own, other} == {"engine", "testing"}:
            pytest.fail(f"{module} imports {target}; engine and testing know nothing of each other")
    if "transformers" in {name.partition(".")[0] for name in imports(module)}:
        assert module.startswith(KNOW_TRANSFORMERS), f"{module} imports transformers; only {KNOW_TRANSFORMERS}… may"


def test_there_is_no_utils() -> None:
    assert [module for module in MODULES if module.rpartition(".")[2] in ("utils", "helpers", "common_utils")] == []


def test_the_root_facade_is_the_registry() -> None:
    for name in attn_backends.registry.__all__:
        assert getattr(registry, name) is getattr(attn_backends.registry, name)
    assert attn_backends.get_backend is registry.get_backend
    assert set(attn_backends.registry.__all__) <= set(vars(registry))


def test_every_public_name_exists() -> None:
    for name in attn_backends.__all__:
        assert getattr(attn_backends, name) is not None
    stub = ast.parse((ROOT / PACKAGE / "__init__.pyi").read_text())
    told = {
        (str(node.module), alias.name) for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert told == {(f"{PACKAGE}.{module}", name) for name, module in attn_backends._HOME.items()}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        attn_backends.nothing  # noqa: B018 (the lookup is the test)


def test_no_key_is_in_pyproject_and_setup_cfg() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setup_cfg = configparser.ConfigParser()
    setup_cfg.read(ROOT / "setup.cfg")
    assert "setuptools" not in pyproject["tool"]
    assert "metadata" not in setup_cfg
    assert all(section.partition(".")[0] == "options" for section in setup_cfg.sections())
    known_as = {"install_requires": "dependencies", "extras_require": "optional-dependencies",
                "python_requires": "requires-python", "entry_points": "scripts"}  # fmt: skip
    assert not {known_as.get(key, key) for key in setup_cfg["options"]} & set(pyproject["project"])
    assert setup_cfg["options"]["py_modules"] == ""


def test_constraints_pin_everything_that_is_asked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + [name for extra in project["optional-dependencies"].values() for name in extra]
    pins = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    names = {requirement.partition(">")[0].lower() for requirement in asked}
    assert names - pins == set()
