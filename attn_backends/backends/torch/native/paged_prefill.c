// Attention of rows with any number of new tokens, over a paged cache in a CPU's memory: prompts, and chunks after what
// is cached. Flash attention (Dao et al.), with a query in each lane: logits, their maxima and their sums need no sum
// across lanes, and an element of a key or value is read where it lies in its page, and broadcast.
//
// A row's queries are its tokens times the GROUP query heads of a KV head, in this order. A task is one row, a KV head
// and a block of STRIPS strips of queries; or some keys of it, a piece, where there are few blocks and many threads.
//
// In bfloat16 on a CPU with AMX, products are of tiles: a tile of logits is [key, query], one of outputs [dimension of
// values, query], so both are the vectors that the rest works with, and queries and weights are B as they are.

#include "paged.h"
#if BFLOAT16 && defined(__AVX512BF16__)
#include "amx.h"
#endif

#define MIN_PIECE 256   // keys
#define MIN_WORK 65536  // multiplications that are worth waking the other threads
#define TASKS 4         // of a thread, to even out what they differ in
#define LN_2 0.693147181f
#define LOWEST -1e30f   // below all logits, and finite: the difference of two is a number
// TILE: keys between two updates of the softmax. WIDTH: vectors of a strip. AT_ONCE: keys, or dimensions of values, that
// a microkernel holds in registers, with WIDTH what there are.
#if AMX
#define TILE 128
#define STRIPS 8 // which share the turning of values
#define WIDTH 2  // columns of tiles
#define AT_ONCE 8
#elif defined(__AVX512F__)
#define TILE 64
#define STRIPS 2
#define WIDTH 3
#define AT_ONCE 8
#else
#define TILE 64
#define STRIPS 2
#define WIDTH 1
#define AT_ONCE 4
#endif
#define QUERIES (WIDTH * LANES)
#define BLOCK (STRIPS * QUERIES)

// What products are of: float32; or pairs of bfloat16 where the CPU adds two products at once.
#if BFLOAT16 && defined(__AVX512BF16__)
#define PER_WORD 2
typedef uint32_t word;
static inline vec product(ints a, int32_t b, vec acc) {
    return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)_mm512_set1_epi32(b));
}
typedef ints words;
typedef int32_t word_of_key;
#else
#define PER_WORD 1
typedef vec words;
typedef float word_of_key;
static inline vec product(words a, word_of_key b, vec acc) { return acc + a * b; }
#endif
#define KEY_WORDS (HEAD_DIM / PER_WORD)
#if AMX
#define PADDED_WORDS ((KEY_WORDS + LANES - 1) / LANES * LANES) // whole tiles; zeros where keys have no more dimensions
#define ROOM_BYTES (TILE * (HEAD_DIM_VO + 2 * PADDED_WORDS) * 2)
#define DEPTH 32                                               // numbers of a row of a tile
#define SLACK 8.f                                              // in powers of 2
#else
#define PADDED_WORDS KEY_WORDS
#if PER_WORD == 2
#define ROOM_BYTES (TILE * HEAD_DIM_VO * 2)
#elif FLOAT32
#define ROOM_BYTES 64
#else
#define ROOM_BYTES (TILE * (HEAD_DIM + HEAD_DIM_VO) * 4)
#endif
#endif

// Softmax of some keys is out / l, in powers of 2; m is their highest logit.
struct partial { vec out[HEAD_DIM_VO][WIDTH], m[WIDTH], l[WIDTH]; };

struct strip { // queries side by side, one in a lane
    words query[PADDED_WORDS][WIDTH];
    struct partial part;
    ints first[WIDTH], stop[WIDTH], position[WIDTH]; // what each sees, and where it stands
    vec slope[WIDTH];
    int64_t any_first, any_stop, all_first, all_stop; // keys that some query sees, and that all do
    int64_t start;                                    // the first of them in the row
    int num, width;                                   // queries, and vectors that hold them
    int fresh;                                        // nothing is attended, and nothing in part.out
};

struct tile { // keys
    int64_t start, n;
    const cell *lines[2][TILE];                   // where keys and values lie
    const word_of_key *keys[TILE], *values[TILE]; // as products read them: values by pairs where products are
#if AMX
    const cell *rows, *turned; // keys as A, 2 PADDED_WORDS apart; values, [dimension, key], TILE apart; zeros behind
#endif
};

