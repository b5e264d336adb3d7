// Attention of rows with one new token each, over a paged cache in a CPU's memory. Pages are read where they lie.
//
// A task is one row and KV head, or a piece of it where rows are few and long: all query heads of the KV head together,
// so that each key and value is read once. Softmax runs along: Milakov and Gimelshein, "Online normalizer calculation".
//
// Of a KV head's query heads, BLOCK are held in registers at once.

#include "paged.h"

#define TILE 64          // keys between two updates of the softmax
#define AHEAD 12         // keys from a prefetch, to the second cache, to its use
#define ROOM (TILE + LANES) // logits of a tile, and of keys too many
#define MIN_PIECE 256    // keys
#define MIN_WORK 65536   // multiplications that are worth waking the other threads
#define WIDTH (BLOCK <= 4 && HEAD_DIM_VO % 64 == 0 ? 4 : HEAD_DIM_VO % 32 == 0 ? 2 : 1) // vectors of a value at once

#if BFLOAT16 && defined(__AVX512BF16__)
// Products of pairs at once.
#define KEY_VECS ((HEAD_DIM + 2 * LANES - 1) / (2 * LANES))
typedef ints key_vec;
static inline key_vec load_key(const cell *key, int d) {
    __mmask32 whole = d + 1 < KEY_VECS || HEAD_DIM % (2 * LANES) == 0 ? ~0u : 0xffff;
    return (key_vec)_mm512_maskz_loadu_epi16(whole, key + d * 2 * LANES);
}
static inline vec product(key_vec a, key_vec b, vec acc) {
    return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}
#else
#define KEY_VECS (HEAD_DIM / LANES)
typedef vec key_vec;
static inline key_vec load_key(const cell *key, int d) { return load(key + d * LANES); }
static inline vec product(key_vec a, key_vec b, vec acc) { return acc + a * b; }
#endif

#ifdef __AVX512F__
static inline float highest_of(vec v) { return _mm512_reduce_max_ps((__m512)v); }
#else
static inline float highest_of(vec v) {
    float high = v[0];
    for (int i = 1; i < LANES; i++) high = high > v[i] ? high : v[i];
    return high;
}
#endif

static inline float sum_of(vec v) {
    typedef float half __attribute__((vector_size(2 * LANES)));
    typedef float quarter __attribute__((vector_size(LANES)));
    union { vec whole; half part[2]; } a = {v};
    union { half whole; quarter part[2]; } b = {a.part[0] + a.part[1]};
    quarter c = b.part[0] + b.part[1];
    return (c[0] + c[2]) + (c[1] + c[3]);
}

#ifdef __AVX512F__
#define AT_ONCE (LANES / BLOCK) // keys whose logits are summed together
// The sum of each vector, in its lane.
static inline vec sums_of(vec v[LANES]) {
    UNROLL for (int n = LANES / 2; n; n /= 2)
        UNROLL for (int i = 0; i < n; i++)
            v[i] = (vec)ZIP((ints)v[i], (ints)v[i + n], 0) + (vec)ZIP((ints)v[i], (ints)v[i + n], 8);
    return v[0];
}
#else
#define AT_ONCE 1
#endif

// Softmax of some keys is out / l; m is their highest logit.
struct partial { vec out[GROUP][HEAD_DIM_VO / LANES]; float m[GROUP], l[GROUP]; };

