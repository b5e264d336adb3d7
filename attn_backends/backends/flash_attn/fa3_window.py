"""Which calls of vLLM's FlashAttention 3 show early queries of a sliding window keys ahead of them.

Where it follows from, in `hopper/` of vllm-project/flash-attention: for queries `low` to `high` of a row, which one
tile takes, `block.h` lets the keys begin at `n_offset = max(0, low + seq_len - query_len - window)`, and blocks are
counted from there. `mainloop_fwd_sm90_tma_gmma_ws.hpp`, where `IntraWGOverlap` holds, masks the last
block, then blocks from `(low + tot_seqlen_k - query_len) / kBlockN` on, and none of those before, down to
`ceil_div(high + tot_seqlen_k - query_len - window, kBlockN)`. There `tot_seqlen_k` is the row's length, and the length
behind `n_offset` is meant. The first query's own key is key `window` of the tile, so for `n_offset > 0` block `n` shows
it others, if

    (window + 1) // kBlockN  <=  n  <=  ceil_div(window + num_tokens, kBlockN) - 2
    ceil_div(n_offset + high - low, kBlockN)  <=  n  <=  (window + n_offset) // kBlockN - 1

where `num_tokens` is how many of the row's tokens the tile has. The first line asks for `needed` of them, and with it
the second for an `n_offset` of `needed - 1` and more. Given a `tot_seqlen_k` beyond every length
(`cp_tot_seqused_k`, which nothing else reads without context parallelism) the kernel masks every block: right, and
slower. That is for windows alone: a causal call without one, which a window of all keys is, would mask its last block
and no other.
"""

from __future__ import annotations

from typing import NamedTuple

from attn_backends.backends.flash_attn.call import HostLens, Rows

BEYOND_ALL = 1 << 30  # keys; sums with lengths stay below 2^31


class Tile(NamedTuple):
    """The tile of a kernel for windows."""

    block_m: int  # query tokens times query heads of a KV head
    block_n: int  # keys


# By bytes of an element and the kernel's head dim: tiles for windows with IntraWGOverlap, in `tile_size.h` of all
# versions that take `cp_tot_seqused_k`. fp8 is for pages alone.
TILES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (2, 64): (Tile(64, 192),),  # of rows that fit it, until January 2026; the tile of others has no IntraWGOverlap
    (2, 128): (Tile(128, 128),),
    (2, 192): (Tile(128, 96),),
    (2, 256): (Tile(128, 64),),
    (1, 64): (Tile(192, 128), Tile(192, 160)),
    (1, 128): (Tile(128, 192), Tile(128, 160), Tile(64, 96)),
    (1, 192): (Tile(128, 96), Tile(128, 128)),
    (1, 256): (),
}


def may_see_ahead(tile: Tile, group_size: int, window: int, rows: Rows) -> bool:
    """Whether a query of these rows may see keys ahead of it, in a causal call with a window of `window` keys before
    its own.

    True as well for some rows that are right, by the tile's last queries; never for rows of one token, for rows that
    the window covers, or for rows whose queries all stand `2 * window` keys and more behind the first.

    Args:
        group_size: query heads of a KV head, which lie in one tile (PackGQA).
        rows: those without lengths on the host may have any up to `max_seq_len`.
    """
    needed = tile.block_n + 2 - (window + 1) % tile.block_n  # tokens of a tile that reaches into another block
    num_tokens = min(rows.max_query_len, _most_tokens(tile, group_size))
    if num_tokens < needed or rows.max_seq_len < window + 2 * needed - 1:
        return False
    last = -(-(window + num_tokens) // tile.block_n) - 2  # block that may go without a mask
    most_offset = last * tile.block_n - needed
    if most_offset < needed - 1:
        return False
    return rows.on_host is None or _has_such_rows(rows.on_host, window, needed, most_offset)


def _most_tokens(tile: Tile, group_size: int) -> int:
    """Tokens that a tile may have some heads of: one more where the group does not divide it."""
    whole, rest = divmod(tile.block_m, group_size)
    return whole if not rest else (tile.block_m - 2) // group_size + 2


def _has_such_rows(lens: HostLens, window: int, needed: int, most_offset: int) -> bool:
    """Whether a row may have `needed` tokens in one tile, with `n_offset` from `needed - 1` to `most_offset`."""
    starts, seq_lens = lens.query_start_loc.numpy(), lens.seq_lens.numpy()
    query_lens = starts[1:] - starts[:-1]
    found = (query_lens >= needed) & (seq_lens >= window + 2 * needed - 1)
    if lens.are_exact:
        found &= seq_lens - query_lens <= window + most_offset
    return bool(found.any())
