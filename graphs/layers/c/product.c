/* Products of states and weights: by pairs of bfloat16 where the processor has the instruction. */

#include "product.h"

enum { COLUMNS = 64 };

INLINED int all_columns(const product_call *call) {
    for (int64_t first = 0; first < call->outer; first += COLUMNS) {
        int64_t end = first + COLUMNS < call->outer ? first + COLUMNS : call->outer;
#ifdef HAS_DOT_PRODUCTS
        if (call->bfloat16 && __builtin_cpu_supports("avx512bf16")) product_by_pairs(call, first, end);
        else
#endif
        if (call->bfloat16) columns(call, first, end, 1);
        else columns(call, first, end, 0);
    }
    return 0;
}

EXPORTED FOR_EACH_PROCESSOR int stepgraph_product(const argument *given) {
    const argument *states = given, *weight = given + 1;
    product_call call = {
        .states = states->data, .weight = weight->data, .bias = given[2].data, .output = given[3].data,
        .rows = states->size[0], .inner = states->size[1], .outer = weight->size[0], .step = states->stride[0], .bfloat16 = states->bfloat16,
    };
    return all_columns(&call);
}
