"""What an object holds, however deep: every tensor and every Python number, by a path that can be typed."""

from __future__ import annotations

import enum
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

Number = bool | int | float
_NUMBERS: tuple[type, ...] = (bool, int, float)
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
    return _walk(roots, closed, _NUMBERS)


def tensors_of(roots: Sequence[object], closed: tuple[type, ...] = ()) -> dict[str, torch.Tensor]:
    """The tensors that `walk` finds, by path."""
    return dict(_walk(roots, (*closed, *_NUMBERS), ()))


def _walk(roots: Sequence[object], closed: tuple[type, ...], numbers: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """`walk`, with numbers of these classes. It runs at every replay: a class is looked at once, and nothing is named
    that is not looked into."""
    closed, kinds, seen = (*_CLOSED, *closed), dict[type, _Kind](), set[int]()

    def kind_of(value: object) -> _Kind:
        cls = type(value)
        if cls not in kinds:
            kinds[cls] = _Kind.of(cls, closed, numbers)
        return kinds[cls]

    waiting: list[tuple[str, Any, _Kind]] = []

    def open_up(path: str, named: Iterable[tuple[Any, Any]], is_field: bool = False) -> None:
        found = [
            (f"{path}.{name}" if is_field else f"{path}[{name!r}]", child, kind)
            for name, child in named
            if (kind := kind_of(child)) is not _Kind.CLOSED
        ]
        waiting.extend(reversed(found))

    open_up("persistent", enumerate(roots))
    while waiting:
        path, value, kind = waiting.pop()
        if kind is _Kind.NUMBER:
            yield path, value
        elif id(value) not in seen:
            seen.add(id(value))
            if kind is _Kind.TENSOR:
                yield path, value
            elif kind is _Kind.MAPPING:
                open_up(path, value.items())
            elif kind is _Kind.LIST:
                open_up(path, enumerate(value))
            else:
                open_up(path, _fields(value, kind), is_field=True)


def flat(values: Any) -> Iterator[Any]:
    """The leaves of nested lists and tuples, in order: an operation's arguments or results."""
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from flat(value)
    else:
        yield values


class _Kind(enum.Enum):
    """How objects of a class are looked into."""

    NUMBER, CLOSED, TENSOR, MAPPING, NAMED_TUPLE, LIST, MODULE, OTHER = range(8)

    @staticmethod
    def of(cls: type, closed: tuple[type, ...], numbers: tuple[type, ...]) -> _Kind:
        if issubclass(cls, numbers):
            return _Kind.NUMBER
        if issubclass(cls, (*closed, types.NoneType)):
            return _Kind.CLOSED
        if issubclass(cls, tuple) and hasattr(cls, "_fields"):
            return _Kind.NAMED_TUPLE
        kinds: list[tuple[type, _Kind]] = [
            (torch.Tensor, _Kind.TENSOR), (Mapping, _Kind.MAPPING), (list, _Kind.LIST), (tuple, _Kind.LIST),
            (torch.nn.Module, _Kind.MODULE),
        ]  # fmt: skip
        return next((kind for base, kind in kinds if issubclass(cls, base)), _Kind.OTHER)


def _fields(value: Any, kind: _Kind) -> Iterable[tuple[str, Any]]:
    if kind is _Kind.NAMED_TUPLE:
        return zip(value._fields, value, strict=True)
    held = dict(getattr(value, "__dict__", {}))
    if kind is _Kind.MODULE:  # its tensors and children under the names by which code reads them
        for table in ("_parameters", "_buffers", "_modules"):
            held.update(held.pop(table))
    cls: Any = type(value)
    held.update({name: getattr(value, name) for name in _slots(cls) if hasattr(value, name)})
    return held.items()


@lru_cache(maxsize=512)
def _slots(cls: Any) -> tuple[str, ...]:
    declared = (getattr(base, "__slots__", ()) for base in cls.__mro__)
    return tuple(name for names in declared for name in ((names,) if isinstance(names, str) else names))
