// What lies around attention in a decoder layer of the Llama form, each side of it one operator of torch, and products.
//
// Compiled for one dtype of FLOAT32 and BFLOAT16. Sums are float32, and what is kept between two products is rounded.

#include "products.h"
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define BLOCK 64    // tokens that go through all products together,
#define LONG 256    // and by AMX
#define MANY 4      // tokens, from which on that is faster
#define SMALL 65536 // weights, below which a second thread costs more than it saves
#define ALIGNED 64  // bytes

int omp_get_thread_num(void), omp_get_num_threads(void), omp_get_max_threads(void); // of torch's own OpenMP

// x · w / √(mean x² + ε) of each row
static void normalise(const cell *x, const float *weight, float epsilon, int64_t tokens, int64_t size, cell *out) {
    for (int64_t t = 0; t < tokens; t++, x += size, out += size) {
        vec sum = {0};
        for (int64_t i = 0; i < size; i += 16) {
            vec v = read(x + i, size - i < 16 ? 0xffff >> (16 - (size - i)) : 0xffff);
            sum += v * v;
        }
        float scale = 1.f / sqrtf(_mm512_reduce_add_ps(sum) / size + epsilon);
        for (int64_t i = 0; i < size; i += 16) {
            __mmask16 some = size - i < 16 ? 0xffff >> (16 - (size - i)) : 0xffff;
            write(out + i, read(x + i, some) * scale * _mm512_maskz_loadu_ps(some, weight + i), some);
        }
    }
}

// An operator in C has no way to raise.
static void no_memory(void) {
    fputs("attn_backends: no memory for what a decoder layer computes\n", stderr);
    abort();
}

static pthread_key_t rooms;
static void make_rooms(void) { pthread_key_create(&rooms, free); }

// Memory for what lies between two products; kept, as fresh memory costs more than what is done in it, until the thread
// ends.
static cell *room(int64_t cells) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    static _Thread_local cell *kept;
    static _Thread_local int64_t size;
    if (cells > size) {
        free(kept);
        kept = aligned_alloc(ALIGNED, (cells * sizeof(cell) + ALIGNED - 1) / ALIGNED * ALIGNED);
        size = cells;
        if (!kept || pthread_once(&once, make_rooms) || pthread_setspecific(rooms, kept)) no_memory();
    }
    return kept;
}

struct norm { const float *weight; float epsilon; };

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Whether products of tokens of such sizes, with that many rows at least, are those of tile_products.h.
static int in_pairs(int64_t tokens, int64_t size, int64_t rows) {
#if AMX
    return tiles_allowed && tokens >= MANY && size % DEPTH == 0 && rows >= RUN;
#else
    return 0;
#endif
}

// Tokens that take room in a block of so many.
static int64_t padded(int64_t tokens, int paired) {
#if AMX
    if (paired) return (tokens + RUN - 1) / RUN * RUN;
#endif
    return tokens;
}

// What `over` needs, for a block.
static int64_t own_cells(int64_t tokens, int64_t size, int paired) {
#if AMX
    if (paired) return (padded(tokens, paired) + RUN) * size;
#endif
    return tokens * size;
}

// A job over tokens [tokens, size], normalised if there is a norm, as its products read them, in a thread's own memory.
static struct job over(const cell *x, const struct norm *norm, int64_t tokens, int64_t size, int paired, cell *own) {
    struct job job = {.x = x, .tokens = tokens, .size = size};
#if AMX
    if (paired) {
        cell *rows = own + padded(tokens, paired) * size;
        for (int64_t t = 0; t < tokens; t += RUN) {
            int64_t some = least(RUN, tokens - t);
            if (norm) normalise(x + t * size, norm->weight, norm->epsilon, some, size, rows);
            pair(norm ? rows : x + t * size, some, size, own + t * size);
        }
        job.pairs = own;
        return job;
    }
#endif
    if (norm) normalise(x, norm->weight, norm->epsilon, tokens, size, own), job.x = own;
    return job;
}

struct before { // attention
    const cell *hidden;                 // [tokens, size]
    struct norm norm;
    const cell *weight;                 // [queries, keys and values of head_dim rows, size]
    const cell *cos, *sin;              // [tokens, head_dim]
    cell *query, *key, *value;          // [tokens, heads, head_dim]
    int64_t tokens, size, head_dim, queries, keys;
};

