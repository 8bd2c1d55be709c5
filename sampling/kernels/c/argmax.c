/* The largest legal logit of every position, one mask word at a time: logits under a word without a bit are not read. */

#include "native.h"

typedef struct {
    const void *logits;                 /* [batch, positions, width] */
    const int32_t *masks;               /* [mask_rows, positions, words] */
    const int64_t *rows, *ids, *status; /* [batch], [width], [batch, positions]; each may be NULL */
    const bool *constrained;            /* [batch] */
    bool *finite;                       /* [batch, positions] */
    int64_t *token;
    int64_t batch, positions, width, row_step, position_step, mask_rows, words, mask_row_step, mask_position_step;
} argmax_call;

typedef struct {
    float value;
    int64_t index;
} choice;

/* The lowest index wins a tie; a NaN wins over every number and ends the search. */
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

/* Whether any of a word's logits is greater than `least` or a NaN. */
INLINED int promising(const float values[WORD], float least) {
    int any = 0;
    for (int i = 0; i < WORD; i++) any |= !(values[i] <= least);
    return any;
}

INLINED void read_word(float values[WORD], const void *logits, int64_t first, uint32_t word, int64_t count, int64_t bfloat16) {
    for (int64_t i = 0; i < count; i++) values[i] = word >> i & 1 ? number(logits, first + i, bfloat16) : -INFINITY;
    for (int64_t i = count; i < WORD; i++) values[i] = -INFINITY;
}

/* `mask` is NULL for a row that is not constrained. */
INLINED void choose_in_order(
    choice *found, const argmax_call *call, const void *logits, const int32_t *mask, const int64_t *ids, int64_t bfloat16) {
    float values[WORD];
    for (int64_t first = 0; first < call->width; first += WORD) {
        int64_t count = call->width - first < WORD ? call->width - first : WORD;
        uint32_t word = allowed_in(mask, ids, first, count, call->words);
        if (!word) continue;
        if (count == WORD) read_word(values, logits, first, word, WORD, bfloat16); /* a count known to the compiler */
        else read_word(values, logits, first, word, count, bfloat16);
        if (promising(values, found->value) && better(found, values, first, count)) return;
    }
}

INLINED int argmax_all(const argmax_call *call, int64_t bfloat16) {
    int64_t bytes = bfloat16 ? 2 : 4;
    for (int64_t i = 0; call->ids && i < call->width; i++)
        if (index_in(call->ids[i], call->words * WORD) < 0) return 1;
    for (int64_t row = 0; row < call->batch; row++) {
        int64_t mask_row = call->rows ? index_in(call->rows[row], call->mask_rows) : row;
        if (mask_row < 0) return 1;
        for (int64_t position = 0; position < call->positions; position++) {
            const void *logits = (const char *)call->logits + (row * call->row_step + position * call->position_step) * bytes;
            const int32_t *mask = call->masks + mask_row * call->mask_row_step + position * call->mask_position_step;
            int64_t at = row * call->positions + position;
            choice found = {-INFINITY, 0};
            bool constrained = call->constrained[row], open = !constrained || !call->status || call->status[at] == STATUS_OK;
            if (open && constrained && call->ids) choose_in_order(&found, call, logits, mask, call->ids, bfloat16);
            else if (open) choose_in_order(&found, call, logits, constrained ? mask : NULL, NULL, bfloat16); /* a constant */
            call->finite[at] = isfinite(found.value);
            call->token[at] = found.index;
        }
    }
    return 0;
}

EXPORTED FOR_EACH_PROCESSOR int stepgraph_masked_argmax(const argument *args) {
    const argument *logits = args, *masks = args + 1;
    argmax_call call = {
        .logits = logits->data, .masks = masks->data, .rows = args[2].data, .constrained = args[3].data, .ids = args[4].data,
        .status = args[5].data, .finite = args[6].data, .token = args[7].data,
        .batch = logits->size[0], .positions = logits->size[1], .width = logits->size[2],
        .row_step = logits->stride[0], .position_step = logits->stride[1],
        .mask_rows = masks->size[0], .words = masks->size[2], .mask_row_step = masks->stride[0], .mask_position_step = masks->stride[1],
    };
    return logits->bfloat16 ? argmax_all(&call, 1) : argmax_all(&call, 0);
}
