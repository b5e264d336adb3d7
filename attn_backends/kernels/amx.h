// AMX (Intel's instruction set reference): what kernels of this package that have tiles share. A tile register holds
// TILE_ROWS rows of TILE_BYTES. Of C += A · B (TDPBF16PS), A is [row, number], as numbers lie, B [pair of numbers,
// column], and C float32 [row, column].

#if defined(TILES) || defined(__AMX_BF16__)
#define AMX 1
#include <immintrin.h>
#include <stdint.h>
#ifdef TILES // a header with these instructions in other words
#include TILES
#endif
#ifndef TILES_ALLOWED
#include <sys/syscall.h>
long syscall(long, ...);
#define TILES_ALLOWED() (!syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */))
#endif

static int tiles_allowed = -1; // or whether Linux lets this process use them
static void ask_for_tiles(void) {
    if (tiles_allowed < 0) tiles_allowed = TILES_ALLOWED();
}

#define TILE_ROWS 16
#define TILE_BYTES 64

// Compilers are not told what tiles are loaded from: what is at `from`, and elsewhere in memory, is written before.
#define WRITTEN(from) __asm__ volatile("" ::"r"(from) : "memory")

struct tile_shapes { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; };

// Tiles of so many rows: the first six, which are C and A, and the last two, which are B. What the thread had before is
// put in `before`, to be loaded again.
static void shape_tiles(int first, int last, struct tile_shapes *before) {
    struct tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.bytes[i] = TILE_BYTES, shapes.rows[i] = i < 6 ? first : last;
    WRITTEN(&shapes);
    _tile_storeconfig(before);
    _tile_loadconfig(&shapes);
    WRITTEN(before);
}

static void restore_tiles(const struct tile_shapes *before) {
    WRITTEN(before);
    _tile_loadconfig(before);
}
#endif
