/* Which products are taken how. */

#include "product.h"

enum { COLUMNS = 64 };

INLINED int all_columns(const product_call *call) {
    for (int64_t first = 0; first < call->outer; first += COLUMNS) {
        int64_t end = first + COLUMNS < call->outer ? first + COLUMNS : call->outer;
#ifdef HAS_DOT_PRODUCTS
        if (call->narrow && __builtin_cpu_supports("avx512bf16")) product_by_pairs(call, first, end);
        else
#endif
        if (call->narrow) columns(call, first, end, 1);
        else columns(call, first, end, 0);
    }
    return 0;
}

EXPORTED FOR_EACH_PROCESSOR int stepgraph_product(const product_call *call) { return all_columns(call); }
