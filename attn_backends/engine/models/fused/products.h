// Products of tokens with weights as they lie, [out_features, in_features], by AVX-512, in float32 or bfloat16.
//
// A tile is up to TOKENS tokens times two runs of ROWS weight rows. Its sums are held in registers along the inner
// dimension and added up at its end, so that no weight is reordered, and each is read once, in order, for few tokens.

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define TOKENS 4
#define ROWS 3
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef __m512 vec;

#if FLOAT32
typedef float cell;
typedef __m512 cells;
typedef __mmask16 mask;
#define LANES 16
INLINE cells load(const cell *at, mask some) { return _mm512_maskz_loadu_ps(some, at); }
INLINE vec product(cells a, cells b, vec sum) { return _mm512_fmadd_ps(a, b, sum); }
INLINE vec read(const cell *at, __mmask16 some) { return _mm512_maskz_loadu_ps(some, at); }
INLINE void write(cell *at, vec v, __mmask16 some) { _mm512_mask_storeu_ps(at, some, v); }
INLINE __m128 read3(const cell *at) { return _mm_maskz_loadu_ps(7, at); }
INLINE void write3(cell *at, __m128 v) { _mm_mask_storeu_ps(at, 7, v); }
#elif BFLOAT16
typedef uint16_t cell;
typedef __m512i cells;
typedef __mmask32 mask;
#define LANES 32
INLINE cells load(const cell *at, mask some) { return _mm512_maskz_loadu_epi16(some, at); }
INLINE vec product(cells a, cells b, vec sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
INLINE vec read(const cell *at, __mmask16 some) {
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, at)), 16);
}
INLINE void write(cell *at, vec v, __mmask16 some) {
    _mm256_mask_storeu_epi16(at, some, (__m256i)_mm512_cvtneps_pbh(v));
}
INLINE __m128 read3(const cell *at) {
    return (__m128)_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_maskz_loadu_epi16(7, at)), 16);
}
INLINE void write3(cell *at, __m128 v) { _mm_mask_storeu_epi16(at, 7, (__m128i)_mm_cvtneps_pbh(v)); }
#endif
#define WHOLE ((mask)-1)

#if BFLOAT16
#include "amx.h"
#endif
#if AMX
#include "tile_products.h"
#endif

// Lane 4 t + r is the sum of v[t][r].
INLINE vec sums_of(vec v[TOKENS][4]) {
    vec quads[TOKENS];
    UNROLL for (int t = 0; t < TOKENS; t++) {
        vec a = _mm512_unpacklo_ps(v[t][0], v[t][1]) + _mm512_unpackhi_ps(v[t][0], v[t][1]);
        vec b = _mm512_unpacklo_ps(v[t][2], v[t][3]) + _mm512_unpackhi_ps(v[t][2], v[t][3]);
        quads[t] = (vec)_mm512_unpacklo_pd((__m512d)a, (__m512d)b) + (vec)_mm512_unpackhi_pd((__m512d)a, (__m512d)b);
    }
    vec a = _mm512_shuffle_f32x4(quads[0], quads[1], 0x88) + _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd);
    vec b = _mm512_shuffle_f32x4(quads[2], quads[3], 0x88) + _mm512_shuffle_f32x4(quads[2], quads[3], 0xdd);
    return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
}

INLINE void step(const int tokens, const cell *x, const cell *const w[2], int64_t size, int64_t k, mask some,
                 vec sum[2][TOKENS][4]) {
    cells rows[2][ROWS];
    UNROLL for (int i = 0; i < 2; i++) UNROLL for (int r = 0; r < ROWS; r++) {
        rows[i][r] = load(w[i] + r * size + k, some);
        asm("" : "+v"(rows[i][r])); // read once, and not for each token
    }
    UNROLL for (int t = 0; t < tokens; t++) {
        cells token = load(x + t * size + k, some);
        UNROLL for (int i = 0; i < 2; i++)
            UNROLL for (int r = 0; r < ROWS; r++) sum[i][t][r] = product(rows[i][r], token, sum[i][t][r]);
    }
}

