/* Paged attention. Keys are read in tiles that begin at the same positions for every query, so that a query's sums have one order in any
   batch. Keys that a query does not see are not multiplied at all. */

#include "kernels.h"

#include <stdatomic.h>

enum { TILE = 64, BLOCK = 32 };

typedef struct {
    const void *query, *keys, *values;         /* [batch, count, heads, size]; [slots, kv_heads, size] of one layer */
    const int64_t *positions, *slots, *tables; /* [batch, count] twice, [batch, pages] */
    const void *sinks;                         /* [heads] or NULL */
    void *output;
    atomic_int *failed; /* set to 1 if a page is outside of the cache */
    int64_t step; /* queries at once, at most BLOCK */
    int64_t batch, count, heads, kv_heads, size, page_size, pages, cache_slots, window, bfloat16, bfloat16_sinks, entry_bytes;
    float scale, softcap; /* softcap 0: none */
} attention_call;

/* Up to BLOCK queries over one tile of one head's entries, as float32, heads padded with zeros to `width`. */
typedef struct {
    float keys[TILE * MAX_HEAD_SIZE], values[TILE * MAX_HEAD_SIZE], query[BLOCK * MAX_HEAD_SIZE], total[BLOCK * MAX_HEAD_SIZE];
    float highest[BLOCK], weight[BLOCK];
    int64_t first[BLOCK], end[BLOCK]; /* the entries that each query sees */
} block;

INLINED float reduce_lanes(const float part[LANES], int highest) {
    float rest[LANES];
    memcpy(rest, part, sizeof rest);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) {
            float other = rest[lane + half];
            rest[lane] = !highest ? rest[lane] + other : other > rest[lane] ? other : rest[lane];
        }
    return rest[0];
}

/* `from` and `to` are multiples of LANES. */
INLINED void score(const float *query, const float *keys, int64_t from, int64_t to, int64_t width, float scores[TILE]) {
    for (int64_t key = from; key < to; key += LANES) {
        lanes parts[LANES] = {0};
#pragma GCC unroll 16
        for (int one = 0; one < LANES; one++)
            for (int64_t i = 0; i < width; i += LANES)
                parts[one] += *(const lanes *)(query + i) * *(const lanes *)(keys + (key + one) * width + i);
        sum_lanes(parts);
        memcpy(scores + key, parts, sizeof *parts);
    }
}

INLINED void weigh(block *block, int64_t one, int64_t tile, int64_t width, float softcap) {
    int64_t from = block->first[one] - tile, to = block->end[one] - tile;
    from = from < 0 ? 0 : from;
    to = to > TILE ? TILE : to;
    if (from >= to) return;
    int64_t begin = from / LANES * LANES, finish = (to + LANES - 1) / LANES * LANES;
    float scores[TILE], top[LANES], sums[LANES] = {0};
    score(block->query + one * width, block->keys, begin, finish, width, scores);
    if (softcap != 0.0f)
        for (int64_t key = from; key < to; key++) scores[key] = softcap * tanhf(scores[key] / softcap);
    for (int lane = 0; lane < LANES; lane++) top[lane] = block->highest[one];
    for (int64_t key = begin; key < finish; key++) scores[key] = key >= from && key < to ? scores[key] : -INFINITY;
    for (int64_t key = begin; key < finish; key += LANES)
        for (int lane = 0; lane < LANES; lane++) top[lane] = scores[key + lane] > top[lane] ? scores[key + lane] : top[lane];
    float highest = reduce_lanes(top, 1), shrink = power_of_e(block->highest[one] - highest);
    for (int64_t key = begin; key < finish; key += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            scores[key + lane] = power_of_e(scores[key + lane] - highest);
            sums[lane] += scores[key + lane]; /* a masked key adds 1e-38 to at least 1 */
        }
    block->highest[one] = highest;
    block->weight[one] = block->weight[one] * shrink + reduce_lanes(sums, 0);
    float *kept = block->total + one * width;
    lanes total[2][MAX_HEAD_SIZE / LANES] = {{{0}}}; /* sums of even and of odd keys, which do not depend on each other */
    int64_t key = from;
    for (; key + 2 <= to; key += 2)
        for (int64_t i = 0; i < width / LANES; i++) {
            const float *value = block->values + key * width + i * LANES;
            total[0][i] += scores[key] * *(const lanes *)value;
            total[1][i] += scores[key + 1] * *(const lanes *)(value + width);
        }
    for (int64_t i = 0; key < to && i < width / LANES; i++) total[0][i] += scores[key] * *(const lanes *)(block->values + key * width + i * LANES);
    for (int64_t i = 0; i < width / LANES; i++) *(lanes *)(kept + i * LANES) = *(lanes *)(kept + i * LANES) * shrink + (total[0][i] + total[1][i]);
}

