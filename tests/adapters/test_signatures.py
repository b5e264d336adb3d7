"""What engines of every version call of our adapters takes what they pass: by the committed signatures of their wheels.

`make engine-signatures` makes those anew; a version that changed one fails here by name.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.signatures import ASKED, COMMITTED, VERSIONS, changes, parameters, signatures_in

ADAPTERS = Path(__file__).parents[2] / "attn_backends" / "adapters"
TOLD: dict[str, Any] = json.loads(COMMITTED.read_text())
OURS = [  # our class, in which file, and whose place it takes
    ("sglang", "backend.py", "SGLangAttention", "AttentionBackend"),
    ("vllm", "backend.py", "ServedBackend", "AttentionBackend"),
    ("vllm", "backend.py", "MLAServedBackend", "AttentionBackend"),
    ("vllm", "builder.py", "ServedBuilder", "AttentionMetadataBuilder"),
    ("vllm", "layers.py", "ServedImpl", "AttentionImpl"),
    ("vllm", "mla.py", "MLAServedImpl", "MLAAttentionImpl"),
]
CALLED = {  # what we call of theirs: how many positional arguments, and which keywords
    "sglang": {
        "KVWriteLoc": (2, set()),
        "MHATokenToKVPool.get_kv_buffer": (1, set()),
        "MHATokenToKVPool.set_kv_buffer": (6, set()),
        "SWAKVPool.get_kv_buffer": (1, set()),
        "SWAKVPool.set_kv_buffer": (6, set()),
        "SWAKVPool.translate_loc_from_full_to_swa": (1, set()),
        "register_attention_backend": (1, set()),
    },
    "vllm": {"register_backend": (2, set())},
}  # fmt: skip


BATCH = "CommonAttentionMetadata"  # what vLLM tells builders of a batch
BATCH_NAMES = {"theirs", "common_attn_metadata"}  # it goes by these in the adapter
NOT_READ = {  # of its fields, and why; a field that a version adds fails here until somebody has looked at it
    "dcp_local_seq_lens", "dcp_local_seq_lens_cpu", "dcp_local_seq_lens_cpu_upper_bound",  # refused with DCP
    "encoder_seq_lens", "encoder_seq_lens_cpu",  # cross attention is refused
    "is_prefilling", "positions", "req_idx", "replayssm_decode_base_cpu",  # other kinds of layers read them
    "logits_indices_padded", "max_logits_per_req", "num_logits_indices",  # fast prefill: vLLM's own wrapper reads them
}  # fmt: skip


def signature_at(engine: str, name: str, version: str) -> list[str] | None:
    """The parameters of a name in a version; None where there is no such name."""
    now = None
    for since, signature in TOLD[engine]["signatures"].get(name, {}).items():
        if VERSIONS[engine].index(since) <= VERSIONS[engine].index(version):
            now = signature
    return None if now is None else [word for word in now.split(", ") if word]


def methods(engine: str, file: str, name: str) -> dict[str, list[str]]:
    tree = ast.parse((ADAPTERS / engine / file).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {each.name: parameters(each) for each in found.body if isinstance(each, ast.FunctionDef)}


def refused(ours: list[str], theirs: list[str]) -> list[str]:
    """Parameters that an engine may pass and ours does not take, or that ours wants and no engine passes."""
    plain = [word.rstrip("=") for word in theirs if not word.startswith("*")]
    taken = [word.rstrip("=") for word in ours if not word.startswith("*")]
    takes_any = any(word.startswith("**") for word in ours)
    takes_more = any(word.startswith("*") and word.strip("*") and not word.startswith("**") for word in ours)
    found = [] if takes_any else [word for word in plain if word not in taken and not takes_more]
    found += [word for word in ours if not word.endswith("=") and not word.startswith("*") and word not in plain]
    in_order = [word for word in plain if word in taken]
    return found + [word for at, word in zip(taken, in_order, strict=False) if at != word and not takes_more]


def read_of_batches() -> dict[str, bool]:
    """Attributes of vLLM's batches that the adapter reads: whether it needs them, or has a default in their place."""
    read: dict[str, bool] = {}
    for file in sorted((ADAPTERS / "vllm").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id=batch), attr=name) if batch in BATCH_NAMES:
                    read[name] = True
                case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id=batch), ast.Constant(value=name), _]):
                    if batch in BATCH_NAMES:
                        read.setdefault(str(name), False)
    return read