static void before(const struct before *s) {
    int64_t dim = s->head_dim, queries = s->queries * dim, keys = s->keys * dim;
    int paired = in_pairs(s->tokens, s->size, dim);
    int64_t block = least(s->tokens, paired ? LONG : BLOCK), own = own_cells(block, s->size, paired);
    cell *rows = room(omp_get_max_threads() * own);
#pragma omp parallel if ((queries + 2 * keys) * s->size > SMALL)
    {
        int64_t thread = omp_get_thread_num(), of = omp_get_num_threads();
        for (int64_t t = 0; t < s->tokens; t += block) { // every thread normalises all: so none waits for another
            struct job job = over(s->hidden + t * s->size, &s->norm, least(block, s->tokens - t), s->size, paired,
                                  rows + thread * own);
            job.w = s->weight, job.rows = job.out_row = queries, job.half = dim / 2, job.out = s->query + t * queries;
            job.other = s->cos + t * dim, job.sin = s->sin + t * dim, job.other_row = dim;
            turned(&job, thread, of);
            job.w += queries * s->size, job.rows = job.out_row = keys, job.out = s->key + t * keys;
            turned(&job, thread, of);
            job.w += keys * s->size, job.out = s->value + t * keys, job.other = NULL, job.half = 0;
            plain(&job, thread, of);
        }
    }
}

struct behind { // attention
    const cell *hidden, *attended;         // [tokens, size], [tokens, width]
    const cell *out, *gate, *up, *down;    // [size, width], [inner, size] twice, [size, inner]
    struct norm norm;
    cell *result;                          // [tokens, size]
    int64_t tokens, size, width, inner;
};

static void behind(const struct behind *s) {
    int64_t size = s->size;
    int paired = in_pairs(s->tokens, s->width, size) && in_pairs(s->tokens, size, s->inner) &&
                 in_pairs(s->tokens, s->inner, size);
    int64_t block = least(s->tokens, paired ? LONG : BLOCK), own = own_cells(block, most(size, s->width), paired);
    cell *hiddens = room(omp_get_max_threads() * own + 2 * block * size + padded(block, paired) * s->inner);
    cell *inner = hiddens + 2 * block * size, *rows = inner + padded(block, paired) * s->inner;
#pragma omp parallel if (s->inner * size > SMALL)
    {
        int64_t thread = omp_get_thread_num(), of = omp_get_num_threads();
        cell *mine = rows + thread * own;
        for (int64_t t = 0; t < s->tokens; t += block) {
            int64_t tokens = least(block, s->tokens - t);
            // By turns: some thread may still read the last block's.
            cell *hidden = hiddens + t / block % 2 * block * size;
            struct job job = over(s->attended + t * s->width, NULL, tokens, s->width, paired, mine);
            job.w = s->out, job.rows = job.out_row = job.other_row = size, job.out = hidden;
            job.other = s->hidden + t * size;
            plain(&job, thread, of);
#pragma omp barrier
            job = over(hidden, &s->norm, tokens, size, paired, mine);
            job.w = s->gate, job.up = s->up, job.rows = job.out_row = s->inner, job.out = inner;
            gated(&job, thread, of);
#pragma omp barrier
            job = (struct job){.x = inner, .pairs = paired ? inner : NULL, .tokens = tokens, .size = s->inner};
            job.w = s->down, job.rows = job.out_row = job.other_row = size, job.out = s->result + t * size;
            job.other = hidden;
            plain(&job, thread, of);
        }
    }
}

// Operators, by torch's C interface (torch/csrc/inductor/aoti_torch/c/shim.h): torch calls them with a stack of arguments
// and place for results.
typedef struct AtenTensorOpaque *tensor;
int32_t aoti_torch_get_data_ptr(tensor, void **), aoti_torch_get_size(tensor, int64_t dim, int64_t *);
int32_t aoti_torch_get_dim(tensor, int64_t *), aoti_torch_get_numel(tensor, int64_t *);
int32_t aoti_torch_get_sizes(tensor, int64_t **), aoti_torch_get_dtype(tensor, int32_t *);
int32_t aoti_torch_empty_strided(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, tensor *);
int32_t aoti_torch_delete_tensor_object(tensor);
typedef struct TorchLibraryOpaque *library;
int32_t aoti_torch_library_init_impl(const char *, const char *, const char *, uint32_t, library *);
int32_t aoti_torch_library_impl(library, const char *, void (*)(uint64_t *, uint64_t, uint64_t));

static int64_t size(tensor t, int64_t dim) { int64_t n = 0; aoti_torch_get_size(t, dim, &n); return n; }
static int64_t numel(tensor t) { int64_t n = 0; aoti_torch_get_numel(t, &n); return n; }
static void *data(tensor t) { void *at = NULL; aoti_torch_get_data_ptr(t, &at); return at; }
static double number(uint64_t bits) { double n; memcpy(&n, &bits, sizeof n); return n; }

