/* Products of states and weights, for product.c, wide.c and product_dot.c. The sum of a result has LANES parts along the inner
   dimension, which are added as a tree: in the same order for any number of rows and any tiling. */

#include "kernels.h"

enum { MAX_ROWS = 8 };

#ifdef DOT_PRODUCTS
enum { WIDENED = 1 }; /* how many bytes of prepared states there are for each byte of bfloat16 */

INLINED void write_states(char *to, const char *raw, int64_t bfloat16) {
    (void)bfloat16;
    memcpy(to, raw, 64);
}

INLINED void add_products(
    part (*sums)[PARTS], const char *states, int64_t row_bytes, const char *weight, int64_t column_bytes, int tall, int wide,
    int64_t bfloat16) {
    (void)bfloat16;
    for (int column = 0; column < wide; column++) {
        __m512bh right = (__m512bh)_mm512_loadu_si512(weight + column * column_bytes);
        for (int row = 0; row < tall; row++) {
            __m512bh left = (__m512bh)_mm512_loadu_si512(states + row * row_bytes);
            *sums[row * wide + column] = (part)_mm512_dpbf16_ps((__m512)*sums[row * wide + column], left, right);
        }
    }
}
#else
enum { WIDENED = 2 };

/* Reads LANES float32 numbers into to[0], or 2 * LANES bfloat16 numbers: even indices into to[0], odd ones into to[1]. */
INLINED void read_lanes(const char *from, int64_t bfloat16, part to[2][PARTS]) {
    for (int one = 0; one < PARTS; one++) {
        word_part raw = ((const word_part *)from)[one];
        to[0][one] = (part)(bfloat16 ? raw << 16 : raw);
        if (bfloat16) to[1][one] = (part)(raw & 0xffff0000u);
    }
}

INLINED void write_states(char *to, const char *raw, int64_t bfloat16) { read_lanes(raw, bfloat16, (part(*)[PARTS])to); }

INLINED void add_products(
    part (*sums)[PARTS], const char *states, int64_t row_bytes, const char *weight, int64_t column_bytes, int tall, int wide,
    int64_t bfloat16) {
    for (int column = 0; column < wide; column++) {
        part right[2][PARTS];
        read_lanes(weight + column * column_bytes, bfloat16, right);
        for (int row = 0; row < tall; row++) {
            const part *left = (const part *)(states + row * row_bytes);
            for (int one = 0; one < PARTS; one++) {
                sums[row * wide + column][one] += left[one] * right[0][one];
                if (bfloat16) sums[row * wide + column][one] += left[PARTS + one] * right[1][one];
            }
        }
    }
}
#endif

/* Up to MAX_ROWS rows of states, converted once for all columns: `row_bytes` apart, the last chunk filled up with zeros. */
typedef struct {
    const product_call *call;
    const char *states;
    int64_t row, rows, row_bytes;
} row_group;

INLINED row_group prepare(const product_call *call, int64_t row, int64_t rows, int64_t bfloat16, char buffer[STATE_BYTES]) {
    int64_t bytes = bfloat16 ? 2 : 4, chunk = 64 / bytes, chunks = (call->inner + chunk - 1) / chunk,
        chunk_bytes = bfloat16 ? 64 * WIDENED : 64;
    const char *states = (const char *)call->states + row * call->step * bytes;
    if (WIDENED == 1 && call->inner % chunk == 0) return (row_group){call, states, row, rows, call->step * bytes};
    rows = fitting_rows(rows, chunks * chunk_bytes);
    for (int64_t one = 0; one < rows; one++)
        for (int64_t i = 0; i < chunks; i++) {
            char raw[64] = {0};
            int64_t left = (call->inner - i * chunk) * bytes;
            memcpy(raw, states + (one * call->step + i * chunk) * bytes, left < 64 ? (size_t)left : 64);
            write_states(buffer + (one * chunks + i) * chunk_bytes, raw, bfloat16);
        }
    return (row_group){call, buffer, row, rows, chunks * chunk_bytes};
}

/* Each pass over the inner dimension adds as many sums as there are registers for. It prefetches its part of `ahead` cache lines a step, of
   later columns, from `next` on: loading them takes longer than computing this tile. They go to the L2 cache: with an inner dimension above
   1,024 the L1 cache has no room for eight later columns beside the states. */