def test_vllms_batches_have_what_is_read_of_them() -> None:
    read = read_of_batches()
    assert len(read) > 10  # the adapter still calls a batch by these names
    missing, had, new = [], set(), []
    for version in VERSIONS["vllm"]:
        fields = {word.rstrip("=") for word in signature_at("vllm", BATCH, version) or []}
        had |= fields
        missing += [f"{version}: {name}" for name, is_needed in read.items() if is_needed and name not in fields]
        public = {name for name in fields if not name.startswith("_")}
        new += [f"{version}: {name}" for name in sorted(public - set(read) - NOT_READ)]
    assert missing == []
    assert new == []
    assert set(read) | NOT_READ <= had  # each is a field of some version


@pytest.mark.parametrize(("engine", "file", "ours", "theirs"), OURS, ids=lambda each: str(each))
def test_overridden_methods_take_what_engines_pass(engine: str, file: str, ours: str, theirs: str) -> None:
    wrong, known = [], 0
    for method, taken in methods(engine, file, ours).items():
        for version in VERSIONS[engine]:
            given = signature_at(engine, f"{theirs}.{method}", version)
            if given is not None:
                known += 1
                wrong += [f"{version}: {theirs}.{method}: {word}" for word in refused(taken, given)]
    assert wrong == []
    assert known >= len(VERSIONS[engine])  # the names are those that engines have


@pytest.mark.parametrize(
    ("engine", "name"), [(engine, name) for engine, named in CALLED.items() for name in named], ids=str
)
def test_engines_take_what_we_pass(engine: str, name: str) -> None:
    count, keywords = CALLED[engine][name]
    for version in VERSIONS[engine]:
        signature = signature_at(engine, name, version)
        assert signature is not None, f"{name} is gone in {version}"
        positional = signature[: signature.index("*")] if "*" in signature else signature
        assert len(positional) >= count, f"{version}: {name}{signature}"
        required = [word for word in positional[count:] if not word.endswith("=") and not word.startswith("*")]
        assert set(required) <= keywords, f"{version}: {name}{signature}"


def test_all_versions_are_told() -> None:
    assert {engine: told["versions"] for engine, told in TOLD.items()} == VERSIONS
    assert set(TOLD) == set(ASKED)


def test_signatures_are_read_of_source() -> None:
    source = """
class A:
    x: int
    y: int = 0
    def f(self, a, b=1, *, c, d=2, **rest): ...
    @classmethod
    def g(cls, *args): ...
class B:
    def f(self): ...
def h(a, *args, b): ...
"""
    assert signatures_in(source, ("A", "h")) == {
        "A": ["x", "y="], "A.f": ["a", "b=", "*", "c", "d=", "**rest"], "A.g": ["*args"], "h": ["a", "*args", "b"],
    }  # fmt: skip
    assert signatures_in(source, ("B.f",)) == {"B.f": []}
    before, after = {"f": ["a"]}, {"f": ["a", "b"], "g": []}
    assert changes({"1": before, "2": before, "3": after}) == {"f": {"1": "a", "3": "a, b"}, "g": {"1": None, "3": ""}}


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (["a", "b="], ["a", "b"], []),
        (["a"], ["a", "new="], ["new"]),
        (["a", "**rest"], ["a", "new="], []),
        (["a", "b"], ["a"], ["b"]),
        (["b", "a"], ["a", "b"], ["a", "b"]),
        (["*args", "**rest"], ["a", "b="], []),
    ],
)
def test_what_counts_as_refused(ours: list[str], theirs: list[str], expected: list[str]) -> None:
    assert refused(ours, theirs) == expected
