"""What an object holds, however deep: every tensor and every Python number, by a path that can be typed."""

from __future__ import annotations

import enum
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Number = bool | int | float
# Not looked into: code, and values that have fields but no state.
_CLOSED = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, enum.Enum, str)
_HOST = re.compile(r"_cpu(?!\w)")


@dataclass(frozen=True)
class Place:
    """Where a tensor is and how it lies there: what a captured graph has baked in."""

    address: int  # of its first element
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: int  # address of what it is a view of

    @staticmethod
    def of(tensor: torch.Tensor) -> Place:
        storage = address(tensor)
        if tensor.layout is not torch.strided:
            return Place(storage, tuple(tensor.shape), (), tensor.dtype, storage)
        return Place(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, storage)

    def changes(self, now: Place) -> str:
        """What differs, in words: "shape [4] → [8], address"."""
        named = [
            f"{name} {list(before)} → {list(after)}"
            for name, before, after in (("shape", self.shape, now.shape), ("stride", self.stride, now.stride))
            if before != after
        ]
        named += [f"dtype {self.dtype} → {now.dtype}"] if self.dtype is not now.dtype else []
        named += [f"address {self.address:#x} → {now.address:#x}"] if self.address != now.address else []
        return ", ".join(named)


def address(tensor: torch.Tensor) -> int:
    """Where a tensor's storage starts, 0 if it has no bytes. Views have their base's.

    A tensor without strides (oneDNN's packed weights) shows no storage; a negative number stands for the tensor itself.
    """
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else -id(tensor)


def is_host_path(path: str) -> bool:
    """Whether a name on the path ends in `_cpu`, as tensors that stay on the host are named."""
    return _HOST.search(path) is not None


def walk(roots: Sequence[object], closed: tuple[type, ...] = ()) -> Iterator[tuple[str, torch.Tensor | Number]]:
    """Every tensor and number within `roots`, depth first, an object that is met twice once.

    Looks into mappings, lists, tuples, modules, dataclasses and other objects' `__dict__` and `__slots__`.

    Args:
        roots: named "persistent[0]", "persistent[1]" and so on.
        closed: classes whose objects are not looked into.

    Yields:
        (path, value), such as ("persistent[0].buffers['seq_lens']", a tensor).
    """
    closed, seen = (*_CLOSED, *closed), set[int]()
    waiting: list[tuple[str, Any]] = [(f"persistent[{i}]", root) for i, root in enumerate(roots)][::-1]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, Number):
            yield path, value
        elif id(value) not in seen and not isinstance(value, closed):
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                yield path, value
            elif value is not None:
                waiting += [(path + step, child) for step, child in _children(value)][::-1]


def tensors_of(roots: Sequence[object], closed: tuple[type, ...] = ()) -> dict[str, torch.Tensor]:
    """The tensors that `walk` finds, by path."""
    return {path: value for path, value in walk(roots, closed) if isinstance(value, torch.Tensor)}


def flat(values: Any) -> Iterator[Any]:
    """The leaves of nested lists and tuples, in order: an operation's arguments or results."""
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from flat(value)
    else:
        yield values


def _children(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", child) for name, child in zip(value._fields, value, strict=True)]
    if isinstance(value, (list, tuple)):
        return [(f"[{i}]", child) for i, child in enumerate(value)]
    held = dict(getattr(value, "__dict__", {}))
    if isinstance(value, torch.nn.Module):  # its tensors and children under the names by which code reads them
        for table in ("_parameters", "_buffers", "_modules"):
            held.update(held.pop(table))
    slots = (name for cls in type(value).__mro__ for name in _names(getattr(cls, "__slots__", ())))
    held.update({name: getattr(value, name) for name in slots if hasattr(value, name)})
    return [(f".{name}", child) for name, child in held.items()]


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots
