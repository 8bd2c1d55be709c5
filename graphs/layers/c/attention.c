/* Calls of attention. */

#include "attention.h"

static FOR_NARROW_VECTORS void run_blocks(const void *call, int64_t first, int64_t end) { attend_range(call, first, end); }

EXPORTED int stepgraph_attention(const argument *args) {
    const argument *query = args, *keys = args + 1, *tables = args + 5;
    atomic_int failed = 0;
    attention_call call = {
        .query = query->data, .keys = keys->data, .values = args[2].data,
        .positions = args[3].data, .slots = args[4].data, .tables = tables->data, .sinks = args[10].data,
        .output = args[11].data, .failed = &failed,
        .batch = query->size[0], .count = query->size[1], .heads = query->size[2], .kv_heads = keys->size[1], .size = query->size[3],
        .page_size = args[6].integer, .pages = tables->size[1], .cache_slots = keys->size[0], .entry_bytes = keys->integer,
        .window = args[7].integer,
        .bfloat16 = query->bfloat16, .bfloat16_sinks = args[10].bfloat16, .scale = (float)args[8].real, .softcap = (float)args[9].real,
    };
    int64_t queries = call.count * (call.heads / call.kv_heads), bytes = 0; /* bytes: reading so many takes as long as the call */
    for (int64_t row = 0; row < call.batch; row++) bytes += (last_of(&call, row) + 1) * call.count * call.heads * call.size;
    if (!queries) return 0;
    int64_t blocks = (queries + BLOCK - 1) / BLOCK;
    blocks *= queries > 3 && threads_for(bytes) > 1 ? 2 : 1; /* smaller blocks divide more evenly among threads */
    call.step = (queries + blocks - 1) / blocks;
    blocks = (queries + call.step - 1) / call.step;
    range_work run = run_blocks;
#ifdef HAS_WIDE_VECTORS
    if (__builtin_cpu_supports("avx512bw")) run = attend_by_wide_vectors;
#endif
    divide_work(run, &call, call.batch * call.kv_heads * blocks, bytes);
    return atomic_load(&failed);
}
