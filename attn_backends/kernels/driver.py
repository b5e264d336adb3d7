"""Kernels that Triton compiled, launched by CUDA's driver itself.

Triton's launcher takes every argument out of a Python object at every launch, and makes descriptors of the tensor
memory accelerator anew. Here arguments stay where the driver reads them, and a launch writes those that differ. What a
kernel takes is asked of the driver too (`cuFuncGetParamInfo`): where that is not what Triton's signature says, or the
driver is too old to say, Triton launches by itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

_BYTES = {"i1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "fp32": 4, "f32": 4}
_FLOATS = ("fp32", "f32")
_MAP_BYTES = _MAP_ALIGNMENT = 128  # CUtensorMap
_SCRATCH = 2  # addresses behind a kernel's own parameters, of memory that ours do not ask for
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_L2_PROMOTION_128B, _NO_INTERLEAVE, _ZEROS_OUTSIDE = 2, 0, 0
_MENDED_SINCE = 100  # compute capability times 10: a descriptor of few bytes is mended by Triton, for a driver's fault
# Triton's numbers of data types, where the driver's are others.
_HOST_DTYPES = {8: 10, 9: 8, 10: 9}


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint64),
                ("rest", ctypes.c_char * 56))  # fmt: skip


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "smem")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint32),
    )  # fmt: skip


@cache
def cuda_driver() -> Any:
    """The driver's library; None where there is none, or one that is too old."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name in ("cuLaunchKernelEx", "cuFuncGetParamInfo", "cuTensorMapEncodeTiled", "cuTensorMapReplaceAddress"):
            getattr(library, name)
    except (OSError, AttributeError):
        return None
    return library


def prepare_launch(
    compiled: Any, descriptors: Sequence[Any], tensors: Sequence[Any], varying: Sequence[float], numbers: Sequence[Any]
) -> PreparedLaunch | None:  # fmt: skip
    """A launch of what Triton compiled for arguments like these. None where that is Triton's to launch: see this
    module."""
    driver = cuda_driver()
    if driver is None:
        return None
    metadata, types = compiled.metadata, [*compiled.src.signature.values()]
    is_plain = not (metadata.global_scratch_size or metadata.profile_scratch_size or metadata.launch_cooperative_grid)
    if not is_plain or getattr(metadata, "num_ctas", 1) != 1:
        return None
    if descriptors and (metadata.target.arch >= _MENDED_SINCE or not all(map(_is_plain, descriptors))):
        return None
    described, types = types[: len(descriptors)], types[len(descriptors) :]
    pointers, rest = types[: len(tensors)], types[len(tensors) :]
    maps = [kind for kind in described if kind != "constexpr"]
    if not all(kind.startswith("tensordesc") for kind in maps) or len(maps) != len(_described(metadata)):
        return None
    if not all(kind.startswith("*") for kind in pointers) or not {*rest} <= {*_BYTES, "constexpr"}:
        return None
    if len(rest) != len(varying) + len(numbers) or "constexpr" in rest[: len(varying)]:
        return None
    made = PreparedLaunch(driver, compiled, [*zip(described, descriptors, strict=True)], len(tensors),
                          [*zip(rest, (*varying, *numbers), strict=True)], len(varying))  # fmt: skip
    return made if made.sizes == _param_sizes(driver, compiled.function, len(made.sizes) + 1) else None


def _described(metadata: Any) -> Sequence[dict[str, Any]]:
    """How a kernel's descriptors of the tensor memory accelerator are made."""
    return getattr(metadata, "tensordesc_meta", None) or ()


def _is_plain(descriptor: Any) -> bool:
    """Whether zeros are outside of what a descriptor is of, and numbers stay as they are."""
    if descriptor is None:
        return True
    return getattr(descriptor, "padding", "zero") == "zero" and not getattr(descriptor, "round_f32_to_tf32", False)


def _param_sizes(driver: Any, function: int, most: int) -> list[int]:
    """Bytes of each parameter of a kernel, of so many at most."""
    offset, size, sizes = ctypes.c_size_t(), ctypes.c_size_t(), []
    for i in range(most):
        to = ctypes.byref(offset), ctypes.byref(size)
        if driver.cuFuncGetParamInfo(ctypes.c_void_p(function), ctypes.c_size_t(i), *to):
            break
        sizes.append(size.value)
    return sizes


