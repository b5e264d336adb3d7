"""FlashAttention 4 (`flash_attn.cute.interface` of flash-attn-4 4.0.0b36) played on a CPU, as it is on Hopper.

`MODULES` are the modules that it stands for, the one of versions among them. Its refusals are AssertionErrors, as in
the real one. Pages as long as a tile are copied whole: what is not finite behind a row's end, in its last one, makes
its output NaN. Keys of other pages are copied one by one, some at a time: where a tile is no multiple of these they
overrun it, and everything is NaN here.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from typing import Any

import torch

from tests.emulated.flash_attn_checks import HALF, MAX_HEAD_DIM
from tests.emulated.flash_attn_kernel import FP8, Keys, Rules, attend, own_keys, paged_keys

VERSION = "4.0.0b36"
SINK_DTYPES = (*HALF, torch.float32)
ALIGNMENT = 16  # bytes, of an output's address and strides


def version(distribution_name: str) -> str:
    """`importlib.metadata.version`, where this package is the only one."""
    if distribution_name != "flash-attn-4":
        raise PackageNotFoundError(distribution_name)
    return VERSION


def tile_of(head_dim: int, causal: bool, local: bool) -> int:
    """Keys of a tile."""
    if head_dim <= 64:
        return 128
    if head_dim <= 96:
        return 128 if causal or local else 144
    if head_dim <= 128:
        return 128
    if head_dim <= 192:
        return 96 if local else 112
    return 64 if local else 80


def copied_at_a_time(head_dim: int, head_dim_v: int) -> int:
    """Keys that the 128 threads which copy take in one go, 8 elements each."""
    return 128 * 8 // math.gcd(head_dim, head_dim_v, 64)


def _flash_attn_fwd(
    q: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim]
    k: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim], or [num_keys, num_kv_heads, head_dim]
    v: torch.Tensor,
    qv: None = None,
    cu_seqlens_q: torch.Tensor | None = None,  # [num_rows + 1] i32
    cu_seqlens_k: torch.Tensor | None = None,  # [num_rows + 1] i32
    seqused_q: None = None,
    seqused_k: torch.Tensor | None = None,  # [num_rows] i32
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,  # [num_rows, max_pages] i32
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: torch.Tensor | None = None,  # [num_qo_heads]
    num_splits: int = 1,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None]:
    """`out` is written in place. Lengths are read on the device, the longest ones are hints.

    Returns:
        out [num_tokens, num_qo_heads, head_dim]; lse [num_qo_heads, num_tokens] f32 with `return_lse`, sinks included,
        and nothing else in rows without keys, where it is minus infinity if there are none; three of other calls.
    """
    if cu_seqlens_q is None or (page_table is None) == (cu_seqlens_k is None) or qv is not None or num_splits < 1:
        raise NotImplementedError("dense rows, keys in neither pages nor rows, MLA and chosen splits are not emulated")
    num_rows, (num_tokens, num_heads, dim) = len(cu_seqlens_q) - 1, q.shape
    if page_table is not None:
        assert page_table.dtype is torch.int32, "page_table must be int32"
        assert page_table.stride(-1) == 1, "page_table must be contiguous in the last dimension"
        assert len(page_table) == num_rows, "page_table must have a line a row"
    kv_heads, is_paged = v.shape[-2], page_table is not None
    assert v.dim() == (4 if is_paged else 3), "v must have shape (num_pages, page_size, num_head_kv, head_dim_v)"
    assert k.shape == (*v.shape[:-1], dim), "k must have the shape of v, and the head_dim of q"
    assert seqused_k is None or seqused_k.shape == (num_rows,), "seqused_k must have shape (batch_size,)"
    assert v.dtype in (*HALF, FP8, torch.float8_e5m2), "inputs must be float16, bfloat16, fp8 e4m3fn, or fp8 e5m2"
    assert q.dtype is k.dtype is v.dtype, "q, k, v, and qv must have the same dtype"
    for ints in (cu_seqlens_q, cu_seqlens_k, seqused_k):
        if ints is not None:
            assert ints.dtype is torch.int32, "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k must be int32"
            assert ints.stride(0) == 1, "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k must be contiguous"
    if learnable_sink is not None:
        assert learnable_sink.shape == (num_heads,), "learnable_sink must have shape (num_head,)"
        assert learnable_sink.dtype in SINK_DTYPES, "learnable_sink must be float16, bfloat16, or float32"
    assert num_heads % kv_heads == 0, "num_head must be divisible by num_head_kv"
    alignment = 16 // v.element_size()
    dims = (dim, v.shape[-1])
    assert all(8 <= size <= MAX_HEAD_DIM and size % alignment == 0 for size in dims), (
        f"(head_dim, head_dim_v)={dims} is not supported on SM90. head_dim and head_dim_v must be between 8 and 256 "
        f"and divisible by {alignment}."
    )
    out = q.new_empty(num_tokens, num_heads, v.shape[-1]) if out is None else _checked(out, q, v)
    assert v.dtype in HALF, "FP8 is only supported on SM100 (compute capability 10.x) for FA4 CuTe."
    assert num_splits == 1, "SplitKV not supported on SM 9.0"
    left, right = _window(causal, window_size_left, window_size_right)
    tile, overruns = tile_of(dim, right == 0 and left < 0, left >= 0 or right > 0), False
    if page_table is None:
        assert cu_seqlens_k is not None
        assert cu_seqlens_k.shape == (num_rows + 1,), "cu_seqlens_k must have shape (batch_size + 1,)"
        keys = own_keys(k, v, cu_seqlens_k)
    else:
        page_size, width = k.shape[1], page_table.shape[1]
        assert page_size == tile or all(size % 16 == 0 for size in dims), "Paged KV does not support irregular head dim"
        lens = page_table.new_full((num_rows,), page_size * width) if seqused_k is None else seqused_k
        keys = paged_keys(k, v, page_table, lens)
        overruns = page_size != tile and tile % copied_at_a_time(*dims) != 0
        if page_size == tile:
            keys = _with_tails(keys, page_size)
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    rules = Rules(scale, False, (left, right), softcap or 0.0, sinks=learnable_sink)
    made, lse, _ = attend(q, cu_seqlens_q, keys, rules)
    out.copy_(made.fill_(torch.nan) if overruns else made)
    if learnable_sink is not None:
        lse = torch.where(lse.isneginf(), learnable_sink.float(), lse)
    return out, lse.t().contiguous() if return_lse else None, None, None, None


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The public function, some of whose arguments are not here: `_flash_attn_fwd` without `out`."""
    left, right = window_size
    made = _flash_attn_fwd(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, page_table=page_table, softmax_scale=softmax_scale, causal=causal, softcap=softcap,
        window_size_left=left, window_size_right=right, learnable_sink=learnable_sink, num_splits=num_splits,
        return_lse=return_lse,
    )  # fmt: skip
    return made[:2]