INLINED void pad_and_read(float *to, const void *from, int64_t first, int64_t size, int64_t width, int64_t bfloat16, int64_t bytes) {
    read_entries(to, from, first, size, bfloat16, bytes);
    for (int64_t i = size; i < width; i++) to[i] = 0.0f;
}

/* The entries [tile, end) of one head, then zeros: no uninitialised number is read. */
INLINED int read_tile(const attention_call *call, block *block, const int64_t *table, int64_t head, int64_t tile, int64_t end, int64_t width) {
    int64_t size = call->size, live = end - tile < TILE ? end - tile : TILE, left = 0, slot = 0;
    for (int64_t key = 0; key < live; key++, slot++, left--) {
        if (!left) {
            int64_t page = table[(tile + key) / call->page_size], inside = (tile + key) % call->page_size;
            if (page < 0 || page >= call->cache_slots / call->page_size) return 1;
            slot = page * call->page_size + inside;
            left = call->page_size - inside;
        }
        int64_t first = (slot * call->kv_heads + head) * size;
        pad_and_read(block->keys + key * width, call->keys, first, size, width, call->bfloat16, call->entry_bytes);
        pad_and_read(block->values + key * width, call->values, first, size, width, call->bfloat16, call->entry_bytes);
    }
    memset(block->keys + live * width, 0, (size_t)((TILE - live) * width) * sizeof(float));
    return 0;
}

/* Queries [start, start + used) of one row and one head of its cache; a position's queries, one per head of the group, are adjacent. */
INLINED int attend(const attention_call *call, block *block, int64_t row, int64_t head, int64_t start, int64_t used, int64_t last, int64_t width) {
    int64_t groups = call->heads / call->kv_heads, size = call->size, begin = last + 1, end = 0;
    const int64_t *positions = call->positions + row * call->count;
    for (int64_t one = 0; one < used; one++) {
        int64_t index = (start + one) / groups, query = (start + one) % groups + head * groups;
        int64_t position = positions[index];
        block->first[one] = call->window && position >= call->window ? position - call->window + 1 : 0;
        block->end[one] = (position < last ? position : last) + 1;
        begin = block->first[one] < begin ? block->first[one] : begin;
        end = block->end[one] > end ? block->end[one] : end;
        float *wide = block->query + one * width;
        pad_and_read(wide, call->query, ((row * call->count + index) * call->heads + query) * size, size, width, call->bfloat16, 0);
        for (int64_t i = 0; i < size; i++) wide[i] *= call->scale;
        block->highest[one] = call->sinks ? number(call->sinks, query, call->bfloat16_sinks) : -INFINITY;
        block->weight[one] = call->sinks ? 1.0f : 0.0f;
    }
    memset(block->total, 0, (size_t)(used * width) * sizeof(float));
    for (int64_t tile = begin / TILE * TILE; tile < end; tile += TILE) {
        if (read_tile(call, block, call->tables + row * call->pages, head, tile, end, width)) return 1;
        for (int64_t one = 0; one < used; one++) weigh(block, one, tile, width, call->softcap);
    }
    for (int64_t one = 0; one < used; one++) {
        int64_t index = (start + one) / groups, query = (start + one) % groups + head * groups;
        float *total = block->total + one * width, weight = block->weight[one] == 0.0f ? 1.0f : block->weight[one];
        for (int64_t i = 0; i < size; i++) total[i] /= weight;
        write_numbers(call->output, ((row * call->count + index) * call->heads + query) * size, total, size, call->bfloat16);
    }
    return 0;
}

