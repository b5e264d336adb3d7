"""Metadata as a flat dict and back: what a driver sends its workers, every tensor under a name of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any


@dataclass(frozen=True)
class Node:
    """What stands in the dict for a value with parts, which follow under `name.part`."""

    kind: type
    parts: tuple[str, ...]


def flatten(value: object, skip_fields: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass by name, those of dataclasses, tuples and dicts in them by dotted names.

    Values are the object's own: no tensor is copied. `skip_fields` are left out, with all their parts.
    """
    flat: dict[str, Any] = {}
    for name, part in _parts(value).items():
        if name not in skip_fields:
            _put(flat, name, part)
    return flat


def rebuild(flat: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The values that `flatten` took apart, of so many names."""
    return {name: _get(flat, name) for name in names}


def _put(flat: dict[str, Any], name: str, value: object) -> None:
    if not (isinstance(value, (tuple, dict)) or (is_dataclass(value) and not isinstance(value, type))):
        flat[name] = value
        return
    parts = _parts(value)
    flat[name] = Node(type(value), tuple(parts))
    for part, inner in parts.items():
        _put(flat, f"{name}.{part}", inner)


def _get(flat: Mapping[str, Any], name: str) -> Any:
    value = flat[name]
    if not isinstance(value, Node):
        return value
    parts = {part: _get(flat, f"{name}.{part}") for part in value.parts}
    if issubclass(value.kind, dict):
        return parts
    if issubclass(value.kind, tuple):
        return value.kind(*parts.values()) if hasattr(value.kind, "_fields") else tuple(parts.values())
    return value.kind(**parts)


def _parts(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, tuple):
        return {str(number): part for number, part in enumerate(value)}
    return {field.name: getattr(value, field.name) for field in fields(value)}