// out[i] has in lane 4 t + r the product of token t and row r of run i. Meanwhile `lines` rows of each run that lie
// `ahead` are fetched to the second cache, one after another.
INLINE void tile(const int tokens, const int lines, const cell *x, const cell *const w[2], int64_t size, int64_t ahead,
                 vec out[2]) {
    vec sum[2][TOKENS][4] = {0};
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) {
        UNROLL for (int i = 0; i < 2; i++)
            UNROLL for (int r = 0; r < lines; r++) __builtin_prefetch(w[i] + ahead + lines * k + r * LANES, 0, 2);
        step(tokens, x, w, size, k, WHOLE, sum);
    }
    if (k < size) step(tokens, x, w, size, k, WHOLE >> (LANES - (size - k)), sum);
    UNROLL for (int i = 0; i < 2; i++) out[i] = sums_of(sum[i]);
}

typedef void tile_of(const cell *x, const cell *const w[2], int64_t size, int64_t ahead, vec out[2]);
#define TILE(tokens, lines)                                                                                            \
    static void tile_##tokens##_##lines(const cell *x, const cell *const w[2], int64_t size, int64_t ahead, vec out[2]) { \
        tile(tokens, lines, x, w, size, ahead, out);                                                                   \
    }
TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(4, 2) TILE(1, 3) TILE(2, 3) TILE(3, 3) TILE(4, 3)
static tile_of *const tiles[ROWS][TOKENS] = { // by lines and tokens
    {tile_1_1, tile_2_1, tile_3_1, tile_4_1}, {NULL, NULL, NULL, tile_4_2}, {tile_1_3, tile_2_3, tile_3_3, tile_4_3},
};

// Three numbers of each of up to TOKENS rows, from lane 4 t on.
INLINE vec read_rows(const cell *at, int64_t row, int tokens) {
    __m128 quads[TOKENS] = {0};
    for (int t = 0; t < tokens; t++) quads[t] = read3(at + t * row);
    vec v;
    memcpy(&v, quads, sizeof v);
    return v;
}

INLINE void write_rows(cell *at, int64_t row, int tokens, vec v) {
    __m128 quads[TOKENS];
    memcpy(quads, &v, sizeof v);
    for (int t = 0; t < tokens; t++) write3(at + t * row, quads[t]);
}

// e^x for x <= 0, of Cephes' polynomial; 0 far below.
INLINE vec exp_of(vec x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.f), x); // not a number stays one
    vec n = _mm512_roundscale_ps(x * 1.44269504f, 0), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = ((p * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r + 1.6666665459e-1f;
    return _mm512_scalef_ps((p * r + 5.0000001201e-1f) * r * r + r + 1.f, n);
}

INLINE vec silu(vec x) {
    vec e = exp_of(-_mm512_abs_ps(x)), one = _mm512_set1_ps(1.f);
    return x * (_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)x), one, e) / (one + e));
}

enum kind {
    PLAIN,  // with `other` added, if there is any
    GATED,  // silu(x gateᵀ) · (x upᵀ)
    TURNED, // heads, rotated: the first half of a head and its second one are the coordinates that angles turn
};

struct job {
    const cell *x, *w, *up;  // [tokens, size], [rows, size], and of GATED a second one for `up`
    const cell *pairs;       // x in pairs, or NULL: for tile_products.h, of which GATED gives `out` so, too
    int64_t tokens, size, rows, half; // of TURNED: of a head
    cell *out;               // [tokens, rows], out_row apart
    int64_t out_row;
    const cell *other;       // [tokens, rows], other_row apart; of TURNED the cosines [tokens, 2 half]
    const cell *sin;
    int64_t other_row;
};

// Sums a and b of two runs of rows: of up to TOKENS tokens, or `wide`, some of one token's.
INLINE void finish(const enum kind kind, const struct job *j, int64_t t, int tokens, int64_t row, int64_t apart,
                   const int wide, __mmask16 some, vec a, vec b) {
#define READ(at) (wide ? read(at, some) : read_rows(at, j->other_row, tokens))
#define WRITE(at, v) (wide ? write(at, v, some) : write_rows(at, j->out_row, tokens, v))
    cell *out = j->out + t * j->out_row + row;
    const cell *other = j->other + t * j->other_row;
    if (kind == GATED) a = silu(a) * b;
    if (kind == PLAIN && j->other) {
        a += READ(other + row);
        b += READ(other + row + apart);
    }
    if (kind == TURNED) {
        int64_t at = row % (2 * j->half);
        const cell *cos = other + at, *sin = j->sin + t * j->other_row + at;
        vec x = a, y = b;
        a = x * READ(cos) - y * READ(sin);
        b = y * READ(cos + apart) + x * READ(sin + apart);
    }
    WRITE(out, a);
    if (kind != GATED) WRITE(out + apart, b);
#undef READ
#undef WRITE
}

