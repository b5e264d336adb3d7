"""Descriptors that are checked once for all tensors that lie alike, and are what Triton makes of each."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

hopper = pytest.importorskip("attn_backends.kernels.hopper", reason="needs Triton's Gluon")


@pytest.mark.parametrize("seed", range(20))
def test_a_descriptor_is_what_triton_makes(seed: int) -> None:
    """Of rows and columns, and of rows, heads and columns; of two tensors, the second one without a check."""
    dice = Random(seed)
    dtype, rows = dice.choice((torch.float16, torch.bfloat16)), 2 ** dice.randrange(8)
    shape, strides = [dice.randrange(1, 999), 64 * dice.randrange(1, 5)], [8 * dice.randrange(32, 99), 1]
    more: dict[str, Any] = {"block_shape": [rows, 64], "layout": hopper.BLOCK_LAYOUT}
    if dice.random() < 0.5:
        shape.insert(1, dice.randrange(1, 9))
        strides.insert(1, 8 * dice.randrange(8, 30))
        more = {"block_shape": [rows, 1, 64], "layout": hopper.HEAD_LAYOUT}
    for _ in range(2):
        tensor = torch.empty(64, dtype=dtype)
        made = hopper.tma_descriptor(shape, strides, tensor, rows)
        assert vars(made) == vars(hopper.TensorDescriptor(tensor, shape, strides, **more))
        assert made.base is tensor


def test_what_no_descriptor_can_be_made_of_is_refused() -> None:
    tensor = torch.empty(64, dtype=torch.float16)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"begins 2 bytes behind a multiple of 16.*allocate it by itself"):
            hopper.tma_descriptor([4, 64], [64, 1], tensor[1:], 4)
        with pytest.raises(AssertionError, match="strides must be 16-byte aligned"):
            hopper.tma_descriptor([4, 64], [63, 1], tensor, 4)
