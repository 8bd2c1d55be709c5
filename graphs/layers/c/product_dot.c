/* The same products by the instruction that adds up pairs of bfloat16, where processor and compiler have it. */

#include "kernels.h"

#ifdef HAS_DOT_PRODUCTS
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512bf16,fma")
#include <immintrin.h>
#define DOT_PRODUCTS
#include "product.h"

void product_by_pairs(const product_call *call, int64_t first, int64_t end) { columns(call, first, end, 1); }
#endif
