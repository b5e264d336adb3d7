"""What the emulated FlashInfer's plans decide: splits, and the bytes of each workspace that they need.

The formulas are those of FlashInfer 0.6.12, `include/flashinfer/attention/scheduler.cuh`. Sizes of scratch depend on
the GPU; this is an H100, with 132 multiprocessors. At the start of the int workspace lies what the emulation knows of a
plan: `kv_lens [batch_size] i32, qo_indptr [batch_size + 1] i32`. The real work lists are allocated behind; those of fa2
in graphs are filled (see flashinfer_work.py), and the others left empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

NUM_SMS = 132
PREFILL_CTAS_PER_SM = 2
DECODE_CTAS_PER_SM = 16  # an upper bound: the real one asks the driver, and is told 4 to 16
_INT, _FLOAT, _BOOL = 4, 4, 1  # bytes


class WorkspaceAllocator:
    """Hands out a workspace from its start; the base is taken to be aligned."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.used = 0

    def take(self, size: int, name: str, alignment: int = 16) -> int:
        """Offset in bytes of the next `size` bytes.

        Raises:
            RuntimeError: the workspace has fewer left.
        """
        start = -(-self.used // alignment) * alignment
        if start + size > self.num_bytes:
            raise RuntimeError(
                f"Buffer overflow when allocating memory for {name} with size {size} and alignment {alignment}, but "
                f"only {self.num_bytes - self.used} bytes available in AlignedAllocator. Increase the workspace buffer "
                "size."
            )
        self.used = start + size
        return start


def planned_rows_size(batch_size: int) -> int:
    """Bytes of what `run` reads of a plan."""
    return _INT * (2 * batch_size + 1)


def decode_schedule(
    indptr: Sequence[int],  # [batch_size + 1], in pages
    num_qo_heads: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    graph: bool,
    floats: WorkspaceAllocator,
    ints: WorkspaceAllocator,
) -> list[int]:
    """The plan info of CUDA-core decode, in the order of `DecodePlanInfo`: 10 numbers.

    Raises:
        RuntimeError: a workspace is too small.
    """
    num_pages = [stop - start for start, stop in pairwise(indptr)]
    batch_size = len(num_pages)
    max_grid_size = DECODE_CTAS_PER_SM * NUM_SMS
    if batch_size * num_kv_heads >= max_grid_size:
        split, num_tiles, padded = False, batch_size, batch_size
    else:
        chunk = _smallest_chunk(
            lambda pages: sum(-(-n // pages) for n in num_pages) * num_kv_heads <= max_grid_size,
            max(128 // page_size, 1),
            max(num_pages, default=0),
        )
        num_tiles = sum(-(-max(n, 1) // chunk) for n in num_pages)
        split = graph or num_tiles != batch_size
        padded = max_grid_size // num_kv_heads if graph else num_tiles
    ints.take(planned_rows_size(batch_size), "batch_decode_planned_rows")
    requests = ints.take(_INT * padded, "batch_decode_request_indices")
    kv_tiles = ints.take(_INT * padded, "batch_decode_kv_tile_indices")
    o_indptr = ints.take(_INT * (padded + 1), "batch_decode_o_indptr")
    chunk_size = ints.take(_INT, "batch_decode_kv_chunk_size_ptr", 1)
    v_offset = s_offset = valid = 0
    if split:
        v_offset = floats.take(num_qo_heads * padded * head_dim * _FLOAT, "batch_decode_tmp_v")
        s_offset = floats.take(num_qo_heads * padded * _FLOAT, "batch_decode_tmp_s")
        valid = ints.take(_BOOL * padded, "batch_decode_block_valid_mask")
    return [padded, v_offset, s_offset, requests, kv_tiles, o_indptr, valid, chunk_size, int(graph), int(split)]


def fa2_schedule(
    qo_indptr: Sequence[int],  # [batch_size + 1]
    kv_indptr: Sequence[int],  # [batch_size + 1], in pages
    total_num_rows: int,
    num_qo_heads: int,
    num_kv_heads: int,
    page_size: int,
    head_dim_vo: int,
    graph: bool,
    window_left: int,
    fixed_split_size: int,
    disable_split_kv: bool,
    floats: WorkspaceAllocator,
    ints: WorkspaceAllocator,
) -> list[int]:
    """The plan info of fa2 prefill and tensor-core decode, in the order of `PrefillPlanInfo`: 15 numbers.

    Raises:
        RuntimeError: a workspace is too small; an indptr decreases; a fixed split makes more tiles than a graph holds.
    """
    sizes = (total_num_rows, num_qo_heads, num_kv_heads, page_size, head_dim_vo)
    tiles = fa2_tiles(qo_indptr, kv_indptr, *sizes, graph, window_left, fixed_split_size, disable_split_kv)
    batch_size, tile_q, split = len(tiles.q_tiles), tiles.tile_q, tiles.split
    max_tiles = PREFILL_CTAS_PER_SM * NUM_SMS // num_kv_heads
    num_tiles = sum(t * n for t, n in zip(tiles.q_tiles, tiles.num_chunks, strict=True))
    padded = max(max_tiles, tiles.most_q_tiles) if graph else num_tiles
    if num_tiles > padded:
        raise RuntimeError(
            "new batch size should not exceed padded batch size. If you are using fixed split size, please consider "
            "disabling cuda graph."
        )
    ints.take(planned_rows_size(batch_size), "batch_prefill_planned_rows")
    requests = ints.take(_INT * padded, "batch_prefill_request_indices")
    qo_tiles = ints.take(_INT * padded, "batch_prefill_qo_tile_indices")
    kv_tiles = ints.take(_INT * padded, "batch_prefill_kv_tile_indices")
    o_indptr = ints.take(_INT * (batch_size + 1), "batch_prefill_o_indptr")
    chunk_size = ints.take(_INT, "batch_prefill_kv_chunk_size_ptr", 1)
    rows = ints.take(_INT, "batch_prefill_total_num_rows") if graph else 0
    v_offset = s_offset = merge = valid = 0
    if split:
        v_offset = floats.take(num_qo_heads * padded * tile_q * head_dim_vo * _FLOAT, "batch_prefill_tmp_v")
        s_offset = floats.take(num_qo_heads * padded * tile_q * _FLOAT, "batch_prefill_tmp_s")
        merge = ints.take(_INT * (total_num_rows + 1), "batch_prefill_merge_indptr")
        valid = ints.take(_BOOL * padded, "batch_prefill_block_valid_mask")
    return [padded, total_num_rows, rows, tile_q, requests, qo_tiles, kv_tiles, merge, o_indptr, chunk_size, v_offset,
            s_offset, valid, int(graph), int(split)]  # fmt: skip


@dataclass(frozen=True)
class Fa2Tiles:
    """How `PrefillSplitQOKVIndptr` cuts rows: queries into tiles, keys into chunks."""

    tile_q: int  # query tokens times group size
    q_tiles: list[int]  # of each row
    num_chunks: list[int]  # of each row
    chunk: int  # pages
    split: bool  # partial results are merged
    most_q_tiles: int  # of all rows, in a graph of any rows of as many tokens


def fa2_tiles(
    qo_indptr: Sequence[int],  # [batch_size + 1]
    kv_indptr: Sequence[int],  # [batch_size + 1], in pages
    total_num_rows: int,
    num_qo_heads: int,
    num_kv_heads: int,
    page_size: int,
    head_dim_vo: int,
    graph: bool,
    window_left: int,
    fixed_split_size: int,
    disable_split_kv: bool,
    tile_q: int | None = None,
) -> Fa2Tiles:
    """What one plan cuts; `tile_q`: a tile that is not the library's choice.

    Raises:
        RuntimeError: an indptr decreases.
    """
    group_size = num_qo_heads // num_kv_heads
    packed_lens = [n * group_size for n in _lens(qo_indptr, "qo_indptr")]
    kv_lens = _lens(kv_indptr, "kv_indptr")
    batch_size = len(kv_lens)
    max_tiles = PREFILL_CTAS_PER_SM * NUM_SMS // num_kv_heads
    if graph:  # the tokens of one row could be all but one for each other row; the real number is unsigned
        tile_q = tile_q or cta_tile_q(((total_num_rows - batch_size + 1) % 2**32) * group_size, head_dim_vo)
        most_q_tiles = -(-total_num_rows * group_size // tile_q) + batch_size - 1
    else:
        tile_q = tile_q or cta_tile_q(sum(packed_lens) // batch_size, head_dim_vo)
        most_q_tiles = sum(-(-n // tile_q) for n in packed_lens)
    if window_left >= 0:
        kv_lens = [min(-(-(window_left + tile_q) // page_size), n) for n in kv_lens]
    q_tiles = [-(-n // tile_q) for n in packed_lens]
    chunk, split = _prefill_chunk(q_tiles, kv_lens, max_tiles, page_size, graph, fixed_split_size, disable_split_kv)
    num_chunks = [-(-max(n, 1) // chunk) for n in kv_lens]
    return Fa2Tiles(tile_q, q_tiles, num_chunks, chunk, split, most_q_tiles)


def fa3_schedule(
    qo_indptr: Sequence[int],  # [batch_size + 1]
    total_num_rows: int,
    num_qo_heads: int,
    head_dim_vo: int,
    graph: bool,
    ints: WorkspaceAllocator,
) -> list[int]:
    """The plan info of fa3 prefill, in the order of `PrefillPlanSM90Info`: 9 numbers. It needs no float workspace.

    Raises:
        RuntimeError: the int workspace is too small, or `qo_indptr` decreases.
    """
    qo_lens = _lens(qo_indptr, "qo_indptr")
    tile_q = 192 if head_dim_vo == 64 else 128
    max_per_head = -(-total_num_rows // tile_q) + len(qo_lens) - 1
    same_for_all_heads = max_per_head > 4096
    per_head = max_per_head if graph else sum(-(-n // tile_q) for n in qo_lens)
    size = _INT * per_head * (1 if same_for_all_heads else num_qo_heads)
    ints.take(planned_rows_size(len(qo_lens)), "batch_prefill_sm90_planned_rows")
    names = ("qo_tile_indices", "qo_offset", "kv_offset", "qo_len", "kv_len", "head_indices")
    offsets = [ints.take(size, f"batch_prefill_sm90_{name}") for name in names]
    work_indptr = ints.take(_INT * (NUM_SMS + 1), "batch_prefill_sm90_work_indptr")
    batch_indices = ints.take(size, "batch_prefill_sm90_batch_indices")
    return [*offsets, work_indptr, batch_indices, int(same_for_all_heads)]


def cta_tile_q(packed_len: int, head_dim: int) -> int:
    """Query tokens times group size that one block of an fa2 kernel takes, on compute capability 8 and above."""
    if packed_len > 64 and head_dim < 256:
        return 128
    return 64 if packed_len > 16 else 16


def _prefill_chunk(
    q_tiles: Sequence[int],
    kv_lens: Sequence[int],  # in pages
    max_tiles: int,
    page_size: int,
    graph: bool,
    fixed_split_size: int,
    disable_split_kv: bool,
) -> tuple[int, bool]:
    """Pages that one tile takes, and whether the rest of a row goes to others."""
    longest = max(1, *kv_lens)
    if disable_split_kv:
        return longest, False
    if fixed_split_size > 0:
        return fixed_split_size, any(t and n > fixed_split_size for t, n in zip(q_tiles, kv_lens, strict=True))
    chunk = _smallest_chunk(
        lambda pages: sum(t * -(-max(n, 1) // pages) for t, n in zip(q_tiles, kv_lens, strict=True)) <= max_tiles,
        max(128 // page_size, 1),
        longest,
    )
    return chunk, graph or chunk < longest


def _smallest_chunk(fits: Callable[[int], bool], low: int, high: int) -> int:
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _lens(indptr: Sequence[int], name: str) -> list[int]:
    lens = [stop - start for start, stop in pairwise(indptr)]
    for i, length in enumerate(lens):
        if length < 0:
            raise RuntimeError(f"{name}[{i + 1}]{indptr[i + 1]} - {name}[{i}]{indptr[i]} should be non-negative")
    return lens
