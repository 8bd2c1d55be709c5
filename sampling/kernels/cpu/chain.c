/* Whether masks may be used, how many drafts hold, and what is said of each row then. */

#include "choices.h"

EXPORTED int stepgraph_mask_status(const status_call *call) {
    for (int64_t row = 0; row < call->batch; row++) {
        int64_t mine = call->rows ? inside(call->rows[row], call->tag_rows) : row;
        if (mine < 0) return 1;
        int64_t owner = call->owner[row * call->owner_step], generated = call->generated[row * call->generated_step];
        for (int64_t place = 0; place < call->places; place++) {
            const int64_t *tag = call->tags + mine * call->row_step + place * call->place_step;
            bool own = tag[0] == owner && tag[1] == generated && tag[2] == call->first + place;
            call->status[row * call->places + place] = !call->constrained[row] ? STATUS_OK : own ? tag[3] : STATUS_NONE;
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
    for (int64_t place = 0; place < offered; place++)
        for (int64_t i = 0; i < call->stops; i++)
            if (sampled[place] == stops[i]) return place;
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

EXPORTED int stepgraph_chain_accept(const chain_call *call) {
    for (int64_t row = 0; row < call->batch; row++) {
        int64_t held = call->known ? call->known[row] : leading(call, row);
        if (held < 0 || held > call->count) return 1;
        int64_t last = call->status[row * (call->count + 1) + held];
        bool number = call->finite[row * (call->count + 1) + held];
        int64_t offered = held + (last == STATUS_OK && number);
        int64_t stop = first_stop(call, row, offered);
        int64_t emitted = offered < stop + 1 ? offered : stop + 1;
        emitted = emitted < call->room[row] ? emitted : call->room[row];
        int64_t finish = last == STATUS_OK && !number ? FINISH_LOGITS_FAULT : finish_of_status(last);
        finish = emitted == call->room[row] ? FINISH_LENGTH : finish;
        call->finish[row] = stop < emitted ? FINISH_STOP : finish;
        call->emitted[row] = emitted;
        call->accepted[row] = held < emitted ? held : emitted;
    }
    return 0;
}

EXPORTED int64_t stepgraph_choices_layout(int64_t *values) {
    int64_t known[] = {CHOICES_VERSION, sizeof(argmax_call), sizeof(status_call), sizeof(chain_call)};
    memcpy(values, known, sizeof known);
    return sizeof known / sizeof *known;
}
