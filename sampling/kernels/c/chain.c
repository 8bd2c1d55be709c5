/* Whether mask rows are valid, how many drafts hold, and the outcome of the round for each row. */

#include "native.h"

typedef struct {
    const int64_t *sampled; /* [batch, drafts + 1], as finite and status */
    const bool *finite;
    const int64_t *drafts, *draft_count, *status, *stop_ids, *room, *accepted; /* stop_ids [batch, stops]; accepted [batch] or NULL */
    int64_t count, stops;
} chain_call;

/* tags [table_rows, positions, TAG_FIELDS]; owner, generated, constrained [table_rows] of any stride; first; rows [batch] or NULL;
   status [batch, positions], has_grammar [batch]. */
EXPORTED int stepgraph_mask_status(const argument *args) {
    const argument *tags = args;
    const int64_t *owner = args[1].data, *generated = args[2].data, *constrained = args[3].data, *rows = args[5].data;
    bool *has_grammar = args[7].data;
    int64_t first = args[4].integer, positions = tags->size[1], *status = args[6].data;
    for (int64_t row = 0; row < args[6].size[0]; row++) {
        int64_t table_row = rows ? index_in(rows[row], tags->size[0]) : row;
        if (table_row < 0) return 1;
        int64_t own = owner[table_row * args[1].stride[0]], count = generated[table_row * args[2].stride[0]];
        has_grammar[row] = constrained[table_row * args[3].stride[0]] != 0;
        for (int64_t position = 0; position < positions; position++) {
            const int64_t *tag = (const int64_t *)tags->data + table_row * tags->stride[0] + position * tags->stride[1];
            bool valid = tag[0] == own && tag[1] == count && tag[2] == first + position;
            status[row * positions + position] = !has_grammar[row] ? STATUS_OK : valid ? tag[3] : STATUS_NONE;
        }
    }
    return 0;
}

INLINED int64_t count_accepted(const chain_call *call, int64_t row) {
    const int64_t *sampled = call->sampled + row * (call->count + 1), *status = call->status + row * (call->count + 1);
    const bool *finite = call->finite + row * (call->count + 1);
    const int64_t *drafts = call->drafts + row * call->count;
    int64_t num_accepted = 0;
    for (; num_accepted < call->count && num_accepted < call->draft_count[row]; num_accepted++) {
        int64_t next = status[num_accepted + 1];
        bool legal = status[num_accepted] == STATUS_OK && next != STATUS_NONE && next != STATUS_ILLEGAL;
        if (!legal || !finite[num_accepted] || sampled[num_accepted] != drafts[num_accepted]) break;
    }
    return num_accepted;
}

INLINED int64_t first_stop_position(const chain_call *call, int64_t row, int64_t num_valid) {
    const int64_t *sampled = call->sampled + row * (call->count + 1), *stops = call->stop_ids + row * call->stops;
    for (int64_t position = 0; position < num_valid; position++)
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

EXPORTED int stepgraph_chain_accept(const argument *args) {
    chain_call call = {
        .sampled = args[0].data, .finite = args[1].data, .drafts = args[2].data, .draft_count = args[3].data, .status = args[4].data,
        .stop_ids = args[5].data, .room = args[6].data, .accepted = args[7].data, .count = args[2].size[1], .stops = args[5].size[1],
    };
    int64_t *emitted = args[8].data, *accepted = args[9].data, *finish = args[10].data;
    for (int64_t row = 0; row < args[0].size[0]; row++) {
        int64_t num_accepted = call.accepted ? call.accepted[row] : count_accepted(&call, row);
        if (num_accepted < 0 || num_accepted > call.count) return 1;
        int64_t last = call.status[row * (call.count + 1) + num_accepted];
        bool finite = call.finite[row * (call.count + 1) + num_accepted];
        int64_t num_valid = num_accepted + (last == STATUS_OK && finite);
        int64_t stop = first_stop_position(&call, row, num_valid), room = call.room[row];
        int64_t count = num_valid < stop + 1 ? num_valid : stop + 1;
        count = count < room ? count : room;
        int64_t code = last == STATUS_OK && !finite ? FINISH_LOGITS_FAULT : finish_of_status(last);
        code = count == room ? FINISH_LENGTH : code;
        finish[row] = stop < count ? FINISH_STOP : code;
        emitted[row] = count;
        accepted[row] = num_accepted < count ? num_accepted : count;
    }
    return 0;
}

typedef struct {
    int (*kernel)(const argument *);
    const argument *arguments;
} packed_call;

/* Runs an array of calls in order, up to the first one that fails. */
EXPORTED int stepgraph_run_kernels(const argument *args) {
    const packed_call *calls = args[0].data;
    for (int at = 0; at < args[0].size[0]; at++)
        if (calls[at].kernel(calls[at].arguments)) return at + 1;
    return 0;
}

/* A host node as a kernel: calls the function with its data. */
EXPORTED int stepgraph_call_host(const argument *args) {
    ((void (*)(void *))args[0].data)(args[1].data);
    return 0;
}

EXPORTED const int64_t stepgraph_kernel_sizes[] = {KERNELS_VERSION, sizeof(argument)};
