"""Tensors that the package makes do not follow torch's defaults: frameworks set these while they make a model."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [*sorted((ROOT / "attn_backends").rglob("*.py")), ROOT / "registry.py"]

OF_INTEGERS = {"arange", "randint", "randperm", "tril_indices", "triu_indices"}  # where no argument is a float
MAKERS = OF_INTEGERS | {
    "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_permuted", "empty_strided", "eye",
    "full", "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "normal", "ones", "rand", "randn",
    "range", "scalar_tensor", "sparse_coo_tensor", "tensor", "zeros",
}  # fmt: skip
MODULES = {"Embedding", "LayerNorm", "Linear", "RMSNorm"}  # of torch.nn: they make parameters
OLD_MAKERS = {"Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor"}
DEFAULTS = {"get_default_dtype", "set_default_dtype", "get_default_device", "set_default_device"}

# What reads or sets a default on purpose, and why.
EXCEPTIONS = {
    "attn_backends/adapters/vllm/mla.py: torch.get_default_dtype": "vLLM says the model's dtype in no other way",
    "attn_backends/testing/kit/defaults.py: torch.get_default_dtype": "the kit puts back what it sets",
    "attn_backends/testing/kit/defaults.py: torch.set_default_dtype": "the kit runs layers under other defaults",
    "attn_backends/testing/graphs/host_reads.py: torch.as_tensor": "a name to compare calls with",
    "attn_backends/testing/graphs/host_reads.py: torch.asarray": "a name to compare calls with",
    "attn_backends/testing/graphs/host_reads.py: torch.tensor": "a name to compare calls with",
}


def lacking(call: ast.Call, name: str) -> list[str]:
    """What a call of a maker leaves to torch's defaults. What `**` brings does not count: a reader cannot see it."""
    named = {keyword.arg for keyword in call.keywords}
    of_floats = any(
        (isinstance(node, ast.Constant) and isinstance(node.value, float)) or isinstance(node, ast.Div)
        for argument in call.args
        for node in ast.walk(argument)
    )
    needed = ("device",) if name in OF_INTEGERS and not of_floats else ("device", "dtype")
    return [argument for argument in needed if argument not in named]


def following_defaults(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, name and fault of all that makes a tensor by torch's defaults, or may do so out of sight."""
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "torch.nn"):
            for alias in node.names:
                if alias.name in MAKERS | MODULES | DEFAULTS:
                    yield node.lineno, f"{node.module}.{alias.name}", "is imported: call it by its full name"
        if not isinstance(node, ast.Attribute):
            continue
        name, owner, call = node.attr, ast.unparse(node.value), calls.get(id(node))
        if (owner == "torch" and name in DEFAULTS) or (owner == "torch" and name in OLD_MAKERS and call):
            yield node.lineno, f"torch.{name}", "reads or sets torch's defaults"
        elif (owner == "torch" and name in MAKERS) or (owner in ("torch.nn", "nn") and name in MODULES and call):
            if call is None:
                yield node.lineno, f"{owner}.{name}", "is passed on: what calls it cannot be seen here"
            elif missing := lacking(call, name):
                yield node.lineno, f"{owner}.{name}", f"does not name its {' and '.join(missing)}"


def test_a_tensor_is_made_with_its_dtype_and_device() -> None:
    found, excused = [], set()
    for path in FILES:
        file = path.relative_to(ROOT).as_posix()
        for line, name, fault in following_defaults(ast.parse(path.read_text())):
            if f"{file}: {name}" in EXCEPTIONS:
                excused.add(f"{file}: {name}")
            else:
                found.append(f"{file}:{line}: {name} {fault}")
    assert found == []
    assert excused == set(EXCEPTIONS), "these are as they should be now: take them off EXCEPTIONS"


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("torch.empty(2, dtype=torch.int32, device='cpu')", False),
        ("torch.empty(2, device='cpu')", True),
        ("torch.empty(2, dtype=torch.int32)", True),
        ("torch.tensor([1], **how)", True),
        ("torch.arange(3, device=device)", False),
        ("torch.arange(3)", True),
        ("torch.arange(0.5, 3, device=device)", True),
        ("torch.arange(n / 2, device=device)", True),
        ("torch.nn.Linear(2, 3, dtype=dtype, device=device)", False),
        ("torch.nn.Linear(2, 3)", True),
        ("type(x) is torch.nn.Linear", False),
        ("torch.FloatTensor(3)", True),
        ("isinstance(x, torch.Tensor)", False),
        ("partial(torch.zeros, 3)", True),
        ("from torch import zeros", True),
        ("torch.get_default_dtype()", True),
        ("torch.from_numpy(array)", False),
        ("query.new_empty(3)", False),
    ],
)
def test_the_rule_finds(line: str, is_found: bool) -> None:
    assert bool(list(following_defaults(ast.parse(line)))) == is_found
