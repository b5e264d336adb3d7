// What lies around attention in a decoder layer of the Llama form, each side of it one operator of torch, and products.
//
// Compiled for one dtype of FLOAT32 and BFLOAT16. Sums are float32, and what is kept between two products is rounded.

#include "products.h"
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define BLOCK 64    // tokens that go through all products together
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

struct before { // attention
    const cell *hidden;                 // [tokens, size]
    struct norm norm;
    const cell *weight;                 // [queries, keys and values of head_dim rows, size]
    const cell *cos, *sin;              // [tokens, head_dim]
    cell *query, *key, *value;          // [tokens, heads, head_dim]
    int64_t tokens, size, head_dim, queries, keys;
};

static void before(const struct before *s) {
    int64_t threads = omp_get_max_threads(), block = s->tokens < BLOCK ? s->tokens : BLOCK, dim = s->head_dim;
    int64_t queries = s->queries * dim, keys = s->keys * dim, own = block * s->size;
    cell *normed = room(threads * own);
#pragma omp parallel if ((queries + 2 * keys) * s->size > SMALL)
    {
        int64_t thread = omp_get_thread_num(), of = omp_get_num_threads();
        cell *x = normed + thread * own; // every thread's own: so none waits for another
        for (int64_t t = 0; t < s->tokens; t += block) {
            int64_t tokens = s->tokens - t < block ? s->tokens - t : block;
            normalise(s->hidden + t * s->size, s->norm.weight, s->norm.epsilon, tokens, s->size, x);
            struct job job = {x, s->weight, NULL, tokens, s->size, queries, dim / 2, s->query + t * queries, queries,
                              s->cos + t * dim, s->sin + t * dim, dim};
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
    int64_t threads = omp_get_max_threads(), block = s->tokens < BLOCK ? s->tokens : BLOCK, size = s->size;
    int64_t own = block * size;
    cell *rows = room((threads + 2) * own + block * s->inner), *inner = rows + (threads + 2) * own;
#pragma omp parallel if (s->inner * size > SMALL)
    {
        int64_t thread = omp_get_thread_num(), of = omp_get_num_threads();
        cell *x = rows + (thread + 2) * own;
        for (int64_t t = 0; t < s->tokens; t += block) {
            int64_t tokens = s->tokens - t < block ? s->tokens - t : block;
            cell *hidden = rows + t / block % 2 * own; // by turns: some thread may still read the last block's
            struct job out = {s->attended + t * s->width, s->out, NULL, tokens, s->width, size, 0, hidden, size,
                              s->hidden + t * size, NULL, size};
            plain(&out, thread, of);
#pragma omp barrier
            normalise(hidden, s->norm.weight, s->norm.epsilon, tokens, size, x);
            struct job both = {x, s->gate, s->up, tokens, size, s->inner, 0, inner, s->inner};
            gated(&both, thread, of);
#pragma omp barrier
            struct job down = {inner, s->down, NULL, tokens, s->inner, size, 0, s->result + t * size, size,
                               hidden, NULL, size};
            plain(&down, thread, of);
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
    const cell *x = data(in[0]);
    cell *out = data(made);
#pragma omp parallel if (rows * inner > SMALL)
    for (int64_t t = 0; t < all; t += BLOCK) {
        struct job job = {x + t * inner, data(weight), NULL, all - t < BLOCK ? all - t : BLOCK, inner, rows, 0,
                          out + t * rows, rows, numel(bias) ? data(bias) : NULL};
        plain(&job, omp_get_thread_num(), omp_get_num_threads());
    }
    put_back(stack, 3, &made, 1);
}

#define TEXT2(name) #name
#define TEXT(name) TEXT2(name)

// Gives torch the operators that Python has defined; 0 if it took them.
int32_t implement(void) {
    library here;
    return aoti_torch_library_init_impl("attn_backends", "CPU", __FILE__, __LINE__, &here) ||
           aoti_torch_library_impl(here, "llama_before_" TEXT(DTYPE), call_before) ||
           aoti_torch_library_impl(here, "llama_behind_" TEXT(DTYPE), call_behind) ||
           aoti_torch_library_impl(here, "rows_product_" TEXT(DTYPE), call_product);
}
