// The small operations of a decoder layer over rows of tokens: normalisation, and the rotation of queries and keys.
//
// Compiled for one dtype of FLOAT32 and BFLOAT16; sums and products are float32, and what is stored is rounded once.

#include <math.h>
#include <stdint.h>
#include <string.h>

#define SMALL 65536 // numbers, below which a second thread costs more than it saves

#if FLOAT32
typedef float cell;
static inline float read(cell x) { return x; }
static inline cell rounded(float x) { return x; }
#elif BFLOAT16
typedef uint16_t cell;
static inline float read(cell x) {
    uint32_t bits = (uint32_t)x << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}
static inline cell rounded(float x) { // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#endif

struct norm {
    const cell *hidden; // [num_rows, size], a row in one piece
    const float *weight; // [size]
    cell *out; // [num_rows, size], contiguous
    int64_t num_rows, size, row; // elements from row to row of `hidden`
    double epsilon;
};

// x · w / √(mean x² + ε)
void rms_norm(const struct norm *a) {
#pragma omp parallel for if (a->num_rows * a->size > SMALL)
    for (int64_t r = 0; r < a->num_rows; r++) {
        const cell *x = a->hidden + r * a->row;
        cell *out = a->out + r * a->size;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < a->size; i++)
            sum += read(x[i]) * read(x[i]);
        float scale = 1.f / sqrtf(sum / a->size + (float)a->epsilon);
#pragma omp simd
        for (int64_t i = 0; i < a->size; i++)
            out[i] = rounded(read(x[i]) * scale * a->weight[i]);
    }
}

struct rotation {
    cell *heads; // [num_tokens, num_heads, head_dim], changed in place; a token's heads in one piece
    const cell *cos, *sin; // [num_tokens, head_dim], contiguous
    int64_t num_tokens, num_heads, head_dim, token; // elements from token to token
};

// The first half of a head and the second one are the two coordinates that angles turn.
void rotate(const struct rotation *a) {
    int64_t half = a->head_dim / 2;
#pragma omp parallel for if (a->num_tokens * a->num_heads * a->head_dim > SMALL)
    for (int64_t t = 0; t < a->num_tokens; t++) {
        const cell *cos = a->cos + t * a->head_dim, *sin = a->sin + t * a->head_dim;
        for (int64_t h = 0; h < a->num_heads; h++) {
            cell *first = a->heads + t * a->token + h * a->head_dim, *second = first + half;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                float x = read(first[i]), y = read(second[i]);
                first[i] = rounded(x * read(cos[i]) - y * read(sin[i]));
                second[i] = rounded(y * read(cos[i + half]) + x * read(sin[i + half]));
            }
        }
    }
}
