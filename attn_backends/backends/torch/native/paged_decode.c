// Attention of rows with one new token each, over a paged cache in a CPU's memory. Pages are read where they lie.
//
// A task is one row and KV head, or a piece of it where rows are few and long: all query heads of the KV head together,
// so that each key and value is read once. Softmax runs along: Milakov and Gimelshein, "Online normalizer calculation".
//
// Of a KV head's query heads, BLOCK are held in registers at once.

#include "paged.h"

#define TILE 64          // keys between two updates of the softmax
#define AHEAD 8          // keys from a prefetch to its use
#define MIN_PIECE 256    // keys
#define MIN_WORK 65536   // multiplications that are worth waking the other threads
#define WIDTH (BLOCK <= 4 && HEAD_DIM_VO % 64 == 0 ? 4 : HEAD_DIM_VO % 32 == 0 ? 2 : 1) // vectors of a value at once

static inline float sum_of(vec v) {
    typedef float half __attribute__((vector_size(2 * LANES)));
    typedef float quarter __attribute__((vector_size(LANES)));
    union { vec whole; half part[2]; } a = {v};
    union { half whole; quarter part[2]; } b = {a.part[0] + a.part[1]};
    quarter c = b.part[0] + b.part[1];
    return (c[0] + c[2]) + (c[1] + c[3]);
}

// Softmax of some keys is out / l; m is their highest logit.
struct partial { vec out[GROUP][HEAD_DIM_VO / LANES]; float m[GROUP], l[GROUP]; };

// logits[g][i] of BLOCK query heads and n keys
static inline void dot(vec q[][HEAD_DIM / LANES], const cell **keys, int n, float logits[][TILE]) {
    for (int i = 0; i < n; i++) {
        if (i + AHEAD < n)
            for (int at = 0; at < HEAD_DIM; at += 64 / sizeof(cell)) __builtin_prefetch(keys[i + AHEAD] + at);
        vec acc[BLOCK];
        UNROLL for (int g = 0; g < BLOCK; g++) acc[g] = (vec){0};
        UNROLL for (int d = 0; d < HEAD_DIM / LANES; d++) {
            vec k = load(keys[i] + d * LANES);
            UNROLL for (int g = 0; g < BLOCK; g++) acc[g] += q[g][d] * k;
        }
        UNROLL for (int g = 0; g < BLOCK; g++) logits[g][i] = sum_of(acc[g]);
    }
}

// Logits to weights, and what came before to the new maximum.
static inline void soften(const struct step *s, int64_t row, int64_t head, int64_t start, int n, vec *logits,
                          float *m, float *l, vec *out) {
    if (s->soft_cap)
        for (int i = 0; i < TILE / LANES; i++) logits[i] = tanh_of(logits[i] / (float)s->soft_cap) * (float)s->soft_cap;
    if (s->slopes)
        for (int i = 0; i < n; i++) ((float *)logits)[i] += s->slopes[head] * (start + i - (s->seq_lens[row] - 1));
    for (int i = n; i < TILE; i++) ((float *)logits)[i] = -INFINITY;
    vec highs = logits[0], added = {0};
    for (int i = 1; i < TILE / LANES; i++) highs = higher(highs, logits[i]);
    float high = *m;
    for (int i = 0; i < LANES; i++) high = high > highs[i] ? high : highs[i];
    for (int i = 0; i < TILE / LANES; i++) added += logits[i] = exp_of(logits[i] - high);
    float shrink = expf(*m - high);
    *l = *l * shrink + sum_of(added);
    *m = high;
    if (shrink != 1.f)
        for (int d = 0; d < HEAD_DIM_VO / LANES; d++) out[d] *= shrink;
}

// out[g] += Σ weights[g][i] · values[i]
static inline void add(const cell **values, int n, float weights[][TILE], vec out[][HEAD_DIM_VO / LANES]) {
    for (int d = 0; d < HEAD_DIM_VO / LANES; d += WIDTH) {
        vec acc[BLOCK][WIDTH];
        UNROLL for (int g = 0; g < BLOCK; g++) UNROLL for (int w = 0; w < WIDTH; w++) acc[g][w] = out[g][d + w];
        for (int i = 0; i < n; i++) {
            const cell *value = values[i] + d * LANES;
            if (i + AHEAD < n)
                for (int at = 0; at < WIDTH * LANES; at += 64 / sizeof(cell))
                    __builtin_prefetch(values[i + AHEAD] + d * LANES + at);
            UNROLL for (int w = 0; w < WIDTH; w++) {
                vec v = load(value + w * LANES);
                UNROLL for (int g = 0; g < BLOCK; g++) acc[g][w] += v * weights[g][i];
            }
        }
        UNROLL for (int g = 0; g < BLOCK; g++) UNROLL for (int w = 0; w < WIDTH; w++) out[g][d + w] = acc[g][w];
    }
}