// Rows to columns: each round moves one bit of an element's place from its row to its column.
static inline void transpose(ints rows[LANES]) {
    for (int round = 0; round < 4; round++) {
        ints next[LANES];
        UNROLL for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = ZIP(rows[i], rows[i + LANES / 2], 0);
            next[2 * i + 1] = ZIP(rows[i], rows[i + LANES / 2], 8);
        }
        memcpy(rows, next, sizeof next);
    }
}

// 2^x for x <= 0, to a unit in the last place, or as exact as bfloat16 needs; 0 far below.
static inline vec exp2_of(vec x) {
#ifdef __AVX512F__
    // Results that are no normal numbers would take a hundred cycles each. Not a number stays one.
    __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.f), _CMP_NLT_UQ);
    vec n = (vec)_mm512_roundscale_ps((__m512)x, 0), r = x - n;
#else
    ints whole = __builtin_convertvector(x - 0.5f, ints);
    vec r = x - __builtin_convertvector(whole, vec);
#endif
#if PER_WORD == 2
    vec p = ((9.570101276e-3f * r + 5.591785908e-2f) * r + 2.402474433e-1f) * r + 6.931217909e-1f;
#else
    vec p = ((1.327647129e-3f * r + 9.675540961e-3f) * r + 5.550713092e-2f) * r + 2.402212024e-1f;
    p = p * r + 6.931469440e-1f;
#endif
    p = p * r + 1.f;
#ifdef __AVX512F__
    return (vec)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)n);
#else
    return (vec)(((ints)p + (whole << 23)) & ~(x < -126.f));
#endif
}

// A strip's queries of a KV head, transposed, and nothing attended.
static void load_queries(const struct step *s, int64_t row, int64_t head, struct strip *strip) {
    int64_t first_token = s->query_starts[row], context = s->seq_lens[row] - (s->query_starts[row + 1] - first_token);
    float factor = PER_WORD == 1 ? s->scale * s->k_scale / (s->soft_cap ? s->soft_cap : LN_2) : 1;
    for (int w = 0; w < strip->width; w++) {
        const cell *from[LANES];
        for (int i = 0; i < LANES; i++) {
            int at = w * LANES + i < strip->num ? w * LANES + i : strip->num - 1; // lanes too many do as the last one
            int64_t token = (strip->start + at) / GROUP, g = head * GROUP + (strip->start + at) % GROUP, stop;
            from[i] = s->query.data + (first_token + token) * s->query.stride[0] + g * s->query.stride[1];
            strip->position[w][i] = context + token;
            strip->first[w][i] = visible(s, row, context + token, &stop);
            strip->stop[w][i] = stop;
            strip->slope[w][i] = s->slopes ? s->slopes[g] / LN_2 : 0;
        }
        for (int d = 0; d < KEY_WORDS; d += LANES) {
            ints rows[LANES];
            for (int i = 0; i < LANES; i++)
#if PER_WORD == 2
                if (d + LANES <= KEY_WORDS) memcpy(&rows[i], from[i] + 2 * d, sizeof rows[i]);
                else rows[i] = (ints){0}, memcpy(&rows[i], from[i] + 2 * d, (KEY_WORDS - d) * 4);
#else
                rows[i] = (ints)(load(from[i] + d) * factor);
#endif
            transpose(rows);
            for (int i = 0; i < LANES && d + i < KEY_WORDS; i++) strip->query[d + i][w] = (words)rows[i];
        }
        strip->part.m[w] = (vec){0} + LOWEST;
        strip->part.l[w] = (vec){0};
    }
    for (int d = KEY_WORDS; d < PADDED_WORDS; d++) for (int w = 0; w < WIDTH; w++) strip->query[d][w] = (words){0};
    strip->fresh = 1;
    int last = strip->num - 1;
    strip->any_first = strip->first[0][0], strip->all_first = strip->first[last / LANES][last % LANES];
    strip->all_stop = strip->stop[0][0], strip->any_stop = strip->stop[last / LANES][last % LANES];
}

static void begin(struct strip *strip) {
    for (int d = 0; strip->fresh && d < HEAD_DIM_VO; d++)
        for (int w = 0; w < WIDTH; w++) strip->part.out[d][w] = (vec){0};
    strip->fresh = 0;
}

// Where the keys [start, stop) lie, or the first of them; what is too many of AT_ONCE, which no query sees, repeats the
// last one.
static void locate(const struct step *s, int64_t row, int64_t head, int64_t start, int64_t stop, struct tile *t) {
    const int32_t *pages = s->pages + s->first_pages[row];
    t->start = start, t->n = stop - start < TILE ? stop - start : TILE;
    int64_t page = start / s->page_size, offset = start % s->page_size;
    for (int64_t i = 0; i < t->n; i++) {
        t->lines[0][i] = slot(&s->key_cache, pages[page], offset, head);
        t->lines[1][i] = slot(&s->value_cache, pages[page], offset, head);
        if (++offset == s->page_size) offset = 0, page++;
    }
    for (int64_t i = t->n; i % AT_ONCE; i++)
        for (int kind = 0; kind < 2; kind++) t->lines[kind][i] = t->lines[kind][i - 1];
}

