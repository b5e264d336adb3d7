"""Which kernels a compiled library holds, by the names in its file: nothing is loaded, and no device is asked.

A build can leave out head dims, dtypes and soft caps. What is called all the same raises at best; at worst the device's
context is lost with it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from attn_backends.interface.capabilities import Capabilities

_DTYPES = {
    "half_t": torch.float16,
    "bfloat16_t": torch.bfloat16,
    "float_e4m3_t": torch.float8_e4m3fn,
}
_STRING_TABLE = 3  # SHT_STRTAB
_ELF_64 = b"\x7fELF\x02\x01"  # of 64 bits, the least significant byte first


class Kernel(NamedTuple):
    """A kernel over pages and over keys that lie together, with keys split and whole."""

    dtype: torch.dtype  # of keys
    head_dim: int  # the largest that it takes
    soft_cap: bool


Kernels = frozenset[Kernel]
Reader = Callable[[bytes], Kernels]


def everything(head_dims: Iterable[int]) -> Kernels:
    """The kernels of a build that leaves nothing out."""
    return frozenset(Kernel(*each) for each in product(_DTYPES.values(), head_dims, (False, True)))


def kernels_in(file: Path, read: Reader) -> Kernels:
    """What `read` makes of a shared library's names; none where there is no such file, or no names in it."""
    try:
        return _kernels_in(file, file.stat().st_mtime_ns, read)
    except OSError:
        return frozenset()


@cache
def _kernels_in(file: Path, changed_ns: int, read: Reader) -> Kernels:
    return read(names_in(file))


def names_in(file: Path) -> bytes:
    """The names that an ELF library exports or asks for, each with a zero behind it; b"" for another kind of file."""
    with file.open("rb") as library:
        header = library.read(64)
        if len(header) < 64 or not header.startswith(_ELF_64):
            return b""
        at, size, count, names = *struct.unpack_from("<Q", header, 40), *struct.unpack_from("<3H", header, 58)
        library.seek(at)
        table = library.read(size * count)
        sections = [struct.unpack_from("<IIQQQQ", table, size * nth) for nth in range(count)]
        library.seek(sections[names][4])
        titles = library.read(sections[names][5])
        for title, kind, _, _, start, length in sections:
            if kind == _STRING_TABLE and titles[title:].startswith(b".dynstr\0"):
                library.seek(start)
                return library.read(length)
    return b""


_FA2 = re.compile(
    rb"\d+run_flash_(splitkv_)?fwdI\d+Flash_fwd_kernel_traitsILi(\d+)E[^\0]*?N7cutlass\d+(half_t|bfloat16_t)E"
)


def flash_attention_2(names: bytes) -> Kernels:
    """Kernels of FlashAttention 2, all of which take a soft cap; those that are there split, for pages, and whole."""
    found = {(bool(split), _DTYPES[dtype.decode()], int(dim)) for split, dim, dtype in _FA2.findall(names)}
    both = {each[1:] for each in found if each[0]} & {each[1:] for each in found if not each[0]}
    return frozenset(Kernel(dtype, dim, soft_cap) for dtype, dim in both for soft_cap in (False, True))


_FA3 = re.compile(
    rb"run_mha_fwd_ILi90EN7cutlass\d+(half_t|bfloat16_t|float_e4m3_t)ELi(\d+)ELi(\d+)ELb([01])ELb([01])ELb([01])E"
)


def flash_attention_3(names: bytes) -> Kernels:
    """Kernels of FlashAttention 3 for Hopper whose values are as wide as their keys, those that are there split and
    whole, in pages and not."""
    variants: dict[Kernel, set[tuple[bytes, bytes]]] = {}
    for dtype, dim, dim_vo, split, paged, soft_cap in _FA3.findall(names):
        if dim == dim_vo:
            kernel = Kernel(_DTYPES[dtype.decode()], int(dim), soft_cap == b"1")
            variants.setdefault(kernel, set()).add((split, paged))
    return frozenset(kernel for kernel, found in variants.items() if len(found) == 4)


def narrowed(can: Capabilities, kernels: Kernels, kernel_dim: Callable[[int], int | None]) -> Capabilities:
    """Capabilities without what has no kernel. What is left holds in all combinations.

    Args:
        kernel_dim: the head dim of the kernel that a layer's is run by.
    """
    fp8 = can.cache_dtypes - can.dtypes
    plain = {kernel.dtype for kernel in kernels if not kernel.soft_cap}
    dtypes = can.dtypes & plain

    def has(dtypes: Iterable[torch.dtype], dims: Iterable[int], soft_cap: bool) -> bool:
        asked = (Kernel(dtype, kernel_dim(dim) or 0, soft_cap) for dtype in dtypes for dim in dims)
        return all(kernel in kernels for kernel in asked)

    dims = frozenset(dim for dim in can.head_dims or () if dtypes and has(dtypes, [dim], False))
    soft_cap = can.soft_cap and has(dtypes, dims, True)
    caps = (False, True) if soft_cap else (False,)
    small = frozenset(dtype for dtype in fp8 if all(has([dtype], dims, each) for each in caps))
    return replace(can, dtypes=dtypes, cache_dtypes=dtypes | small, head_dims=dims, soft_cap=soft_cap)
