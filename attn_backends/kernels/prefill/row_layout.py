"""Keys and values as rows that the tensor memory accelerator can load, and its descriptors of them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_backends.kernels.launch import ALIGNED

_ROW_ALIGNMENT = 16  # bytes, of the tensor memory accelerator


class TiledRows(NamedTuple):
    """Rows as a descriptor has them that loads one head's columns by TMA tiles."""

    shape: list[int]
    strides: list[int]
    head: int  # from head to head, in columns or in heads


class RowLayout(NamedTuple):
    """[(pages,) slots, heads, dim] as rows one slot's stride apart: heads lie within a row, or whole rows apart."""

    steps: tuple[int, ...]  # rows from page to page, and from head to head
    column: int  # from head to head
    num_rows: int
    slot: int  # elements
    width: int  # columns up to the end of the last head: a row may be a part of a longer one

    @property
    def layout(self) -> tuple[list[int], list[int]]:
        """Shape and strides of the rows."""
        return [self.num_rows, self.width], [self.slot, 1]

    def in_tiles(self, head_dim: int, tile_cols: int) -> TiledRows:
        """Rows of columns, of which a head's are whole TMA tiles. Other heads have a dimension of their own: so what
        lies behind a head's last column, which may be another's, or NaN, is read as zeros."""
        if head_dim % tile_cols == 0:
            return TiledRows(*self.layout, self.column)
        num_heads = (self.width - head_dim) // self.column + 1 if self.column else 1
        strides = [self.slot, self.column or self.slot, 1]
        return TiledRows([self.num_rows, num_heads, head_dim], strides, int(self.column > 0))

    @staticmethod
    @lru_cache(maxsize=256)  # a layer's cache lies alike in all steps
    def of(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> RowLayout | None:
        """None: not so, or not in multiples of 16 bytes."""
        *page, slot, head, _ = strides
        if slot <= 0 or any(stride % slot for stride in page) or (slot * itemsize | head * itemsize) % _ROW_ALIGNMENT:
            return None
        if (shape[-2] - 1) * head + shape[-1] > slot and head % slot:
            return None
        last = sum((size - 1) * stride for size, stride in zip(shape[:-1], strides[:-1], strict=True))
        steps, column = (*(stride // slot for stride in page), head // slot), head % slot
        return RowLayout(steps, column, last // slot + 1, slot, (shape[-2] - 1) * column + shape[-1])


def row_layouts(key: torch.Tensor, value: torch.Tensor) -> tuple[RowLayout, RowLayout] | None:
    """The layouts with which the tensor memory accelerator can load blocks of one head's keys and values: one thread
    asks for a block, and no other works out addresses.

    It wants addresses and rows of multiples of 16 bytes. A head's keys are then a run of rows, from the same row on as
    its values.
    """
    if (key.data_ptr() | value.data_ptr()) % _ROW_ALIGNMENT:
        return None
    keys, values = (RowLayout.of(tensor.shape, tensor.stride(), tensor.itemsize) for tensor in (key, value))
    return None if keys is None or values is None or keys.steps != values.steps else (keys, values)


def has_aligned_rows(query: torch.Tensor) -> bool:
    """Whether queries [tokens, heads, dim] can be copied into shared memory as they lie."""
    token, head, _ = query.stride()
    return not (token % ALIGNED or head % ALIGNED or query.data_ptr() % ALIGNED)


def kv_descriptors(key: torch.Tensor, value: torch.Tensor, block_n: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Descriptors of blocks of `block_n` rows of one head, of keys and of values that have a `RowLayout`."""
    layouts = row_layouts(key, value)
    assert layouts is not None
    of_key, of_value = (
        TensorDescriptor(tensor, *layout.layout, [block_n, tensor.shape[-1]])
        for tensor, layout in zip((key, value), layouts, strict=True)
    )
    return of_key, of_value