#if AMX
// Keys and values in whole tiles. Keys are copied even where they lie evenly: rows of several heads would take the same
// few sets of the first cache.
static void prepare_tiles(struct tile *t, cell *room) {
    cell *turned = room + TILE * 2 * PADDED_WORDS;
    t->rows = room, t->turned = turned;
    for (int64_t first = 0; first < t->n; first += DEPTH) {
        for (int64_t i = first; i < first + DEPTH; i++, room += 2 * PADDED_WORDS) {
            if (i >= t->n || KEY_WORDS < PADDED_WORDS) memset(room, 0, 2 * PADDED_WORDS * sizeof(cell));
            if (i < t->n) memcpy(room, t->lines[0][i], HEAD_DIM * sizeof(cell));
        }
        for (int d = 0; d < HEAD_DIM_VO; d += LANES) {
            ints pairs[LANES];
            for (int64_t i = 0; i < LANES; i++) {
                int64_t key = first + 2 * i;
                bits even = key < t->n ? widen(t->lines[1][key] + d) : (bits){0};
                bits odd = key + 1 < t->n ? widen(t->lines[1][key + 1] + d) : (bits){0};
                pairs[i] = (ints)(even | odd << 16);
            }
            transpose(pairs);
            for (int i = 0; i < LANES; i++) memcpy(turned + (d + i) * TILE + first, &pairs[i], sizeof pairs[i]);
        }
    }
}
#endif

// Keys and values as products read them, in `room` where that is not how they lie.
static void prepare(struct tile *t, void *room) {
#if AMX
    if (tiles_allowed) return prepare_tiles(t, room);
#endif
#if FLOAT32
    memcpy(t->keys, t->lines[0], sizeof t->keys);
    memcpy(t->values, t->lines[1], sizeof t->values);
#elif PER_WORD == 2
    // Pairs of values side by side; nothing beside an odd last one.
    uint32_t *pairs = room;
    memcpy(t->keys, t->lines[0], sizeof t->keys);
    for (int64_t i = 0; i < t->n; i += 2, pairs += HEAD_DIM_VO) {
        for (int d = 0; d < HEAD_DIM_VO; d += LANES) {
            bits pair = widen(t->lines[1][i] + d);
            if (i + 1 < t->n) pair |= widen(t->lines[1][i + 1] + d) << 16;
            memcpy(pairs + d, &pair, sizeof pair);
        }
        t->values[i / 2] = (const void *)pairs;
    }
#else
    float *at = room;
    for (int64_t i = 0; i < t->n; i++)
        for (int kind = 0; kind < 2; kind++) {
            *(kind ? &t->values[i] : &t->keys[i]) = at;
            for (int d = 0; d < (kind ? HEAD_DIM_VO : HEAD_DIM); d += LANES, at += LANES) {
                vec v = load(t->lines[kind][i] + d);
                memcpy(at, &v, sizeof v);
            }
        }
    for (int64_t i = t->n; i % AT_ONCE; i++) t->keys[i] = t->keys[i - 1];
#endif
}

// Logits of a key, or -infinity where a query does not see it.
static inline vec seen(const struct strip *strip, ints key, int w, vec x) {
    ints hidden = (key < strip->first[w]) | (key >= strip->stop[w]);
    return (vec)(((ints)x & ~hidden) | ((ints)((vec){0} - INFINITY) & hidden));
}

// Whether every query sees AT_ONCE keys.
static inline int all_seen(const struct strip *strip, const struct tile *t, int at) {
    int64_t first = t->start + at;
    return first >= strip->all_first && first + AT_ONCE <= strip->all_stop && first + AT_ONCE <= t->start + t->n;
}

