"""Which keys the main loop of vLLM's FlashAttention 3 (0.26.0) shows a query for want of a mask.

From `hopper/` of vllm-project/flash-attention: `block.h` (where a tile's keys begin, and how many blocks it has),
`mainloop_fwd_sm90_tma_gmma_ws.hpp` (which blocks get a mask) and `tile_size.h`. With a window, blocks are counted from
the first query's window on, and which of them need a mask is worked out from the row's whole length, or from
`cp_tot_seqused_k`. Rows drawn for it on an H200 on 2026-11-23 were wrong where this predicts it, and nowhere else; no
report of that run is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.emulated.flash_attn_checks import check_ints

# kBlockM and kBlockN for windows by bytes of an element and head dim, over pages of 16 and over none. Others have no
# IntraWGOverlap, and mask by the length from the first block on.
_TILES = {
    (2, 96): (192, 128),
    (2, 128): (128, 128),
    (2, 192): (128, 96),
    (2, 256): (128, 64),
    (1, 64): (192, 128),
    (1, 96): (128, 128),
    (1, 128): (128, 192),
    (1, 192): (128, 96),
}
_HEAD_DIMS = (64, 96, 128, 192, 256)
_WITHOUT_WINDOW = (128, 128)  # sizes differ, and what goes wrong does not


@dataclass(frozen=True)
class Blocks:
    """How a call cuts queries and keys, and which lengths masks follow from."""

    block_m: int  # query tokens times query heads of a KV head
    block_n: int
    window: int | None  # keys before a query's own; None: all of them
    tot_seq_lens: torch.Tensor | None  # [R]; None: the rows' own

    def shown(
        self,
        row: torch.Tensor,  # [num_tokens]
        index: torch.Tensor,  # [num_tokens], in its row
        query_lens: torch.Tensor,  # [R]
        seq_lens: torch.Tensor,  # [R]
        key_index: torch.Tensor,  # [num_slots], in its row
        group_size: int,
    ) -> torch.Tensor:
        """[num_tokens, group_size, num_slots] bool: keys in blocks that no mask is put on, for queries of their row."""
        heads = torch.arange(group_size, device=index.device)
        tile = (index[:, None] * group_size + heads) // self.block_m
        low = tile * self.block_m // group_size
        high = ((tile + 1) * self.block_m - 1) // group_size + 1
        query_len, seq_len = query_lens[row][:, None], seq_lens[row][:, None]
        told = seq_len if self.tot_seq_lens is None else self.tot_seq_lens.long()[row][:, None]
        offset = first = 0 * low
        if self.window is not None:
            offset = (low + seq_len - query_len - self.window).clamp(min=0)
            first = _up(high + told - query_len - self.window, self.block_n).clamp(min=0)
        own = seq_len - offset
        reach = high + (told if self.window is None else own) - query_len
        num_blocks = torch.minimum(_up(own, self.block_n), _up(reach, self.block_n))
        stop = torch.minimum(num_blocks - 1, (low + told - query_len).clamp(min=0) // self.block_n)
        key = key_index - offset[..., None]
        block = key.div(self.block_n, rounding_mode="floor")
        return (key >= 0) & (block >= first[..., None]) & (block < stop[..., None])


def blocks_of(
    element_size: int, head_dim: int, paged: bool, window: tuple[int, int], causal: bool, max_seqlen_k: int,
    tot_seq_lens: torch.Tensor | None, num_rows: int,
) -> Blocks | None:  # fmt: skip
    """A call's blocks; None where every block has the mask that it needs."""
    if tot_seq_lens is not None:
        check_ints(tot_seq_lens, num_rows, "cp_tot_seqused_k")
    if not causal:  # a window without a right end shows the first query of a tile all keys behind its own
        return None
    if window[0] < 0 or window[0] >= max_seqlen_k - 1:
        return None if tot_seq_lens is None else Blocks(*_WITHOUT_WINDOW, None, tot_seq_lens)
    dim = next(dim for dim in _HEAD_DIMS if dim >= head_dim)
    if (element_size, dim) == (1, 256) and not paged:
        return Blocks(128, 64, window[0], tot_seq_lens)
    tile = _TILES.get((element_size, dim))
    return None if tile is None else Blocks(*tile, window[0], tot_seq_lens)


def _up(a: torch.Tensor, b: int) -> torch.Tensor:
    return -(-a // b)
