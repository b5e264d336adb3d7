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

FLOORS = [  # a module imports from its own floor and those above it in this list
    {
        "page_table",
        "page_sets",
        "page_rows",
        "derive",
        "graph_inputs",
        "derive_triton",
        "csr_triton",
        "kv_write_triton",
        "lse_merge",
        "lse_merge_triton",
        "page_copy_triton",
        "triton_launch",
        "triton_split",
        "triton_variants",
        "triton_examples",
        "triton_fp8",
        "triton_hopper",
        "staging",
        "streams",
        "step_device",
        "device_copy",
        "devices",
        "flashinfer_package",
        "cache_folder",
        "spec",
        "mla_spec",
        "layer_parameters",
        "config",
        "config_errors",
    },
    {"batch", "step_table", "batch_order", "batch_views", "virtual_batches", "kv_cache", "native"},
    {"capabilities", "interface", "cuda_graphs"},
    {"call_checks", "capturing_state", "warm_up"},
    {"backends", "registry", "entries", "verdicts", "support", "measured"},
    {"engine", "adapters", "testing"},
    {"cli", "cli_tables", "cli_generate", "cli_verify", "cli_errors"},
]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}


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
    """ "engine" of "attn_backends.engine.hf"; at depth 2, "hf"."""
    return [*module.split("."), "", ""][depth]


def test_every_module_has_a_floor() -> None:
    assert {part(module) for module in MODULES} <= set(FLOOR)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str) -> None:
    for target in inner_imports(module):
        assert target != PACKAGE, f"{module} imports {PACKAGE} itself; name the module"
        assert FLOOR[part(target)] <= FLOOR[part(module)], f"{module} imports {target}, which is above it"


def test_no_circle() -> None:
    graph = {module: inner_imports(module) for module in MODULES}
    list(graphlib.TopologicalSorter(graph).static_order())


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
        assert module == "attn_backends.engine.hf", f"{module} imports transformers; only engine/hf.py may"


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