// Products of AT_ONCE keys to logits, in powers of 2; `high` is the highest so far.
static inline __attribute__((always_inline)) void mask(const struct step *s, const struct strip *strip,
                                                       const struct tile *t, int at, int width, vec acc[][WIDTH],
                                                       vec logits[][WIDTH], vec *high) {
    int64_t first = t->start + at;
    float factor = PER_WORD == 2 ? s->scale * s->k_scale / (s->soft_cap ? s->soft_cap : LN_2) : 1;
    int whole = all_seen(strip, t, at);
    if (whole && !s->soft_cap && !s->slopes)
        UNROLL for (int i = 0; i < AT_ONCE; i++) UNROLL for (int w = 0; w < width; w++) {
            vec x = PER_WORD == 2 ? acc[i][w] * factor : acc[i][w];
            high[w] = higher(high[w], x);
            logits[at + i][w] = x;
        }
    else
        for (int i = 0; i < AT_ONCE; i++) for (int w = 0; w < width; w++) {
            vec x = PER_WORD == 2 ? acc[i][w] * factor : acc[i][w];
            ints key = (ints){0} + (int32_t)(first + i);
            if (s->soft_cap) x = tanh_of(x) * (float)(s->soft_cap / LN_2);
            if (s->slopes) x += strip->slope[w] * __builtin_convertvector(key - strip->position[w], vec);
            x = seen(strip, key, w, x);
            high[w] = higher(high[w], x);
            logits[at + i][w] = x;
        }
}

// Logits of AT_ONCE keys.
static inline __attribute__((always_inline)) void dot(const struct step *s, const struct strip *strip,
                                                      const struct tile *t, const struct tile *next, int at, int width,
                                                      vec logits[][WIDTH], vec *high) {
    vec acc[AT_ONCE][WIDTH];
    UNROLL for (int i = 0; i < AT_ONCE; i++) UNROLL for (int w = 0; w < width; w++) acc[i][w] = (vec){0};
    const word_of_key *const *keys = t->keys + at;
    for (int d = 0; d < KEY_WORDS; d += 8) {
        // Half a line a step: at its first half a line of keys, at its second one of values.
        int bytes = d * PER_WORD * sizeof(cell), kind = bytes % 64 != 0;
        if (next && bytes % 32 == 0 && bytes < (kind ? HEAD_DIM_VO : HEAD_DIM) * (int)sizeof(cell))
            for (int i = 0; i < AT_ONCE; i++) __builtin_prefetch((const char *)next->lines[kind][at + i] + bytes, 0, 2);
        UNROLL for (int e = 0; e < 8; e++)
            UNROLL for (int i = 0; i < AT_ONCE; i++)
                UNROLL for (int w = 0; w < width; w++)
                    acc[i][w] = product(strip->query[d + e][w], keys[i][d + e], acc[i][w]);
    }
    mask(s, strip, t, at, width, acc, logits, high);
}

// Rounded before anything is subtracted: the highest of all must come to 0, and huge ones are whole numbers far apart.
static inline vec times(vec x, float factor) {
    x *= factor;
#if AMX
    __asm__("" : "+v"(x));
#endif
    return x;
}

// Logits [from, to), times a factor, to weights, in pairs where products are; what comes before is to shrink.
static inline __attribute__((always_inline)) void soften(struct strip *strip, vec logits[][WIDTH], float factor,
                                                         int from, int to, int width, const vec *high, vec *shrink) {
    vec sum[WIDTH];
    UNROLL for (int w = 0; w < width; w++) {
        shrink[w] = exp2_of(strip->part.m[w] - high[w]);
        strip->part.m[w] = high[w];
        sum[w] = strip->part.l[w] * shrink[w];
    }
    for (int i = from; i < to; i += 2)
        UNROLL for (int w = 0; w < width; w++) {
            vec a = exp2_of(times(logits[i][w], factor) - high[w]), b = exp2_of(times(logits[i + 1][w], factor) - high[w]);
            sum[w] += a + b;
#if PER_WORD == 2
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
            const __m512i zip = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                                 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
            logits[i / 2][w] = (vec)_mm512_permutexvar_epi16(zip, both);
#else
            logits[i][w] = a, logits[i + 1][w] = b;
#endif
        }
    UNROLL for (int w = 0; w < width; w++) strip->part.l[w] = sum[w];
}

// out = out · shrink + Σ weight · value
static inline __attribute__((always_inline)) void add(struct strip *strip, const struct tile *t, vec logits[][WIDTH],
                                                      int from, int to, int width, const vec *shrink) {
    for (int d = 0; d < HEAD_DIM_VO; d += AT_ONCE) {
        vec acc[AT_ONCE][WIDTH];
        UNROLL for (int i = 0; i < AT_ONCE; i++)
            UNROLL for (int w = 0; w < width; w++) acc[i][w] = strip->part.out[d + i][w] * shrink[w];
        for (int k = from / PER_WORD; k < to / PER_WORD; k++) {
            const word_of_key *value = t->values[k] + d;
            UNROLL for (int i = 0; i < AT_ONCE; i++)
                UNROLL for (int w = 0; w < width; w++)
                    acc[i][w] = product((words)logits[k][w], value[i], acc[i][w]);
        }
        UNROLL for (int i = 0; i < AT_ONCE; i++)
            UNROLL for (int w = 0; w < width; w++) strip->part.out[d + i][w] = acc[i][w];
    }
}

