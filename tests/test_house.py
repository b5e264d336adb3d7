"""Rules of the house, each a test that reads the code.

Sections stand by themselves: whoever adds a rule adds a section.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from attn_backends.interface import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionState,
    Capabilities,
)
from attn_backends.registry.table import BUILT_IN, BackendEntry, get_class

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "attn_backends"


# ---- The five classes, and the backends that implement them. -------------------------------------------------------

FIVE = (AttentionBackend, AttentionMetadataBuilder, AttentionMetadata, AttentionState, AttentionImpl)
CONTRACT_VERBS = {  # verbs of DESIGN.md's contract that an engine calls, whether or not ours does
    "get_metadata_cls", "decode_metadata", "prefill_metadata", "build_for_cudagraph_capture", "reorder_batch",
    "graph_capture_get_metadata_for_batch", "move_to_current_stream", "preferred_page_sizes", "graph_sizes",
    "asdict_zerocopy", "from_dict", "prepare", "get_supported_head_sizes", "build_from_groups",
}  # fmt: skip
TOLD_TO_PEOPLE = {
    "lse",
    "lowest_logit",
}  # nothing branches on them: the support table shows them, the kit tests by them
BASES_WITHOUT_STATE = {"ABC", "Generic", "Protocol", "NamedTuple", "BaseModel", "object"}
ROLES = {"impl_cls": "impl", "metadata_cls": "metadata", "builder_cls": "metadata", "state_cls": "state"}


def modules(*folders: str) -> dict[Path, ast.Module]:
    return {
        path: ast.parse(path.read_text()) for folder in folders for path in sorted((PACKAGE / folder).rglob("*.py"))
    }


def classes(*folders: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for path, module in modules(*folders).items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}


def calls_init(node: ast.AST, of: type[ast.expr]) -> bool:
    """Whether `super().__init__(…)` (`of` a Call) or `Parent.__init__(self, …)` (`of` a Name) is called in it."""
    called = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return any(isinstance(f, ast.Attribute) and f.attr == "__init__" and isinstance(f.value, of) for f in called)


def test_no_backend_defines_forward_or_graph_clone() -> None:
    """They are the same for all: a backend has `attend`, and a `GraphState`."""
    found = [where for where, node in classes("backends") if {"forward", "graph_clone"} & set(methods(node))]
    assert found == []


def test_nothing_skips_its_parents_init() -> None:
    found = []
    for where, node in classes("interface", "backends", "graphs"):
        bases = {ast.unparse(base).partition("[")[0] for base in node.bases} - BASES_WITHOUT_STATE
        init = methods(node).get("__init__")
        if calls_init(node, ast.Name) or (bases and init and not calls_init(init, ast.Call)):
            found.append(where)
    assert found == []


def used_names() -> set[str]:
    """Attributes that the product reads or calls; a function's own definition does not use its name."""
    found: set[str] = set()

    def visit(node: ast.AST, inside: frozenset[str]) -> None:
        if isinstance(node, ast.FunctionDef):
            inside |= {node.name}
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr not in inside:
            found.add(node.attr)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    for path, module in modules(".").items():
        if "testing" not in path.relative_to(PACKAGE).parts:
            visit(module, frozenset())
    return found


def asked_capabilities() -> set[str]:
    """Fields that the product reads of `can`, or of what `capabilities()` gives."""
    found = set()
    for path, module in modules(".").items():
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute) and "testing" not in path.parts:
                owner = node.value.func if isinstance(node.value, ast.Call) else node.value
                if getattr(owner, "id", getattr(owner, "attr", "")) in ("can", "capabilities"):
                    found.add(node.attr)
    return found


def public_verbs(cls: type[Any]) -> set[str]:
    return {name for name, member in vars(cls).items() if not name.startswith("_")
            and (callable(member) or isinstance(member, (classmethod, staticmethod, property)))}  # fmt: skip


def test_every_verb_and_capability_has_a_user_in_the_product() -> None:
    used, verbs = used_names(), set().union(*map(public_verbs, FIVE))
    assert verbs - used <= CONTRACT_VERBS
    assert {field.name for field in fields(Capabilities)} - asked_capabilities() == TOLD_TO_PEOPLE


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda entry: entry.name)
def test_a_backends_folder_has_its_name_and_a_file_for_each_class_of_its_own(entry: BackendEntry) -> None:
    module, _, _ = entry.target.partition(":")
    folder, _, file = module.rpartition(".")
    assert (folder.rpartition(".")[2], file) == (entry.name.lower(), "backend")
    try:
        backend = get_class(entry)
    except ImportError as error:  # Triton is not everywhere
        pytest.skip(str(error))
    for attribute, role in ROLES.items():
        where = getattr(backend, attribute).__module__
        assert where.rpartition(".")[2] == role, f"{attribute} is in {where}"
