"""Triton's interpreter without what it repeats to no end, which is most of its time.

What kernels compute is left alone: each function here gives what the one in whose place it stands gives.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from triton import language as tl
from triton.language import semantic
from triton.runtime import interpreter


def quicken() -> None:
    """Puts all of it in place, in this process."""
    interpreter._patch_lang = _once_a_module(interpreter._patch_lang)
    interpreter._patch_attr = _patch_attr
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter._validate_np_data_size = _fits
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # it works out whether integers overflow and, but for `debug`, drops the answer
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    tl.tensor.__init__ = _make_tensor
    tl.block_type.__init__ = _make_type
    semantic.TritonSemantic.broadcast_impl_value = _broadcast


def _once_a_module(put: Callable[..., object]) -> Callable[..., Any]:
    """It puts its functions in the place of the language's at each call of a device function: once a module is enough
    where all is interpreted."""
    done: set[str] = set()

    def put_once(function: Callable[..., object]) -> Any:
        if function.__module__ not in done:
            done.add(function.__module__)
            put(function)
        return interpreter._LangPatchScope()  # nothing to put back

    return put_once


def _patch_attr(obj: object, name: str, member: Any, builder: object, scope: Any) -> None:
    """Calls the language's function itself, without the one around it that looks whether a kernel calls."""
    if getattr(getattr(member, "__code__", None), "co_qualname", "") == "builtin.<locals>.wrapper":
        member = member.__wrapped__

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, call)


def _by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A type's numpy dtype, from a table that is made once."""
    found: dict[str, Any] = {}

    def of_type(type: Any) -> Any:
        name = type.name
        if name not in found:
            found[name] = find(type)
        return found[name]

    return of_type


def _fits(array: Any, type: Any) -> bool:
    """Whether a numpy array is as narrow as a type."""
    return isinstance(type, tl.pointer_type) or array.itemsize * 8 <= max(8, type.primitive_bitwidth)


@functools.cache
def _shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


_SCALAR = _shape_of(())


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensor if type.is_block() else _SCALAR


_make_checked_type = tl.block_type.__init__
_types: dict[object, tuple[Any, ...]] = {}
_shapes: dict[tuple[int, ...], Any] = {}  # one object for all types of a shape


def _make_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = vars(shape).get("sizes") if type(shape) is tl.tuple else None
    if sizes is None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
    key = (element_ty.name, sizes)
    if key not in _types:
        _make_checked_type(self, element_ty, shape)
        if sizes not in _shapes:
            _shapes[sizes] = self.shape
            self.shape.sizes = sizes
        _types[key] = _shapes[sizes], self.numel, self.name, _shape_of(sizes)
    self.element_ty = element_ty
    self.shape, self.numel, self.name, self.of_tensor = _types[key]


_broadcast_any = semantic.TritonSemantic.broadcast_impl_value


def _broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Nothing to do for two of one shape, which most are."""
    one, other = lhs.type, rhs.type
    if one.is_block() and other.is_block() and one.shape is other.shape:
        return lhs, rhs
    return _broadcast_any(self, lhs, rhs)  # type: ignore[no-any-return]
