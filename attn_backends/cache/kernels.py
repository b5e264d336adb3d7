"""The cache's kernels for a GPU, one launch each: new keys and values into their slots, fp8, and copies of pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from attn_backends.kernels.launch import Fixed, fixed_numbers, launch, power_of_two, start_kernel, supports_pdl
from attn_backends.kernels.pdl import grid_wait, launch_dependents
from attn_backends.spec import FP8_DTYPES

_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    new, cached, token, page, offset, scale, new_token, new_head, page_stride, offset_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One token's heads, [HEADS, DIM], quantised as `kv_cache.quantise` does."""
    lane = tl.arange(0, BLOCK)
    head, dim, live = lane // DIM, lane % DIM, lane < HEADS * DIM
    value = tl.load(new + token * new_token + head * new_head + dim, mask=live, other=0.0)
    if SCALED:
        value = value.to(tl.float32) / scale
    if LIMIT > 0:  # NaN stays NaN
        value = tl.maximum(value.to(tl.float32), -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        value = tl.minimum(value, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    to = cached + page * page_stride + offset * offset_stride + head * head_stride + dim
    tl.store(to, value.to(cached.dtype.element_ty), mask=live)


class WriteTensors(NamedTuple):
    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor


class WriteScales(NamedTuple):
    k_scale: float
    v_scale: float


class WriteStrides(NamedTuple):
    key_token: int
    key_head: int
    value_token: int
    value_head: int
    key_page: int
    key_offset: int
    key_cache_head: int
    value_page: int
    value_offset: int
    value_cache_head: int


class WriteConstants(NamedTuple):
    PAGE_SIZE: int
    HEADS: int
    KEY_DIM: int
    VALUE_DIM: int
    KEY_BLOCK: int
    VALUE_BLOCK: int
    LIMIT: float
    SCALED: bool
    USE_PDL: bool
    LAUNCH_DEPENDENTS: bool


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["k_scale", "v_scale"], do_not_specialize_on_alignment=["slot_mapping"]
)
def write_kv_kernel(  # type: ignore[no-untyped-def]
    key,  # [num_tokens, HEADS, KEY_DIM], the last dimension contiguous as of all tensors
    value,  # [num_tokens, HEADS, VALUE_DIM]
    key_cache,  # [num_pages, PAGE_SIZE, HEADS, KEY_DIM]
    value_cache,  # [num_pages, PAGE_SIZE, HEADS, VALUE_DIM]
    slot_mapping,  # [num_tokens] i64; -1 is padding
    k_scale,  # f32, a cached key times it is the real one
    v_scale,  # f32, a cached value times it is the real one
    key_token,  # elements from token to token, as all strides
    key_head,
    value_token,
    value_head,
    key_page,
    key_offset,
    key_cache_head,
    value_page,
    value_offset,
    value_cache_head,
    PAGE_SIZE: tl.constexpr,  # slots
    HEADS: tl.constexpr,  # KV heads
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,  # HEADS * KEY_DIM, padded
    VALUE_BLOCK: tl.constexpr,  # HEADS * VALUE_DIM, padded
    LIMIT: tl.constexpr,  # the cache dtype's largest value, where values are clamped to it; else 0
    SCALED: tl.constexpr,  # a scale is not 1
    USE_PDL: tl.constexpr,  # it starts before the kernel in front of it has ended
    LAUNCH_DEPENDENTS: tl.constexpr,  # the next kernel waits for this one by itself
):
    """One program writes a token's keys and values.

    With LAUNCH_DEPENDENTS the next kernel may know what was there before this one.
    """
    if USE_PDL:
        grid_wait()
    if LAUNCH_DEPENDENTS:
        launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        _store(key, key_cache, token, page, offset, k_scale, key_token, key_head, key_page, key_offset,
               key_cache_head, HEADS, KEY_DIM, KEY_BLOCK, LIMIT, SCALED)  # fmt: skip
        _store(value, value_cache, token, page, offset, v_scale, value_token, value_head, value_page, value_offset,
               value_cache_head, HEADS, VALUE_DIM, VALUE_BLOCK, LIMIT, SCALED)  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def quantise_kernel(  # type: ignore[no-untyped-def]
    tensor,  # [num_tokens, HEADS, DIM], the last dimension contiguous
    stored,  # [num_tokens, HEADS, DIM] of 8 bits, contiguous
    token_stride,  # elements
    head_stride,  # elements
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # HEADS * DIM, padded
    LIMIT: tl.constexpr,  # the stored dtype's largest value
):
    """One program quantises a token."""
    token = tl.program_id(0).to(tl.int64)
    _store(tensor, stored, token, token, 0, 1.0, token_stride, head_stride, HEADS * DIM, 0, DIM, HEADS, DIM, BLOCK,
           LIMIT, False)  # fmt: skip


class QuantiseTensors(NamedTuple):
    tensor: torch.Tensor
    stored: torch.Tensor


class QuantiseNumbers(NamedTuple):
    token_stride: int
    head_stride: int
    HEADS: int
    DIM: int
    BLOCK: int
    LIMIT: float


def to_fp8(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`attn_backends.cache.kv_cache.quantise` of [num_tokens, heads, dim] with a scale of 1, in one launch."""
    tensor = tensor if tensor.stride(2) == 1 else tensor.contiguous()
    num_tokens, heads, dim = tensor.shape
    stored = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    numbers = QuantiseNumbers(
        tensor.stride(0), tensor.stride(1), heads, dim, power_of_two(heads * dim), torch.finfo(dtype).max
    )
    launch(quantise_kernel, num_tokens, QuantiseTensors(tensor, stored), (), (numbers,), _WARPS)
    return stored


def launch_write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float,
    v_scale: float,
    next_waits: bool,
) -> None:
    """`attn_backends.cache.kv_cache.write_kv`, in one launch."""
    key, value = (new if new.stride(2) == 1 else new.contiguous() for new in (key, value))
    has_pdl, num_tokens = supports_pdl(key_cache.device), min(key.shape[0], slot_mapping.shape[0])
    use_pdl = has_pdl and num_tokens == 1  # as the engine's kernels in front of it (`engine.models.fused.kernels`)
    tensors = WriteTensors(key, value, key_cache, value_cache, slot_mapping)
    numbers = _write_numbers(
        key.shape[1:], value.shape[2], key_cache.shape[1], key_cache.dtype, key.stride(), value.stride(),
        key_cache.stride(), value_cache.stride(), k_scale != 1.0 or v_scale != 1.0, use_pdl, next_waits and has_pdl,
    )  # fmt: skip
    launch(write_kv_kernel, num_tokens, tensors, WriteScales(float(k_scale), float(v_scale)), numbers, _WARPS,
           use_pdl=use_pdl)  # fmt: skip


@lru_cache(maxsize=256)  # layers and steps are alike
def _write_numbers(
    heads_of_key: tuple[int, int], value_dim: int, page_size: int, dtype: torch.dtype, key: tuple[int, ...],
    value: tuple[int, ...], key_cache: tuple[int, ...], value_cache: tuple[int, ...], scaled: bool, use_pdl: bool,
    launch_dependents: bool,
) -> Fixed:  # fmt: skip
    """What follows from shapes and strides."""
    num_heads, key_dim = heads_of_key
    limit = torch.finfo(dtype).max if dtype in FP8_DTYPES else 0.0
    strides = WriteStrides._make((*key[:2], *value[:2], *key_cache[:3], *value_cache[:3]))
    constants = WriteConstants(
        PAGE_SIZE=page_size, HEADS=num_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        KEY_BLOCK=power_of_two(num_heads * key_dim), VALUE_BLOCK=power_of_two(num_heads * value_dim), LIMIT=limit,
        SCALED=scaled, USE_PDL=use_pdl, LAUNCH_DEPENDENTS=launch_dependents,
    )  # fmt: skip
    return fixed_numbers(write_kv_kernel, strides, constants)


_BLOCK = 1024  # words of four bytes


@triton.jit  # type: ignore[untyped-decorator]
def copy_pages_kernel(  # type: ignore[no-untyped-def]
    addresses,  # [num_tensors] i64
    strides,  # [num_tensors] i64, words from page to page
    sizes,  # [num_tensors] i32, words of a page
    pairs,  # [num_pairs, 2] i64, source and destination page
    BLOCK: tl.constexpr,  # words at a time
):
    """One program copies a page of a tensor."""
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


def launch_copy_pages(tensors: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copies pages in each tensor [num_pages, …] of `can_copy`. No destination may be a source."""
    device = tensors[0].device
    addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=device)
    strides = [tensor.stride(0) * tensor.itemsize // 4 for tensor in tensors]
    sizes = torch.tensor([tensor[0].nbytes // 4 for tensor in tensors], dtype=torch.int32, device=device)
    words, pages = (torch.tensor(each, dtype=torch.int64, device=device) for each in (strides, pairs))
    tables = (addresses, words, sizes, pages)
    start_kernel(copy_pages_kernel, (len(tensors), len(pairs)), *tables, _BLOCK)
