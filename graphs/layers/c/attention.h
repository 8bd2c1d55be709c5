/* Paged attention, for attention.c and wide.c. Keys are read in tiles that begin at the same positions for every query, so that a
   query's sums have one order in any batch. Keys that a query does not see are not multiplied at all. */

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

void attend_by_wide_vectors(const void *call, int64_t first, int64_t end); /* with vectors of 64 bytes */

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

/* Sums that registers have room for. */
enum { TOGETHER = PARTS == 1 ? LANES : 4 };

/* `from` and `to` are multiples of LANES. */
INLINED void score(const float *query, const float *keys, int64_t from, int64_t to, int64_t width, float scores[TILE]) {
    for (int64_t key = from; key < to; key += LANES) {
        part sums[LANES];
        for (int first = 0; first < LANES; first += TOGETHER) {
            part parts[TOGETHER][PARTS] = {{{0}}};
            for (int64_t i = 0; i < width; i += LANES)
                for (int one = 0; one < TOGETHER * PARTS; one++) {
                    int64_t at = i + one % PARTS * PART;
                    parts[one / PARTS][one % PARTS] +=
                        *(const part *)(query + at) * *(const part *)(keys + (key + first + one / PARTS) * width + at);
                }
            for (int one = 0; one < TOGETHER; one++) sums[first + one] = joined(parts[one]);
        }
        sum_lanes(sums);
        memcpy(scores + key, sums, LANES * sizeof *scores);
    }
}

/* Sums of even and of odd keys do not depend on each other. */
INLINED void add_values(
    float *total, const float *values, const float *scores, int64_t from, int64_t to, int64_t width, float shrink, int parts) {
    part even[4] = {{0}}, odd[4] = {{0}};
    int64_t key = from;
    for (; key + 2 <= to; key += 2)
        for (int one = 0; one < parts; one++) {
            const float *value = values + key * width + one * PART;
            even[one] += scores[key] * *(const part *)value;
            odd[one] += scores[key + 1] * *(const part *)(value + width);
        }
    for (int one = 0; one < parts; one++, total += PART) {
        if (key < to) even[one] += scores[key] * *(const part *)(values + key * width + one * PART);
        *(part *)total = *(part *)total * shrink + (even[one] + odd[one]);
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
    float *total = block->total + one * width;
    int64_t i = 0;
    for (; i + 4 * PART <= width; i += 4 * PART) add_values(total + i, block->values + i, scores, from, to, width, shrink, 4);
    for (; i < width; i += PART) add_values(total + i, block->values + i, scores, from, to, width, shrink, 1);
}

INLINED void pad_and_read(float *to, const void *from, int64_t first, int64_t size, int64_t width, int64_t bfloat16, int64_t bytes) {
    read_entries(to, from, first, size, bfloat16, bytes);
    for (int64_t i = size; i < width; i++) to[i] = 0.0f;
}

/* The entries [tile, end) of one head, then zeros: no uninitialised number is read. */
INLINED int read_tile(const attention_call *call, block *block, const int64_t *table, int64_t head, int64_t tile, int64_t end,
    int64_t width) {
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
INLINED int attend(const attention_call *call, block *block, int64_t row, int64_t head, int64_t start, int64_t used, int64_t last,
    int64_t width) {
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
        if (last >= call->pages * call->page_size || attend(call, block, row, head, start, used, last, width))
            atomic_store(call->failed, 1);
    }
}

INLINED void attend_range(const attention_call *range, int64_t first, int64_t end) {
    attention_call call = *range;
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
