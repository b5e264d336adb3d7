"""Write the changelog of docs/contract.md anew, from the releases that refusals are worded with.

And docs/contract.json, the names and signatures that the contract covers, which changes of the code are compared with.

python -m benchmarks docs contract
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attn_backends as ab
from attn_backends import interface, registry
from attn_backends.graphs.inputs import GraphTensors
from attn_backends.interface.contract import CONTRACT, RELEASES, dotted

PAGE = Path(__file__).parents[2] / "docs" / "contract.md"
SURFACE = PAGE.with_suffix(".json")
HEADING = "## Changelog\n\n"  # the page's last: what stands behind it is made here


def page(text: str) -> str:
    """The page with the changelog as it should be."""
    return text.partition(HEADING)[0] + HEADING + changelog()


def changelog() -> str:
    """The releases in Markdown, newest first."""
    parts = []
    for release in RELEASES:
        kinds = ("added", "deprecated", "removed")
        lines = [f"- {kind.capitalize()}: {sentence}" for kind in kinds for sentence in getattr(release, kind)]
        parts.append("\n".join([f"### {dotted(release.version)} ({release.date})", "", *lines]))
    return "\n\n".join(parts) + "\n"


def covered() -> dict[str, Any]:
    """What docs/contract.md says that the contract covers, by name: classes and functions."""
    names = {name: getattr(interface, name) for name in interface.__all__ if name != "CONTRACT"}
    names |= {name: getattr(registry, name) for name in registry.__all__ if inspect.isfunction(getattr(registry, name))}
    asked = ("AttentionSpec", "AttentionType", "CommonAttentionMetadata", "KVCache", "KVCacheSpec", "Limits", "MLASpec",
             "PlanGroup", "SequenceData", "SequenceGroup")  # fmt: skip
    return names | {name: getattr(ab, name) for name in asked} | {"GraphTensors": GraphTensors}


def surface() -> dict[str, Any]:
    """The contract's version, and what is covered: members of classes, with signatures, types and defaults."""
    return {"version": [*CONTRACT], "names": {name: _members(each) for name, each in sorted(covered().items())}}


def _members(each: Any) -> Any:
    return str(inspect.signature(each)) if inspect.isfunction(each) else dict(_of_class(each))


def _of_class(cls: type[Any]) -> Iterator[tuple[str, str]]:
    """Fields, attributes and public methods that a class itself has."""
    if issubclass(cls, enum.Enum):
        yield from ((member.name, repr(member.value)) for member in cls)
        return
    defaults = {each.name: each.default for each in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    annotated = vars(cls).get("__annotations__", {}).items()
    for name, annotation in ((name, annotation) for name, annotation in annotated if not name.startswith("_")):
        default = defaults.get(name, dataclasses.MISSING)
        yield name, f"{annotation}{'' if default is dataclasses.MISSING else f' = {default}'}"
    for name, member in sorted(vars(cls).items()):
        function = getattr(member, "__func__", member)
        if inspect.isfunction(function) and (not name.startswith("_") or (name == "__init__" and not defaults)):
            kind = type(member).__name__ if isinstance(member, classmethod | staticmethod) else "def"
            yield name, f"{kind} {inspect.signature(function)}"
        elif isinstance(member, property) and not name.startswith("_"):
            yield name, "property"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    SURFACE.write_text(json.dumps(surface(), indent=1) + "\n")
    print(f"written to {PAGE} and {SURFACE}")