// A contiguous tensor of another's dtype.
static tensor make(tensor like, int64_t dims, const int64_t *sizes) {
    int64_t strides[dims], stride = 1;
    for (int64_t i = dims - 1; i >= 0; i--) strides[i] = stride, stride *= sizes[i];
    int32_t dtype;
    tensor made;
    aoti_torch_get_dtype(like, &dtype);
    if (aoti_torch_empty_strided(dims, sizes, strides, dtype, 0, 0, &made)) no_memory();
    return made;
}

// All but the last dimension of another, and that one.
static tensor make_wide(tensor like, int64_t width) {
    int64_t dims, *sizes;
    aoti_torch_get_dim(like, &dims), aoti_torch_get_sizes(like, &sizes);
    int64_t wide[dims];
    memcpy(wide, sizes, sizeof wide);
    wide[dims - 1] = width;
    return make(like, dims, wide);
}

static void put_back(uint64_t *stack, int64_t tensors, const tensor *results, int64_t num) {
    for (int64_t i = 0; i < tensors; i++) aoti_torch_delete_tensor_object((tensor)stack[i]);
    memcpy(stack, results, num * sizeof *results);
}

static void call_before(uint64_t *stack, uint64_t inputs, uint64_t outputs) {
    tensor *in = (tensor *)stack, hidden = in[0], norm = in[1], weight = in[2];
    int64_t head_dim = stack[5], queries = stack[6], keys = (size(weight, 0) / head_dim - queries) / 2;
    int64_t width = size(norm, 0), tokens = numel(hidden) / width;
    int64_t query_sizes[3] = {tokens, queries, head_dim}, sizes[3] = {tokens, keys, head_dim};
    tensor made[3] = {make(hidden, 3, query_sizes), make(hidden, 3, sizes), make(hidden, 3, sizes)};
    struct before s = {data(hidden), {data(norm), number(stack[7])}, data(weight), data(in[3]), data(in[4]),
                       data(made[0]), data(made[1]), data(made[2]), tokens, width, head_dim, queries, keys};
    before(&s);
    put_back(stack, 5, made, 3);
}

static void call_behind(uint64_t *stack, uint64_t inputs, uint64_t outputs) {
    tensor *in = (tensor *)stack, hidden = in[0], out = in[2], norm = in[3], gate = in[4];
    int64_t width = size(norm, 0);
    tensor made = make_wide(hidden, width);
    struct behind s = {data(hidden), data(in[1]), data(out), data(gate), data(in[5]), data(in[6]),
                       {data(norm), number(stack[7])}, data(made), numel(hidden) / width, width, size(out, 1),
                       size(gate, 0)};
    behind(&s);
    put_back(stack, 7, &made, 1);
}

static void call_product(uint64_t *stack, uint64_t inputs, uint64_t outputs) {
    tensor *in = (tensor *)stack, weight = in[1], bias = in[2];
    int64_t rows = size(weight, 0), inner = size(weight, 1);
    tensor made = make_wide(in[0], rows);
    int64_t all = numel(made) / rows;
    int paired = in_pairs(all, inner, rows);
    int64_t block = least(all, paired ? LONG : BLOCK), own = own_cells(block, inner, paired);
    cell *mine = paired ? room(omp_get_max_threads() * own) : NULL;
#pragma omp parallel if (rows * inner > SMALL)
    for (int64_t t = 0; t < all; t += block) {
        int64_t thread = omp_get_thread_num();
        struct job job = over((cell *)data(in[0]) + t * inner, NULL, least(block, all - t), inner, paired,
                              mine + thread * own);
        job.w = data(weight), job.rows = job.out_row = rows, job.out = (cell *)data(made) + t * rows;
        job.other = numel(bias) ? data(bias) : NULL;
        plain(&job, thread, omp_get_num_threads());
    }
    put_back(stack, 3, &made, 1);
}

#define TEXT2(name) #name
#define TEXT(name) TEXT2(name)

// Gives torch the operators that Python has defined; 0 if it took them.
int32_t implement(void) {
    library here;
#if AMX
    ask_for_tiles();
#endif
    return aoti_torch_library_init_impl("attn_backends", "CPU", __FILE__, __LINE__, &here) ||
           aoti_torch_library_impl(here, "llama_before_" TEXT(DTYPE), call_before) ||
           aoti_torch_library_impl(here, "llama_behind_" TEXT(DTYPE), call_behind) ||
           aoti_torch_library_impl(here, "rows_product_" TEXT(DTYPE), call_product);
}
