"""The kernels in C of this folder, and what they are called with: a step's tensors and constants, as one struct."""

from __future__ import annotations

import ctypes
import logging
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from attn_backends.cache.kv_cache import KVCache
from attn_backends.kernels.c_compiler import CompileError, load
from attn_backends.spec import AttentionSpec, AttentionType

logger = logging.getLogger(__name__)

LANES = 16  # head dims are multiples of it

DTYPES = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}
# `struct step` of paged.h: five views of an address and three strides, addresses, integers, floats.
_step = struct.Struct("P3q" * 5 + "9P10q4d")
_REFUSED = {  # by what kernels return in place of their number of threads
    0: (MemoryError, "no memory for the pieces of long rows"),
    -1: (IndexError, "slot_mapping has a slot behind the cache's last; nothing was written: give slots of its pages"),
    -2: (
        IndexError,
        "page_table has a page that the cache does not, or fewer than seq_lens needs; nothing was written",
    ),
}


@dataclass(frozen=True)
class PagedRows:
    """The rows of a step, as a kernel reads them: row i's pages are `pages[first_pages[i]:]`."""

    pages: torch.Tensor  # [n] i32
    first_pages: torch.Tensor  # [num_rows] i64
    seq_lens: torch.Tensor  # [num_rows] i32, new tokens included; 0 for padding, whose output is zero
    first_key: int = 0  # keys before it are left out
    query_starts: torch.Tensor | None = None  # [num_rows + 1] i32; None: one token a row

    @classmethod
    def of(
        cls,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        first_key: int = 0,
        query_starts: torch.Tensor | None = None,
    ) -> PagedRows:
        """The rows of a dense table [num_rows, max_pages] i32, without a copy where each row lies in one piece. Rows
        may be the same one, a stride of 0 apart."""
        if page_table.stride(1) != 1:
            page_table = page_table.contiguous()
        (num_rows, num_pages), (stride, _) = page_table.shape, page_table.stride()
        pages = page_table.as_strided(((num_rows - 1) * stride + num_pages,), (1,))
        return cls(pages, torch.arange(num_rows, device="cpu") * stride, seq_lens, first_key, query_starts)

    def first(self, num_rows: int) -> PagedRows:
        return replace(self, first_pages=self.first_pages[:num_rows], seq_lens=self.seq_lens[:num_rows])


class Compiled(NamedTuple):
    """A kernel for a shape of layer."""

    run: Callable[[Any], int]
    library: ctypes.CDLL
    into: Any = None  # an operator of torch that writes into a given output; returns the number of threads


class PagedKernel(ABC):
    """A kernel for layers of one shape, with one layer's constants: cached self-attention, in one dtype of three.

    Args:
        sinks: [num_qo_heads] float, as the spec says.
        k_scale, v_scale: a cached value times its scale is the real one.
    """

    def __init__(
        self, compiled: Compiled, spec: AttentionSpec, sinks: torch.Tensor | None, k_scale: float, v_scale: float
    ) -> None:
        self.run, self.into = compiled.run, compiled.into
        self.causal = spec.causal
        tensors = (
            torch.as_tensor(() if each is None else each, dtype=torch.float32, device="cpu")
            for each in (sinks, spec.alibi_slopes)
        )
        numbers = (spec.window_left, spec.chunk_size or 0, spec.scale, spec.logits_soft_cap or 0.0, k_scale, v_scale)
        self.constants: tuple[Any, ...] = (*tensors, *numbers)  # in the order in which `into` takes them

    @staticmethod
    @abstractmethod
    def compiled(spec: AttentionSpec) -> Compiled | None:
        """The kernel for layers of such a shape, compiled at the first question; None where there is none."""

    @classmethod
    def serves(cls, spec: AttentionSpec, device: torch.device) -> bool:
        """Whether there is a kernel for such a layer. Compiles it at the first question; logs why there is none."""
        whole = not any(dim % LANES for dim in (spec.head_dim, spec.head_dim_vo))
        alike = spec.dtype in DTYPES and spec.cache_dtype is spec.dtype
        written_for = device.type == "cpu" and spec.attention_type is AttentionType.DECODER and whole and alike
        return written_for and cls.compiled(spec) is not None

    @classmethod
    def of(
        cls, spec: AttentionSpec, device: torch.device, sinks: torch.Tensor | None, k_scale: float, v_scale: float
    ) -> Self | None:
        compiled = cls.compiled(spec) if cls.serves(spec, device) else None
        return None if compiled is None else cls(compiled, spec, sinks, k_scale, v_scale)

    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim]
        key: torch.Tensor | None,  # [num_new, num_kv_heads, head_dim], written first; None: nothing to write
        value: torch.Tensor | None,
        kv_cache: KVCache,
        slots: torch.Tensor,  # [num_new] i64; -1 is not written
        rows: PagedRows,  # tokens outside of them are left alone
        output: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim_vo]
        lse: torch.Tensor | None = None,  # [num_tokens, num_qo_heads] f32, contiguous; natural log, sinks included
    ) -> int:
        """Write the new tokens of a step and attend its rows; returns the number of threads that did.

        Raises:
            IndexError: a slot, or a page that some query sees, is not the cache's. Nothing is written.
        """
        whole = lse is None and not rows.first_key and self.causal and output.is_contiguous()
        if key is None or value is None:
            whole, key, value, slots = False, query, query, slots[:0]
        query, key, value = readable(query, key, value)
        if whole and self.into is not None:
            of_rows = (rows.pages, rows.first_pages, rows.seq_lens)
            return _checked(self.into(query, key, value, *kv_cache, slots, *of_rows, *self.constants, output))
        out = output.contiguous()
        sinks, slopes, window_left, chunk_size, *floats = self.constants
        packed = _step.pack(
            *_view(query), *_view(key), *_view(value), *_view(kv_cache.key), *_view(kv_cache.value), out.data_ptr(),
            0 if lse is None else lse.data_ptr(), slots.data_ptr(), rows.pages.data_ptr(), rows.first_pages.data_ptr(),
            rows.seq_lens.data_ptr(), 0 if rows.query_starts is None else rows.query_starts.data_ptr(),
            sinks.data_ptr(), slopes.data_ptr(), len(slots), len(rows.seq_lens), kv_cache.key.shape[2],
            kv_cache.key.shape[1], len(kv_cache.key), len(rows.pages), rows.first_key, window_left, chunk_size,
            self.causal, *floats,
        )  # fmt: skip
        num_threads = _checked(self.run(packed))
        if out is not output:
            output.copy_(out)
        return num_threads


def compile_kernel(source: Path, defines: Mapping[str, Any], instead: str) -> Compiled | None:
    """A source's function of its own name; logs that `instead` is what runs where it cannot be compiled."""
    try:
        library = load(source, defines)
    except CompileError as error:
        logger.warning("%s in plain torch, which is slower, as its kernel cannot be compiled: %s", instead, error)
        return None
    run = getattr(library, source.stem)
    run.argtypes = (ctypes.c_char_p,)
    return Compiled(run, library)


def readable(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with each head in one piece."""
    return (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)


def _checked(num_threads: int) -> int:
    if num_threads < 1:
        error, message = _REFUSED[num_threads]
        raise error(message)
    return num_threads


def _view(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.data_ptr(), *tensor.stride()[:3]