// logits[g][i] of BLOCK query heads and n keys; those behind are of keys that repeat the last one.
static inline void dot(key_vec q[][KEY_VECS], const cell **keys, const cell **values, int n, float logits[][ROOM]) {
    for (int i = 0; i < n; i += AT_ONCE) {
        UNROLL for (int k = 0; k < AT_ONCE; k++) {
            const cell *key = keys[i + k + AHEAD], *value = values[i + k + AHEAD];
            for (int d = 0; d < HEAD_DIM; d += 64 / sizeof(cell)) __builtin_prefetch(key + d, 0, 2);
            for (int d = 0; d < HEAD_DIM_VO; d += 64 / sizeof(cell)) __builtin_prefetch(value + d, 0, 2);
        }
        vec acc[LANES] = {0};
        UNROLL for (int d = 0; d < KEY_VECS; d++)
            UNROLL for (int k = 0; k < AT_ONCE; k++) {
                key_vec key = load_key(keys[i + k], d);
                UNROLL for (int g = 0; g < BLOCK; g++)
                    acc[g * AT_ONCE + k] = product(q[g][d], key, acc[g * AT_ONCE + k]);
            }
#ifdef __AVX512F__
        vec sums = sums_of(acc);
        UNROLL for (int g = 0; g < BLOCK; g++) memcpy(&logits[g][i], (float *)&sums + g * AT_ONCE, AT_ONCE * 4);
#else
        UNROLL for (int g = 0; g < BLOCK; g++) logits[g][i] = sum_of(acc[g]);
#endif
    }
}