#if AMX
// Four tiles of sums, of two rows of tiles and two columns, or one of each; tiles 4 and 5 are of A, 6 and 7 of B.
#define EACH_SUM(of)                                                                                                   \
    of(0, 0, 0);                                                                                                       \
    if (width > 1) of(1, 0, 1);                                                                                        \
    if (rows > 1) of(2, 1, 0);                                                                                         \
    if (rows > 1 && width > 1) of(3, 1, 1)
#define ADD_TILES(a, next_a, apart, b)                                                                                 \
    _tile_loadd(4, a, apart);                                                                                          \
    _tile_loadd(6, b, WIDTH * TILE_BYTES);                                                                             \
    _tile_dpbf16ps(0, 4, 6);                                                                                           \
    if (width > 1) {                                                                                                   \
        _tile_loadd(7, b + 1, WIDTH * TILE_BYTES);                                                                     \
        _tile_dpbf16ps(1, 4, 7);                                                                                       \
    }                                                                                                                  \
    if (rows > 1) {                                                                                                    \
        _tile_loadd(5, next_a, apart);                                                                                 \
        _tile_dpbf16ps(2, 5, 6);                                                                                       \
        if (width > 1) _tile_dpbf16ps(3, 5, 7);                                                                        \
    }

// Products of DEPTH keys.
static inline __attribute__((always_inline)) void dot_tiles(const struct strip *strip, const struct tile *t, int at,
                                                            int width, vec logits[][WIDTH]) {
    const int rows = 2, size = 2 * PADDED_WORDS;
#define ZERO(sum, row, w) _tile_zero(sum)
#define STORE(sum, row, w) _tile_stored(sum, &logits[at + row * TILE_ROWS][w], WIDTH * TILE_BYTES)
    WRITTEN(strip);
    EACH_SUM(ZERO);
    for (int k = 0; k < PADDED_WORDS; k += TILE_ROWS) {
        const cell *a = t->rows + at * size + 2 * k;
        ADD_TILES(a, a + TILE_ROWS * size, size * sizeof(cell), strip->query[k]);
    }
    EACH_SUM(STORE);
#undef STORE
}

// `add` for two tiles of dimensions, or one.
static inline __attribute__((always_inline)) void add_tiles(struct strip *strip, const struct tile *t, int d,
                                                            const int rows, vec logits[][WIDTH], int from, int to,
                                                            int width) {
#define LOAD(sum, row, w) _tile_loadd(sum, &strip->part.out[d + row * TILE_ROWS][w], WIDTH * TILE_BYTES)
#define STORE(sum, row, w) _tile_stored(sum, &strip->part.out[d + row * TILE_ROWS][w], WIDTH * TILE_BYTES)
    WRITTEN(logits);
    if (strip->fresh) { EACH_SUM(ZERO); }
    else { EACH_SUM(LOAD); }
    for (int k = from; k < to; k += DEPTH) {
        const cell *a = t->turned + d * TILE + k;
        ADD_TILES(a, a + TILE_ROWS * TILE, TILE * sizeof(cell), logits[k / 2]);
    }
    EACH_SUM(STORE);
}

// The highest product of AT_ONCE keys; those that a query does not see are -infinity.
static inline __attribute__((always_inline)) void hide(const struct strip *strip, const struct tile *t, int at,
                                                       int width, vec products[][WIDTH], vec *high) {
    int64_t first = t->start + at;
    int whole = all_seen(strip, t, at);
    for (int i = 0; !whole && i < AT_ONCE; i++)
        UNROLL for (int w = 0; w < width; w++)
            products[at + i][w] = seen(strip, (ints){0} + (int32_t)(first + i), w, products[at + i][w]);
    UNROLL for (int i = 0; i < AT_ONCE; i++)
        UNROLL for (int w = 0; w < width; w++) high[w] = higher(high[w], products[at + i][w]);
}

// Whether none of a strip's maxima has grown so much that what was before must shrink: weights are up to 2^SLACK else.
static inline __attribute__((always_inline)) int keeps(const struct strip *strip, const vec *high, int width) {
    int grown = 0;
    UNROLL for (int w = 0; w < width; w++)
        grown |= _mm512_cmp_ps_mask((__m512)high[w], (__m512)(strip->part.m[w] + SLACK), _CMP_NLE_UQ);
    return !grown;
}

