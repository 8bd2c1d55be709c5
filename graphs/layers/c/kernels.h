/* Numbers of the model layers: float32, or bfloat16 where `bfloat16` is 1; sums are float32. */

#pragma once

#include "native.h"

enum { LANES = 16, PARTS = LANES / PART }; /* sums and columns of packed weights come in LANES, held in one or two vectors */
enum { MAX_HEAD_SIZE = 256, STATE_BYTES = 1 << 18 }; /* STATE_BYTES: of converted states, on the stack; see MAX_INNER in quantised.py */

/* How many of up to `rows` rows with `bytes` of converted states are converted at once. */
INLINED int64_t fitting_rows(int64_t rows, int64_t bytes) {
    while (rows * bytes > STATE_BYTES) rows--;
    return rows;
}

typedef struct {
    const void *states, *weight, *bias; /* [rows, inner], rows `step` elements apart; [outer, inner]; [outer] or NULL */
    void *output;                       /* [rows, outer] */
    const int64_t *places;              /* where the output has each row; NULL: in order */
    int64_t rows, inner, outer, step, bfloat16;
} product_call;

/* Blocks of COLUMNS columns, with vectors of 64 bytes, by pairs of bfloat16 and by tiles. */
enum { COLUMNS = 64 };
void product_by_wide_vectors(const void *call, int64_t first, int64_t last);
void product_by_pairs(const void *call, int64_t first, int64_t last);
void product_by_tiles(const void *call, int64_t first, int64_t last);
int has_tiles_for(int64_t inner);

/* The operand of `ldtilecfg`: the shapes of matrix tiles. */
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_shapes;
#define TILES_READ_MEMORY() __asm__ volatile("" ::: "memory") /* GCC 12 moves stores across the loads of tiles */

/* Calls `run` for the rows of each expert, up to GATHERED_ROWS of them at once, adjacent: a weight is read once for all. places: the output
   row of each. args: states [choices / per_state, inner]; experts [choices]; weights of all experts, one after the other; experts;
   biases [experts * outer] or NULL; output [choices, outer]. Returns 1 if there is no such expert. */
enum { GATHERED_ROWS = 16 };
typedef void (*expert_rows)(const argument *args, int64_t expert, const char *gathered, const int64_t *places, int64_t rows);
int each_expert(const argument *args, expert_rows run);
INLINED bool is_packed(const argument *weight) { return weight->integer == 1; } /* bytes of an element */
int quantised_product(const argument *args);
void quantised_rows_of_expert(const argument *args, int64_t expert, const char *gathered, const int64_t *places, int64_t rows);

/* Calls `work` for ranges that make up [0, count), on the threads of stepgraph_use_threads. bytes: how many all of it reads. */
typedef void (*range_work)(const void *call, int64_t first, int64_t end);
void divide_work(range_work work, const void *call, int64_t count, int64_t bytes);
int64_t threads_for(int64_t bytes); /* how many threads divide_work uses at most; below 2: only the calling thread */

