"""How the house stays kept: sizes of files and functions, first words of docstrings, one definition a name, doors."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "attn_backends"
FILES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {file: ast.parse(text, file) for file, text in FILES.items()}

MOST_LINES, MOST_FUNCTION_LINES = 300, 45
# What was longer when the rule was written, with its size then. Entries shrink or go; nothing is added.
LONG_FILES = {
    "backends/flashinfer/state.py": 369,
    "backends/torch/metadata.py": 357,
}
LONG_FUNCTIONS = {
    "backends/mla/flashmla/schedule.py:_fill_kernel": 60,  # device code
    "batch/common.py:CommonAttentionMetadata.from_sequence_groups": 61,
    "cli/app.py:generate": 49,  # a command's signature is the table of its options
    "cli/verify.py:verify": 56,  # likewise
    "kernels/equal_cuts.py:cut_kernel": 56,  # device code
    "testing/cases/random_batch.py:random_batch": 56,
    "testing/reference.py:reference_attention": 47,
}

FIRST_WORDS = {"Of", "As", "By", "Those", "Whose"}  # a text about a thing begins with the thing, or with what it does

# Public names that stand in several modules, and why.
SEVERAL_HOMES = {
    "explain": "the function, and the command that has its name",
    "Layer": "a layer of an adapter's engine; one of the test harness",
    "num_multiprocessors": "kernels/launch.py knows machines that are listed and not here",
    "Row": "a row of TORCH's metadata; one of a test case",
    "padded": "an array for a kernel; a batch of the test harness",
    "register": "what each engine's plugin is called by",
    # One word for what each backend has of its own, behind its own door.
    "SplitPlan": "a backend's own", "PlannedStep": "an adapter's; the base of steps", "PrefillRows": "a backend's own",
    "DecodeConstants": "a kernel's arguments", "DecodeTensors": "a kernel's arguments",
    "Descriptors": "a kernel's arguments", "HopperConstants": "a kernel's arguments",
    "HopperTensors": "a kernel's arguments", "Scales": "a kernel's arguments, and a part of the kit",
    "Kernels": "a backend's own", "Rows": "a backend's own", "Schedule": "a backend's own",
    "Tile": "a backend's own", "Workspace": "a backend's own", "block_dims": "a backend's own",
    "decode_tile": "a backend's own", "decode_tiles": "a backend's own", "graph_metadata": "a backend's own",
    "is_known": "a backend's own", "load": "a backend's own", "suits_hopper_kernel": "a backend's own",
    # Still to become one, or two names.
    "csr_of": "the host's, and a kernel's", "merge": "torch's, a launch, and a kernel's",
    "write_rows": "TRITON's, and what Hopper kernels share",
}  # fmt: skip

MODEL_DOORS = {"loaded_model", "load", "context", "kv_scales"}  # what the engine may import of its models/
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def is_kernel(file: str) -> bool:
    """Whether a file is device code or stands for it: a function there is one launch, and is not cut for its length."""
    *folders, name = file.split("/")
    return "kernels" in folders[1:] or name.endswith(("kernel.py", "kernels.py"))


def functions(file: str) -> Iterator[tuple[str, int]]:
    """Name and lines of each function, as "file:Class.method"."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}.{child.name}" if isinstance(child, Definition) else prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                assert child.end_lineno is not None
                yield f"{file}:{name[1:]}", child.end_lineno - child.lineno + 1
            yield from walk(child, name)

    yield from walk(TREES[file], "")


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes, functions and attributes, and help texts, each with its line."""
    for node in ast.walk(tree):
        value: ast.AST | None = None
        if isinstance(node, ast.Expr) or (isinstance(node, ast.keyword) and node.arg in ("help", "description")):
            value = node.value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value


def too_long(found: dict[str, int], most: int, listed: dict[str, int]) -> list[str]:
    """What breaks a limit, or the promise of a list of exceptions to shrink."""
    return [
        *(f"{name} has {size} lines; at most {listed.get(name, most)}: find the subject that deserves its own place"
          for name, size in found.items() if size > listed.get(name, most)),
        *(f"{name} has {found.get(name, 0)} lines: take it off the list"
          for name in listed if found.get(name, 0) <= most),
    ]  # fmt: skip


def test_files_fit_on_a_few_screens() -> None:
    sizes = {file: len(text.splitlines()) for file, text in FILES.items() if not is_kernel(file)}
    assert too_long(sizes, MOST_LINES, LONG_FILES) == []


def test_functions_fit_on_one_screen() -> None:
    sizes = {name: size for file in FILES if not is_kernel(file) for name, size in functions(file)}
    assert too_long(sizes, MOST_FUNCTION_LINES, LONG_FUNCTIONS) == []


def first_words(room: str) -> list[str]:
    """Places in a room whose docstring or help text begins with one of the words."""
    return [
        f"{file}:{line}: {text.split(chr(10))[0]}"
        for file, tree in TREES.items()
        if file.split("/")[0].removesuffix(".py") == room
        for line, text in texts(tree)
        if text.split() and text.split()[0].rstrip(",:") in FIRST_WORDS
    ]


@pytest.mark.parametrize("room", sorted({file.split("/")[0].removesuffix(".py") for file in FILES}))
def test_texts_begin_with_what_they_are_about(room: str) -> None:
    assert first_words(room) == []


def test_a_public_name_has_one_definition() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for file, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, Definition) and not node.name.startswith("_"):
                homes[node.name].append(file)
    several = {name: files for name, files in homes.items() if len(files) > 1}
    assert {name: files for name, files in several.items() if name not in SEVERAL_HOMES} == {}
    assert set(SEVERAL_HOMES) <= set(several), "these have one home now: take them off SEVERAL_HOMES"


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of what a module imports from the package, at any depth of its code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith(("engine/", "adapters/", "cli/"))])
def test_engine_and_adapters_reach_a_backend_through_the_registry(file: str) -> None:
    """Neither by an import nor by a name in a string."""
    by_name = [
        node.value
        for node in ast.walk(TREES[file])
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "attn_backends.backends" in node.value
    ]
    assert [name for name in imported(TREES[file]) if name.startswith("attn_backends.backends.")] + by_name == []


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("engine/")])
def test_the_engine_reaches_a_model_by_its_doors(file: str) -> None:
    if file.startswith("engine/models/"):
        return
    found = [name.split(".") for name in imported(TREES[file])]
    assert [".".join(name) for name in found if name[0] == "transformers"] == []
    models = {name[3] for name in found if name[:3] == ["attn_backends", "engine", "models"]}
    assert models <= MODEL_DOORS, f"{file} imports {sorted(models - MODEL_DOORS)} of engine/models"