// A tile's two runs for all tokens, TOKENS at a time, which share the fetching of the next tile's rows.
INLINE void column(const enum kind kind, const struct job *j, int64_t row, int64_t apart, const cell *const w[2],
                   int64_t next) {
    int64_t lines = j->tokens <= TOKENS ? 3 : j->tokens <= 2 * TOKENS ? 2 : 1;
    for (int64_t t = 0, fetched = 0; t < j->tokens; t += TOKENS, fetched += lines, lines = 1) {
        int64_t tokens = j->tokens - t < TOKENS ? j->tokens - t : TOKENS;
        vec out[2];
        tiles[lines - 1][tokens - 1](j->x + t * j->size, w, j->size, fetched < ROWS ? next + fetched * j->size : 0, out);
        finish(kind, j, t, tokens, row, apart, 0, 0, out[0], out[1]);
    }
}

#if AMX
// The same by tile_products.h, two times RUN tokens at a time.
INLINE void tall_column(const enum kind kind, const struct job *j, int64_t height, int64_t row, int64_t apart,
                        const cell *const w[2], int64_t next) {
    float sums[2][2][RUN][RUN] __attribute__((aligned(64)));
    for (int64_t t = 0; t < j->tokens; t += RUN) {
        int64_t group = t / RUN % 2, tokens = j->tokens - t < RUN ? j->tokens - t : RUN;
        int alone = !group && j->tokens - t <= RUN;
        if (!group) sum_tiles(2 - alone, w, j->pairs + t * j->size, j->size, height, t ? 0 : next, sums);
        vec a[RUN], b[RUN];
        memcpy(a, sums[group][0], sizeof a), memcpy(b, sums[group][1], sizeof b);
        if (alone) UNROLL for (int i = 0; i < RUN; i++)
            a[i] += _mm512_load_ps(sums[1][0][i]), b[i] += _mm512_load_ps(sums[1][1][i]);
        if (kind == GATED) {
            cell *pairs = j->out + t * j->rows + row * RUN;
            for (int64_t r = 0; r < height; r += 2)
                write_pair(pairs + r * RUN, silu(a[r]) * b[r], silu(a[r + 1]) * b[r + 1]);
            continue;
        }
        transpose((__m512i *)a), transpose((__m512i *)b);
        for (int64_t i = 0; i < tokens; i++)
            finish(kind, j, t + i, 1, row, apart, 1, (1 << height) - 1, a[i], b[i]);
    }
}

#endif

// The share of one thread of several. Where rows are no multiple of a tile's, the last one goes back over some.
INLINE void share(const enum kind kind, const struct job *j, int64_t thread, int64_t threads) {
    int64_t height = ROWS, runs = kind == TURNED ? j->half : j->rows;
#if AMX
    struct tile_shapes before;
    if (j->pairs) {
        height = runs < RUN || j->rows < 8 * RUN * threads ? RUN / 2 : RUN;
        shape_tiles(height, RUN, &before);
    }
#endif
    int64_t each = kind == PLAIN ? 2 * height : height;
    int64_t in_run = (runs + each - 1) / each, tiles = kind == TURNED ? j->rows / (2 * j->half) * in_run : in_run;
    for (int64_t i = tiles * thread / threads; i < tiles * (thread + 1) / threads; i++) {
        int64_t at = i % in_run * each, apart = kind == TURNED ? j->half : height;
        int64_t row = (at + each <= runs ? at : runs - each) + i / in_run * 2 * j->half;
        const cell *first = j->w + row * j->size;
        const cell *w[2] = {first, kind == GATED ? j->up + row * j->size : first + apart * j->size};
#if AMX
        if (j->pairs) tall_column(kind, j, height, row, apart, w, each * j->size);
        else
#endif
        column(kind, j, row, apart, w, each * j->size);
    }
#if AMX
    if (j->pairs) restore_tiles(&before);
#endif
}

static void plain(const struct job *j, int64_t thread, int64_t threads) { share(PLAIN, j, thread, threads); }
static void gated(const struct job *j, int64_t thread, int64_t threads) { share(GATED, j, thread, threads); }
static void turned(const struct job *j, int64_t thread, int64_t threads) { share(TURNED, j, thread, threads); }
