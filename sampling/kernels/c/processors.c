/* Grammar masks and a request's own settings applied to logits: processors.py is the reference. */

#include "lanes.h"

enum { REPETITION_PENALTY = 4, PRESENCE_PENALTY, FREQUENCY_PENALTY, MIN_NEW_TOKENS, MAX_EARLIER_DRAFTS = 64 };

/* One row at one position. */
typedef struct {
    const void *logits;      /* [width] */
    const int32_t *mask;     /* of a constrained row with a valid mask, else NULL */
    const int64_t *ids;      /* [width] tokens of the logits, or NULL */
    const float *params, *biases;
    const int64_t *bias_ids, *stop_ids;
    const bool *prompt_seen; /* [vocabulary] */
    const int32_t *output_counts;
    float *output;
    int64_t width, words, biased, stops;
    bool forbidden; /* every token */
} position_call;

INLINED int64_t token_of(const position_call *call, int64_t index) { return call->ids ? call->ids[index] : index; }

/* The index of a token's logit; -1 if it has none. */
INLINED int64_t index_of(const position_call *call, int64_t token) {
    if (!call->ids) return token < call->width ? token : -1;
    for (int64_t i = 0; i < call->width; i++)
        if (call->ids[i] == token) return i;
    return -1;
}

INLINED void write_masked(const position_call *call, int64_t bfloat16) {
    for (int64_t first = 0; first < call->width; first += WORD) {
        int64_t count = call->width - first < WORD ? call->width - first : WORD;
        float *to = call->output + first;
        uint32_t word = call->forbidden ? 0 : allowed_in(call->mask, call->ids, first, count, call->words);
        if (!word) {
            for (int64_t i = 0; i < count; i++) to[i] = -INFINITY;
        } else if (word == UINT32_MAX) {
            for (int64_t i = 0; i < count; i++) to[i] = number(call->logits, first + i, bfloat16) + 0.0f;
        } else {
            for (int64_t i = 0; i < count; i++) to[i] = word >> i & 1 ? number(call->logits, first + i, bfloat16) + 0.0f : -INFINITY;
        }
    }
}

INLINED float penalised(const position_call *call, float value, int64_t token, float count) {
    float repetition = call->params[REPETITION_PENALTY], repeated = value > 0 ? value / repetition : value * repetition;
    bool emitted = count > 0;
    value = emitted || call->prompt_seen[token] ? repeated : value;
    return value - call->params[FREQUENCY_PENALTY] * count - call->params[PRESENCE_PENALTY] * (float)emitted;
}

/* `before`: the drafts before this position, -1 where there is none. */
INLINED void penalise(const position_call *call, const int64_t before[MAX_EARLIER_DRAFTS], int64_t drafts) {
    int64_t indices[MAX_EARLIER_DRAFTS];
    float values[MAX_EARLIER_DRAFTS];
    for (int64_t i = 0; i < drafts; i++) {
        indices[i] = before[i] < 0 ? -1 : index_of(call, before[i]);
        values[i] = indices[i] < 0 ? 0.0f : call->output[indices[i]];
    }
    for (int64_t i = 0; i < call->width; i++) {
        int64_t token = token_of(call, i);
        call->output[i] = penalised(call, call->output[i], token, (float)call->output_counts[token]);
    }
    for (int64_t i = 0; i < drafts; i++) {
        if (indices[i] < 0) continue;
        float count = (float)call->output_counts[before[i]];
        for (int64_t j = 0; j < drafts; j++) count += before[j] == before[i];
        call->output[indices[i]] = penalised(call, values[i], before[i], count);
    }
}

INLINED void apply_settings(const position_call *call, int early, const int64_t *before, int64_t drafts) {
    for (int64_t i = 0; i < call->biased && call->bias_ids[i] >= 0; i++) {
        int64_t index = index_of(call, call->bias_ids[i]);
        if (index >= 0) call->output[index] += call->biases[i];
    }
    for (int64_t i = 0; early && i < call->stops; i++) {
        int64_t index = call->stop_ids[i] < 0 ? -1 : index_of(call, call->stop_ids[i]);
        if (index >= 0) call->output[index] = -INFINITY;
    }
    if (call->params[REPETITION_PENALTY] != 1 || call->params[PRESENCE_PENALTY] != 0 || call->params[FREQUENCY_PENALTY] != 0)
        penalise(call, before, drafts);
}

/* The inputs of processors.process_logits, in order; output [B, Q, V] float32, finite [B, Q], status [B, Q]. */
EXPORTED FOR_EACH_PROCESSOR int stepgraph_process_logits(const argument *args) {
    const argument *logits = args, *masks = args + 1, *tables = args + 7, *drafts = args + 14;
    const int64_t *mask_rows = args[2].data, *status = args[4].data, *rows = args[6].data, *generated = args[13].data;
    const bool *constrained = args[3].data;
    int64_t first = args[15].integer, positions = logits->size[1], width = logits->size[2], bytes = logits->bfloat16 ? 2 : 4;
    bool *finite = args[17].data;
    int64_t *final_status = args[18].data;
    if (drafts->size[1] > MAX_EARLIER_DRAFTS) return 1;
    for (int64_t row = 0; row < logits->size[0]; row++) {
        int64_t at = rows ? index_in(rows[row], tables[0].size[0]) : row, mask_row = row;
        bool masked = masks->data && constrained && constrained[row];
        if (masked && mask_rows) mask_row = index_in(mask_rows[row], masks->size[0]);
        if (at < 0 || mask_row < 0) return 1;
        position_call call = {
            .ids = args[5].data, .params = (const float *)tables[0].data + at * tables[0].stride[0],
            .bias_ids = (const int64_t *)tables[1].data + at * tables[1].stride[0],
            .biases = (const float *)tables[2].data + at * tables[2].stride[0],
            .stop_ids = (const int64_t *)tables[3].data + at * tables[3].stride[0],
            .prompt_seen = (const bool *)tables[4].data + at * tables[4].stride[0],
            .output_counts = (const int32_t *)tables[5].data + at * tables[5].stride[0],
            .width = width, .words = masks->size[2], .biased = tables[1].size[1], .stops = tables[3].size[1],
        };
        for (int64_t position = 0; position < positions; position++) {
            int64_t index = row * positions + position, before[MAX_EARLIER_DRAFTS], count = first + position;
            int64_t known = status ? status[index] : STATUS_OK, length = generated[row * args[13].stride[0]] + count;
            count = count < drafts->size[1] ? count : drafts->size[1];
            for (int64_t i = 0; i < count; i++)
                before[i] = ((const int64_t *)drafts->data)[row * drafts->stride[0] + i * drafts->stride[1]];
            call.logits = (const char *)logits->data + (row * logits->stride[0] + position * logits->stride[1]) * bytes;
            call.mask = masked ? (const int32_t *)masks->data + mask_row * masks->stride[0] + position * masks->stride[1] : NULL;
            call.forbidden = masked && status && known != STATUS_OK;
            call.output = (float *)args[16].data + index * width;
            if (logits->bfloat16) write_masked(&call, 1);
            else write_masked(&call, 0);
            bool possible = isfinite(largest(call.output, width, 0));
            apply_settings(&call, (float)length < call.params[MIN_NEW_TOKENS], before, count);
            float best = largest(call.output, width, 0);
            finite[index] = isfinite(best);
            final_status[index] = possible && best == -INFINITY && known == STATUS_OK ? STATUS_DEAD_END : known;
        }
    }
    return 0;
}
