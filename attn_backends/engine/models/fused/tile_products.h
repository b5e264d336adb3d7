// Products of several tokens by AMX, over bfloat16 weights as they lie.
//
// A tile register holds up to RUN weight rows of DEPTH numbers. The other operand are RUN tokens and as many of their
// numbers, in pairs: [pair of numbers, token], in one kilobyte. A tile's sums are [weight row, token].

#define RUN TILE_ROWS
#define DEPTH 32

// 16 vectors of 16 numbers of 32 bits, turned.
INLINE void transpose(__m512i v[RUN]) {
    __m512i a[RUN];
    UNROLL for (int i = 0; i < RUN; i += 2) {
        a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]), a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    UNROLL for (int i = 0; i < RUN; i += 4) UNROLL for (int h = 0; h < 2; h++) {
        v[i + 2 * h] = _mm512_unpacklo_epi64(a[i + h], a[i + 2 + h]);
        v[i + 2 * h + 1] = _mm512_unpackhi_epi64(a[i + h], a[i + 2 + h]);
    }
    UNROLL for (int i = 0; i < 4; i++) UNROLL for (int q = 0; q < RUN; q += 8) {
        a[q + i] = _mm512_shuffle_i32x4(v[q + i], v[q + 4 + i], 0x88);
        a[q + 4 + i] = _mm512_shuffle_i32x4(v[q + i], v[q + 4 + i], 0xdd);
    }
    UNROLL for (int i = 0; i < 8; i++) {
        v[i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0x88);
        v[8 + i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0xdd);
    }
}

// Up to RUN tokens [tokens, size] in pairs; what there are fewer is zero.
static void pair(const cell *x, int64_t tokens, int64_t size, cell *pairs) {
    for (int64_t k = 0; k < size; k += DEPTH, pairs += RUN * DEPTH) {
        __m512i v[RUN];
        UNROLL for (int t = 0; t < RUN; t++) v[t] = t < tokens ? load(x + t * size + k, WHOLE) : _mm512_setzero_si512();
        transpose(v);
        UNROLL for (int t = 0; t < RUN; t++) _mm512_storeu_si512(pairs + t * DEPTH, v[t]);
    }
}

// Two rows of a tile's sums, as a row of the pairs that a product over these numbers reads.
INLINE void write_pair(cell *pairs, vec even, vec odd) {
    __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
    __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
    _mm512_storeu_si512(pairs, low | _mm512_slli_epi32(high, 16));
}

// Steps of `sum_tiles`, over numbers k to k + DEPTH. Of one group, sums of even steps and of odd ones are apart: a sum
// waits for the one before.
#define LOAD_WEIGHTS(k)                                                                                                \
    _tile_loadd(4, w[0] + (k), size * sizeof(cell));                                                                   \
    _tile_loadd(5, w[1] + (k), size * sizeof(cell))
#define ADD(to, also, token_tile, pairs_at)                                                                            \
    _tile_loadd(token_tile, pairs_at, sizeof(cell) * DEPTH);                                                           \
    _tile_dpbf16ps(to, 4, token_tile);                                                                                 \
    _tile_dpbf16ps(also, 5, token_tile)

INLINE void fetch_rows(const cell *const w[2], int64_t at, int64_t height) {
    for (int64_t r = 0; r < height; r++) {
        __builtin_prefetch(w[0] + at + r * DEPTH, 0, 2);
        __builtin_prefetch(w[1] + at + r * DEPTH, 0, 2);
    }
}

// sums[g][i] is run i of weight rows times group g of tokens, of one group or two. Meanwhile the rows that lie `ahead`
// are fetched to the second cache, unless that is 0.
static void sum_tiles(int groups, const cell *const w[2], const cell *pairs, int64_t size, int64_t height,
                      int64_t ahead, float sums[2][2][RUN][RUN]) {
    WRITTEN(pairs);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    int64_t k = 0;
    if (groups == 1) {
        for (; k + DEPTH < size; k += 2 * DEPTH) {
            LOAD_WEIGHTS(k);
            ADD(0, 1, 6, pairs + k * RUN);
            if (ahead) fetch_rows(w, ahead + k * height, height);
            LOAD_WEIGHTS(k + DEPTH);
            ADD(2, 3, 7, pairs + (k + DEPTH) * RUN);
            if (ahead) fetch_rows(w, ahead + (k + DEPTH) * height, height);
        }
    }
    for (; k < size; k += DEPTH) {
        LOAD_WEIGHTS(k);
        ADD(0, 1, 6, pairs + k * RUN);
        if (groups == 2) { ADD(2, 3, 7, pairs + (size + k) * RUN); }
        if (ahead) fetch_rows(w, ahead + k * height, height);
    }
    _tile_stored(0, sums[0][0], sizeof(float) * RUN);
    _tile_stored(1, sums[0][1], sizeof(float) * RUN);
    _tile_stored(2, sums[1][0], sizeof(float) * RUN);
    _tile_stored(3, sums[1][1], sizeof(float) * RUN);
}
