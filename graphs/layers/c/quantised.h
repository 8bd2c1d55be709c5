/* Products of states and quantised weights, for quantised.c and quantised_dot.c.

   Weights are stored as tiles of 16 columns; a tile is a run of blocks, each with `group` weights of every column. A block starts with
   words of 32 bits: vectors of one word for each column. A word holds even inner indices in its low half and odd ones in its high half, in
   fields of `bits` bits; pairs of indices go from low to high fields, and then on in the next vector. After the words: 16 scales and, where
   the kind has them, 16 minimums, in float16 or float32. A weight is scale * (field - zero) + minimum, or scale * the number in
   float8_e4m3fn.

   A result is the sum over the blocks, in their order, of scale * (sum of state * (field - zero)) + minimum * (sum of states): in the same
   order for any number of rows. */

#include "kernels.h"

enum { MAX_BLOCKS = 1024, MAX_GROUP = 128, PREFETCH_BYTES = 4096, FLOAT8 = -1 };

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
    float (*totals)[MAX_BLOCKS]; /* sums of the states of each row in each block; used where the kind has minimums */
    const int64_t *places; /* where the output has each row; NULL: in order */
    int64_t rows, blocks, tiles, step, bfloat16;
    quantised_kind kind;
} quantised_call;

/* Tiles; states in bfloat16. By matrix tiles: at most 16 rows, of groups of 32 and more. */
void quantised_by_pairs(const void *call, int64_t first, int64_t end);
void quantised_by_matrix_tiles(const void *call, int64_t first, int64_t end);

INLINED int64_t word_bytes(quantised_kind kind) { return kind.bits * kind.group * LANES / 8; }
INLINED int64_t scale_bytes(quantised_kind kind) { return LANES * (kind.wide ? 4 : 2); }
INLINED int64_t block_bytes(quantised_kind kind) { return word_bytes(kind) + (1 + kind.ranged) * scale_bytes(kind); }

/* Finite numbers from their bits without the sign: `mantissa` bits, and above them an exponent with this bias. Makes no subnormal float32,
   which a thread that flushes these would read as 0. */
INLINED part float_of(word_part size, int mantissa, int bias) {
    part value = (part)((size << (23 - mantissa)) + ((127u - bias) << 23)); /* right unless the exponent is 0, which adds no 1 */
    word_part is_small = (word_part)(size < 1u << mantissa);
    return value + (part)((word_part)(value - 2.0f / (1u << bias)) & is_small);
}

/* Scales or minimums, from float32 or float16. */
INLINED void read_scales(part to[PARTS], const char *from, int wide_ones) {
    for (int one = 0; one < PARTS; one++) {
        if (wide_ones) {
            to[one] = ((const part *)from)[one];
            continue;
        }
#ifdef FROM_FLOAT16
        to[one] = FROM_FLOAT16(from);
#else
        word_part wide = __builtin_convertvector(((const half_part *)from)[one], word_part);
        part found = float_of(wide & 0x7fff, 10, 15);
        to[one] = (part)((word_part)found | (wide & 0x8000) << 16);
#endif
    }
}

/* Inner indices per call of add_block: as many as the smallest group with fields of this size has. */
INLINED int indices_per_step(int bits) { return bits == 8 ? 16 : 32; }

/* Adds the products with part of a block of `wide` tiles, `apart` bytes apart. Defined by the file that includes this one. */
INLINED void add_block(
    part (*parts)[PARTS], const char *states, int64_t row_bytes, const char *from, int64_t apart, int tall, int wide, int bits, int zero);

/* Writes the sums of a row and the columns of a tile to the output, with the bias. */
INLINED void write_sums(const quantised_call *call, int64_t row, int64_t tile, float sums[LANES]) {
    int64_t place = call->places ? call->places[row] : row;
    if (call->bias)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += number(call->bias, tile * LANES + lane, call->bfloat16);
    write_numbers(call->output, (place * call->tiles + tile) * LANES, sums, LANES, call->bfloat16);
}

