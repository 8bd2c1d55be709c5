/* Products of states and weights, for product.c and product_dot.c. The sum of a result has LANES parts along the inner dimension, which
   are added as a tree: in the same order for any number of rows and any tiling. */

#include "kernels.h"

enum { MAX_ROWS = 8 };

/* Reads LANES float32 numbers into parts[0], or 2 * LANES bfloat16 numbers: even indices into parts[0], odd ones into parts[1]. */
INLINED void read_lanes(const char *from, int64_t bfloat16, lanes parts[2]) {
    words raw = *(const words *)from;
    parts[0] = (lanes)(bfloat16 ? raw << 16 : raw);
    parts[1] = (lanes)(raw & 0xffff0000u);
}

#ifdef DOT_PRODUCTS
INLINED void add_pairs(lanes *sums, const char *states, int64_t row_bytes, const char *weight, int64_t column_bytes, int tall, int wide) {
    for (int column = 0; column < wide; column++) {
        __m512bh right = (__m512bh)_mm512_loadu_si512(weight + column * column_bytes);
        for (int row = 0; row < tall; row++) {
            __m512bh left = (__m512bh)_mm512_loadu_si512(states + row * row_bytes);
            sums[row * wide + column] = (lanes)_mm512_dpbf16_ps((__m512)sums[row * wide + column], left, right);
        }
    }
}
#endif

INLINED void add_products(
    lanes *sums, const char *states, int64_t row_bytes, const char *weight, int64_t column_bytes, int tall, int wide, int64_t bfloat16) {
#ifdef DOT_PRODUCTS
    if (bfloat16) {
        add_pairs(sums, states, row_bytes, weight, column_bytes, tall, wide);
        return;
    }
#endif
    lanes left[4][2], right[2];
    for (int row = 0; row < tall; row++) read_lanes(states + row * row_bytes, bfloat16, left[row]);
    for (int column = 0; column < wide; column++) {
        read_lanes(weight + column * column_bytes, bfloat16, right);
        for (int row = 0; row < tall; row++) {
            sums[row * wide + column] += left[row][0] * right[0];
            if (bfloat16) sums[row * wide + column] += left[row][1] * right[1];
        }
    }
}

/* Each step prefetches `ahead` cache lines of later columns, from `next` on: loading them takes longer than computing this tile. They go to the
   L2 cache: with an inner dimension above 1,024 the L1 cache has no room for eight later columns beside the states. */
INLINED void tile(const product_call *call, int64_t row, int64_t column, int tall, int wide, const char *next, int ahead, int64_t bfloat16) {
    int64_t bytes = bfloat16 ? 2 : 4, inner = call->inner, chunk = 64 / bytes, whole = inner / chunk * chunk;
    const char *states = (const char *)call->states + row * call->step * bytes, *weight = (const char *)call->weight + column * inner * bytes;
    lanes sums[LANES] = {0};
    for (int64_t i = 0; i < whole; i += chunk) {
        for (int line = 0; line < ahead; line++, next += 64) __builtin_prefetch(next, 0, 2);
        add_products(sums, states + i * bytes, call->step * bytes, weight + i * bytes, inner * bytes, tall, wide, bfloat16);
    }
    if (whole < inner) {
        char left[4][64] = {{0}}, right[16][64] = {{0}};
        for (int one = 0; one < tall; one++) memcpy(left[one], states + (one * call->step + whole) * bytes, (size_t)((inner - whole) * bytes));
        for (int one = 0; one < wide; one++) memcpy(right[one], weight + (one * inner + whole) * bytes, (size_t)((inner - whole) * bytes));
        add_products(sums, left[0], 64, right[0], 64, tall, wide, bfloat16);
    }
    sum_lanes(sums);
    float found[LANES];
    memcpy(found, sums, sizeof found);
    if (call->bias)
        for (int one = 0; one < tall * wide; one++) found[one] += number(call->bias, column + one % wide, bfloat16);
    uint16_t rounded_off[LANES];
    for (int one = 0; one < LANES; one++) rounded_off[one] = narrowed(found[one]);
    for (int one = 0; one < tall; one++) {
        int64_t place = call->places ? call->places[row + one] : row + one;
        const void *from = bfloat16 ? (const void *)(rounded_off + one * wide) : (const void *)(found + one * wide);
        memcpy((char *)call->output + (place * call->outer + column) * bytes, from, (size_t)(wide * bytes));
    }
}

/* Up to eight rows are multiplied by the same four columns in turn, while the columns of two turns later are loaded. */
INLINED void few_rows(const product_call *call, int64_t row, int64_t rows, int64_t first, int64_t end, int64_t bfloat16) {
    int64_t line = call->inner * (bfloat16 ? 2 : 4), column = first;
    int share = row ? 0 : rows == 4 || rows == 2 ? 4 : 2;
    if (rows == MAX_ROWS && line > 2048)
        for (; column + 32 <= end; column += 32) { /* the L1 cache holds four rows of states beside four columns, not eight */
            const char *next = (const char *)call->weight + (column + 32) * line;
            for (int64_t four = 0; four < 16; four++, next += 2 * line)
                tile(call, row + four / 8 * 4, column + four % 8 * 4, 4, 4, next, share, bfloat16);
        }
    for (; column + 4 <= end; column += 4) {
        const char *next = (const char *)call->weight + (column + 8) * line;
        int64_t at = row, left = rows;
        for (; left >= 4; left -= 4, at += 4, next += 2 * line) tile(call, at, column, 4, 4, next, share, bfloat16);
        if (left & 2) {
            tile(call, at, column, 2, 4, next, share, bfloat16);
            at += 2, next += 2 * line;
        }
        if (left & 1) tile(call, at, column, 1, 4, next, rows == 7 ? 0 : share, bfloat16);
    }
    for (; column < end; column++)
        for (int64_t at = row; at < row + rows; at++) tile(call, at, column, 1, 1, (const char *)0, 0, bfloat16);
}

INLINED void one_row(const product_call *call, int64_t row, int64_t first, int64_t end, int64_t bfloat16) {
    int64_t line = call->inner * (bfloat16 ? 2 : 4), column = first;
    for (; column + 16 <= end; column += 16)
        tile(call, row, column, 1, 16, (const char *)call->weight + (column + 16) * line, row ? 0 : 16, bfloat16);
    for (; column < end; column++) tile(call, row, column, 1, 1, (const char *)0, 0, bfloat16);
}

INLINED void columns(const product_call *call, int64_t first, int64_t end, int64_t bfloat16) {
    int64_t row = 0;
    for (; row + 1 < call->rows; row += MAX_ROWS) few_rows(call, row, call->rows - row < MAX_ROWS ? call->rows - row : MAX_ROWS, first, end, bfloat16);
    if (row < call->rows) one_row(call, row, first, end, bfloat16);
}
