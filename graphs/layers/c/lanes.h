/* Vectors of sixteen numbers, and their sums in a fixed order. */

#ifndef STEPGRAPH_LANES_H
#define STEPGRAPH_LANES_H

#include "kernels.h"

enum { LANES = 16 };

typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(2)));
typedef int32_t indices __attribute__((vector_size(LANES * sizeof(float)), aligned(2)));

#ifdef __clang__
#define CHOSEN(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CHOSEN(a, b, ...) __builtin_shuffle(a, b, (indices){__VA_ARGS__})
#endif

/* The sums of sixteen vectors, as the lanes of sums[0]. Each is added up as a binary tree. */
INLINED void summed_up(lanes *sums) {
    for (int i = 0; i < 8; i++)
        sums[i] = CHOSEN(sums[i], sums[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                  CHOSEN(sums[i], sums[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        sums[i] = CHOSEN(sums[i], sums[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
                  CHOSEN(sums[i], sums[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        sums[i] = CHOSEN(sums[i], sums[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                  CHOSEN(sums[i], sums[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    sums[0] = CHOSEN(sums[0], sums[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
              CHOSEN(sums[0], sums[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

#endif
