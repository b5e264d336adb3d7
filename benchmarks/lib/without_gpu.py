"""Kernels of ours for a Hopper GPU where there is none: found as those that are compiled already, and started by a
stand-in of CUDA's driver, which does nothing but note them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from triton.runtime.jit import KernelInterface

POINTER, MAP, NUMBERS = 8, 128, {"i32": 4, "fp32": 4}  # bytes
STREAM = 7


class Launch(NamedTuple):
    """What a driver is asked to start."""

    kernel: str
    grid: tuple[int, int, int]
    warps: int
    starts_early: bool
    stream: int
    arguments: tuple[bytes, ...]


class StandIn:
    """Of CUDA's driver, and of what Triton compiles. `launches` has what was started; a count is enough for timing."""

    def __init__(self, *, keeps: bool) -> None:
        self.keeps, self.count = keeps, 0
        self.launches: list[Launch] = []
        self._compiled: list[Any] = []

    def compile(self, kernel: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The first launch is Triton's, as the compiled kernel is found by it."""
        types = {
            parameter.name: _type_of(parameter, value) for parameter, value in zip(kernel.params, given, strict=True)
        }
        described = [each for each in given if hasattr(each, "base")]
        meta = [{"swizzle": 3, "elem_size": each.base.itemsize, "elem_type": 6, "block_size": [*each.block_shape],
                 "fp4_padded": False} for each in described]  # fmt: skip
        made = SimpleNamespace(
            src=SimpleNamespace(signature=types), function=len(self._compiled) + 1, packed_metadata=0,
            metadata=SimpleNamespace(
                num_warps=options["num_warps"], shared=1024, launch_pdl=options.get("launch_pdl", False),
                target=SimpleNamespace(arch=90), global_scratch_size=0, profile_scratch_size=0,
                launch_cooperative_grid=False, tensordesc_meta=meta,
            ),
        )  # fmt: skip
        made.sizes = [size for kind, each in zip(types.values(), given, strict=True) for size in _sizes(kind, each)]
        made.name, made.run = kernel.__name__, self.run
        self._compiled.append(made)
        self.count += 1
        return made

    def run(self, *given: Any) -> None:
        """By Triton's launcher: a kernel whose arguments are the same for ever."""
        self.count += 1

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:
        sizes = [*self._compiled[function.value - 1].sizes, POINTER, POINTER]
        if index.value >= len(sizes):
            return 1
        size._obj.value = sizes[index.value]
        return 0

    def cuTensorMapEncodeTiled(self, at: Any, *numbers: Any) -> int:
        base, rest = numbers[2].value, numbers[3:]
        told = bytes(8) + bytes(str([_plain(each) for each in rest]), "ascii")  # behind the address
        ctypes.memmove(at.value, told.ljust(MAP)[:MAP], MAP)
        return self.cuTensorMapReplaceAddress(at, ctypes.c_void_p(base))

    def cuTensorMapReplaceAddress(self, at: Any, base: Any) -> int:
        ctypes.memmove(at.value, int(base.value).to_bytes(8, "little"), 8)
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, places: Any, extra: None) -> int:
        self.count += 1
        if self.keeps:
            made, asked = self._compiled[function.value - 1], config._obj
            grid = asked.grid_x, asked.grid_y, asked.grid_z
            read = zip(places, [*made.sizes, POINTER, POINTER], strict=True)
            self.launches.append(Launch(
                made.name, grid, asked.block_x // 32, bool(asked.num_attributes), asked.stream,
                tuple(ctypes.string_at(at, size) for at, size in read),
            ))  # fmt: skip
        return 0


def _type_of(parameter: Any, value: Any) -> str:
    """As Triton's signatures have it."""
    if isinstance(value, torch.Tensor):
        return "*" + str(value.dtype)
    if hasattr(value, "base"):
        return f"tensordesc<{value.block_shape}>"
    if (
        parameter.is_constexpr
        or value is None
        or (value == 1 and type(value) is int and not parameter.do_not_specialize)
    ):
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32"


def _sizes(kind: str, value: Any) -> list[int]:
    """Of a kernel's parameters, for one of Triton's."""
    if kind.startswith("tensordesc"):
        rank = len(value.shape)
        return [MAP, *[4] * rank, *[8] * rank]
    return [] if kind == "constexpr" else [POINTER if kind.startswith("*") else NUMBERS[kind]]


def _plain(number: Any) -> Any:
    return [*number] if hasattr(number, "__len__") else number


@contextmanager
def kernels_without_a_gpu(*, keeps: bool) -> Iterator[StandIn]:
    """All launches go to a stand-in, as if for a Hopper GPU."""
    from attn_backends.cache import kernels, kv_cache
    from attn_backends.kernels import driver, launch, repeats
    from attn_backends.kernels.prefill import launch as prefilling

    stand_in = StandIn(keeps=keeps)
    with ExitStack() as held:
        held.enter_context(patch.object(launch, "_forms", launch._Forms()))
        held.enter_context(patch.object(launch, "_RUN_TRIED", {launch._TRITON}))
        held.enter_context(patch.object(driver, "cuda_driver", lambda: stand_in))
        for module in (launch, repeats):
            held.enter_context(patch.object(module, "current_stream", lambda: STREAM))
        held.enter_context(patch.object(KernelInterface, "__getitem__", lambda kernel, grid: (
            lambda *given, **options: stand_in.compile(kernel, given, options)
        )))  # fmt: skip
        held.enter_context(patch.object(kv_cache, "_has_kernel", lambda *tensors: all(
            tensor.dtype is not torch.float64 for tensor in tensors
        )))  # fmt: skip
        held.enter_context(patch.object(prefilling, "has_hopper_kernels", lambda device: True))
        for module in (prefilling, kernels):
            held.enter_context(patch.object(module, "supports_pdl", lambda device: True))
        yield stand_in
