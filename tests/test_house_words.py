"""The words of kernels, impls and states are the field's; a docstring's subject is the thing that it stands on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "attn_backends"

INSTEAD = {  # the left column of the words that this house does not define, and what it writes
    "sums": "acc in a kernel, lse in an impl",
    "top": "m_i",
    "total": "l_i",
    "partial": "partial_acc",
    "partial_sums": "partial_ml",
    "ahead": "window_right",
    "behind": "window_left",
    "KEYS": "BLOCK_N",
    "ROWS": "BLOCK_M",
    "TOKENS": "BLOCK_Q",
    "item": "work_item",
    "place": "partial_slot",
    "parts": "num_splits",
    "Cut": "SplitPlan",
    "ItemList": "WorkList",
    "EARLY": "SCALE_FIRST of a tile, USE_PDL of a launch",
    "Start": "Pdl",
    "BESIDE": "Pdl.WAIT_LAST",
    "let_next_start": "launch_dependents",
    "wait_for_last": "grid_wait",
    "see_all": "acquire_fence",
    "strips": "TMA tiles: desc, kv_tiles",
    "lines": "row layout",
    "row_blocks": "kv_descriptors",
    "told": "tile_info",
    "heard": "info_empty",
    "news": "tile_channel",
    "_tell": "_publish",
    "_hear": "_consume",
    "stretch": "q_scale",
    "shares_of": "scale_to_fp16",
    "largest_of": "row_amax",
    "widen": "upcast",
    "Room": "Workspace",
    "sight": "visible_range",
    "sees": "visible",
}
KERNELS = sorted(
    {*PACKAGE.glob("kernels/**/*.py"), *PACKAGE.glob("backends/**/*.py")}
    | {PACKAGE / "cache/kernels.py", PACKAGE / "step/kernel.py", PACKAGE / "engine/models/fused/kernels.py"}
)
PREPOSITIONS = {"Of", "As", "By", "Those", "Whose"}
DOCUMENTED = sorted(
    {path for path in KERNELS if "backends" not in path.relative_to(PACKAGE).parts[:1]}
    | {*PACKAGE.glob("testing/**/*.py"), *PACKAGE.glob("backends/triton/**/*.py")}
    | {*PACKAGE.glob("backends/mla/triton_mla/*.py"), *PACKAGE.glob("backends/torch/native/*.py")}
    | {PACKAGE / "backends/flashinfer/csr_kernel.py"}
)


def defined(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that a module defines, with their lines: what it imports is somebody else's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", KERNELS, ids=name_of)
def test_names_are_the_fields(path: Path) -> None:
    found = [f"line {line}: {name}; write {INSTEAD[name]}"
             for line, name in defined(ast.parse(path.read_text())) if name in INSTEAD]  # fmt: skip
    assert not found, f"{name_of(path)}: " + ", ".join(found)


@pytest.mark.parametrize("path", DOCUMENTED, ids=name_of)
def test_docstrings_begin_with_their_subject(path: Path) -> None:
    found = [f"line {line}: {text.splitlines()[0]}"
             for line, text in docstrings(ast.parse(path.read_text())) if text.split()[0] in PREPOSITIONS]  # fmt: skip
    assert not found, f"{name_of(path)}: say what it is, or what it does: " + "; ".join(found)
