/* The likeliest legal logit of every place, a mask's word at a time: what a word rules out altogether is not read. */

#include "choices.h"

INLINED float number(const void *from, int64_t at, int64_t narrow) {
    float value;
    uint32_t bits;
    if (!narrow) return ((const float *)from)[at];
    bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

typedef struct {
    float value;
    int64_t place;
} choice;

/* The lowest place wins a tie; a NaN wins over everything, and ends the search. */
INLINED int better(choice *found, const float values[WORD], int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (values[i] != values[i]) {
            *found = (choice){values[i], first + i};
            return 1;
        }
        if (values[i] > found->value) *found = (choice){values[i], first + i};
    }
    return 0;
}

/* Whether any of a word's logits is greater than `least`, or no number. */
INLINED int promising(const float values[WORD], float least) {
    int any = 0;
    for (int i = 0; i < WORD; i++) any |= !(values[i] <= least);
    return any;
}

INLINED void read_word(float values[WORD], const void *logits, int64_t first, uint32_t word, int64_t count, int64_t narrow) {
    for (int64_t i = 0; i < count; i++) values[i] = word >> i & 1 ? number(logits, first + i, narrow) : -INFINITY;
    for (int64_t i = count; i < WORD; i++) values[i] = -INFINITY;
}

/* `mask` is NULL for a row without one. */
INLINED void choose_in_order(choice *found, const void *logits, const int32_t *mask, int64_t width, int64_t narrow) {
    float values[WORD];
    for (int64_t first = 0; first < width; first += WORD) {
        int64_t count = width - first < WORD ? width - first : WORD;
        uint32_t word = mask ? (uint32_t)mask[first / WORD] : UINT32_MAX;
        if (!word) continue;
        if (count == WORD) read_word(values, logits, first, word, WORD, narrow); /* a count known to the compiler */
        else read_word(values, logits, first, word, count, narrow);
        if (promising(values, found->value) && better(found, values, first, count)) return;
    }
}

/* Logits that stand for other places of the mask: 1 where one stands for none of it. */
INLINED int choose_by_ids(choice *found, const argmax_call *call, const void *logits, const int32_t *mask, int64_t narrow) {
    float values[WORD];
    for (int64_t first = 0; first < call->width; first += WORD) {
        int64_t count = call->width - first < WORD ? call->width - first : WORD, outside = 0;
        for (int64_t i = 0; i < WORD; i++) values[i] = -INFINITY;
        for (int64_t i = 0; i < count; i++) {
            int64_t id = inside(call->ids[first + i], call->words * WORD);
            outside |= id < 0;
            id = id < 0 ? 0 : id;
            values[i] = (uint32_t)mask[id / WORD] >> (id % WORD) & 1 ? number(logits, first + i, narrow) : -INFINITY;
        }
        if (outside) return 1;
        if (promising(values, found->value) && better(found, values, first, count)) return 0;
    }
    return 0;
}

INLINED int argmax_all(const argmax_call *call, int64_t narrow) {
    int64_t size = narrow ? 2 : 4;
    for (int64_t row = 0; row < call->batch; row++) {
        int64_t mine = call->rows ? inside(call->rows[row], call->mask_rows) : row;
        if (mine < 0) return 1;
        for (int64_t place = 0; place < call->places; place++) {
            const void *logits = (const char *)call->logits + (row * call->row_step + place * call->place_step) * size;
            const int32_t *mask = call->masks + mine * call->mask_row_step + place * call->mask_place_step;
            int64_t at = row * call->places + place;
            choice found = {-INFINITY, 0};
            bool ruled = call->ruled[row], open = !ruled || !call->status || call->status[at] == STATUS_OK;
            if (open && ruled && call->ids) {
                if (choose_by_ids(&found, call, logits, mask, narrow)) return 1;
            } else if (open) {
                choose_in_order(&found, logits, ruled ? mask : NULL, call->width, narrow);
            }
            call->best[at] = found.value;
            call->token[at] = found.place;
        }
    }
    return 0;
}

EXPORTED FOR_EACH_PROCESSOR int stepgraph_masked_argmax(const argmax_call *call) {
    return call->narrow ? argmax_all(call, 1) : argmax_all(call, 0);
}
