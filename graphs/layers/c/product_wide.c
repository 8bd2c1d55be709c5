/* The same products on processors with vectors of 64 bytes. */

#define WIDE_VECTORS
#include "native.h"

#ifdef HAS_WIDE_VECTORS
#pragma GCC target("arch=x86-64-v4")
#include "product.h"

void product_by_wide_vectors(const void *call, int64_t first, int64_t last) { column_blocks(call, first, last); }
#endif
