"""What both generations of the emulated FlashMLA share: schedule, checks, and attention, without reading the device.

Shapes, dtypes and refusals are the real ones (`csrc/api/dense_decode.h`). Which blocks a part has differs from them, as
nothing outside the kernel may know it. A schedule that was made for other lengths gives NaN everywhere: really it gives
anything.
"""

from __future__ import annotations

import math

import torch

from tests.emulated.flashinfer_kernel import EMPTY_LSE, LOG2E, Rows, Rules, attend, gather_pages

NUM_SMS = 132  # of an H200
PAGE_SIZE, HEAD_DIM, HEAD_DIM_V = 64, 576, 512
TILE_ROWS = 64  # queries times heads that one block takes
OVERHEAD_BLOCKS = 5  # that beginning a row costs
SCHEDULE_INTS = 8  # of a part: first row and block, last row and block, first split; three unused

Schedule = tuple[torch.Tensor, torch.Tensor]  # [num_parts, 8] i32, [batch_size + 1] i32


def num_parts(packed_len: int) -> int:
    """Parts of a schedule, for so many query tokens times heads a row."""
    return NUM_SMS // -(-packed_len // TILE_ROWS)


def make_schedule(cache_seqlens: torch.Tensor, parts: int) -> Schedule:
    """All rows' blocks, one after the other, in parts of equal size."""
    check(cache_seqlens.dtype is torch.int32, "seqlens_k must have dtype int32")
    check(cache_seqlens.is_contiguous(), "seqlens_k must be contiguous")
    lens = cache_seqlens.long()
    blocks = ((lens + PAGE_SIZE - 1) // PAGE_SIZE).clamp(min=1) + OVERHEAD_BLOCKS
    ends = blocks.cumsum(0)
    starts, total = ends - blocks, ends[-1:]
    size = (total + parts - 1) // parts
    edges = torch.minimum(torch.arange(parts + 1, device=lens.device) * size, total)
    first, last = (torch.searchsorted(ends, edge, right=True) for edge in (edges[:-1], edges[1:] - 1))
    starts = torch.cat([starts, total])  # a part without work begins behind the last row
    first_part, last_part = starts // size, (ends - 1) // size
    numbers = (first, edges[:-1] - starts[first], last, edges[1:] - starts[last],
               torch.arange(parts, device=lens.device) - first_part[first])  # fmt: skip
    unused = torch.zeros_like(first)
    tiles = torch.stack([*numbers, *[unused] * (SCHEDULE_INTS - len(numbers))], dim=1)
    splits = torch.cat([unused[:1], (last_part - first_part[:-1] + 1).cumsum(0)])
    return tiles.int(), splits.int()


def decode(
    query: torch.Tensor,  # [batch_size, query_len, num_heads_q, 576]
    k_cache: torch.Tensor,  # [num_pages, 64, 1, 576]
    head_dim_v: int,
    cache_seqlens: torch.Tensor,  # [batch_size] i32
    block_table: torch.Tensor,  # [batch_size, max_pages] i32
    scale: float,
    causal: bool,
    schedule: Schedule,
    needs_keys: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out [batch_size, query_len, num_heads_q, 512] and the LSE [batch_size, num_heads_q, query_len] f32,
    natural log: zeros and +inf for a query that sees no key.

    Args:
        needs_keys: a row without keys gets NaN. The older kernels, and those for fp8, divide by a sum that they never
            set there, and load the page whose id stands in front of the row's (`dense_fp8/flash_fwd_mla_kernel.h` of
            vLLM's FlashMLA: `n_block` is -1).

    Raises:
        RuntimeError: what the real one's checks refuse.
    """
    _check_call(query, k_cache, head_dim_v, cache_seqlens, block_table)
    batch_size, query_len, num_heads, _ = query.shape
    made = make_schedule(cache_seqlens, num_parts(query_len * num_heads))
    for name, given, right in zip(("tile_scheduler_metadata", "num_splits"), schedule, made, strict=True):
        check(given.dtype is torch.int32, f"{name} must have dtype int32")
        check(given.shape == right.shape, f"{name} must have shape {tuple(right.shape)}, got {tuple(given.shape)}")
        check(given.is_contiguous(), f"{name} must be contiguous")
    starts = torch.arange(batch_size + 1, device=query.device)
    key_starts = starts * block_table.shape[1]
    lens, query_lens = cache_seqlens.long(), torch.full_like(starts[1:], query_len)
    rows = Rows(starts * query_len, key_starts * PAGE_SIZE, lens, lens, query_lens)
    keys = gather_pages(k_cache, block_table.flatten(), key_starts, lens)
    rules = Rules(scale, causal and query_len > 1, -1, 0.0)
    out, lse, _ = attend(query.flatten(0, 1), keys, keys[..., :head_dim_v], rows, rules)
    lse = (lse / LOG2E).masked_fill(lse == EMPTY_LSE, math.inf)
    fits = torch.stack([(given == right).all() for given, right in zip(schedule, made, strict=True)]).all()
    out, lse = (torch.where(fits, tensor, math.nan) for tensor in (out, lse))
    if needs_keys:
        lacking = (lens == 0).repeat_interleave(query_len)
        out, lse = out.masked_fill(lacking[:, None, None], math.nan), lse.masked_fill(lacking[:, None], math.nan)
    shape = (batch_size, query_len, num_heads)
    return out.to(query.dtype).view(*shape, head_dim_v), lse.view(shape).transpose(1, 2).contiguous()


def check(holds: bool, told: str) -> None:
    """As `TORCH_CHECK`."""
    if not holds:
        raise RuntimeError(told)


def _check_call(
    query: torch.Tensor, k_cache: torch.Tensor, head_dim_v: int, cache_seqlens: torch.Tensor, block_table: torch.Tensor
) -> None:
    check(query.dtype in (torch.float16, torch.bfloat16), f"Unsupported dtype {query.dtype} for dense MLA on SM90")
    check(k_cache.dtype is query.dtype, "query and key must have the same dtype")
    check(block_table.dtype is torch.int32, "block_table must have dtype torch.int32")
    for name, tensor in (("q", query), ("kcache", k_cache), ("block_table", block_table)):
        check(tensor.stride(-1) == 1, f"{name} must have contiguous last dimension")
    check(query.shape[0] > 0, "batch size must be positive")
    check(query.shape[3] == HEAD_DIM, "Only head_size_k == 576 is supported")
    check(head_dim_v == HEAD_DIM_V, "Only head_size_v == 512 is supported")
    check(k_cache.shape[1] == PAGE_SIZE, "Currently page_block_size must be 64")
    check(k_cache.shape[2:] == (1, HEAD_DIM), f"kcache must have shape (num_blocks, 64, 1, {HEAD_DIM})")
    check(cache_seqlens.shape == query.shape[:1], "seqlens_k must have shape (batch_size)")
    check(block_table.dim() == 2 and len(block_table) == len(query), "block_table must have batch_size rows")
