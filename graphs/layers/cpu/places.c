/* Where the tokens of a round lie, what turns them, where masks belong, and which draft a row goes on with: whole numbers, row by row. */

#include "kernels.h"

/* The cache slot of a position, or -1 where its page lies outside of the row's table. */
INLINED int64_t slot_of(const int64_t *table, int64_t pages, int64_t position, int64_t page_size) {
    int64_t page = position / page_size;
    return page < pages ? table[page] * page_size + position % page_size : -1;
}

EXPORTED int stepgraph_place_tokens(const place_call *call) {
    for (int64_t i = 0; i < call->batch * call->count; i++) {
        int64_t row = i / call->count, position = call->length[row * call->length_step] + call->offset + i % call->count;
        int wanted = call->wanted[i] && position >= 0 && position < call->end[row * call->end_step];
        position = position < 0 ? 0 : position >= call->max_length ? call->max_length - 1 : position;
        int64_t slot = slot_of(call->tables + row * call->pages, call->pages, position, call->page_size);
        if (slot < 0 && wanted) return 1;
        call->known[i] = call->tokens[i] < 0 ? 0 : call->tokens[i];
        call->positions[i] = position;
        call->slots[i] = wanted ? slot : position % call->page_size;
    }
    return 0;
}

EXPORTED int stepgraph_shift_entries(const shift_call *call) {
    for (int64_t i = 0; i < call->batch * call->count; i++) {
        int64_t row = i / call->count, position = call->positions[i];
        int real = call->slots[i] >= call->page_size && position >= call->by + call->shared;
        position = position < call->by ? 0 : position - call->by;
        int64_t slot = slot_of(call->tables + row * call->pages, call->pages, position, call->page_size);
        if (slot < 0 && real) return 1;
        call->earlier[i] = position;
        call->earlier_slots[i] = real ? slot : position % call->page_size;
    }
    return 0;
}

EXPORTED int stepgraph_angles(const angle_call *call) {
    int64_t half = call->half;
    for (int64_t token = 0; token < call->tokens; token++)
        for (int64_t i = 0; i < half; i++) {
            float turned = (float)call->positions[token] * call->frequencies[i], cosine = cosf(turned), sine = sinf(turned);
            for (int64_t place = 2 * token * half + i, twice = 0; twice < 2; place += half, twice++) {
                put(call->cosines, place, cosine, call->narrow);
                put(call->sines, place, sine, call->narrow);
            }
        }
    return 0;
}

EXPORTED int stepgraph_place_masks(const mask_call *call) {
    for (int64_t i = 0; i < call->batch; i++) {
        int64_t row = call->rows[i], place = call->tags[i * TAG_FIELDS + 2];
        if (row < 0 || row >= call->table_rows || place < 0 || place >= call->places) return 1;
        int64_t to = row * call->places + place;
        memcpy(call->row_masks + to * call->words, call->masks + i * call->words, (size_t)call->words * sizeof *call->masks);
        memcpy(call->row_tags + to * TAG_FIELDS, call->tags + i * TAG_FIELDS, TAG_FIELDS * sizeof *call->tags);
    }
    return 0;
}

EXPORTED int stepgraph_settle_draft(const settle_call *call) {
    for (int64_t row = 0; row < call->batch; row++) {
        int64_t token = call->tokens[row], found = call->found ? call->found[row * call->found_step] : -1;
        int free_of = !call->masks || !call->ruled[row], own = call->masks && call->status[row] == MASK_OK;
        int taken = found >= 0, forced = 0;
        if (taken && !free_of) {
            if (found / 32 >= call->words) return 1;
            taken = own && call->masks[row * call->mask_step + found / 32] >> (found % 32) & 1;
        }
        if (taken) token = found;
        if (call->wanted) {
            forced = call->wanted[row] >= 0 && !free_of && own;
            if (forced) token = call->wanted[row];
            call->forced[row] = (uint8_t)forced;
        }
        if (call->found) call->looked_up[row] = (uint8_t)taken;
        int goes_on = call->alive[row] && call->limit[row * call->limit_step] >= call->step;
        call->settled[row] = goes_on && (call->finite[row] || taken || forced) ? token : -1;
    }
    return 0;
}
