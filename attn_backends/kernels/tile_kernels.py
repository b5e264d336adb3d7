"""What decode and prefill kernels share: a tile of queries that attends to a run of keys, and what it writes.

The online softmax is that of FlashAttention (Dao et al., 2022), in powers of two. Rows of a tile are pairs of a query
token and a query head of one KV head, so that every key is read once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_backends.kernels.fp8 import accumulate, unpack_columns
from attn_backends.kernels.split_kv import LN_2, LOG2_E, first_key, load_block

ROWS_AT_ONCE = tl.constexpr(128)  # that are looked at for the one that a tile is of


@triton.jit  # type: ignore[untyped-decorator]
def attend_keys(  # type: ignore[no-untyped-def]
    queries,  # [BLOCK_M, BLOCK_DIM] of the layer's dtype; float16 that was divided by q_scale
    q_scale,  # [BLOCK_M] f32, see `fp8.scale_to_fp16`; or None
    acc,  # weighted values so far, as `zero_acc` has them
    m_i,  # [BLOCK_M] f32, the highest logit so far
    l_i,  # [BLOCK_M] f32, the sum of weights so far
    start,  # the first key, a multiple of BLOCK_N
    stop,  # the end of the keys; the last block reads beyond it where `num_keys` lies there
    num_keys,  # of the row: nothing is a key from there on
    first_seen,  # keys in front of it are seen by no query; or None, as where not MASKED: there are no such
    positions,  # [BLOCK_M] i32, of the queries
    slopes,  # [BLOCK_M] f32, of ALiBi
    key,  # pointer to the KV head's first element
    value,  # the same; to 16 bits where `acc` has two parts (see `fp8.as_pairs`)
    pages,  # pointer to the row's page ids
    kv_tma,  # None, as where MASKED; or a tuple, see below
    scale,  # f32, makes logits of products; in base 2, unless a soft cap comes between
    soft_cap,  # f32
    window_right,  # positions after its own that a query sees
    window_left,  # positions before its own that a query sees
    chunk,  # positions in a chunk; a query sees its own chunk alone
    key_page,  # elements from page to page, as all strides
    key_slot,
    value_page,
    value_slot,
    MASKED: tl.constexpr,  # some query may not see some key of these blocks, or they reach beyond the keys
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SCALE_FIRST: tl.constexpr,  # logits are scaled before they are compared
    PAGE_SIZE: tl.constexpr,  # slots; 0: keys lie one behind the other from `key` on
    BLOCK_N: tl.constexpr,
    DIM: tl.constexpr,
    DIM_VO: tl.constexpr,
    STAGES: tl.constexpr,  # blocks under way
    EXACT: tl.constexpr,  # a product of float32 is three of tf32
):
    """Attend to keys `start` to `stop`, in blocks of BLOCK_N.

    `kv_tma` has descriptors of keys and of values for blocks of BLOCK_N (see `kv_descriptors`), the row of the
    first key in pages or of all, and the first column of both. What lies behind the last key, or in front of the first
    that is seen, may be NaN, which a mask keeps out and a descriptor does not.

    SCALE_FIRST is for logits with something between the scale and the comparison, or a scale that is not positive. It
    saves a multiplication a key not to.

    EXACT gives float32's precision but for a few bits, as tensor cores cut sums off and do not round them. Products of
    float32 itself hold whole rows and columns in a thread's registers, far more than it has.

    Returns:
        acc, m_i, l_i; `m_i` times `logit_scale(scale, SCALE_FIRST)` is a logit in base 2.
    """
    lane = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, queries.shape[1])
    dims_vo = tl.arange(0, acc[0].shape[1])
    PRECISION: tl.constexpr = "tf32x3" if EXACT else None
    exp_scale = logit_scale(scale, SCALE_FIRST)
    # Where a block's keys lie within their pages is the same for every block: only the pages move.
    inside = lane * 0
    if PAGE_SIZE == 0 or PAGE_SIZE % BLOCK_N == 0:
        inside = lane
    elif BLOCK_N % PAGE_SIZE == 0:
        inside = lane % PAGE_SIZE
    key_offsets = inside[:, None] * key_slot + dims[None]
    value_offsets = inside[:, None] * value_slot + dims_vo[None]
    if MASKED:  # of the keys that each query sees
        low = first_key(positions, window_left, chunk)
        chunk_end = tl.maximum(positions, 0) // chunk * chunk + (chunk - 1)
        high = tl.minimum(tl.minimum(positions + window_right, chunk_end), num_keys - 1)
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        keys = first + lane
        live = keys < num_keys
        if first_seen is not None:
            live = live & (keys >= first_seen)
        key_move, value_move = 0, 0
        if kv_tma is not None:
            at_row = kv_tma[2] + first
            if PAGE_SIZE != 0:
                at_row += tl.load(pages + first // PAGE_SIZE) * (key_page // key_slot) - first // PAGE_SIZE * PAGE_SIZE
        elif PAGE_SIZE == 0:
            key_move = tl.cast(first, tl.int64) * key_slot
            value_move = tl.cast(first, tl.int64) * value_slot
        elif PAGE_SIZE % BLOCK_N == 0:  # a block lies in one page
            page = tl.load(pages + first // PAGE_SIZE).to(tl.int64)
            key_move = page * key_page + first % PAGE_SIZE * key_slot
            value_move = page * value_page + first % PAGE_SIZE * value_slot
        else:
            at = (
                pages + first // PAGE_SIZE + lane // PAGE_SIZE
                if BLOCK_N % PAGE_SIZE == 0
                else pages + keys // PAGE_SIZE
            )
            page = (tl.load(at, mask=live, other=0) if MASKED else tl.load(at)).to(tl.int64)
            key_move, value_move = page[:, None] * key_page, page[:, None] * value_page
            if BLOCK_N % PAGE_SIZE != 0:
                key_move += (keys % PAGE_SIZE)[:, None] * key_slot
                value_move += (keys % PAGE_SIZE)[:, None] * value_slot
        if kv_tma is not None:
            k = kv_tma[0].load([at_row, kv_tma[3]])
        else:
            k = load_block(
                key + key_move + key_offsets, live[:, None], dims[None] < DIM, MASKED, queries.shape[1] == DIM
            )
        k = k.to(queries.dtype)
        logits = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
        if q_scale is not None:
            logits *= q_scale[:, None]
        logits = scale_logits(logits, scale, soft_cap, SOFT_CAP, SCALE_FIRST)
        if ALIBI:
            logits += slopes[:, None] * LOG2_E * (keys[None] - positions[:, None]).to(tl.float32)
        if MASKED:
            logits = tl.where((keys[None] >= low[:, None]) & (keys[None] <= high[:, None]), logits, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(logits, 1))
        m_safe = m_new * exp_scale
        if MASKED:  # a row that has seen nothing yet
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_safe)
        p = tl.exp2(logits * exp_scale - m_safe[:, None])
        alpha = tl.exp2(m_i * exp_scale - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        if kv_tma is not None:
            v = kv_tma[1].load([at_row, kv_tma[4]])
        else:
            width: tl.constexpr = DIM_VO // len(acc)
            v = load_block(
                value + value_move + value_offsets, live[:, None], dims_vo[None] < width, MASKED,
                acc[0].shape[1] == width,
            )  # fmt: skip
        v = unpack_columns(v, key.dtype.element_ty, queries.dtype, len(acc) == 2)
        acc = accumulate(acc, p.to(queries.dtype), alpha, v, PRECISION)
        m_i = m_new
    return acc, m_i, l_i


@triton.jit  # type: ignore[untyped-decorator]
def scale_logits(  # type: ignore[no-untyped-def]
    logits, scale, soft_cap, SOFT_CAP: tl.constexpr, SCALE_FIRST: tl.constexpr
):
    """Logits of products, in base 2; the products themselves where neither constant is set."""
    if SOFT_CAP:  # cap * tanh(logit / cap), where tanh(x) = 1 - 2 / (exp(2x) + 1)
        e = tl.exp2(logits * (scale * 2 * LOG2_E / soft_cap))
        logits = (soft_cap * LOG2_E) * (1 - 2 / (e + 1))
    elif SCALE_FIRST:
        logits *= scale
    return logits


@triton.jit  # type: ignore[untyped-decorator]
def prefetch_keys(  # type: ignore[no-untyped-def]
    key,  # pointer to the KV head's first element
    value,  # the same
    pages,  # pointer to the row's page ids
    start,  # the first key
    stop,  # the end of the keys
    key_page,  # elements from page to page, as all strides
    key_slot,
    value_page,
    value_slot,
    PAGE_SIZE: tl.constexpr,  # slots
    NUM_KEYS: tl.constexpr,  # a power of two
    DIM: tl.constexpr,
    DIM_VO: tl.constexpr,
    BLOCK_DIM: tl.constexpr,  # DIM, padded
    BLOCK_DIM_VO: tl.constexpr,  # DIM_VO, padded
):
    """Let the L2 fetch the first keys and values, while a program waits for its queries."""
    page, slot = first_slots(pages, start, stop, PAGE_SIZE, NUM_KEYS)
    # As they come from here on, queries are asked for before: compilers wait for a page id in front of that else.
    page = tl.inline_asm_elementwise("// $0", "=l,0", [page], tl.int64, is_pure=False, pack=1)
    _prefetch(lines_of(key, page, slot, key_page, key_slot, DIM, BLOCK_DIM))
    _prefetch(lines_of(value, page, slot, value_page, value_slot, DIM_VO, BLOCK_DIM_VO))


@triton.jit  # type: ignore[untyped-decorator]
def first_slots(pages, start, stop, PAGE_SIZE: tl.constexpr, NUM_KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[NUM_KEYS]: pages and slots of keys from `start` on; 0 from `stop` on."""
    at = start + tl.arange(0, NUM_KEYS)
    there = at < stop
    page = tl.load(pages + at // PAGE_SIZE, mask=there, other=0).to(tl.int64)
    return page, tl.where(there, at % PAGE_SIZE, 0)


@triton.jit  # type: ignore[untyped-decorator]
def lines_of(  # type: ignore[no-untyped-def]
    cached, page, slot, page_stride, slot_stride, NUM_COLS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    """[NUM_KEYS, lines]: pointers into the lines of the L2 that hold columns of keys or of values; where these begin
    within a line, the last one may be missing."""
    LINE: tl.constexpr = 1024 // cached.dtype.element_ty.primitive_bitwidth
    NUM_LINES: tl.constexpr = BLOCK_COLS // LINE if BLOCK_COLS > LINE else 1
    columns = tl.minimum(tl.arange(0, NUM_LINES) * LINE, NUM_COLS - 1)
    return cached + (page * page_stride + slot * slot_stride)[:, None] + columns[None]


@triton.jit
def _prefetch(at):  # type: ignore[no-untyped-def]
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [at.to(tl.int64)], tl.int32, is_pure=False, pack=1)


@triton.jit  # type: ignore[untyped-decorator]
def once_loaded(piece, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """What was loaded, as products want it only from here on: compilers make it so right behind its load else, and wait
    for it before they ask for what is loaded next. On GPUs where kernels start early, which is where that was measured:
    an interpreter has no such instruction."""
    if PDL and piece.dtype.primitive_bitwidth == 8:
        words = piece.to(tl.int8, bitcast=True)
        words = tl.inline_asm_elementwise("// $0", "=r,0", [words], tl.int8, is_pure=False, pack=4)
        return words.to(piece.dtype, bitcast=True)
    elif PDL:
        return tl.inline_asm_elementwise("// $0", "=r,0", [piece], piece.dtype, is_pure=False, pack=2)
    else:
        return piece


@triton.jit  # type: ignore[untyped-decorator]
def logit_scale(scale, SCALE_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The factor that makes logits in base 2 of those that `attend_keys` compares."""
    if SCALE_FIRST:
        return scale * 0 + 1
    return scale


@triton.jit  # type: ignore[untyped-decorator]
def write_rows(  # type: ignore[no-untyped-def]
    output,  # [num_tokens, num_qo_heads, DIM_VO]
    lse,  # [num_tokens, num_qo_heads] f32
    sinks,  # [num_qo_heads] f32 logits
    acc,  # [BLOCK_M, BLOCK_DIM_VO] f32, as `attend_keys` returns it
    m_i,  # [BLOCK_M] f32, in base 2
    l_i,  # [BLOCK_M] f32
    lane,  # [BLOCK_M] i32, token times GROUP plus query head, counted from the row's first token
    head,  # the KV head
    first_token,  # the row's
    query_len,  # tokens of the row end there
    value_scale,  # f32
    out_token,  # elements from token to token, as all strides
    out_head,
    lse_token,
    has_sinks,  # 0 or 1
    want_lse,  # 0 or 1
    GROUP: tl.constexpr,
    DIM_VO,  # columns from there on, a constant or not
):
    """Write outputs and natural LSEs of a KV head's queries; zeros and -inf for one that saw no key.

    A sink takes its share of the softmax and gives nothing.
    """
    token = lane // GROUP
    q_head = head * GROUP + lane % GROUP
    live = token < query_len
    at = (first_token + token).to(tl.int64)
    dims = tl.arange(0, acc.shape[1])
    saw = l_i > 0
    # Compared as a block: of one number, Triton 3.9's interpreter makes a mask that is none.
    sink = tl.load(sinks + q_head, mask=live & (q_head * 0 + has_sinks != 0), other=float("-inf")) * LOG2_E
    higher = tl.maximum(m_i, sink)
    alpha = tl.exp2(m_i - higher)
    l_i = l_i * alpha + tl.exp2(sink - higher)
    out = tl.where(saw[:, None], acc * (alpha * value_scale / tl.where(saw, l_i, 1.0))[:, None], 0.0)
    to = output + at[:, None] * out_token + q_head[:, None] * out_head + dims[None]
    tl.store(to, out.to(output.dtype.element_ty), mask=live[:, None] & (dims[None] < DIM_VO))
    if want_lse != 0:
        log_sum = (higher + tl.log2(tl.where(saw, l_i, 1.0))) * LN_2
        tl.store(lse + at * lse_token + q_head, tl.where(saw, log_sum, float("-inf")), mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def tile_of(program, num_tiles, section, KV_HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A prefill program's KV head and tile. The last tiles, which see the most keys where attention is causal, come
    first. Heads come in sections, whose keys and values fit the L2: within one, tiles are the outer order."""
    first_head = program // (num_tiles * section) * section
    heads = tl.minimum(section, KV_HEADS - first_head)
    program -= first_head * num_tiles
    return first_head + program % heads, num_tiles - 1 - program // heads


@triton.jit  # type: ignore[untyped-decorator]
def rows_of(  # type: ignore[no-untyped-def]
    tile, query_start_loc, first_row, num_rows, GROUP: tl.constexpr, TILE: tl.constexpr
):
    """The row that a tile of TILE queries is of, its first query token, their number, and which of its queries, token
    times GROUP plus query head, is the tile's first; it may lie behind the last.

    The ith row's tiles are those from (its first query + i * (TILE - 1)) // TILE on, counted from `first_row`: as many
    as it needs, or one more.
    """
    before = tl.load(query_start_loc + first_row)
    lane = tl.arange(0, ROWS_AT_ONCE)
    found = 0  # rows whose tiles begin here or before, but for the first
    for begin in range(1, num_rows, ROWS_AT_ONCE):
        nth = begin + lane
        start = tl.load(query_start_loc + first_row + nth, mask=nth < num_rows, other=0)
        begins = ((start - before) * GROUP + nth * (TILE - 1)) // TILE
        found += tl.sum(((begins <= tile) & (nth < num_rows)).to(tl.int32), 0)
    row = first_row + found
    first_token = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - first_token
    begins = ((first_token - before) * GROUP + found * (TILE - 1)) // TILE
    return row, first_token, query_len, (tile - begins) * TILE
