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
    interpreter.TensorHandle.__init__ = _make_handle
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # it works out whether integers overflow and, but for `debug`, drops the answer
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    tl.tensor.__init__ = _make_tensor
    tl.block_type.__init__ = _make_type
    tl.core._unwrap_if_constexpr = _unwrap
    tl.dtype.__eq__ = _equal
    semantic.TritonSemantic.broadcast_impl_value = _broadcast
    semantic.TritonSemantic.binary_op_type_checking_impl = _alike


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
    name = type.name
    if name not in _widths:
        _widths[name] = 1 << 10 if isinstance(type, tl.pointer_type) else max(8, type.primitive_bitwidth)
    return bool(array.itemsize * 8 <= _widths[name])


_widths: dict[str, int] = {}


def _make_handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    self.data, self.dtype = data, dtype
    self.attr = {} if attr is None else attr
    if not _fits(data, dtype):
        self.__post_init__()  # an error


_unwrap_any = tl.core._unwrap_if_constexpr
_AS_THEY_ARE = frozenset({tl.tensor, int, bool, float, str, type(None), tl.dtype, tl.block_type, tl.pointer_type})


def _unwrap(value: Any) -> Any:
    """Asks what a value is once, not for each of three things that hold others."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    return value.value if kind is tl.constexpr else _unwrap_any(value)


_equal_any = tl.dtype.__eq__


def _equal(self: Any, other: Any) -> bool:
    if self is other:
        return True
    return bool(self.name == other.name if type(other) is tl.dtype else _equal_any(self, other))


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


_alike_any = semantic.TritonSemantic.binary_op_type_checking_impl
_NUMBERS = frozenset({"int1", "int32", "int64", "fp32"})  # types that stay what they are beside themselves
_INTEGERS = frozenset({"int32", "int64"})  # that are added to pointers as they are
_WITH = {"int32": frozenset({int}), "int64": frozenset({int}), "fp32": frozenset({int, float})}  # and beside numbers


def _alike(
    self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True, div_or_mod: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Two operands in the type that an operation has: nothing to convert where both have it, and a number gets it."""
    if type(lhs) is tl.tensor:
        name = lhs.dtype.name
        if type(rhs) is tl.tensor:
            other = rhs.dtype.name
            if name in _NUMBERS and name == other:
                return self.broadcast_impl_value(lhs, rhs)  # type: ignore[no-any-return]
            if allow_lhs_ptr and other in _INTEGERS and type(lhs.dtype) is tl.pointer_type:
                return self.broadcast_impl_value(lhs, rhs)  # type: ignore[no-any-return]
        elif arithmetic_check and _takes(name, rhs):
            return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, dtype=lhs.dtype))  # type: ignore[no-any-return]
    elif type(rhs) is tl.tensor and arithmetic_check and _takes(rhs.dtype.name, lhs):
        return self.broadcast_impl_value(self.scalar_constant(lhs, dtype=rhs.dtype), rhs)  # type: ignore[no-any-return]
    return _alike_any(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)  # type: ignore[no-any-return]


def _takes(name: str, number: Any) -> bool:
    """Whether a number beside a tensor has the tensor's type, and fits into it."""
    kind = type(number)
    return name in _WITH and kind in _WITH[name] and (kind is float or -(1 << 31) <= number < 1 << 31)


_broadcast_any = semantic.TritonSemantic.broadcast_impl_value


def _broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Nothing to do for two of one shape, or for two scalars, which most are."""
    one, other = lhs.type, rhs.type
    if not one.is_block():
        return (_filled(self, lhs, other), rhs) if other.is_block() else (lhs, rhs)
    if not other.is_block():
        return lhs, _filled(self, rhs, one)
    if one.shape is other.shape:
        return lhs, rhs
    sizes, others = one.shape.sizes, other.shape.sizes
    if len(sizes) != len(others) or not all(a == b or 1 in (a, b) for a, b in zip(sizes, others, strict=True)):
        return _broadcast_any(self, lhs, rhs)  # type: ignore[no-any-return]
    shape = [max(pair) for pair in zip(sizes, others, strict=True)]
    return _spread(self, lhs, sizes, shape), _spread(self, rhs, others, shape)


def _filled(self: Any, scalar: Any, block: Any) -> Any:
    """A block that is the scalar everywhere."""
    made = block.with_element_ty(scalar.dtype)
    return tl.tensor(self.builder.create_splat(made, scalar.handle), made)


def _spread(self: Any, tensor: Any, sizes: tuple[int, ...], shape: list[int]) -> Any:
    """A block along dimensions in which it has one element and the shape has more."""
    if sizes == tuple(shape):
        return tensor
    return tl.tensor(self.builder.create_broadcast(tensor.handle, shape), tl.block_type(tensor.dtype, shape))
