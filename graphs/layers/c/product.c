/* Products of states and weights: with wide vectors, and by pairs of bfloat16, where the processor has them. */

#include "product.h"

static FOR_NARROW_VECTORS void run_columns(const void *call, int64_t block, int64_t last) { column_blocks(call, block, last); }

static void all_columns(const product_call *call) {
    int64_t bytes = call->outer * call->inner * (call->bfloat16 ? 2 : 4);
    range_work run = run_columns;
#ifdef HAS_WIDE_VECTORS
    if (__builtin_cpu_supports("avx512bw")) run = product_by_wide_vectors;
    if (call->bfloat16 && __builtin_cpu_supports("avx512bf16")) run = product_by_pairs;
    if (call->bfloat16 && has_tiles_for(call->inner)) run = product_by_tiles;
#endif
    divide_work(run, call, (call->outer + COLUMNS - 1) / COLUMNS, bytes);
}

EXPORTED int stepgraph_product(const argument *args) {
    const argument *states = args, *weight = args + 1;
    if (is_packed(weight)) return quantised_product(args);
    product_call call = {
        .states = states->data, .weight = weight->data, .bias = args[2].data, .output = args[3].data,
        .rows = states->size[0], .inner = states->size[1], .outer = weight->size[0], .step = states->stride[0],
        .bfloat16 = states->bfloat16,
    };
    all_columns(&call);
    return 0;
}

static void rows_of_expert(const argument *args, int64_t expert, const char *gathered, const int64_t *places, int64_t rows) {
    int64_t inner = args->size[1], outer = args[5].size[1], bytes = args->bfloat16 ? 2 : 4, column = expert * outer;
    all_columns(&(product_call){
        .states = gathered, .weight = (const char *)args[2].data + column * inner * bytes,
        .bias = args[4].data ? (const char *)args[4].data + column * bytes : NULL, .output = args[5].data, .places = places,
        .rows = rows, .inner = inner, .outer = outer, .step = inner, .bfloat16 = args->bfloat16,
    });
}

EXPORTED int stepgraph_expert_product(const argument *args) {
    return each_expert(args, is_packed(args + 2) ? quantised_rows_of_expert : rows_of_expert);
}

/* states [batch * count, inner]; slots [batch] of any stride; weights [slots, outer, inner]; base [batch * count, outer] or NULL;
   output. */
EXPORTED FOR_EACH_PROCESSOR int stepgraph_slot_product(const argument *args) {
    const argument *states = args, *slots = args + 1, *weights = args + 2, *base = args + 3;
    int64_t batch = slots->size[0], bytes = states->bfloat16 ? 2 : 4;
    product_call call = {
        .rows = batch ? states->size[0] / batch : 0, .inner = states->size[1], .outer = weights->size[1],
        .step = states->stride[0], .bfloat16 = states->bfloat16,
    };
    int64_t size = call.rows * call.outer;
    for (int64_t row = 0; row < batch; row++) {
        int64_t slot = ((const int64_t *)slots->data)[row * slots->stride[0]];
        char *output = (char *)args[4].data + row * size * bytes;
        if (slot < 0 || slot >= weights->size[0]) return 1;
        call.states = (const char *)states->data + row * call.rows * call.step * bytes;
        call.weight = (const char *)weights->data + slot * call.outer * call.inner * bytes;
        call.output = output;
        if (slot) all_columns(&call);
        else memset(output, 0, (size_t)(size * bytes));
        for (int64_t i = 0; base->data && i < size; i++)
            put(output, i, number(base->data, row * size + i, call.bfloat16) + number(output, i, call.bfloat16), call.bfloat16);
    }
    return 0;
}
