/* What Python and C share of the CPU kernels. calls.py holds the same structs, field by field, and compares their sizes.

   Numbers are float32, or bfloat16 where `narrow` is 1; sums are float32. Nothing here knows torch or the interpreter, takes memory or
   starts a thread. A kernel gives 0, or 1 where an index lies outside of its cache: nothing was written beyond it. */

#ifndef STEPGRAPH_CPU_KERNELS_H
#define STEPGRAPH_CPU_KERNELS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { KERNELS_VERSION = 3, MOST_SIZE = 256 };
enum { TAG_FIELDS = 4, MASK_OK = 1 }; /* as status.py numbers them */

typedef struct {
    const void *query, *keys, *values;         /* [batch, count, heads, size]; [slots, kv_heads, size] of one layer */
    const int64_t *positions, *slots, *tables; /* [batch, count] twice, [batch, pages] */
    void *output;
    int64_t batch, count, heads, kv_heads, size, page_size, pages, cache_slots, window, narrow;
    float scale;
} attention_call;

typedef struct {
    const void *query, *key, *value, *cosines, *sines; /* a token's heads side by side, tokens `*_step` numbers apart */
    const int64_t *slots;                              /* [tokens] */
    void *output, *keys, *values;
    int64_t tokens, heads, kv_heads, size, query_step, key_step, value_step, cache_slots, narrow;
} turn_call;

typedef struct {
    const void *states, *weight; /* [outer, inner, size], outer ones `step` numbers apart; [size] */
    void *output;
    int64_t outer, inner, size, step, narrow;
    float epsilon;
} norm_call;

typedef struct {
    const void *pairs; /* [rows, 2 * size], the gate in front */
    void *output;
    int64_t rows, size, narrow;
} gate_call;

typedef struct {
    const void *states, *weight, *bias, *onto; /* [rows, inner], rows `step` numbers apart; [outer, inner]; [outer] and [rows, outer], or NULL */
    void *output;                              /* [rows, outer] */
    int64_t rows, inner, outer, step, narrow;
} product_call;

typedef struct {
    const int64_t *tokens, *length, *end, *tables; /* [batch, count], [batch] of any step twice, [batch, pages] */
    const uint8_t *wanted;                         /* [batch, count] */
    int64_t *known, *positions, *slots;            /* [batch, count] */
    int64_t batch, count, pages, length_step, end_step, offset, page_size, max_length;
} place_call;

typedef struct {
    const int64_t *positions, *slots, *tables; /* [batch, count] twice, [batch, pages] */
    int64_t *earlier, *earlier_slots;
    int64_t batch, count, pages, page_size, by, shared;
} shift_call;

typedef struct {
    const int64_t *positions;
    const float *frequencies; /* [half] */
    void *cosines, *sines;    /* [tokens, 2 * half] */
    int64_t tokens, half, narrow;
} angle_call;

typedef struct {
    const int64_t *rows, *tags; /* [batch]; [batch, TAG_FIELDS], with the place of each in its row */
    const int32_t *masks;       /* [batch, words] */
    int64_t *row_tags;          /* [table_rows, places, TAG_FIELDS] */
    int32_t *row_masks;         /* [table_rows, places, words] */
    int64_t batch, words, table_rows, places;
} mask_call;

typedef struct {
    const int64_t *tokens, *limit, *found, *status, *wanted; /* [batch] each, `limit` and `found` of any step; the last three may be NULL */
    const uint8_t *finite, *alive, *ruled;                   /* [batch]; `ruled`, `masks` and `status` are there together */
    const int32_t *masks;                                    /* [batch, words], rows `mask_step` numbers apart */
    int64_t *settled;
    uint8_t *looked_up, *forced; /* [batch]; written where there is `found`, and `wanted` */
    int64_t batch, step, limit_step, found_step, mask_step, words;
} settle_call;

void product_by_pairs(const product_call *call, int64_t first, int64_t end); /* bfloat16, columns [first, end) */

/* One library for every processor: the loader takes the widest version that this one has. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define HAS_DOT_PRODUCTS
#else
#define FOR_EACH_PROCESSOR
#endif
#define EXPORTED __attribute__((visibility("default")))
#define INLINED static inline __attribute__((always_inline))

INLINED float widened(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* To the nearest, to even between two. A NaN made of bfloat16 has no low bits that would carry it away from being one. */
INLINED uint16_t narrowed(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINED float rounded(float value, int64_t narrow) { return narrow ? widened(narrowed(value)) : value; }

INLINED float number(const void *from, int64_t at, int64_t narrow) {
    return narrow ? widened(((const uint16_t *)from)[at]) : ((const float *)from)[at];
}

INLINED void put(void *to, int64_t at, float value, int64_t narrow) {
    if (narrow) ((uint16_t *)to)[at] = narrowed(value);
    else ((float *)to)[at] = value;
}

INLINED void read_numbers(float *to, const void *from, int64_t first, int64_t count, int64_t narrow) {
    if (narrow)
        for (int64_t i = 0; i < count; i++) to[i] = widened(((const uint16_t *)from)[first + i]);
    else
        memcpy(to, (const float *)from + first, (size_t)count * sizeof *to);
}

INLINED void write_numbers(void *to, int64_t first, const float *from, int64_t count, int64_t narrow) {
    if (narrow)
        for (int64_t i = 0; i < count; i++) ((uint16_t *)to)[first + i] = narrowed(from[i]);
    else
        memcpy((float *)to + first, from, (size_t)count * sizeof *from);
}

/* e to the power of what is at most 88, to two units in the last place; below -87 next to nothing. */
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