INLINED void tile(const row_group *group, int64_t row, int64_t column, int tall, int wide, const char *next, int ahead, int64_t bfloat16) {
    const product_call *call = group->call;
    int64_t bytes = bfloat16 ? 2 : 4, inner = call->inner, chunk = 64 / bytes, whole = inner / chunk * chunk,
        state_bytes = bfloat16 ? 2 * WIDENED : 4;
    const char *states = group->states + row * group->row_bytes;
    int together = PARTS == 1 || wide * tall <= 4 ? wide : 4 / tall, passes = wide / together;
    part sums[LANES];
    for (int one = tall * wide; one < LANES; one++) sums[one] = (part){0};
    for (int pass = 0; pass < passes; pass++) {
        const char *weight = (const char *)call->weight + (column + pass * together) * inner * bytes;
        int lines = ahead * (pass + 1) / passes - ahead * pass / passes;
        part parts[LANES][PARTS];
        for (int one = 0; one < tall * together * PARTS; one++) parts[one / PARTS][one % PARTS] = (part){0};
        for (int64_t i = 0; i < whole; i += chunk) {
            for (int line = 0; line < lines; line++, next += 64) __builtin_prefetch(next, 0, 2);
            add_products(parts, states + i * state_bytes, group->row_bytes, weight + i * bytes, inner * bytes, tall, together, bfloat16);
        }
        if (whole < inner) {
            char right[16][64] = {{0}};
            for (int one = 0; one < together; one++)
                memcpy(right[one], weight + (one * inner + whole) * bytes, (size_t)((inner - whole) * bytes));
            add_products(parts, states + whole * state_bytes, group->row_bytes, right[0], 64, tall, together, bfloat16);
        }
        for (int one = 0; one < tall * together; one++) sums[one / together * wide + pass * together + one % together] = joined(parts[one]);
    }
    sum_lanes(sums);
    float found[LANES];
    memcpy(found, sums, sizeof found);
    if (call->bias)
        for (int one = 0; one < tall * wide; one++) found[one] += number(call->bias, column + one % wide, bfloat16);
    uint16_t rounded_off[LANES];
    for (int one = 0; one < LANES; one++) rounded_off[one] = narrowed(found[one]);
    for (int one = 0; one < tall; one++) {
        int64_t place = group->row + row + one;
        if (call->places) place = call->places[place];
        const void *from = bfloat16 ? (const void *)(rounded_off + one * wide) : (const void *)(found + one * wide);
        memcpy((char *)call->output + (place * call->outer + column) * bytes, from, (size_t)(wide * bytes));
    }
}

/* Up to eight rows are multiplied by the same four columns in turn, while the columns of two turns later are loaded. */
INLINED void few_rows(const row_group *group, int64_t first, int64_t end, int64_t bfloat16) {
    int64_t rows = group->rows, line = group->call->inner * (bfloat16 ? 2 : 4), column = first;
    int share = group->row ? 0 : rows == 4 || rows == 2 ? 4 : 2;
    const char *weight = group->call->weight;
    if (rows == MAX_ROWS && line > 2048)
        for (; column + 32 <= end; column += 32) { /* the L1 cache holds four rows of states beside four columns, not eight */
            const char *next = weight + (column + 32) * line;
            for (int64_t four = 0; four < 16; four++, next += 2 * line)
                tile(group, four / 8 * 4, column + four % 8 * 4, 4, 4, next, share, bfloat16);
        }
    for (; column + 4 <= end; column += 4) {
        const char *next = weight + (column + 8) * line;
        int64_t at = 0, left = rows;
        for (; left >= 4; left -= 4, at += 4, next += 2 * line) tile(group, at, column, 4, 4, next, share, bfloat16);
        if (left & 2) {
            tile(group, at, column, 2, 4, next, share, bfloat16);
            at += 2, next += 2 * line;
        }
        if (left & 1) tile(group, at, column, 1, 4, next, rows == 7 ? 0 : share, bfloat16);
    }
    for (; column < end; column++)
        for (int64_t at = 0; at < rows; at++) tile(group, at, column, 1, 1, (const char *)0, 0, bfloat16);
}

INLINED void one_row(const row_group *group, int64_t first, int64_t end, int64_t bfloat16) {
    int64_t line = group->call->inner * (bfloat16 ? 2 : 4), column = first;
    for (; column + 16 <= end; column += 16)
        tile(group, 0, column, 1, 16, (const char *)group->call->weight + (column + 16) * line, group->row ? 0 : 16, bfloat16);
    for (; column < end; column++) tile(group, 0, column, 1, 1, (const char *)0, 0, bfloat16);
}

INLINED void columns(const product_call *call, int64_t first, int64_t end, int64_t bfloat16) {
    _Alignas(64) char buffer[STATE_BYTES];
    for (int64_t row = 0; row < call->rows;) {
        row_group group = prepare(call, row, call->rows - row < MAX_ROWS ? call->rows - row : MAX_ROWS, bfloat16, buffer);
        if (group.rows > 1) few_rows(&group, first, end, bfloat16);
        else one_row(&group, first, end, bfloat16);
        row += group.rows;
    }
}

/* Blocks [block, last) of columns. A block stays in the cache for all rows. */
INLINED void column_blocks(const product_call *call, int64_t block, int64_t last) {
    int64_t step = call->rows > MAX_ROWS ? 1 : last - block;
    for (; block < last; block += step) {
        int64_t first = block * COLUMNS, end = (block + step) * COLUMNS < call->outer ? (block + step) * COLUMNS : call->outer;
        if (WIDENED == 1 || call->bfloat16) columns(call, first, end, 1);
        else columns(call, first, end, 0);
    }
}
