// What the kernels of this folder share: vectors, a step's arguments, and the paged cache in a CPU's memory.
//
// Compiled for one layer's shape: HEAD_DIM and HEAD_DIM_VO (multiples of LANES), GROUP query heads a KV head, and
// one of FLOAT32, BFLOAT16, FLOAT16. Vectors are GCC's and Clang's.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
int omp_get_max_threads(void); // torch's own OpenMP, loaded long before this
int omp_get_num_threads(void);

#if FLOAT32
typedef float cell;
static inline vec load(const cell *at) { vec v; memcpy(&v, at, sizeof v); return v; }
static inline void store(cell *at, vec v) { memcpy(at, &v, sizeof v); }
#elif BFLOAT16
typedef uint16_t cell;
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
static inline bits widen(const cell *at) {
#ifdef __AVX512F__ // compilers split the conversion
    return (bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)at));
#else
    halves h;
    memcpy(&h, at, sizeof h);
    return __builtin_convertvector(h, bits);
#endif
}
static inline vec load(const cell *at) { return (vec)(widen(at) << 16); }
static inline void store(cell *at, vec v) { // to nearest, ties to even
    bits b = (bits)v, is_nan = (bits)(v != v);
    b = (((b + 0x7fff + (b >> 16 & 1)) & ~is_nan) | (0x7fc00000 & is_nan)) >> 16;
    halves h = __builtin_convertvector(b, halves);
    memcpy(at, &h, sizeof h);
}
#elif FLOAT16
typedef _Float16 cell;
#ifdef __AVX512F__
static inline vec load(const cell *at) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)at)); }
static inline void store(cell *at, vec v) { _mm256_storeu_si256((void *)at, _mm512_cvtps_ph((__m512)v, 0)); }
#else
typedef _Float16 halves __attribute__((vector_size(2 * LANES)));
static inline vec load(const cell *at) {
    halves h;
    memcpy(&h, at, sizeof h);
    return __builtin_convertvector(h, vec);
}
static inline void store(cell *at, vec v) { halves h = __builtin_convertvector(v, halves); memcpy(at, &h, sizeof h); }
#endif
#endif

// Lanes `at` to `at + 7` of two vectors, by turns.
#if defined(__clang__)
#define ZIP(a, b, at)                                                                                                  \
    __builtin_shufflevector(a, b, at, at + 16, at + 1, at + 17, at + 2, at + 18, at + 3, at + 19, at + 4, at + 20,     \
                            at + 5, at + 21, at + 6, at + 22, at + 7, at + 23)
#else
#define ZIP(a, b, at)                                                                                                  \
    __builtin_shuffle(a, b, (ints){at, at + 16, at + 1, at + 17, at + 2, at + 18, at + 3, at + 19, at + 4, at + 20,    \
                                   at + 5, at + 21, at + 6, at + 22, at + 7, at + 23})
#endif

static inline vec higher(vec a, vec b) {
    ints first = a > b;
    return (vec)(((ints)a & first) | ((ints)b & ~first));
}

// e^x for x <= 0, to 2 units in the last place: 2^n · e^r with the polynomial of Cephes' expf; 0 below -87.
static inline vec exp_of(vec x) {
    ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, ints);
    vec f = __builtin_convertvector(n, vec), r = x - f * 0.693359375f + f * 2.12194440e-4f;
    vec p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = ((p * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r + 1.6666665459e-1f;
    p = (p * r + 5.0000001201e-1f) * r * r + r + 1.f;
    return (vec)(((ints)p + (n << 23)) & ~(x < -87.f));
}

static inline vec tanh_of(vec x) {
    ints sign = (ints)x & INT32_MIN;
    vec e = exp_of((vec)((ints)x & INT32_MAX) * -2.f);
    return (vec)((ints)((1.f - e) / (1.f + e)) | sign);
}

struct view { cell *data; int64_t stride[3]; };

struct step { // paged_rows.py fills the same
    struct view query, key, value;       // [token, head], [new token, KV head] twice; the last dimension is contiguous
    struct view key_cache, value_cache;  // [page, offset, KV head]
    cell *output;                        // [token, head, HEAD_DIM_VO] contiguous
    float *lse;                          // [token, head], natural log, sinks included; or NULL
    const int64_t *slots;                // [new token]; negative ones are not written
    const int32_t *pages;                // every row's, from first_pages[row] on
    const int64_t *first_pages;
    const int32_t *seq_lens;             // 0 for padding
    const int32_t *query_starts;         // row i's tokens are query_starts[i] to [i + 1]; NULL: one each
    const float *sinks, *slopes;         // [head], or NULL
    int64_t num_new, num_rows, num_kv_heads, page_size;
    int64_t num_pages, num_listed;       // of the cache; in `pages`
    int64_t first_key, window_left, chunk_size, causal;
    double scale, soft_cap, k_scale, v_scale;
};

static inline cell *slot(const struct view *cache, int64_t page, int64_t offset, int64_t head) {
    return cache->data + page * cache->stride[0] + offset * cache->stride[1] + head * cache->stride[2];
}

static void write_new(const struct step *s, int64_t token) {
    const struct view *from[2] = {&s->key, &s->value}, *to[2] = {&s->key_cache, &s->value_cache};
    float by[2] = {s->k_scale, s->v_scale};
    int64_t at = s->slots[token], size[2] = {HEAD_DIM, HEAD_DIM_VO};
    for (int i = 0; i < 2 && at >= 0; i++)
        for (int64_t head = 0; head < s->num_kv_heads; head++) {
            const cell *new = from[i]->data + token * from[i]->stride[0] + head * from[i]->stride[1];
            cell *cached = slot(to[i], at / s->page_size, at % s->page_size, head);
            if (by[i] == 1.f) memcpy(cached, new, size[i] * sizeof(cell));
            else for (int64_t d = 0; d < size[i]; d += LANES) store(cached + d, load(new + d) / by[i]);
        }
}

// The first key that a query sees at a position of a row, and in `stop` the end of them.
static inline int64_t visible(const struct step *s, int64_t row, int64_t position, int64_t *stop) {
    int64_t first = 0;
    *stop = s->causal ? position + 1 : s->seq_lens[row];
    if (s->window_left >= 0) first = position - s->window_left;
    if (s->chunk_size) {
        first = position / s->chunk_size * s->chunk_size;
        *stop = *stop < first + s->chunk_size ? *stop : first + s->chunk_size;
    }
    first = first > s->first_key ? first : s->first_key;
    return first < *stop ? first : *stop;
}

enum { NO_MEMORY = 0, NO_SLOT = -1, NO_PAGE = -2 }; // what a kernel returns in place of its number of threads

// Asked before anything is written: whether slots are the cache's, and all pages that some query sees. Those of keys
// that have left a window may be anything.
static int refused(const struct step *s) {
    for (int64_t token = 0; token < s->num_new; token++)
        if (s->slots[token] >= s->num_pages * s->page_size) return NO_SLOT;
    for (int64_t row = 0; row < s->num_rows; row++) {
        if (s->seq_lens[row] <= 0) continue; // its tokens would stand in front of its first page
        int64_t query_len = s->query_starts ? s->query_starts[row + 1] - s->query_starts[row] : 1, stop;
        int64_t page = visible(s, row, s->seq_lens[row] - query_len, &stop) / s->page_size;
        const int32_t *pages = s->pages + s->first_pages[row];
        for (; page * s->page_size < s->seq_lens[row]; page++)
            if (s->first_pages[row] + page >= s->num_listed || pages[page] < 0 || pages[page] >= s->num_pages)
                return NO_PAGE;
    }
    return 0;
}
