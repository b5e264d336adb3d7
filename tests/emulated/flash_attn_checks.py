"""What the emulated FlashAttention checks, and refuses as the real kernels do: with a RuntimeError."""

from __future__ import annotations

import torch

HALF = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


def check(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


def check_shape(tensor: torch.Tensor, shape: tuple[int, ...], name: str) -> None:
    check(tuple(tensor.shape) == shape, f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


def check_ints(tensor: torch.Tensor, num: int, name: str) -> None:
    """[num] i32, contiguous."""
    check(tensor.dtype is torch.int32, f"{name} must have dtype int32")
    check(tensor.is_contiguous(), f"{name} must be contiguous")
    check_shape(tensor, (num,), name)


def check_page_table(table: torch.Tensor, num_rows: int) -> None:
    check(table.dtype is torch.int32, "block_table must have dtype torch.int32")
    check(table.stride(-1) == 1, "block_table must have contiguous last dimension")
    check_shape(table, (num_rows, table.shape[1]), "block_table")


def check_inputs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Dtypes, last strides, heads and head dims."""
    check(query.dtype in dtypes, f"FlashAttention only support {' and '.join(str(d)[6:] for d in dtypes)} data type")
    check(key.dtype is query.dtype, "query and key must have the same dtype")
    check(value.dtype is query.dtype, "query and value must have the same dtype")
    for tensor in (query, key, value):
        check(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    heads, kv_heads, dim = query.shape[-2], key.shape[-2], query.shape[-1]
    check(dim <= MAX_HEAD_DIM, f"FlashAttention forward only supports head dimension at most {MAX_HEAD_DIM}")
    check(dim % (16 if query.element_size() == 1 else 8) == 0, "head_size should be a multiple of 8, of 16 in fp8")
    check(heads % kv_heads == 0, "Number of heads in key/value must divide number of heads in query")
    check(key.shape[-1] == dim and value.shape[-1] == dim, "k and v must have the head_size of q")


def check_out(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(out.dtype is dtype, "Output must have the same dtype as inputs")
    check(out.stride(-1) == 1, "Output tensor must have contiguous last dimension")
    check_shape(out, shape, "out")


def check_slopes(slopes: torch.Tensor | None, num_heads: int) -> None:
    if slopes is not None:
        check(slopes.dtype is torch.float32, "ALiBi slopes must have dtype fp32")
        check_shape(slopes, (num_heads,), "alibi_slopes")
