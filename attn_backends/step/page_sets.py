"""Which pages each row has, as bits: whether a page would come twice is known without a look at the row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attn_backends.batch.page_table import IntArray

BoolArray = NDArray[np.bool_]
RowArray = NDArray[np.int64]

_BIT = np.left_shift(np.uint8(1), np.arange(8, dtype=np.uint8))


class PageSets:
    """One set of page ids a row; `max_rows * num_pages / 8` bytes. Rows change places without moving bits."""

    def __init__(self, max_rows: int, num_pages: int) -> None:
        width = -(-num_pages // 8)
        self._bits = np.zeros(max_rows * width, np.uint8)
        self._width = width
        self._start = np.arange(max_rows) * width  # row → where its bits are

    def has(self, row: int, pages: IntArray) -> BoolArray:
        """Which of the pages a row has."""
        found: BoolArray = (self._bits[self._start[row] + (pages >> 3)] & _BIT[pages & 7]) != 0
        return found

    def add_each(self, rows: RowArray, pages: IntArray) -> bool:
        """One page each to different rows. If a row has its page already, nothing is added, and False returned."""
        places, bits = self._start[rows] + (pages >> 3), _BIT[pages & 7]
        there = self._bits[places]
        if np.count_nonzero(there & bits):
            return False
        self._bits[places] = there | bits
        return True

    def add_all(self, row: int, pages: IntArray) -> None:
        """Many pages to one row. Pages may share a byte, so each is added by itself."""
        np.bitwise_or.at(self._bits, self._start[row] + (pages >> 3), _BIT[pages & 7])

    def clear(self, row: int) -> None:
        self._bits[self._start[row] : self._start[row] + self._width] = 0

    def clear_all(self) -> None:
        self._bits[:] = 0
        self._start[:] = np.arange(len(self._start)) * self._width

    def swap(self, first: int, second: int) -> None:
        self._start[[first, second]] = self._start[[second, first]]