def _checked(out: torch.Tensor, q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    shape = (*q.shape[:-1], v.shape[-1])
    assert out.shape == shape, f"out shape {out.shape} != expected {shape}"
    assert out.dtype is q.dtype, f"out dtype {out.dtype} != expected {q.dtype}"
    assert 0 not in out.stride(), "out must not have broadcast dimensions"
    places = (out.data_ptr(), *(stride * out.element_size() for stride in out.stride()[:-1]))
    is_aligned = out.stride(-1) == 1 and all(place % ALIGNMENT == 0 for place in places)
    assert is_aligned, "out must have aligned strides and a contiguous last dimension"
    return out


def _window(causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    """As `Rules` have it. Two that are below 0 are no limits, one is a limit like any other."""
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    right = 0 if causal else right
    if min(left or 0, right or 0) < 0:
        raise NotImplementedError("a window that ends before a query is not emulated: None is no limit")
    return -1 if left is None else left, -1 if right is None else right


def _with_tails(keys: Keys, page_size: int) -> Keys:
    """With values NaN in rows behind whose end, in the last page, one is not finite."""
    slots = torch.arange(len(keys.value), device=keys.value.device)
    row = torch.searchsorted(keys.starts[1:], slots, right=True)
    slots, last = slots - keys.starts[row], (keys.lens + (page_size - 1)) // page_size * page_size
    is_behind = (slots >= keys.lens[row]) & (slots < last[row])
    is_bad = is_behind & ~keys.value.isfinite().flatten(1).all(1)
    is_hit = torch.zeros_like(keys.lens).index_add(0, row, is_bad.long()) > 0
    return replace(keys, value=keys.value.masked_fill(is_hit[row][:, None, None], torch.nan))


MODULES: dict[str, Any] = dict.fromkeys(("flash_attn.cute.interface", "importlib.metadata"), sys.modules[__name__])
