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

INLINED int_part either(int_part mask, int_part yes, int_part no) { return (mask & yes) | (~mask & no); }
INLINED part select_lanes(int_part mask, part yes, part no) { return (part)either(mask, (int_part)yes, (int_part)no); }

/* Numbers first to first + PART, `beyond` from `count` on. */
INLINED part load_lanes(const void *from, int64_t first, int64_t count, float beyond, int64_t bfloat16) {
    int64_t bytes = bfloat16 ? 2 : 4;
    const char *at = (const char *)from + first * bytes;
    part found;
    if (first + PART <= count) {
        half_part half;
        memcpy(bfloat16 ? (void *)&half : (void *)&found, at, (size_t)(PART * bytes));
        return bfloat16 ? (part)(__builtin_convertvector(half, int_part) << 16) : found;
    }
    for (int lane = 0; lane < PART; lane++) found[lane] = first + lane < count ? number(from, first + lane, bfloat16) : beyond;
    return found;
}

INLINED void store_lanes(float *to, int64_t first, int64_t count, part values) {
    memcpy(to + first, &values, (size_t)(count - first < PART ? count - first : PART) * sizeof *to);
}

INLINED int any(int_part mask) {
    int64_t parts[PART / 2], found = 0;
    memcpy(parts, &mask, sizeof parts);
    for (int i = 0; i < PART / 2; i++) found |= parts[i];
    return found != 0;
}

/* The largest number, or a NaN if there is one. */
INLINED float largest(const void *logits, int64_t count, int64_t bfloat16) {
    part most = (part){0} - INFINITY;
    int_part unordered = {0};
    for (int64_t i = 0; i < count; i += PART) {
        part values = load_lanes(logits, i, count, -INFINITY, bfloat16);
        most = select_lanes(values > most, values, most);
        unordered |= values != values;
    }
    for (int lane = 1; lane < PART; lane++) most[0] = most[lane] > most[0] ? most[lane] : most[0];
    return any(unordered) ? NAN : most[0];
}
