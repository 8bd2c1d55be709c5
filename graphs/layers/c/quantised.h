/* Products of states and quantised weights, for quantised.c and quantised_dot.c.

   Weights are stored as tiles of 16 columns; a tile is a run of blocks, each with `group` weights of every column. A block starts with words of
   32 bits: vectors of one word for each column. A word holds even inner indices in its low half and odd ones in its high half, in
   fields of `bits` bits; pairs of indices go from low to high fields, and then on in the next vector. After the words: 16 scales and, where
   the kind has them, 16 minimums, in float16 or float32. A weight is scale * (field - zero) + minimum, or scale * the number in float8_e4m3fn.

   A result is the sum over the blocks, in their order, of scale * (sum of state * (field - zero)) + minimum * (sum of states): in the same
   order for any number of rows. */

#include "kernels.h"

enum { ROWS_AT_ONCE = 16, MOST_BLOCKS = 1024, MOST_GROUP = 128, AHEAD = 4096, FLOAT8 = -1 };

typedef struct {
    int bits, zero; /* zero: FLOAT8 for float8_e4m3fn */
    int ranged;     /* has minimums */
    int wide;       /* scales and minimums in float32 */
    int group;      /* inner indices with one scale */
    int together;   /* blocks counted as one in the shape, so that the number of bytes determines the kind */
} quantised_kind;

/* As KINDS in quantised.py. */
static const quantised_kind KINDS[] = {
    {4, 8, 0, 0, 32, 1},   {4, 0, 1, 0, 32, 1},   {8, 128, 0, 0, 32, 1},  {4, 0, 1, 1, 32, 1},       {4, 0, 1, 1, 128, 1},
    {8, 128, 1, 1, 32, 1}, {8, 128, 0, 1, 16, 4}, {8, 128, 1, 1, 16, 4},  {8, FLOAT8, 0, 1, 128, 1},
};

typedef struct {
    const char *states, *weight;
    const void *bias;
    char *output;
    float (*totals)[MOST_BLOCKS]; /* of the states of each row in each block; used where the kind has minimums */
    const int64_t *places; /* where the output has each row; NULL: in order */
    int64_t rows, blocks, tiles, step, bfloat16;
    quantised_kind kind;
} quantised_call;

void quantised_by_pairs(const quantised_call *call, int64_t first, int64_t end); /* tiles; states in bfloat16 */

typedef uint32_t words __attribute__((vector_size(LANES * sizeof(float)), aligned(2)));
typedef uint16_t halves __attribute__((vector_size(LANES * sizeof(uint16_t)), aligned(2)));

INLINED int64_t word_bytes(quantised_kind kind) { return kind.bits * kind.group * LANES / 8; }
INLINED int64_t scale_bytes(quantised_kind kind) { return LANES * (kind.wide ? 4 : 2); }
INLINED int64_t block_bytes(quantised_kind kind) { return word_bytes(kind) + (1 + kind.ranged) * scale_bytes(kind); }

/* Scales or minimums; finite float16 numbers exactly: the bits in place of float32's, with an exponent that is 112 too small. */
INLINED void read_scales(lanes *to, const char *from, int wide_ones) {
    if (wide_ones) {
        *to = *(const lanes *)from;
        return;
    }
#ifdef FROM_FLOAT16
    *to = FROM_FLOAT16(from);
#else
    words wide = __builtin_convertvector(*(const halves *)from, words);
    lanes found = (lanes)((wide & 0x7fff) << 13) * 0x1p112f;
    *to = (lanes)((words)found | (wide & 0x8000) << 16);
#endif
}

/* Inner indices that add_block takes: those of the smallest group with fields of this size. */
INLINED int taken_at_once(int bits) { return bits == 8 ? 16 : 32; }

/* `tall` rows by the columns of one tile. `bits` and `zero` are the kind's, as constants. */
INLINED void tile_of_rows(const quantised_call *call, int64_t row, int64_t tile, int tall, int bits, int zero) {
    int64_t number_bytes = call->bfloat16 ? 2 : 4, scaled = scale_bytes(call->kind), words_end = word_bytes(call->kind);
    int64_t bytes = block_bytes(call->kind), parts_bytes = bits * taken_at_once(bits) * LANES / 8;
    const char *states = call->states + row * call->step * number_bytes, *block = call->weight + tile * call->blocks * bytes;
    lanes sums[8] = {0};
    for (int64_t index = 0; index < call->blocks; index++, block += bytes) {
        if (row == 0)
            for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(block + AHEAD + line);
        lanes parts[8] = {0};
        for (int64_t at = 0; at < words_end; at += parts_bytes, states += taken_at_once(bits) * number_bytes)
            add_block(parts, states, call->step * number_bytes, block + at, tall, bits, zero, call->bfloat16);
        lanes scale, minimum;
        read_scales(&scale, block + words_end, call->kind.wide);
        if (call->kind.ranged) read_scales(&minimum, block + words_end + scaled, call->kind.wide);
#pragma GCC unroll 8
        for (int one = 0; one < tall; one++) {
            sums[one] += parts[one] * scale;
            if (call->kind.ranged) sums[one] += minimum * call->totals[row + one][index];
        }
    }
    for (int one = 0; one < tall; one++) {
        float found[LANES];
        memcpy(found, sums + one, sizeof found);
        if (call->bias)
            for (int lane = 0; lane < LANES; lane++) found[lane] += number(call->bias, tile * LANES + lane, call->bfloat16);
        int64_t place = call->places ? call->places[row + one] : row + one;
        write_numbers(call->output, (place * call->tiles + tile) * LANES, found, LANES, call->bfloat16);
    }
}

/* All rows take the same tile in turn: the first of them reads it from memory. Where EVERY_HEIGHT is 0, rows are taken by eight, four, two and
   one: half the time to compile. */
INLINED void tiles_of(const quantised_call *call, int64_t tile, int64_t end, int bits, int zero) {
    for (; tile < end; tile++)
        for (int64_t row = 0, tall; row < call->rows; row += tall) {
            tall = call->rows - row < 8 ? call->rows - row : 8;
            if (!EVERY_HEIGHT) tall = tall == 8 ? 8 : tall >= 4 ? 4 : tall >= 2 ? 2 : 1;
            switch (tall) {
            case 1: tile_of_rows(call, row, tile, 1, bits, zero); break;
            case 2: tile_of_rows(call, row, tile, 2, bits, zero); break;
            case 4: tile_of_rows(call, row, tile, 4, bits, zero); break;
#if EVERY_HEIGHT
            case 3: tile_of_rows(call, row, tile, 3, bits, zero); break;
            case 5: tile_of_rows(call, row, tile, 5, bits, zero); break;
            case 6: tile_of_rows(call, row, tile, 6, bits, zero); break;
            case 7: tile_of_rows(call, row, tile, 7, bits, zero); break;
#endif
            default: tile_of_rows(call, row, tile, 8, bits, zero);
            }
        }
}

/* By the fields that the kind has. */
#define FOR_FIELDS(run, call, first, end) \
    do { \
        if ((call)->kind.zero == FLOAT8) run(call, first, end, 8, FLOAT8); \
        else if ((call)->kind.bits == 8) run(call, first, end, 8, 128); \
        else if ((call)->kind.zero) run(call, first, end, 4, 8); \
        else run(call, first, end, 4, 0); \
    } while (0)
