/* Whether mask rows are valid, how many drafts hold, and the outcome of the round for each row. */

#include "native.h"

typedef struct {
    const int64_t *sampled; /* [batch, drafts + 1], as finite and status */
    const bool *finite;
    const int64_t *drafts, *draft_count, *status, *stop_ids, *room, *known; /* stop_ids [batch, stops]; known [batch] or NULL */
    int64_t count, stops;
} chain_call;

/* tags [tag_rows, positions, TAG_FIELDS]; owner, generated, constrained [batch] of any stride; first; rows [batch] or NULL;
   status [batch, positions], has_grammar [batch]. */
EXPORTED int stepgraph_mask_status(const argument *given) {
    const argument *tags = given;
    const int64_t *owner = given[1].data, *generated = given[2].data, *constrained = given[3].data, *rows = given[5].data;
    bool *has_grammar = given[7].data;
    int64_t first = given[4].integer, positions = tags->size[1], *status = given[6].data;
    for (int64_t row = 0; row < given[1].size[0]; row++) {
        int64_t tag_row = rows ? index_in(rows[row], tags->size[0]) : row;
        if (tag_row < 0) return 1;
        int64_t own = owner[row * given[1].stride[0]], count = generated[row * given[2].stride[0]];
        has_grammar[row] = constrained[row * given[3].stride[0]] != 0;
        for (int64_t position = 0; position < positions; position++) {
            const int64_t *tag = (const int64_t *)tags->data + tag_row * tags->stride[0] + position * tags->stride[1];
            bool valid = tag[0] == own && tag[1] == count && tag[2] == first + position;
            status[row * positions + position] = !has_grammar[row] ? STATUS_OK : valid ? tag[3] : STATUS_NONE;
        }
    }
    return 0;
}

INLINED int64_t leading(const chain_call *call, int64_t row) {
    const int64_t *sampled = call->sampled + row * (call->count + 1), *status = call->status + row * (call->count + 1);
    const bool *finite = call->finite + row * (call->count + 1);
    const int64_t *drafts = call->drafts + row * call->count;
    int64_t held = 0;
    for (; held < call->count && held < call->draft_count[row]; held++) {
        int64_t next = status[held + 1];
        bool legal = status[held] == STATUS_OK && next != STATUS_NONE && next != STATUS_ILLEGAL;
        if (!legal || !finite[held] || sampled[held] != drafts[held]) break;
    }
    return held;
}

INLINED int64_t first_stop(const chain_call *call, int64_t row, int64_t offered) {
    const int64_t *sampled = call->sampled + row * (call->count + 1), *stops = call->stop_ids + row * call->stops;
    for (int64_t position = 0; position < offered; position++)
        for (int64_t i = 0; i < call->stops; i++)
            if (sampled[position] == stops[i]) return position;
    return call->count + 1;
}

INLINED int64_t finish_of_status(int64_t status) {
    switch (status) {
    case STATUS_OK: return FINISH_RUNNING;
    case STATUS_COMPLETE: return FINISH_COMPLETE;
    case STATUS_TERMINATED: return FINISH_STOP;
    case STATUS_DEAD_END: return FINISH_DEAD_END;
    default: return FINISH_MASK_FAULT;
    }
}

EXPORTED int stepgraph_chain_accept(const argument *given) {
    chain_call call = {
        .sampled = given[0].data, .finite = given[1].data, .drafts = given[2].data, .draft_count = given[3].data, .status = given[4].data,
        .stop_ids = given[5].data, .room = given[6].data, .known = given[7].data, .count = given[2].size[1], .stops = given[5].size[1],
    };
    int64_t *emitted = given[8].data, *accepted = given[9].data, *finish = given[10].data;
    for (int64_t row = 0; row < given[0].size[0]; row++) {
        int64_t held = call.known ? call.known[row] : leading(&call, row);
        if (held < 0 || held > call.count) return 1;
        int64_t last = call.status[row * (call.count + 1) + held];
        bool finite = call.finite[row * (call.count + 1) + held];
        int64_t offered = held + (last == STATUS_OK && finite);
        int64_t stop = first_stop(&call, row, offered), room = call.room[row];
        int64_t count = offered < stop + 1 ? offered : stop + 1;
        count = count < room ? count : room;
        int64_t code = last == STATUS_OK && !finite ? FINISH_LOGITS_FAULT : finish_of_status(last);
        code = count == room ? FINISH_LENGTH : code;
        finish[row] = stop < count ? FINISH_STOP : code;
        emitted[row] = count;
        accepted[row] = held < count ? held : count;
    }
    return 0;
}

typedef struct {
    int (*kernel)(const argument *);
    const argument *arguments;
} packed_call;

/* Runs an array of calls in order, up to the first one that fails. */
EXPORTED int stepgraph_run_kernels(const argument *given) {
    const packed_call *calls = given[0].data;
    for (int at = 0; at < given[0].size[0]; at++)
        if (calls[at].kernel(calls[at].arguments)) return at + 1;
    return 0;
}

EXPORTED void stepgraph_kernel_layout(int64_t *values) {
    values[0] = KERNELS_VERSION;
    values[1] = sizeof(argument);
}
