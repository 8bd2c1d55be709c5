/* Numbers of the model layers: float32, or bfloat16 where `bfloat16` is 1; sums are float32. */

#ifndef STEPGRAPH_KERNELS_H
#define STEPGRAPH_KERNELS_H

#include "native.h"

enum { MOST_SIZE = 256 };

typedef struct {
    const void *states, *weight, *bias, *onto; /* [rows, inner], rows `step` numbers apart; [outer, inner]; [outer] and [rows, outer], or NULL */
    void *output;                              /* [rows, outer] */
    int64_t rows, inner, outer, step, bfloat16;
} product_call;

void product_by_pairs(const product_call *call, int64_t first, int64_t end); /* bfloat16, columns [first, end) */

/* To the nearest, to even between two. A NaN made of bfloat16 has no low bits that would carry it away from being one. */
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

/* exp(x) for x up to 88, with an error of at most two ULP; below -87 almost zero. */
INLINED float power_of_e(float x) {
    x = x < -87.0f ? -87.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f; /* the whole number lies in the lowest bits */
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

#endif
