/* Whole numbers of the rows of a round: positions and cache slots of tokens, rotary angles, mask rows, and the draft that a row takes. */

#include "kernels.h"

/* The cache slot of a position, or -1 if its page lies outside of the row's table. */
INLINED int64_t slot_of(const int64_t *table, int64_t pages, int64_t position, int64_t page_size) {
    int64_t page = position / page_size;
    return page < pages ? table[page] * page_size + position % page_size : -1;
}

/* tokens, live [batch, count]; length, end [batch] of any stride; tables [batch, pages]; offset, page_size, max_length;
   known, positions, slots [batch, count]. */
EXPORTED int stepgraph_place_tokens(const argument *given) {
    const int64_t *tokens = given[0].data, *length = given[2].data, *end = given[3].data, *tables = given[4].data;
    const bool *live = given[1].data;
    int64_t batch = given[0].size[0], count = given[0].size[1], pages = given[4].size[1];
    int64_t offset = given[5].integer, page_size = given[6].integer, max_length = given[7].integer;
    int64_t *known = given[8].data, *positions = given[9].data, *slots = given[10].data;
    for (int64_t i = 0; i < batch * count; i++) {
        int64_t row = i / count, position = length[row * given[2].stride[0]] + offset + i % count;
        bool inside = live[i] && position >= 0 && position < end[row * given[3].stride[0]];
        position = position < 0 ? 0 : position >= max_length ? max_length - 1 : position;
        int64_t slot = slot_of(tables + row * pages, pages, position, page_size);
        if (slot < 0 && inside) return 1;
        known[i] = tokens[i] < 0 ? 0 : tokens[i];
        positions[i] = position;
        slots[i] = inside ? slot : position % page_size;
    }
    return 0;
}

/* positions [tokens]; frequencies [half] float32; dtype, not read; cosines, sines [tokens, 1, 2 * half]. */
EXPORTED int stepgraph_rope_angles(const argument *given) {
    const int64_t *positions = given[0].data;
    const float *frequencies = given[1].data;
    int64_t half = given[1].size[0];
    for (int64_t token = 0; token < given[0].size[0]; token++)
        for (int64_t i = 0; i < half; i++) {
            float angle = (float)positions[token] * frequencies[i], cosine = cosf(angle), sine = sinf(angle);
            for (int64_t at = 2 * token * half + i, twice = 0; twice < 2; at += half, twice++) {
                put(given[3].data, at, cosine, given[3].bfloat16);
                put(given[4].data, at, sine, given[4].bfloat16);
            }
        }
    return 0;
}

/* rows [batch]; tags [batch, TAG_FIELDS], with the index of each mask in its row; masks [batch, words]; row_tags, row_masks
   [table_rows, positions, ...]. */
EXPORTED int stepgraph_scatter_masks(const argument *given) {
    const int64_t *rows = given[0].data, *tags = given[1].data;
    const int32_t *masks = given[2].data;
    int64_t *row_tags = given[3].data, words = given[2].size[1], table_rows = given[4].size[0], positions = given[4].size[1];
    int32_t *row_masks = given[4].data;
    for (int64_t i = 0; i < given[0].size[0]; i++) {
        int64_t row = rows[i], index = tags[i * TAG_FIELDS + 2];
        if (row < 0 || row >= table_rows || index < 0 || index >= positions) return 1;
        int64_t to = row * positions + index;
        memcpy(row_masks + to * words, masks + i * words, (size_t)words * sizeof *masks);
        memcpy(row_tags + to * TAG_FIELDS, tags + i * TAG_FIELDS, TAG_FIELDS * sizeof *tags);
    }
    return 0;
}

/* tokens, finite, alive, limit [batch]; step; looked_up_ids, forced_ids [batch], masks [batch, words], constrained, status [batch], or
   NULL, the last three together; out: settled [batch], looked_up, forced [batch]. */
EXPORTED int stepgraph_select_draft(const argument *given) {
    const int64_t *tokens = given[0].data, *limit = given[3].data, *found = given[5].data, *forced = given[6].data, *status = given[9].data;
    const bool *finite = given[1].data, *alive = given[2].data, *constrained = given[8].data;
    const int32_t *masks = given[7].data;
    int64_t words = given[7].size[1], *selected = given[10].data;
    bool *took_found = given[11].data, *took_forced = given[12].data;
    for (int64_t row = 0; row < given[0].size[0]; row++) {
        int64_t token = tokens[row], candidate = found ? found[row * given[5].stride[0]] : -1;
        bool masked = masks && constrained[row], valid = masks && status[row] == STATUS_OK;
        bool taken = candidate >= 0, is_forced = forced && forced[row] >= 0 && masked && valid;
        if (taken && masked) {
            if (candidate / WORD >= words) return 1;
            taken = valid && masks[row * given[7].stride[0] + candidate / WORD] >> (candidate % WORD) & 1;
        }
        if (taken) token = candidate;
        if (is_forced) token = forced[row];
        took_found[row] = taken;
        took_forced[row] = is_forced;
        bool goes_on = alive[row] && limit[row * given[3].stride[0]] >= given[4].integer;
        selected[row] = goes_on && (finite[row] || taken || is_forced) ? token : -1;
    }
    return 0;
}
