"""Pages copied within many cache tensors, in one launch on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from attn_backends.triton_launch import start_kernel

_BLOCK = 1024  # words of four bytes


@triton.jit  # type: ignore[untyped-decorator]
def copy_pages_kernel(addresses, strides, sizes, pairs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program a tensor and pair. Addresses [n] i64; of its pages strides [n] i64 and sizes [n] i32, in words."""
    tensor, pair = tl.program_id(0), tl.program_id(1)
    base = tl.load(addresses + tensor).to(tl.pointer_type(tl.int32))
    stride, size = tl.load(strides + tensor), tl.load(sizes + tensor)
    source, destination = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        words = tl.load(base + source * stride + at, mask=at < size)
        tl.store(base + destination * stride + at, words, mask=at < size)


def can_copy(tensor: torch.Tensor) -> bool:
    """Whether each of its pages is one run of whole words."""
    dense = 1
    for stride, size in sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True)):
        if size > 1 and stride != dense:
            return False
        dense *= size
    return not (tensor[0].nbytes % 4 or tensor.stride(0) * tensor.itemsize % 4 or tensor.data_ptr() % 4)


def copy_pages(tensors: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """In each tensor [num_pages, …] of `can_copy`, page to page. No destination may be a source."""
    device = tensors[0].device
    addresses = torch.tensor([tensor.data_ptr() for tensor in tensors])
    strides = torch.tensor([tensor.stride(0) * tensor.itemsize // 4 for tensor in tensors])
    sizes = torch.tensor([tensor[0].nbytes // 4 for tensor in tensors], dtype=torch.int32)
    told = (each.to(device) for each in (addresses, strides, sizes, torch.tensor(pairs)))
    start_kernel(copy_pages_kernel, (len(tensors), len(pairs)), *told, _BLOCK)
