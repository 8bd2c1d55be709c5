/* What all kernels in C share. native.py holds the same struct, field by field, and compares version and size.

   A kernel takes an array of arguments in the order of the operation's signature, inputs and then outputs, and returns 0, or 1 if an
   index lies outside of its table; run_kernels 1 more than the number of the call that failed. Whether a kernel supports types and layouts
   is checked in Python, before it is called. A kernel uses neither torch nor the interpreter and allocates no memory. Products divide
   their columns among threads, see threads.c. */

#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { KERNELS_VERSION = 22, WORD = 32, TAG_FIELDS = 4 };

typedef struct {
    void *data; /* NULL for None */
    int64_t size[4], stride[4], bfloat16, integer; /* integer, of a tensor: the bytes of an element */
    double real;
} argument;

/* As status.py and acceptance.py number them. */
enum { STATUS_NONE, STATUS_OK, STATUS_COMPLETE, STATUS_TERMINATED, STATUS_DEAD_END, STATUS_ILLEGAL };
enum { FINISH_RUNNING = 1, FINISH_STOP, FINISH_LENGTH, FINISH_COMPLETE, FINISH_DEAD_END, FINISH_MASK_FAULT, FINISH_LOGITS_FAULT };

/* One library for every processor: the dynamic loader selects the widest version that the processor supports. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define FOR_NARROW_VECTORS __attribute__((target_clones("arch=x86-64-v3", "default"))) /* others have a file of their own */
#define HAS_WIDE_VECTORS
#else
#define FOR_EACH_PROCESSOR
#define FOR_NARROW_VECTORS
#endif
#define EXPORTED __attribute__((visibility("default")))
#define INLINED static inline __attribute__((always_inline))

/* Vectors of PART elements, at any even address: of 64 bytes in files for processors that have them, which define WIDE_VECTORS, otherwise
   of 32 bytes. GCC keeps vectors that are wider than a register in memory. */
#ifdef WIDE_VECTORS
enum { PART = 16 };
#else
enum { PART = 8 };
#endif
typedef float part __attribute__((vector_size(PART * 4), aligned(2)));
typedef int32_t int_part __attribute__((vector_size(PART * 4), aligned(2)));
typedef uint32_t word_part __attribute__((vector_size(PART * 4), aligned(2)));
typedef uint16_t half_part __attribute__((vector_size(PART * 2), aligned(2)));

/* A negative index counts from the end, as in torch; -1 if it lies outside of [0, size). */
INLINED int64_t index_in(int64_t index, int64_t size) {
    index += index < 0 ? size : 0;
    return index < 0 || index >= size ? -1 : index;
}

/* Which of up to WORD logits, from `first` on, a mask allows. mask NULL: all; ids: the bit of each logit, or NULL: its index. */
INLINED uint32_t allowed_in(const int32_t *mask, const int64_t *ids, int64_t first, int64_t count, int64_t words) {
    uint32_t allowed = 0;
    if (!mask) return UINT32_MAX;
    if (!ids) return (uint32_t)mask[first / WORD];
    for (int64_t i = 0; i < count; i++) {
        int64_t id = index_in(ids[first + i], words * WORD);
        allowed |= ((uint32_t)mask[id / WORD] >> (id % WORD) & 1) << i;
    }
    return allowed;
}

INLINED float widened(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

INLINED float number(const void *from, int64_t at, int64_t bfloat16) {
    return bfloat16 ? widened(((const uint16_t *)from)[at]) : ((const float *)from)[at];
}
