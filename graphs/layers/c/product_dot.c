/* The same products by the instruction that adds up pairs of bfloat16, where processor and compiler have it. */

#define WIDE_VECTORS
#include "native.h"

#ifdef HAS_WIDE_VECTORS
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512bf16,fma")
#include <immintrin.h>
#define DOT_PRODUCTS
#include "product.h"

void product_by_pairs(const void *call, int64_t first, int64_t last) { column_blocks(call, first, last); }
#endif