static inline __attribute__((always_inline)) void attend_tiles(const struct step *s, struct strip *strip,
                                                               const struct tile *t, const struct tile *next,
                                                               int64_t from, int64_t to, int width) {
    vec logits[TILE][WIDTH], high[WIDTH], shrink[WIDTH];
    from = from / DEPTH * DEPTH, to = (to + DEPTH - 1) / DEPTH * DEPTH;
    float factor = s->scale * s->k_scale;
    int plain = !(s->soft_cap || s->slopes) && factor > 0; // then a maximum of products is one of logits
    factor = plain ? factor / LN_2 : 1;
    UNROLL for (int w = 0; w < width; w++) high[w] = plain ? (vec){0} - INFINITY : strip->part.m[w];
    for (int at = from; at < to; at += DEPTH) {
        for (int i = at; next && i < at + DEPTH && i < next->n; i++)
            for (int kind = 0; kind < 2; kind++)
                for (int bytes = 0; bytes < (kind ? HEAD_DIM_VO : HEAD_DIM) * 2; bytes += 64)
                    __builtin_prefetch((const char *)next->lines[kind][i] + bytes, 0, 2);
        dot_tiles(strip, t, at, width, logits);
        for (int i = at; i < at + DEPTH; i += AT_ONCE)
            if (plain) hide(strip, t, i, width, logits, high);
            else mask(s, strip, t, i, width, logits + i, logits, high);
    }
    if (plain) UNROLL for (int w = 0; w < width; w++) high[w] = higher(strip->part.m[w], high[w] * factor);
    int kept = keeps(strip, high, width);
    if (kept) UNROLL for (int w = 0; w < width; w++) high[w] = strip->part.m[w];
    soften(strip, logits, factor, from, to, width, high, shrink);
    for (int d = 0; !kept && !strip->fresh && d < HEAD_DIM_VO; d++)
        UNROLL for (int w = 0; w < width; w++) strip->part.out[d][w] *= shrink[w];
    int d = 0;
    for (; d + TILE_ROWS < HEAD_DIM_VO; d += 2 * TILE_ROWS) add_tiles(strip, t, d, 2, logits, from, to, width);
    if (d < HEAD_DIM_VO) add_tiles(strip, t, d, 1, logits, from, to, width);
    strip->fresh = 0;
}
#endif

static inline __attribute__((always_inline)) void attend_by(const struct step *s, struct strip *strip,
                                                            const struct tile *t, const struct tile *next, int width) {
    int64_t from = strip->any_first > t->start ? strip->any_first - t->start : 0;
    int64_t to = strip->any_stop < t->start + t->n ? strip->any_stop - t->start : t->n;
    if (from >= to) return;
#if AMX
    if (tiles_allowed) return attend_tiles(s, strip, t, next, from, to, width);
#endif
    begin(strip);
    from = from / AT_ONCE * AT_ONCE, to = (to + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
    vec logits[TILE][WIDTH], high[WIDTH], shrink[WIDTH];
    UNROLL for (int w = 0; w < width; w++) high[w] = strip->part.m[w];
    for (int at = from; at < to; at += AT_ONCE) 
        dot(s, strip, t, next && at < next->n ? next : NULL, at, width, logits, high);
    soften(strip, logits, 1.f, from, to, width, high, shrink);
    // Behind the last key there are weights of 0 and no values.
    to = to < t->n ? to : (t->n + PER_WORD - 1) / PER_WORD * PER_WORD;
    add(strip, t, logits, from, to, width, shrink);
}

#define ATTEND(width)                                                                                                  \
    static __attribute__((noinline)) void attend_##width(const struct step *s, struct strip *strip,                    \
                                                         const struct tile *t, const struct tile *next) {              \
        attend_by(s, strip, t, next, width);                                                                           \
    }
ATTEND(1)
#if WIDTH > 1
ATTEND(2)
#endif
#if WIDTH > 2
ATTEND(3)
#endif