/* `tall` rows by the columns of `wide` tiles. `bits` and `zero` are the kind's, as constants. */
INLINED void tiles_of_rows(const quantised_call *call, int64_t row, int64_t tile, int tall, int wide, int bits, int zero) {
    int64_t scaled = scale_bytes(call->kind), words_end = word_bytes(call->kind);
    int64_t bytes = block_bytes(call->kind), parts_bytes = bits * indices_per_step(bits) * LANES / 8, apart = call->blocks * bytes;
    const char *states = call->states + row * call->step * STATE_SIZE, *block = call->weight + tile * apart;
    const char *next = block + (wide > 1 ? 4 * apart : PREFETCH_BYTES); /* with several tiles farther ahead, into the L2 cache */
    part sums[8][PARTS] = {{{0}}};
    for (int64_t index = 0; index < call->blocks; index++, block += bytes, next += wide * bytes) {
        if (row == 0)
            for (int64_t line = 0; line < wide * bytes; line += 64) {
                if (wide > 1) __builtin_prefetch(next + line, 0, 2);
                else __builtin_prefetch(next + line);
            }
        part parts[8][PARTS] = {{{0}}};
        for (int64_t at = 0; at < words_end; at += parts_bytes, states += indices_per_step(bits) * STATE_SIZE)
            add_block(parts, states, call->step * STATE_SIZE, block + at, apart, tall, wide, bits, zero);
#pragma GCC unroll 8
        for (int one = 0; one < tall * wide; one++) {
            const char *scales = block + one % wide * apart + words_end;
            part scale[PARTS], minimum[PARTS];
            read_scales(scale, scales, call->kind.wide);
            if (call->kind.ranged) read_scales(minimum, scales + scaled, call->kind.wide);
            for (int half = 0; half < PARTS; half++) {
                sums[one][half] += parts[one][half] * scale[half];
                if (call->kind.ranged) sums[one][half] += minimum[half] * call->totals[row + one / wide][index];
            }
        }
    }
    for (int one = 0; one < tall * wide; one++) write_sums(call, row + one / wide, tile + one % wide, (float *)(sums + one));
}

/* All rows use the same tile in turn: the first of them reads it from memory. Where EVERY_HEIGHT is 0, rows are grouped by four, two and
   one: registers of 32 bytes have room for the sums of four. Otherwise up to four rows use two tiles of 4-bit fields: sums of one row
   depend on each other. */
INLINED void tiles_of(const quantised_call *call, int64_t tile, int64_t end, int bits, int zero) {
#define TAKE(tall, wide) case tall: tiles_of_rows(call, row, tile, tall, wide, bits, zero); break;
    for (int64_t wide = EVERY_HEIGHT && bits == 4 && call->rows <= 4 ? 2 : 1; tile < end; tile += wide) {
        if (tile + wide > end) wide = 1;
        for (int64_t row = 0, tall; row < call->rows; row += tall) {
            tall = call->rows - row < 8 ? call->rows - row : 8;
            if (!EVERY_HEIGHT) tall = tall >= 4 ? 4 : tall >= 2 ? 2 : 1;
            if (EVERY_HEIGHT && wide > 1) switch (tall) { TAKE(1, 2) TAKE(2, 2) TAKE(3, 2) TAKE(4, 2) }
            else if (EVERY_HEIGHT) switch (tall) { TAKE(1, 1) TAKE(2, 1) TAKE(3, 1) TAKE(4, 1) TAKE(5, 1) TAKE(6, 1) TAKE(7, 1) TAKE(8, 1) }
            else switch (tall) { TAKE(1, 1) TAKE(2, 1) TAKE(4, 1) }
        }
    }
}

/* Calls `run` with the bits and the zero of the kind as constants. */
#define FOR_FIELDS(run, call, first, end) \
    do { \
        if ((call)->kind.zero == FLOAT8) run(call, first, end, 8, FLOAT8); \
        else if ((call)->kind.bits == 8) run(call, first, end, 8, 128); \
        else if ((call)->kind.zero) run(call, first, end, 4, 8); \
        else run(call, first, end, 4, 0); \
    } while (0)
