"""What our adapters rely on of engines' interfaces, read from their wheels by version: nothing of them is imported.

    python tests/engines/signatures.py            # make engine-signatures

A wheel is found by pip's own rules, and only the members that are needed are read of it, by pip's own ranged reads; if
the index has none, it is downloaded for the moment. `signatures.json` has, for each name, its parameters since the
version that changed them: `name`, `name=` with a default, `*` and `**`, and `*` alone before those given by keyword.
None: it is not there.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from zipfile import ZipFile

HERE = Path(__file__).parent
COMMITTED = HERE / "signatures.json"
VERSIONS = {
    "vllm": [f"0.{minor}.0" for minor in range(26, 34)],
    "sglang": [f"0.5.{patch}" for patch in range(14, 24)],
}
# Names by the ends of the files that may define them.
ASKED = {
    "vllm": {
        ("v1/attention/backend.py",): (
            "AttentionBackend", "AttentionImpl", "MLAAttentionImpl", "AttentionMetadataBuilder",
            "CommonAttentionMetadata",
        ),
        ("v1/attention/backends/registry.py",): ("register_backend",),
    },
    "sglang": {
        ("srt/layers/attention/base_attn_backend.py",): ("AttentionBackend",),
        ("srt/layers/attention/attention_registry.py",): ("register_attention_backend",),
        ("srt/layers/radix_attention.py",): ("RadixAttention.__init__",),
        ("srt/mem_cache/memory_pool.py",): (
            "KVWriteLoc", "MHATokenToKVPool.get_kv_buffer", "MHATokenToKVPool.set_kv_buffer",
        ),
        ("srt/mem_cache/swa_memory_pool.py",): (
            "SWAKVPool.get_kv_buffer", "SWAKVPool.set_kv_buffer", "SWAKVPool.translate_loc_from_full_to_swa",
        ),
    },
}  # fmt: skip

Signature = str | None  # parameters, with commas between


def parameters(function: ast.FunctionDef) -> list[str]:
    """Parameters of a function as words, without `self` or `cls`."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    first_default = len(plain) - len(given.defaults)
    words = [arg.arg + ("=" if i >= first_default else "") for i, arg in enumerate(plain)]
    if given.vararg is not None:
        words.append("*" + given.vararg.arg)
    elif given.kwonlyargs:
        words.append("*")
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    words += [arg.arg + ("" if default is None else "=") for arg, default in pairs]
    if given.kwarg is not None:
        words.append("**" + given.kwarg.arg)
    return words[1:] if words and words[0] in ("self", "cls") else words


def signatures_in(source: str, names: tuple[str, ...]) -> dict[str, list[str]]:
    """Signatures of functions, of a class's methods ("Class.method"), or of the fields of a dataclass ("Class")."""
    wanted = {name.partition(".")[0] for name in names}
    found: dict[str, list[str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in wanted:
            found[node.name] = parameters(node)
        elif isinstance(node, ast.ClassDef) and node.name in wanted:
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}.{each.name}": parameters(each) for each in methods}
            fields = [
                each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
            if fields:
                found[node.name] = [ast.unparse(each.target) + ("" if each.value is None else "=") for each in fields]
    return {name: words for name, words in found.items()
            if any(name == asked or ("." not in asked and name.startswith(asked)) for asked in names)}  # fmt: skip


def read_wheel(package: str, version: str) -> dict[str, list[str]]:
    """The asked signatures of one release."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip"]
        subprocess.run(
            [*pip, "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", str(report),
             f"{package}=={version}"], check=True,
        )  # fmt: skip
        wheel = open_wheel(json.loads(report.read_text())["install"][0]["download_info"]["url"], pip, folder)
        found: dict[str, list[str]] = {}
        for ends, names in ASKED[package].items():
            for member in wheel.namelist():
                if member.startswith(f"{package}/") and member.endswith(ends):
                    found |= signatures_in(wheel.read(member).decode(), names)
        return found


def open_wheel(url: str, pip: list[str], folder: str) -> ZipFile:
    """A wheel, of which only what is read is fetched if the index allows it."""
    from pip._internal.network.lazy_wheel import HTTPRangeRequestUnsupported, LazyZipOverHTTP
    from pip._internal.network.session import PipSession

    try:
        return ZipFile(LazyZipOverHTTP(url, PipSession()))  # type: ignore[arg-type]
    except HTTPRangeRequestUnsupported:
        subprocess.run([*pip, "download", "--quiet", "--no-deps", "--dest", folder, url], check=True)
        return ZipFile(next(Path(folder).glob("*.whl")))


def changes(by_version: dict[str, dict[str, list[str]]]) -> dict[str, dict[str, Signature]]:
    """Each name's signature since the version that changed it."""
    found: dict[str, dict[str, Signature]] = {}
    for name in sorted(set().union(*by_version.values())):
        last: Any = ()
        for version, signatures in by_version.items():
            now = ", ".join(signatures[name]) if name in signatures else None
            if now != last:
                found.setdefault(name, {})[version] = last = now
    return found


def main() -> None:
    told = {
        package: {
            "versions": versions,
            "signatures": changes({version: read_wheel(package, version) for version in versions}),
        }
        for package, versions in VERSIONS.items()
    }
    COMMITTED.write_text(json.dumps(told, indent=1) + "\n")
    print(f"written to {COMMITTED}")


if __name__ == "__main__":
    main()