static void attend(const struct step *s, int64_t row, int64_t head, int64_t start, int64_t stop, struct partial *part) {
    vec q[GROUP][HEAD_DIM / LANES], logits[BLOCK][TILE / LANES] = {0};
    const cell *query = s->query.data + row * s->query.stride[0] + head * GROUP * s->query.stride[1];
    for (int g = 0; g < GROUP; g++) {
        for (int d = 0; d < HEAD_DIM / LANES; d++)
            q[g][d] = load(query + g * s->query.stride[1] + d * LANES) * (float)(s->scale * s->k_scale);
        part->m[g] = -INFINITY;
    }
    memset(part->l, 0, sizeof part->l);
    memset(part->out, 0, sizeof part->out);
    const int32_t *pages = s->pages + s->first_pages[row];
    for (; start < stop; start += TILE) {
        const cell *keys[TILE], *values[TILE];
        int n = stop - start < TILE ? stop - start : TILE;
        for (int64_t i = 0, page = start / s->page_size, offset = start % s->page_size; i < n; i++) {
            keys[i] = slot(&s->key_cache, pages[page], offset, head);
            values[i] = slot(&s->value_cache, pages[page], offset, head);
            if (++offset == s->page_size) offset = 0, page++;
        }
        for (int g = 0; g < GROUP; g += BLOCK) {
            dot(q + g, keys, n, (float(*)[TILE])logits);
            for (int b = 0; b < BLOCK; b++)
                soften(s, row, head * GROUP + g + b, start, n, logits[b], &part->m[g + b], &part->l[g + b],
                       part->out[g + b]);
            add(values, n, (float(*)[TILE])logits, part->out + g);
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

// Write the new tokens, then attend. Returns the number of threads that it ran on, or 0 for want of memory.
static int decode(const struct step *s) {
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
    if (max_splits > 1 && !partials) return 0;
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

// Called by nobody here: of libraries for several shapes, the name means the first one's.
int paged_decode(const struct step *s) { return decode(s); }

// The same for graphs that torch.compile makes: an operator of its C interface (torch/csrc/inductor/aoti_torch/c).
typedef struct AtenTensorOpaque *tensor;
int32_t aoti_torch_get_data_ptr(tensor, void **), aoti_torch_get_strides(tensor, int64_t **);
int32_t aoti_torch_get_size(tensor, int64_t dim, int64_t *), aoti_torch_get_dtype(tensor, int32_t *);
int32_t aoti_torch_empty_strided(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, tensor *);

static int64_t size(tensor t, int64_t dim) { int64_t n = 0; aoti_torch_get_size(t, dim, &n); return n; }
static void *data(tensor t) { void *at = NULL; aoti_torch_get_data_ptr(t, &at); return size(t, 0) ? at : NULL; }
static struct view view(tensor t, int num_strides) {
    struct view v = {data(t)};
    int64_t *strides;
    aoti_torch_get_strides(t, &strides);
    memcpy(v.stride, strides, num_strides * sizeof *strides);
    return v;
}

int32_t OPERATOR(tensor query, tensor key, tensor value, tensor key_cache, tensor value_cache, tensor slots,
                 tensor pages, tensor first_pages, tensor seq_lens, tensor sinks, tensor slopes, int64_t window_left,
                 int64_t chunk_size, double scale, double soft_cap, double k_scale, double v_scale, tensor *output) {
    int64_t heads = size(query, 1), sizes[3] = {size(query, 0), heads, HEAD_DIM_VO};
    int64_t strides[3] = {heads * HEAD_DIM_VO, HEAD_DIM_VO, 1};
    int32_t dtype, failed = aoti_torch_get_dtype(query, &dtype);
    if (failed || aoti_torch_empty_strided(3, sizes, strides, dtype, 0, 0, output)) return 1;
    struct step s = {
        view(query, 2), view(key, 2), view(value, 2), view(key_cache, 3), view(value_cache, 3), data(*output), NULL,
        data(slots), data(pages), data(first_pages), data(seq_lens), NULL, data(sinks), data(slopes), size(slots, 0),
        size(seq_lens, 0), heads / GROUP, size(key_cache, 1), 0, window_left, chunk_size, 1, scale, soft_cap, k_scale,
        v_scale,
    };
    return !decode(&s);
}