// Some queries of a row and KV head, over the keys from `start` to `stop`.
static void attend(const struct step *s, int64_t row, int64_t head, int64_t start, int64_t stop, struct strip *strips,
                   int num_strips) {
    char room[ROOM_BYTES] __attribute__((aligned(64)));
    struct tile tiles[2];
#if AMX
    struct tile_shapes before;
    if (tiles_allowed) shape_tiles(TILE_ROWS, TILE_ROWS, &before);
#endif
    locate(s, row, head, start, stop, &tiles[0]);
    for (int nth = 0; start < stop; start += TILE, nth ^= 1) {
        struct tile *t = &tiles[nth], *next = NULL;
        if (start + TILE < stop) locate(s, row, head, start + TILE, stop, next = &tiles[!nth]);
        prepare(t, room);
        for (int i = 0; i < num_strips; i++, next = NULL) { // fetched once
            switch (strips[i].width) {
            case 1: attend_1(s, &strips[i], t, next); break;
#if WIDTH > 1
            case 2: attend_2(s, &strips[i], t, next); break;
#endif
#if WIDTH > 2
            case 3: attend_3(s, &strips[i], t, next); break;
#endif
            }
        }
    }
#if AMX
    if (tiles_allowed) restore_tiles(&before);
#endif
    for (int i = 0; i < num_strips; i++) begin(&strips[i]); // of which no query sees a key of these
}

// Join what two strips of the same queries attended of different keys.
static void merge(struct partial *into, const struct partial *from, int width) {
    for (int w = 0; w < width; w++) {
        vec high = higher(into->m[w], from->m[w]), a = exp2_of(into->m[w] - high), b = exp2_of(from->m[w] - high);
        for (int d = 0; d < HEAD_DIM_VO; d++) into->out[d][w] = into->out[d][w] * a + from->out[d][w] * b;
        into->l[w] = into->l[w] * a + from->l[w] * b;
        into->m[w] = high;
    }
}

// Outputs of a strip, by token and head, with sinks.
static void store_outputs(const struct step *s, int64_t row, int64_t head, const struct strip *strip) {
    int64_t heads = s->num_kv_heads * GROUP;
    for (int w = 0; w < strip->width; w++) {
        int64_t to[LANES];
        int n = strip->num - w * LANES < LANES ? strip->num - w * LANES : LANES;
        vec factor = {0};
        for (int i = 0; i < n; i++) {
            int64_t at = strip->start + w * LANES + i, g = head * GROUP + at % GROUP;
            float m = strip->part.m[w][i], l = strip->part.l[w][i], by = 1;
            float sink = s->sinks ? s->sinks[g] / LN_2 : -INFINITY;
            if (sink > m) by = exp2f(m - sink), l = l * by + 1, m = sink;
            else if (s->sinks) l += exp2f(sink - m);
            to[i] = (s->query_starts[row] + at / GROUP) * heads + g;
            factor[i] = by * (float)s->v_scale / l;
            if (s->lse) s->lse[to[i]] = (m + log2f(l)) * LN_2;
        }
        for (int d = 0; d < HEAD_DIM_VO; d += LANES) {
            ints rows[LANES];
            for (int i = 0; i < LANES; i++) rows[i] = (ints)(strip->part.out[d + i][w] * factor);
            transpose(rows);
            for (int i = 0; i < n; i++) store(s->output + to[i] * HEAD_DIM_VO + d, (vec)rows[i]);
        }
    }
}

struct plan { // who does what
    int64_t num_blocks, piece, max_splits;
    int64_t *first_block; // [row + 1]
};

static int64_t row_of(const struct step *s, const struct plan *plan, int64_t block) {
    int64_t row = 0;
    for (int64_t end = s->num_rows; row + 1 < end;) {
        int64_t middle = (row + end) / 2;
        if (plan->first_block[middle] <= block) row = middle;
        else end = middle;
    }
    return row;
}

// The strips of a block; returns their number, and in `start` and `stop` the keys that they see.
static int cut(const struct step *s, const struct plan *plan, int64_t block, struct strip *strips, int64_t *start,
               int64_t *stop) {
    int64_t row = row_of(s, plan, block), num_tokens = s->query_starts[row + 1] - s->query_starts[row], ignored;
    int64_t first = (block - plan->first_block[row]) * BLOCK, end = num_tokens * GROUP, context;
    int n = 0;
    end = end < first + BLOCK ? end : first + BLOCK;
    for (int64_t at = first; at < end; at += QUERIES, n++) {
        strips[n].start = at, strips[n].num = end - at < QUERIES ? end - at : QUERIES;
        strips[n].width = (strips[n].num + LANES - 1) / LANES;
    }
    context = s->seq_lens[row] - num_tokens;
    *start = visible(s, row, context + first / GROUP, &ignored);
    visible(s, row, context + (end - 1) / GROUP, stop);
    return n;
}

// Of a piece, a block and a KV head: one for each strip.
static inline int64_t place(const struct step *s, const struct plan *plan, int64_t nth, int64_t block, int64_t head) {
    return ((nth * plan->num_blocks + block) * s->num_kv_heads + head) * STRIPS;
}