class PreparedLaunch:
    """A compiled kernel, and room for its arguments. One thread's: another would write its own into the same room."""

    def __init__(
        self, driver: Any, compiled: Any, described: list[tuple[str, Any]], num_tensors: int,
        numbers: list[tuple[str, Any]], num_varying: int,
    ) -> None:  # fmt: skip
        """Args: described, numbers: of each, as Triton's signature has it, its kind and one that it can have; of the
        numbers those in front vary."""
        self._driver, self._launch = driver, driver.cuLaunchKernelEx
        self._compiled = compiled  # whose code is unloaded once nothing has it
        self._function = ctypes.c_void_p(compiled.function)
        self._num_tensors, self._stop = num_tensors, num_tensors + num_varying
        self._floats = [i for i, (kind, _) in enumerate(numbers[:num_varying]) if kind in _FLOATS]
        metadata = compiled.metadata
        of_maps = iter(_described(metadata))
        self._maps = [None if kind == "constexpr" else _Map(driver, next(of_maps), len(descriptor.shape))
                      for kind, descriptor in described]  # fmt: skip
        # Tensors, numbers, scratch: a word each.
        count = num_tensors + len(numbers)
        self._words = (ctypes.c_int64 * (count + _SCRATCH))()
        words = ctypes.addressof(self._words)
        taken = [(i, 8) for i in range(num_tensors)]
        for i, (kind, value) in enumerate(numbers, num_tensors):
            if kind != "constexpr":
                self._words[i] = float_bits(value) if kind in _FLOATS else int(value)
                taken.append((i, _BYTES[kind]))
        taken += [(count + i, 8) for i in range(_SCRATCH)]
        maps = [each for each in self._maps if each is not None]
        self.sizes = [*(size for each in maps for size in each.sizes), *(size for _, size in taken)]
        addresses = [*(at for each in maps for at in each.addresses), *(words + 8 * i for i, _ in taken)]
        self._parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        self._attribute = _Attribute(_PROGRAMMATIC_SERIALIZATION, 0, 1, b"")
        self._config = _Config(
            1, 1, 1, 32 * metadata.num_warps, 1, 1, metadata.shared, None, ctypes.addressof(self._attribute),
            int(bool(metadata.launch_pdl)),
        )  # fmt: skip
        self._by_reference = ctypes.byref(self._config)

    def start(
        self, grid: tuple[int, ...], stream: int, addresses: list[int], varying: list[int],
        descriptors: Sequence[Any], bases: Sequence[int],
    ) -> None:  # fmt: skip
        """Launch, on the thread's current context.

        Args:
            grid: programs; none is started if one of these is 0.
            addresses: of the tensors.
            varying: of `as_words`.
            descriptors, bases: the descriptors, or None, and the addresses of what they are of.

        Raises:
            RuntimeError: by the driver.
        """
        config, words = self._config, self._words
        config.grid_x, config.grid_y, config.grid_z = grid
        config.stream = stream
        words[: self._num_tensors] = addresses  # type: ignore[assignment]
        words[self._num_tensors : self._stop] = varying  # type: ignore[assignment]
        for tensor_map, descriptor, base in zip(self._maps, descriptors, bases, strict=True):
            if tensor_map is not None:
                tensor_map.describe(descriptor, base)
        if grid[0] and grid[1] and grid[2]:
            _check(self._driver, self._launch(self._by_reference, self._function, self._parameters, None))

    def as_words(self, varying: Sequence[float]) -> list[int]:
        """What varies from batch to batch, as it lies in the kernel's room."""
        words = [*varying]
        for i in self._floats:
            words[i] = float_bits(words[i])
        return [*map(int, words)]


class _Map:
    """A descriptor of the tensor memory accelerator, as a kernel takes it: the driver's form, shape and strides."""

    def __init__(self, driver: Any, meta: dict[str, Any], num_dims: int) -> None:
        self._driver, self._meta, self._num_dims = driver, meta, num_dims
        self._room = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        start = ctypes.addressof(self._room)
        self._at = ctypes.c_void_p(start + -start % _MAP_ALIGNMENT)
        self._words = (ctypes.c_int64 * (2 * num_dims))()
        words = ctypes.addressof(self._words)
        self.addresses = [self._at.value or 0, *(words + 8 * i for i in range(2 * num_dims))]
        self.sizes = [_MAP_BYTES, *[4] * num_dims, *[8] * num_dims]
        self._shape: Any = None
        self._strides: Any = None
        self._base = 0

    def describe(self, descriptor: Any, base: int) -> None:
        if descriptor.shape != self._shape or descriptor.strides != self._strides:
            self._encode(descriptor, base)
        elif base != self._base:
            _check(self._driver, self._driver.cuTensorMapReplaceAddress(self._at, ctypes.c_void_p(base)))
        self._base = base

    def _encode(self, descriptor: Any, base: int) -> None:
        """Write the driver's form, in which the last dimension is the first, and has no stride."""
        shape, strides, meta = [*descriptor.shape], [*descriptor.strides], self._meta
        count, size = self._num_dims, meta["elem_size"]
        self._shape = None  # in case the driver refuses
        self._words[:] = [*shape, *strides]
        of_64, of_32 = ctypes.c_uint64 * count, ctypes.c_uint32 * count
        steps = [size * stride for stride in strides[-2::-1]]
        _check(self._driver, self._driver.cuTensorMapEncodeTiled(
            self._at, _HOST_DTYPES.get(meta["elem_type"], meta["elem_type"]), count, ctypes.c_void_p(base),
            of_64(*shape[::-1]), of_64(*steps), of_32(*meta["block_size"][::-1]), of_32(*[1] * count), _NO_INTERLEAVE,
            meta["swizzle"], _L2_PROMOTION_128B, _ZEROS_OUTSIDE,
        ))  # fmt: skip
        self._shape, self._strides = shape, strides


def float_bits(value: float) -> int:
    """A number as float32, by its bits. One that is too large is infinite."""
    return ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value


def _check(driver: Any, result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA's driver refused a launch: {(text.value or b'unknown error').decode()} ({result})")