/* Rounds to nearest, ties to even. A NaN that was widened from bfloat16 stays a NaN: its low bits are zero, so nothing is carried. */
INLINED uint16_t narrowed(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINED float rounded(float value, int64_t bfloat16) { return bfloat16 ? widened(narrowed(value)) : value; }

INLINED void put(void *to, int64_t at, float value, int64_t bfloat16) {
    if (bfloat16) ((uint16_t *)to)[at] = narrowed(value);
    else ((float *)to)[at] = value;
}

INLINED void read_numbers(float *to, const void *from, int64_t first, int64_t count, int64_t bfloat16) {
    if (bfloat16)
        for (int64_t i = 0; i < count; i++) to[i] = widened(((const uint16_t *)from)[first + i]);
    else
        memcpy(to, (const float *)from + first, (size_t)count * sizeof *to);
}

INLINED void write_numbers(void *to, int64_t first, const float *from, int64_t count, int64_t bfloat16) {
    if (bfloat16)
        for (int64_t i = 0; i < count; i++) ((uint16_t *)to)[first + i] = narrowed(from[i]);
    else
        memcpy((float *)to + first, from, (size_t)count * sizeof *from);
}

/* Cache entries: numbers as above, or float8_e4m3fn where `bytes` is 1. */
INLINED float float8_number(uint8_t entry) {
    uint32_t size = entry & 0x7f, bits;
    float value = (float)size * 0x1p-9f; /* of numbers whose exponent is 0: no subnormal float, which a thread may read as 0 */
    memcpy(&bits, &value, sizeof bits);
    bits = (size == 0x7f ? 0x7fc00000 : size < 8 ? bits : (size << 20) + (120u << 23)) | (uint32_t)(entry & 0x80) << 24;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Rounded to the nearest, ties to even; 448 beyond it. */
INLINED uint8_t to_float8(float value) {
    uint32_t bits, size, low;
    memcpy(&bits, &value, sizeof bits);
    size = bits & 0x7fffffff;
    memcpy(&value, &size, sizeof value);
    value += 16384.0f; /* the last bits of the sum are the float8 of a value below 2 ** -6 */
    memcpy(&low, &value, sizeof low);
    uint32_t found = size < 121u << 23 ? low - (141u << 23) : (size + 0x7ffff + (size >> 20 & 1) - (120u << 23)) >> 20;
    found = found > 126 ? 126 : found;
    return (uint8_t)((size > 0x7f800000 ? 127 : found) | (bits >> 24 & 0x80));
}

INLINED void read_entries(float *to, const void *from, int64_t first, int64_t count, int64_t bfloat16, int64_t bytes) {
    if (bytes != 1) {
        read_numbers(to, from, first, count, bfloat16);
        return;
    }
    for (int64_t i = 0; i < count; i++) to[i] = float8_number(((const uint8_t *)from)[first + i]);
}

INLINED void write_entries(void *to, int64_t first, const float *from, int64_t count, int64_t bfloat16, int64_t bytes) {
    if (bytes != 1) {
        write_numbers(to, first, from, count, bfloat16);
        return;
    }
    for (int64_t i = 0; i < count; i++) ((uint8_t *)to)[first + i] = to_float8(rounded(from[i], bfloat16));
}

/* exp(x) for x up to 88, with an error of at most two ULP; below -87 almost zero. */
INLINED float power_of_e(float x) {
    x = x < -87.0f ? -87.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f; /* the rounded integer is in the lowest bits */
    float whole = shifted - 12582912.0f;
    float rest = x - whole * 0.693359375f;
    rest = rest - whole * -2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    uint32_t bits, exponent;
    memcpy(&bits, &sum, sizeof bits);
    memcpy(&exponent, &shifted, sizeof exponent);
    bits += exponent << 23;
    memcpy(&sum, &bits, sizeof bits);
    return sum;
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (int_part){__VA_ARGS__})
#endif

/* The sum of the parts of LANES numbers. */
INLINED part joined(const part parts[PARTS]) { return PARTS == 1 ? parts[0] : parts[0] + parts[PARTS - 1]; }

/* Writes the sum of each of sixteen vectors to the first LANES numbers. Each step adds the halves of two vectors. */
INLINED void sum_lanes(part sums[LANES]) {
#ifdef WIDE_VECTORS
    for (int i = 0; i < 8; i++)
        sums[i] = SHUFFLE(sums[i], sums[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                  SHUFFLE(sums[i], sums[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        sums[i] = SHUFFLE(sums[i], sums[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
                  SHUFFLE(sums[i], sums[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        sums[i] = SHUFFLE(sums[i], sums[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                  SHUFFLE(sums[i], sums[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    sums[0] = SHUFFLE(sums[0], sums[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
              SHUFFLE(sums[0], sums[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#else
    for (int i = 0; i < 8; i++)
        sums[i] = SHUFFLE(sums[i], sums[i + 8], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(sums[i], sums[i + 8], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int i = 0; i < 4; i++)
        sums[i] = SHUFFLE(sums[i], sums[i + 4], 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(sums[i], sums[i + 4], 2, 3, 10, 11, 6, 7, 14, 15);
    for (int i = 0; i < 2; i++)
        sums[i] = SHUFFLE(sums[i], sums[i + 2], 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(sums[i], sums[i + 2], 1, 9, 3, 11, 5, 13, 7, 15);
    part even = sums[0], odd = sums[1];
    sums[0] = SHUFFLE(even, odd, 0, 8, 1, 9, 2, 10, 3, 11);
    sums[1] = SHUFFLE(even, odd, 4, 12, 5, 13, 6, 14, 7, 15);
#endif
}
