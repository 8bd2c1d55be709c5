/* Products of states and quantised weights, for quantised.c and quantised_dot.c.

   Weights are stored as tiles of 16 columns; a tile is a run of blocks, each with 32 weights of every column. A block starts with words of 32
   bits: vectors of one word for each column. A word holds even inner indices in its low half and odd ones in its high half, in
   fields of `bits` bits; pairs of indices go from low to high fields, and then on in the next vector. After the words: 16 scales and, where
   the kind has them, 16 minimums, in float16. A weight is scale * (field - zero) + minimum.

   A result is the sum over the blocks, in their order, of scale * (sum of state * (field - zero)) + minimum * (sum of states): in the same
   order for any number of rows. */

#include "kernels.h"

enum { GROUP = 32, SCALE_BYTES = 2 * LANES, ROWS_AT_ONCE = 16, MOST_BLOCKS = 1024, AHEAD = 4096 };

typedef struct {
    const char *states, *weight;
    const void *bias;
    char *output;
    float (*totals)[MOST_BLOCKS]; /* of the states of each row in each block; used where the kind has minimums */
    int64_t rows, blocks, tiles, step, bfloat16;
} quantised_call;

void quantised_by_pairs(const quantised_call *call, int bits, int zero); /* states in bfloat16 */

typedef uint32_t words __attribute__((vector_size(LANES * sizeof(float)), aligned(2)));
typedef uint16_t halves __attribute__((vector_size(LANES * sizeof(uint16_t)), aligned(2)));

/* Finite float16 numbers, exactly: the bits in place of float32's, with an exponent that is 112 too small. */
INLINED void from_float16(lanes *to, const char *from) {
    words wide = __builtin_convertvector(*(const halves *)from, words);
    lanes found = (lanes)((wide & 0x7fff) << 13) * 0x1p112f;
    *to = (lanes)((words)found | (wide & 0x8000) << 16);
}

INLINED int64_t block_bytes(int bits, int zero) { return bits * GROUP * LANES / 8 + (zero ? 1 : 2) * SCALE_BYTES; }

/* `tall` rows by the columns of one tile. */
INLINED void tile_of_rows(const quantised_call *call, int64_t row, int64_t tile, int tall, int bits, int zero) {
    int64_t number_bytes = call->bfloat16 ? 2 : 4, bytes = block_bytes(bits, zero);
    const char *states = call->states + row * call->step * number_bytes, *block = call->weight + tile * call->blocks * bytes;
    lanes sums[8] = {0};
    for (int64_t index = 0; index < call->blocks; index++, block += bytes) {
        if (row == 0)
            for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(block + AHEAD + line);
        lanes parts[8] = {0};
        add_block(parts, states + index * GROUP * number_bytes, call->step * number_bytes, block, tall, bits, zero, call->bfloat16);
        const char *scales = block + bits * GROUP * LANES / 8;
        lanes scale, minimum;
        from_float16(&scale, scales);
        if (!zero) from_float16(&minimum, scales + SCALE_BYTES);
#pragma GCC unroll 8
        for (int one = 0; one < tall; one++) {
            sums[one] += parts[one] * scale;
            if (!zero) sums[one] += minimum * call->totals[row + one][index];
        }
    }
    for (int one = 0; one < tall; one++) {
        float found[LANES];
        memcpy(found, sums + one, sizeof found);
        if (call->bias)
            for (int lane = 0; lane < LANES; lane++) found[lane] += number(call->bias, tile * LANES + lane, call->bfloat16);
        write_numbers(call->output, ((row + one) * call->tiles + tile) * LANES, found, LANES, call->bfloat16);
    }
}

/* All rows take the same tile in turn: the first of them reads it from memory. */
INLINED void all_tiles(const quantised_call *call, int bits, int zero) {
    for (int64_t tile = 0; tile < call->tiles; tile++)
        for (int64_t row = 0; row < call->rows; row += 8)
            switch (call->rows - row) {
            case 1: tile_of_rows(call, row, tile, 1, bits, zero); break;
            case 2: tile_of_rows(call, row, tile, 2, bits, zero); break;
            case 3: tile_of_rows(call, row, tile, 3, bits, zero); break;
            case 4: tile_of_rows(call, row, tile, 4, bits, zero); break;
            case 5: tile_of_rows(call, row, tile, 5, bits, zero); break;
            case 6: tile_of_rows(call, row, tile, 6, bits, zero); break;
            case 7: tile_of_rows(call, row, tile, 7, bits, zero); break;
            default: tile_of_rows(call, row, tile, 8, bits, zero);
            }
}

/* The kinds, by the fields that they have. */
#define FOR_KIND(run, call, bits, zero) \
    do { \
        if (bits == 8) run(call, 8, 128); \
        else if (zero) run(call, 4, 8); \
        else run(call, 4, 0); \
    } while (0)
