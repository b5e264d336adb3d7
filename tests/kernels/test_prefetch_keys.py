"""Where a decode's first keys are fetched from before the loop asks for them, in Triton's interpreter: prefetches write
nothing, so that no result shows a wrong one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.interpreted import in_own_process, only_interpreted, run_interpreted

triton = pytest.importorskip("triton", reason="needs triton")
import triton.language as tl  # noqa: E402

from attn_backends.kernels.tile_kernels import first_slots, lines_of  # noqa: E402

NUM_KEYS = 16
DTYPES = {torch.bfloat16: 64, torch.float8_e4m3fn: 128, torch.float32: 32}  # columns of a line


@in_own_process
def test_interpreted() -> None:
    run_interpreted(__file__)


@triton.jit
def lines_kernel(  # type: ignore[no-untyped-def]
    at, cached, pages, start, stop, page_stride, slot_stride, PAGE_SIZE: tl.constexpr, NUM_KEYS: tl.constexpr,
    NUM_COLS: tl.constexpr, BLOCK_COLS: tl.constexpr, NUM_LINES: tl.constexpr,
):  # fmt: skip
    page, slot = first_slots(pages, start, stop, PAGE_SIZE, NUM_KEYS)
    lines = lines_of(cached, page, slot, page_stride, slot_stride, NUM_COLS, BLOCK_COLS)
    to = at + tl.arange(0, NUM_KEYS)[:, None] * NUM_LINES + tl.arange(0, NUM_LINES)[None]
    tl.store(to, lines.to(tl.int64) - cached.to(tl.int64))


@only_interpreted
@pytest.mark.parametrize("seed", range(60))
def test_every_line_is_of_the_rows_keys(seed: int) -> None:
    """Random rows, pages, dims and dtypes: pages beyond the row's last one are -1, which nothing may look at."""
    dice = np.random.default_rng(seed)
    dtype = list(DTYPES)[seed % 3]
    page_size, num_cols = int(dice.choice([1, 3, 16, 48, 64])), int(dice.choice([8, 32, 64, 80, 96, 128, 192, 256]))
    slot_stride = num_cols * int(dice.integers(1, 4))
    page_stride = page_size * slot_stride * int(dice.integers(1, 3))
    seq_len = int(dice.integers(1, 200))
    start = int(dice.integers(0, seq_len // NUM_KEYS + 1)) * NUM_KEYS
    stop = int(dice.integers(start, seq_len + 1))
    num_pages = -(-stop // page_size)
    pages = torch.full((num_pages + NUM_KEYS,), -1, dtype=torch.int32)
    pages[:num_pages] = torch.from_numpy(dice.permutation(num_pages + 5)[:num_pages].astype(np.int32))

    block_cols = triton.next_power_of_2(max(16, num_cols))
    num_lines = max(1, block_cols // DTYPES[dtype])
    at = torch.full((NUM_KEYS, num_lines), -1, dtype=torch.int64)
    lines_kernel[(1,)](at, torch.empty(1, dtype=dtype), pages, start, stop, page_stride, slot_stride, page_size,
                       NUM_KEYS, num_cols, block_cols, num_lines)  # fmt: skip

    keys = [
        (int(pages[key // page_size]) * page_stride, key % page_size) for key in range(start, min(stop, start + 16))
    ]
    begins = [page + slot * slot_stride for page, slot in keys] + [0] * (NUM_KEYS - len(keys))
    columns = np.minimum(np.arange(num_lines) * DTYPES[dtype], num_cols - 1)
    assert at.tolist() == [[(begin + int(column)) * dtype.itemsize for column in columns] for begin in begins]