// The `nth` piece of a block and KV head; the outputs, or what is to be joined in `partials`.
static void run(const struct step *s, const struct plan *plan, int64_t block, int64_t head, int64_t nth,
                struct partial *partials) {
    struct strip strips[STRIPS];
    int64_t start, stop, row = row_of(s, plan, block);
    int n = cut(s, plan, block, strips, &start, &stop);
    if (nth && nth * plan->piece >= stop - start) return;
    start += nth * plan->piece;
    for (int i = 0; i < n; i++) load_queries(s, row, head, &strips[i]);
    attend(s, row, head, start, stop - start < plan->piece ? stop : start + plan->piece, strips, n);
    for (int i = 0; i < n; i++)
        if (partials) partials[place(s, plan, nth, block, head) + i] = strips[i].part;
        else store_outputs(s, row, head, &strips[i]);
}

static void finish(const struct step *s, const struct plan *plan, int64_t block, int64_t head,
                   const struct partial *partials) {
    struct strip strips[STRIPS];
    int64_t start, stop, row = row_of(s, plan, block);
    int n = cut(s, plan, block, strips, &start, &stop);
    for (int i = 0; i < n; i++) {
        strips[i].part = partials[place(s, plan, 0, block, head) + i];
        for (int64_t nth = 1; nth * plan->piece < stop - start; nth++)
            merge(&strips[i].part, &partials[place(s, plan, nth, block, head) + i], strips[i].width);
        store_outputs(s, row, head, &strips[i]);
    }
}

// Blocks go to threads whole, or in pieces where they are few.
static void make_plan(const struct step *s, struct plan *plan) {
    int64_t num_keys = 0, longest = 0, start, stop, heads = s->num_kv_heads, threads = omp_get_max_threads();
    plan->first_block[0] = 0;
    for (int64_t row = 0; row < s->num_rows; row++) {
        int64_t num_queries = s->seq_lens[row] ? (s->query_starts[row + 1] - s->query_starts[row]) * GROUP : 0;
        plan->first_block[row + 1] = plan->first_block[row] + (num_queries + BLOCK - 1) / BLOCK;
    }
    plan->num_blocks = plan->first_block[s->num_rows];
    plan->piece = INT64_MAX / 2, plan->max_splits = 1;
    if (threads == 1 || plan->num_blocks * heads >= TASKS * threads) return;
    struct strip strips[STRIPS];
    for (int64_t block = 0; block < plan->num_blocks; block++) {
        cut(s, plan, block, strips, &start, &stop);
        num_keys += stop - start;
        longest = longest > stop - start ? longest : stop - start;
    }
    int64_t piece = num_keys * heads / (TASKS * threads);
    plan->piece = (piece < MIN_PIECE ? MIN_PIECE : piece + TILE - 1) / TILE * TILE;
    plan->max_splits = (longest + plan->piece - 1) / plan->piece;
}

// Write the new tokens, then attend. Returns the number of threads that it ran on, or why it did nothing.
int paged_prefill(const struct step *s) {
    int why = refused(s);
    if (why) return why;
#if AMX
    ask_for_tiles();
#endif
    int64_t heads = s->num_kv_heads, first_block[s->num_rows + 1], threads = 1;
    struct plan plan = {.first_block = first_block};
    make_plan(s, &plan);
    int64_t tasks = plan.num_blocks * heads;
    struct partial *partials = NULL;
    if (plan.max_splits > 1) partials = aligned_alloc(sizeof(vec), tasks * plan.max_splits * STRIPS * sizeof *partials);
    if (plan.max_splits > 1 && !partials) return NO_MEMORY;
    // Each loop ends in a wait for the slowest thread, which costs more than a few tokens take to write.
#pragma omp parallel for if (s->num_new * heads * HEAD_DIM > MIN_WORK)
    for (int64_t token = 0; token < s->num_new; token++) write_new(s, token);
    // Later blocks see more: they go first.
#pragma omp parallel for schedule(dynamic)
    for (int64_t task = tasks * plan.max_splits - 1; task >= 0; task--) {
        if (!task) threads = omp_get_num_threads();
        run(s, &plan, task / plan.max_splits / heads, task / plan.max_splits % heads, task % plan.max_splits, partials);
    }
    if (partials) {
#pragma omp parallel for
        for (int64_t task = 0; task < tasks; task++) finish(s, &plan, task / heads, task % heads, partials);
    }
    free(partials);
    return threads;
}