/* The last position of a row whose entry is live; inert positions do not count. */
INLINED int64_t last_of(const attention_call *call, int64_t row) {
    int64_t last = -1;
    for (int64_t i = row * call->count; i < (row + 1) * call->count; i++)
        if (call->slots[i] >= call->page_size && call->positions[i] > last) last = call->positions[i];
    return last;
}

/* Blocks [first, end) of queries, numbered over all heads of the cache and all rows. */
INLINED void attend_blocks(const attention_call *call, block *block, int64_t first, int64_t end, int64_t width) {
    int64_t queries = call->count * (call->heads / call->kv_heads), blocks = (queries + call->step - 1) / call->step;
    for (int64_t item = first; item < end; item++) {
        int64_t head = item / blocks % call->kv_heads, row = item / blocks / call->kv_heads, start = item % blocks * call->step;
        int64_t used = queries - start < call->step ? queries - start : call->step, last = last_of(call, row);
        if (last >= call->pages * call->page_size || attend(call, block, row, head, start, used, last, width)) atomic_store(call->failed, 1);
    }
}

static FOR_EACH_PROCESSOR void run_blocks(const void *context, int64_t first, int64_t end) {
    attention_call call = *(const attention_call *)context;
    block block;
    if (call.size == 64 && call.bfloat16 && call.entry_bytes == 2) { /* with sizes that the compiler knows, sums stay in registers */
        call.size = 64, call.bfloat16 = 1, call.entry_bytes = 2;
        attend_blocks(&call, &block, first, end, 64);
    } else if (call.size == 128 && call.bfloat16 && call.entry_bytes == 2) {
        call.size = 128, call.bfloat16 = 1, call.entry_bytes = 2;
        attend_blocks(&call, &block, first, end, 128);
    } else if (call.size == 64) {
        attend_blocks(&call, &block, first, end, 64);
    } else {
        attend_blocks(&call, &block, first, end, (call.size + LANES - 1) / LANES * LANES);
    }
}

EXPORTED int stepgraph_attention(const argument *args) {
    const argument *query = args, *keys = args + 1, *tables = args + 5;
    atomic_int failed = 0;
    attention_call call = {
        .query = query->data, .keys = keys->data, .values = args[2].data,
        .positions = args[3].data, .slots = args[4].data, .tables = tables->data, .sinks = args[10].data,
        .output = args[11].data, .failed = &failed,
        .batch = query->size[0], .count = query->size[1], .heads = query->size[2], .kv_heads = keys->size[1], .size = query->size[3],
        .page_size = args[6].integer, .pages = tables->size[1], .cache_slots = keys->size[0], .entry_bytes = keys->integer, .window = args[7].integer,
        .bfloat16 = query->bfloat16, .bfloat16_sinks = args[10].bfloat16, .scale = (float)args[8].real, .softcap = (float)args[9].real,
    };
    int64_t queries = call.count * (call.heads / call.kv_heads), bytes = 0; /* bytes: reading so many takes as long as the call */
    for (int64_t row = 0; row < call.batch; row++) bytes += (last_of(&call, row) + 1) * call.count * call.heads * call.size;
    int64_t blocks = (queries + BLOCK - 1) / BLOCK;
    blocks *= queries > 3 && threads_for(bytes) > 1 ? 2 : 1; /* smaller blocks divide more evenly among threads */
    call.step = (queries + blocks - 1) / blocks;
    blocks = (queries + call.step - 1) / call.step;
    divide_work(run_blocks, &call, call.batch * call.kv_heads * blocks, bytes);
    return atomic_load(&failed);
}
