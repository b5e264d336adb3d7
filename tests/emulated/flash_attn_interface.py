"""FlashAttention 3 (`flash_attn_interface`) played on a CPU: its paged function, with schedules.

A schedule is `[num_vectors * round_up(num_rows, 4) + 1]` i32, as in the real one: queries of each row, splits if keys
are split, a vector for causal and windowed calls, a counter. Where the real one has a row's splits, this one has its
keys: a call with a schedule that is too old attends only the keys, and writes only the tokens, of that time.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch

from tests.emulated.flash_attn_blocks import Blocks
from tests.emulated.flash_attn_checks import (
    HALF,
    check,
    check_inputs,
    check_ints,
    check_out,
    check_page_table,
    check_shape,
)
from tests.emulated.flash_attn_kernel import FP8, Rules, attend, own_keys, paged_keys

MAX_ROWS_SPLIT = 992  # above, keys are not split
SPLIT_KEYS = 16  # a split has at least so many; the real ones have hundreds. With few, small tests see old schedules


@dataclass(frozen=True)
class Shape:
    """What a schedule's size follows from."""

    num_rows: int
    max_seqlen_q: int
    max_seqlen_k: int
    head_dim: int
    paged: bool
    causal: bool
    window: tuple[int, int]
    num_splits: int

    @property
    def rounded(self) -> int:
        return -(-self.num_rows // 4) * 4

    @property
    def splits(self) -> bool:
        """Whether keys may be split."""
        most = self.num_splits if self.num_splits > 0 else min(128, -(-self.max_seqlen_k // SPLIT_KEYS))
        return most > 1 and self.num_rows <= MAX_ROWS_SPLIT

    @property
    def masks(self) -> bool:
        """Whether kernels are those for causal or windowed calls, once sizes are looked at."""
        left = -1 if self.window[0] >= self.max_seqlen_k - 1 else self.window[0]
        right = -1 if self.window[1] >= self.max_seqlen_q - 1 else self.window[1]
        causal = self.causal
        if self.max_seqlen_q == 1 and (left, right) == (-1, -1) and (not self.paged or not 64 < self.head_dim <= 128):
            causal = False
        return causal or left >= 0 or right >= 0

    @property
    def size(self) -> int:
        return self.rounded * (1 + self.splits + self.masks) + 1


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,  # [num_rows] i32
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: None = None,
    cache_leftpad: None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """A schedule, i32, made on the device."""
    check(qkv_dtype in (*HALF, FP8), "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    check(num_heads_q % num_heads_kv == 0, "Number of heads in key/value must divide number of heads in query")
    shape = Shape(batch_size, max_seqlen_q, max_seqlen_k, headdim, page_size is not None, causal, window_size,
                  num_splits)  # fmt: skip
    made = cache_seqlens.new_zeros(shape.size)
    made[:batch_size] = max_seqlen_q if cu_seqlens_q is None else cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    if shape.splits:
        made[shape.rounded : shape.rounded + batch_size] = cache_seqlens
    return made


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    page_table: torch.Tensor | None,
    descales: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    rules: Rules,
    scheduler_metadata: torch.Tensor | None,
    num_splits: int,
    blocks: Blocks | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What both builds call. Returns out [num_tokens, num_qo_heads, head_dim] and lse [num_qo_heads, num_tokens]."""
    check_inputs(q, k, v, (*HALF, FP8))
    num_rows, (num_tokens, num_heads, dim) = len(cu_seqlens_q) - 1, q.shape
    check_ints(cu_seqlens_q, num_rows + 1, "cu_seqlens_q")
    if page_table is not None:
        check(cu_seqlens_k is None, "If cu_seqlens_k is passed in, then page table is not supported")
        check(seqused_k is not None, "seqused_k must be provided if page_table is provided")
        assert seqused_k is not None
        check_page_table(page_table, num_rows)
        check_ints(seqused_k, num_rows, "seqused_k")
        keys = paged_keys(k, v, page_table, seqused_k)
    else:
        assert cu_seqlens_k is not None
        check_ints(cu_seqlens_k, num_rows + 1, "cu_seqlens_k")
        keys = own_keys(k, v, cu_seqlens_k)
    out_dtype = torch.bfloat16 if q.dtype is FP8 else q.dtype
    if out is None:
        out = q.new_empty(num_tokens, num_heads, dim, dtype=out_dtype)
    check_out(out, (num_tokens, num_heads, dim), out_dtype)
    query = q.float()
    if q.dtype is FP8:
        for name, descale in zip("qkv", descales, strict=True):
            if descale is not None:
                check_shape(descale, (num_rows, k.shape[-2]), f"{name}_descale")
        q_scales = _of_rows(descales[0], cu_seqlens_q, num_tokens).expand(-1, k.shape[-2], -1)
        query = query * q_scales.repeat_interleave(num_heads // k.shape[-2], 1)
        key = keys.key * _of_rows(descales[1], keys.starts, len(keys.key))
        value = keys.value * _of_rows(descales[2], keys.starts, len(keys.key))
        keys = type(keys)(key, value, keys.starts, keys.lens, True)
    planned, joins_splits = None, False
    if scheduler_metadata is not None:
        shape = Shape(num_rows, max_seqlen_q, max_seqlen_k, dim, page_table is not None, rules.causal, rules.window,
                      num_splits)  # fmt: skip
        check_ints(scheduler_metadata, shape.size, "scheduler_metadata")
        joins_splits = shape.splits
        planned_keys = scheduler_metadata[shape.rounded :][:num_rows] if shape.splits else keys.lens
        planned = (scheduler_metadata[:num_rows], planned_keys)
    made, lse, covered = attend(query, cu_seqlens_q, keys, rules, planned, blocks)
    if joins_splits:  # the kernel that joins them subtracts the largest of their LSEs from each
        lse = lse.masked_fill(lse == math.inf, math.nan)
    out.copy_(torch.where(covered[:, None, None], made.to(out_dtype), out))
    return out, lse.t().contiguous()


def _of_rows(descale: torch.Tensor | None, starts: torch.Tensor, num: int) -> torch.Tensor:
    """A row's scales for each of its tokens or slots: [num, num_kv_heads, 1] f32, or [1, 1, 1]."""
    if descale is None:
        return torch.ones(1, 1, 1, dtype=torch.float32, device=starts.device)
    row = torch.searchsorted(starts[1:].long(), torch.arange(num, device=starts.device), right=True)
    return descale[row.clamp(max=len(descale) - 1)][..., None]


def flash_attn_with_kvcache(
    q: torch.Tensor,  # [num_tokens, num_qo_heads, head_dim]
    k_cache: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim]
    v_cache: torch.Tensor,
    k: None = None,
    v: None = None,
    qv: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Rows of any lengths over pages; allocates what it returns, (out, lse, …) with `return_softmax_lse`."""
    if cache_seqlens is None or page_table is None or cu_seqlens_q is None or max_seqlen_q is None:
        raise NotImplementedError("a cache without pages, or a query without starts, is not emulated")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    rules = Rules(scale, causal, window_size, softcap)
    made = forward(
        q, k_cache, v_cache, None, cu_seqlens_q, None, cache_seqlens, max_seqlen_q,
        page_table.shape[1] * k_cache.shape[1], page_table, (q_descale, k_descale, v_descale), rules,
        scheduler_metadata, num_splits,
    )  # fmt: skip
    return (*made, q.new_empty(0), q.new_empty(0)) if return_softmax_lse else made[0]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: None = None,
    seqused_k: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Rows of any lengths over keys that lie together; (out, lse) with `return_attn_probs`."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    made = forward(
        q, k, v, None, cu_seqlens_q, cu_seqlens_k, None, max_seqlen_q, max_seqlen_k, None,
        (q_descale, k_descale, v_descale), Rules(scale, causal, window_size, softcap), None, num_splits,
    )  # fmt: skip
    return made if return_attn_probs else made[0]


MODULES: dict[str, Any] = {"flash_attn_interface": sys.modules[__name__]}
