// The instructions of AMX that amx.h takes, in plain C, for CPUs that have none.

#include <stdint.h>
#include <string.h>

#define TILES_ALLOWED() 1

static _Thread_local struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } set;
static _Thread_local uint8_t held[8][16][64];

static void emulate_config(void *before, const void *now) {
    if (before) memcpy(before, &set, sizeof set);
    if (now) memcpy(&set, now, sizeof set);
}

// For tests: the rows that a tile of this thread has now.
int rows_of_tile(int tile) { return set.rows[tile]; }

static void emulate_load(int to, const uint8_t *from, int64_t stride) {
    memset(held[to], 0, sizeof held[to]);
    for (int r = 0; r < set.rows[to]; r++) memcpy(held[to][r], from + r * stride, set.bytes[to]);
}

static void emulate_store(int from, uint8_t *to, int64_t stride) {
    for (int r = 0; r < set.rows[from]; r++) memcpy(to + r * stride, held[from][r], set.bytes[from]);
}

static float number_at(const uint8_t *row, int i) {
    uint32_t bits = (uint32_t)(row[2 * i] | row[2 * i + 1] << 8) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void emulate_products(int to, int a, int b) {
    for (int m = 0; m < set.rows[to]; m++)
        for (int n = 0; n < set.bytes[to] / 4; n++) {
            float sum;
            memcpy(&sum, held[to][m] + 4 * n, sizeof sum);
            for (int k = 0; k < set.bytes[a] / 2; k++)
                sum += number_at(held[a][m], k) * number_at(held[b][k / 2], 2 * n + k % 2);
            memcpy(held[to][m] + 4 * n, &sum, sizeof sum);
        }
}

#undef _tile_storeconfig
#undef _tile_loadconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_storeconfig(to) emulate_config(to, NULL)
#define _tile_loadconfig(from) emulate_config(NULL, from)
#define _tile_zero(tile) memset(held[tile], 0, sizeof held[tile])
#define _tile_loadd(tile, from, stride) emulate_load(tile, (const uint8_t *)(from), stride)
#define _tile_stored(tile, to, stride) emulate_store(tile, (uint8_t *)(to), stride)
#define _tile_dpbf16ps(to, a, b) emulate_products(to, a, b)
