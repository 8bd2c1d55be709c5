/* Sixteen numbers at a time, for kernels whose loops the compiler does not vectorise. In the references every operation is rounded by
   itself, so none may be contracted here. */

#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are results of inlined functions only */
#else
#pragma STDC FP_CONTRACT OFF
#endif

#include "native.h"

typedef int64_t longs __attribute__((vector_size(LANES * 8)));

INLINED ints either(ints mask, ints yes, ints no) { return (mask & yes) | (~mask & no); }
INLINED lanes select_lanes(ints mask, lanes yes, lanes no) { return (lanes)either(mask, (ints)yes, (ints)no); }

/* Numbers first to first + LANES, `beyond` from `count` on. */
INLINED lanes load_lanes(const void *from, int64_t first, int64_t count, float beyond, int64_t bfloat16) {
    int64_t bytes = bfloat16 ? 2 : 4;
    const char *at = (const char *)from + first * bytes;
    lanes found;
    if (first + LANES <= count) {
        halves half;
        memcpy(bfloat16 ? (void *)&half : (void *)&found, at, (size_t)(LANES * bytes));
        return bfloat16 ? (lanes)(__builtin_convertvector(half, ints) << 16) : found;
    }
    for (int lane = 0; lane < LANES; lane++) found[lane] = first + lane < count ? number(from, first + lane, bfloat16) : beyond;
    return found;
}

INLINED void store_lanes(float *to, int64_t first, int64_t count, lanes values) {
    memcpy(to + first, &values, (size_t)(count - first < LANES ? count - first : LANES) * sizeof *to);
}

INLINED int any(ints mask) {
    int64_t parts[LANES / 2], found = 0;
    memcpy(parts, &mask, sizeof parts);
    for (int i = 0; i < LANES / 2; i++) found |= parts[i];
    return found != 0;
}

/* The largest number, or a NaN if there is one. */
INLINED float largest(const void *logits, int64_t count, int64_t bfloat16) {
    lanes most = (lanes){0} - INFINITY;
    ints unordered = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        lanes values = load_lanes(logits, i, count, -INFINITY, bfloat16);
        most = select_lanes(values > most, values, most);
        unordered |= values != values;
    }
    for (int lane = 1; lane < LANES; lane++) most[0] = most[lane] > most[0] ? most[lane] : most[0];
    return any(unordered) ? NAN : most[0];
}