// Logits to weights, and what came before to the new maximum.
static inline void soften(const struct step *s, int64_t row, int64_t head, int64_t start, int n, vec *logits,
                          float *m, float *l, vec *out) {
    for (int i = 0; i < TILE / LANES; i++) logits[i] *= (float)(s->scale * s->k_scale);
    if (s->soft_cap)
        for (int i = 0; i < TILE / LANES; i++) logits[i] = tanh_of(logits[i] / (float)s->soft_cap) * (float)s->soft_cap;
    if (s->slopes)
        for (int i = 0; i < n; i++) ((float *)logits)[i] += s->slopes[head] * (start + i - (s->seq_lens[row] - 1));
    for (int i = 0; i < TILE / LANES; i++) { // keys behind the last one
        ints live = (ints){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + i * LANES < n;
        logits[i] = (vec)(((ints)logits[i] & live) | ((ints)((vec){0} - INFINITY) & ~live));
    }
    vec highs = logits[0], added = {0};
    for (int i = 1; i < TILE / LANES; i++) highs = higher(highs, logits[i]);
    float high = highest_of(highs);
    high = *m > high ? *m : high;
    for (int i = 0; i < TILE / LANES; i++) added += logits[i] = exp_of(logits[i] - high);
    float shrink = expf(*m - high);
    *l = *l * shrink + sum_of(added);
    *m = high;
    if (shrink != 1.f)
        for (int d = 0; d < HEAD_DIM_VO / LANES; d++) out[d] *= shrink;
}

// out[g] += Σ weights[g][i] · values[i]
static inline void add(const cell **values, int n, float weights[][ROOM], vec out[][HEAD_DIM_VO / LANES]) {
    for (int d = 0; d < HEAD_DIM_VO / LANES; d += WIDTH) {
        vec acc[BLOCK][WIDTH];
        UNROLL for (int g = 0; g < BLOCK; g++) UNROLL for (int w = 0; w < WIDTH; w++) acc[g][w] = out[g][d + w];
        for (int i = 0; i < n; i++) {
            const cell *value = values[i] + d * LANES;
            UNROLL for (int w = 0; w < WIDTH; w++) {
                vec v = load(value + w * LANES);
                UNROLL for (int g = 0; g < BLOCK; g++) acc[g][w] += v * weights[g][i];
            }
        }
        UNROLL for (int g = 0; g < BLOCK; g++) UNROLL for (int w = 0; w < WIDTH; w++) out[g][d + w] = acc[g][w];
    }
}

static void attend(const struct step *s, int64_t row, int64_t head, int64_t start, int64_t stop, struct partial *part) {
    key_vec q[GROUP][KEY_VECS];
    vec logits[BLOCK][ROOM / LANES] = {0};
    const cell *query = s->query.data + row * s->query.stride[0] + head * GROUP * s->query.stride[1];
    for (int g = 0; g < GROUP; g++) {
        for (int d = 0; d < KEY_VECS; d++) q[g][d] = load_key(query + g * s->query.stride[1], d);
        part->m[g] = -INFINITY;
    }
    memset(part->l, 0, sizeof part->l);
    memset(part->out, 0, sizeof part->out);
    const int32_t *pages = s->pages + s->first_pages[row];
    for (; start < stop; start += TILE) {
        const cell *keys[ROOM + AHEAD], *values[ROOM + AHEAD]; // the last ones are fetched alone
        int n = stop - start < TILE ? stop - start : TILE, at = 0;
        int end = stop - start < TILE + AHEAD ? stop - start : TILE + AHEAD;
        for (int64_t page = start / s->page_size, offset = start % s->page_size; at < end; page++, offset = 0) {
            const cell *key = slot(&s->key_cache, pages[page], offset, head);
            const cell *value = slot(&s->value_cache, pages[page], offset, head);
            for (; offset < s->page_size && at < end; offset++, at++) {
                keys[at] = key, key += s->key_cache.stride[1];
                values[at] = value, value += s->value_cache.stride[1];
            }
        }
        for (; at < ROOM + AHEAD; at++) keys[at] = keys[at - 1], values[at] = values[at - 1];
        for (int g = 0; g < GROUP; g += BLOCK) {
            dot(q + g, keys, values, n, (float(*)[ROOM])logits);
            for (int b = 0; b < BLOCK; b++)
                soften(s, row, head * GROUP + g + b, start, n, logits[b], &part->m[g + b], &part->l[g + b],
                       part->out[g + b]);
            add(values, n, (float(*)[ROOM])logits, part->out + g);
        }
    }
}

// Join a row's partials, each of which weighs e^m.
static void finish(const struct step *s, int64_t row, int64_t head, const struct partial *partials,
                   int64_t num_splits) {
    int live = s->seq_lens[row] > 0;
    for (int g = 0; g < GROUP; g++) {
        int64_t at = (row * s->num_kv_heads + head) * GROUP + g;
        float high = s->sinks ? s->sinks[head * GROUP + g] : -INFINITY, sum = 0;
        for (int64_t p = 0; p < num_splits; p++) high = high > partials[p].m[g] ? high : partials[p].m[g];
        vec out[HEAD_DIM_VO / LANES] = {0};
        for (int64_t p = 0; p < num_splits; p++) {
            float weight = expf(partials[p].m[g] - high);
            for (int d = 0; d < HEAD_DIM_VO / LANES; d++) out[d] += partials[p].out[g][d] * weight;
            sum += partials[p].l[g] * weight;
        }
        if (s->sinks) sum += expf(s->sinks[head * GROUP + g] - high);
        for (int d = 0; d < HEAD_DIM_VO / LANES; d++)
            store(s->output + at * HEAD_DIM_VO + d * LANES, live ? out[d] * ((float)s->v_scale / sum) : (vec){0});
        if (s->lse) s->lse[at] = live ? high + logf(sum) : -INFINITY;
    }
}

// Write the new tokens, then attend. Returns the number of threads that it ran on, or why it did nothing.
int paged_decode(const struct step *s) {
    int why = refused(s);
    if (why) return why;
    int64_t num_keys = 0, stop, heads = s->num_kv_heads, first_slot[s->num_rows + 1], max_splits = 1, threads = 1;
    for (int64_t row = 0; row < s->num_rows; row++) num_keys -= visible(s, row, s->seq_lens[row] - 1, &stop) - stop;
    // Eight pieces a thread even out what rows differ in.
    int64_t piece = num_keys * heads / (8 * omp_get_max_threads());
    piece = (piece < MIN_PIECE ? MIN_PIECE : piece + TILE - 1) / TILE * TILE;
    first_slot[0] = 0;
    for (int64_t row = 0; row < s->num_rows; row++) {
        int64_t start = visible(s, row, s->seq_lens[row] - 1, &stop), num = (stop - start + piece - 1) / piece;
        max_splits = num > max_splits ? num : max_splits;
        first_slot[row + 1] = first_slot[row] + (num > 1 ? num : 1) * heads;
    }
    struct partial *partials = NULL;
    if (max_splits > 1) partials = aligned_alloc(sizeof(vec), first_slot[s->num_rows] * sizeof *partials);
    if (max_splits > 1 && !partials) return NO_MEMORY;
    // Each loop ends in a wait for the slowest thread, which costs more than a few tokens take to write.
#pragma omp parallel for if (s->num_new * heads * HEAD_DIM > MIN_WORK)
    for (int64_t token = 0; token < s->num_new; token++) write_new(s, token);
#pragma omp parallel for schedule(dynamic) if (num_keys * heads * GROUP * HEAD_DIM > MIN_WORK)
    for (int64_t task = 0; task < s->num_rows * heads * max_splits; task++) {
        if (!task) threads = omp_get_num_threads();
        int64_t row = task / max_splits / heads, head = task / max_splits % heads, nth = task % max_splits;
        int64_t num = (first_slot[row + 1] - first_slot[row]) / heads, end;
        int64_t start = visible(s, row, s->seq_lens[row] - 1, &end) + nth * piece;
        if (nth >= num) continue;
        struct partial own, *part = partials ? partials + first_slot[row] + head * num + nth : &own;
        attend(s, row, head, start, start + piece < end ? start + piece : end, part);
        if (!partials) finish(s, row, head, part, 1);
    }
    if (partials) {
#pragma omp parallel for
        for (int64_t task = 0; task < s->num_rows * heads; task++) {
            int64_t row = task / heads, head = task % heads, num = (first_slot[row + 1] - first_slot[row]) / heads;
            finish(s, row, head, partials + first_slot[row] + head * num, num);
        }
    }
    free(partials);
    return threads;
}

// The same as an operator, by torch's C interface (torch/csrc/inductor/aoti_torch/c): called with a stack of arguments and
// place for results, into a tensor that is there, without a LSE; gives the number of threads.
typedef struct AtenTensorOpaque *tensor;
int32_t aoti_torch_get_data_ptr(tensor, void **), aoti_torch_get_strides(tensor, int64_t **);
int32_t aoti_torch_get_size(tensor, int64_t dim, int64_t *), aoti_torch_delete_tensor_object(tensor);
typedef struct TorchLibraryOpaque *library;
int32_t aoti_torch_library_init_impl(const char *, const char *, const char *, uint32_t, library *);
int32_t aoti_torch_library_impl(library, const char *, void (*)(uint64_t *, uint64_t, uint64_t));

static int64_t size(tensor t, int64_t dim) { int64_t n = 0; aoti_torch_get_size(t, dim, &n); return n; }
static void *data(tensor t) { void *at = NULL; aoti_torch_get_data_ptr(t, &at); return size(t, 0) ? at : NULL; }
static struct view view(tensor t, int num_strides) {
    struct view v = {data(t)};
    int64_t *strides;
    aoti_torch_get_strides(t, &strides);
    memcpy(v.stride, strides, num_strides * sizeof *strides);
    return v;
}

static double number(uint64_t bits) { double n; memcpy(&n, &bits, sizeof n); return n; }

static void decode_into(uint64_t *stack, uint64_t inputs, uint64_t outputs) {
    tensor *in = (tensor *)stack;
    tensor query = in[0], key_cache = in[3], slots = in[5], seq_lens = in[8], output = in[17];
    struct step s = {
        view(query, 2), view(in[1], 2), view(in[2], 2), view(key_cache, 3), view(in[4], 3), data(output), NULL,
        data(slots), data(in[6]), data(in[7]), data(seq_lens), NULL, data(in[9]), data(in[10]), size(slots, 0),
        size(seq_lens, 0), size(query, 1) / GROUP, size(key_cache, 1), size(key_cache, 0), size(in[6], 0), 0, stack[11],
        stack[12], 1, number(stack[13]), number(stack[14]), number(stack[15]), number(stack[16]),
    };
    int64_t threads = paged_decode(&s);
    for (int i = 0; i < 18; i++)
        if (i < 11 || i == 17) aoti_torch_delete_tensor_object(in[i]);
    stack[0] = threads;
}

// Gives torch the operator that Python has defined by this name; 0 if it took it.
int32_t implement(const char *name) {
    library here;
    return aoti_torch_library_init_impl("attn_backends", "CPU", __FILE__, __LINE__, &here) ||
           aoti_torch_library_impl(here, name, decode_into);
}
