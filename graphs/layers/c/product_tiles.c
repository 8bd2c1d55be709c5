/* Products of bfloat16 by matrix tiles (Intel AMX), where processor, system and compiler have them. The left operand is 16 columns of the
   weight, as they are stored; the right one is 16 rows of states, transposed by pairs. A tile of 16 x 16 sums adds 32 inner indices at a
   time, in their order, for any number of rows. So up to 16 rows take about as long as one, which waits for the weights. */

#define _DEFAULT_SOURCE
#define WIDE_VECTORS
#include "kernels.h"

#ifdef HAS_WIDE_VECTORS
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SIDE = 16, TILE_BYTES = 1024, CHUNK = 32, WIDTH = 2 * SIDE }; /* CHUNK: inner indices of a tile; WIDTH: columns at a time */
enum { PACKED_BYTES = 1 << 19, WEIGHT_BYTES = 1 << 19 }; /* of states; of weights that stay in the cache for all rows */

static int allowed;

/* Linux lets a process use tiles on request. */
static void request_tiles(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    bool has = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("amx-bf16");
    allowed = has && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
}

INLINED int64_t packed_bytes(int64_t inner) { return (inner + CHUNK - 1) / CHUNK * TILE_BYTES; } /* of 16 rows */

int has_tiles_for(int64_t inner) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, request_tiles);
    return allowed && packed_bytes(inner) <= PACKED_BYTES;
}

#pragma GCC target("avx512f,avx512bw,avx512vl,amx-tile,amx-bf16")
#include <immintrin.h>

/* Swaps rows and columns of 16 x 16 words. Each step swaps the halves beside the diagonal of all squares of its size. */
INLINED void transpose(word_part words[SIDE]) {
    int_part lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int half = 8; half; half /= 2) {
        int_part upper = lane + (((lane & half) != 0) & (SIDE - half)), lower = upper + half;
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++)
            if (!(i & half)) {
                word_part found = __builtin_shuffle(words[i], words[i + half], upper);
                words[i + half] = __builtin_shuffle(words[i], words[i + half], lower);
                words[i] = found;
            }
    }
}

/* Up to 16 rows as right operands, filled up with zeros. */
INLINED void pack(char *to, const uint16_t *states, int64_t rows, int64_t step, int64_t inner) {
    for (int64_t i = 0; i < inner; i += CHUNK, to += TILE_BYTES) {
        __mmask32 inside = inner - i < CHUNK ? (1u << (inner - i)) - 1 : ~0u;
        word_part pairs[SIDE];
#pragma GCC unroll 16
        for (int row = 0; row < SIDE; row++)
            pairs[row] = row < rows ? (word_part)_mm512_maskz_loadu_epi16(inside, states + row * step + i) : (word_part){0};
        transpose(pairs);
        memcpy(to, pairs, TILE_BYTES);
    }
}

/* Writes the sums of up to 16 columns and rows to the output, with the bias. */
INLINED void write_sums(const product_call *call, int64_t row, int64_t rows, int64_t column, word_part sums[SIDE]) {
    int64_t columns = call->outer - column < SIDE ? call->outer - column : SIDE;
    float bias[SIDE] = {0};
    if (call->bias) read_numbers(bias, call->bias, column, columns, 1);
    transpose(sums);
    for (int64_t one = 0; one < rows && one < SIDE; one++) {
        int64_t place = call->places ? call->places[row + one] : row + one;
        part found = (part)sums[one];
        if (call->bias) found += *(const part *)bias;
        uint16_t rounded_off[SIDE];
        for (int lane = 0; lane < SIDE; lane++) rounded_off[lane] = narrowed(found[lane]);
        memcpy((uint16_t *)call->output + place * call->outer + column, rounded_off, (size_t)columns * 2);
    }
}

/* WIDTH columns by up to 32 rows. Loads a cache line of every 1,024 bytes of later columns, at `next`: the processor loads the others. */
INLINED void tiles(const product_call *call, const char *states, int64_t row, int64_t rows, int64_t column, const char *next) {
    int64_t line = call->inner * 2, left = line, half = packed_bytes(call->inner);
    const char *weight = (const char *)call->weight + column * line;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (; left > 0; left -= CHUNK * 2, weight += CHUNK * 2, states += TILE_BYTES) {
        _Alignas(64) char copied[WIDTH][CHUNK * 2];
        const char *from = weight;
        int64_t apart = line;
        if (left < CHUNK * 2 || call->outer - column < WIDTH) {
            memset(copied, 0, sizeof copied);
            for (int64_t one = 0; one < WIDTH && column + one < call->outer; one++)
                memcpy(copied[one], weight + one * line, left < CHUNK * 2 ? (size_t)left : CHUNK * 2);
            TILES_READ_MEMORY();
            from = copied[0], apart = CHUNK * 2;
        }
        if (next) {
            __builtin_prefetch(next, 0, 2);
            __builtin_prefetch(next + TILE_BYTES, 0, 2);
            next += 2 * TILE_BYTES;
        }
        _tile_loadd(6, states, 64);
        _tile_loadd(4, from, apart);
        _tile_loadd(5, from + SIDE * apart, apart);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        if (rows > SIDE) {
            _tile_loadd(7, states + half, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    word_part sums[4][SIDE];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int one = 0; one < 4; one++) {
        int64_t at = one / 2 * SIDE, first = column + one % 2 * SIDE;
        if (at < rows && first < call->outer) write_sums(call, row + at, rows - at, first, sums[one]);
    }
}

void product_by_tiles(const void *context, int64_t block, int64_t last) {
    static const tile_shapes ALL_TILES = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
        .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    const product_call *call = context;
    static _Thread_local _Alignas(64) char packed[PACKED_BYTES];
    int64_t line = call->inner * 2, half = packed_bytes(call->inner), most = 2 * half <= PACKED_BYTES ? 2 * SIDE : SIDE;
    int64_t end = last * COLUMNS < call->outer ? last * COLUMNS : call->outer, together = WEIGHT_BYTES / (line * WIDTH + 1) + 1;
    if (call->rows <= most) together = end;
    _tile_loadconfig(&ALL_TILES);
    for (int64_t first = block * COLUMNS; first < end; first += together * WIDTH)
        for (int64_t row = 0, rows; row < call->rows; row += rows) {
            rows = call->rows - row < most ? call->rows - row : most;
            const uint16_t *states = (const uint16_t *)call->states + row * call->step;
            pack(packed, states, rows, call->step, call->inner);
            if (rows > SIDE) pack(packed + half, states + SIDE * call->step, rows - SIDE, call->step, call->inner);
            TILES_READ_MEMORY();
            for (int64_t column = first; column < end && column < first + together * WIDTH; column += WIDTH)
                tiles(call, packed, row, rows, column, row ? NULL : (const char *)call->weight + (column + WIDTH) * line);
        }
    _tile_release();
}
#endif
