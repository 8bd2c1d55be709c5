/* Attention and products on processors with vectors of 64 bytes. */

#define WIDE_VECTORS
#include "native.h"

#ifdef HAS_WIDE_VECTORS
#pragma GCC target("arch=x86-64-v4")
#include "attention.h"
#include "product.h"

void attend_by_wide_vectors(const void *call, int64_t first, int64_t end) { attend_range(call, first, end); }
void product_by_wide_vectors(const void *call, int64_t first, int64_t last) { column_blocks(call, first, last); }
#endif
