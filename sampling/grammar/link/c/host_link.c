/* The host nodes of a round: every row accepts, rolls back and fills as its steps specify. python.py is the reference: masks,
   tags, statuses and faults must be bit-identical.

   Nothing is allocated after `stepgraph_open`, no lock is taken that a Python thread can hold, and a failure affects only its
   own row: without a valid tag the device uses no mask of that row. */

#include "matcher.h"
#include "pool.h"

#include "../../automaton/c/compile.h"

#include <stdlib.h>
#include <string.h>

/* Rows that look up masks, per item of the pool: with fewer rows the hand-off to another thread costs more than it saves. */
enum { LOOK_UP_ROWS = 8 };

struct host_link {
    link_shape shape;
    pool *pool;
    matcher_row **rows;     /* [depth, slots] ring of batches; NULL: no constrained request */
    _Atomic int64_t pushed; /* rounds, by the launching thread */
    _Atomic int64_t begun;  /* rounds, by host nodes */
    _Atomic int64_t counts[COUNTS];
    _Atomic(int64_t *) log; /* HostLink.log_nodes, or NULL */
    int64_t log_room;       /* in nodes */
    matcher_row **batch;    /* [slots] of the current round; NULL outside of one */
    int32_t *active;        /* [slots] the slots that the current node processes */
    unsigned num_active, computing; /* number of active slots; the first `computing` have a library that computes masks */
};

/* one row */

static void count(host_link *link, int index, int64_t more) {
    atomic_fetch_add_explicit(&link->counts[index], more, memory_order_relaxed);
}

static void tag(host_link *link, int64_t slot, matcher_row *row, int64_t index, int64_t stage) {
    int64_t *tags = link->shape.tags + (stage * link->shape.slots + slot) * TAG_FIELDS;
    tags[0] = row->owner;
    tags[1] = row->committed;
    tags[2] = index;
    tags[3] = row->last_mask_status;
}

typedef struct {
    host_link *link;
    matcher_row *row;
} search_context;

/* The rest of a marker at its limit, then the forced text of the row's library. Sets a fault and returns -1 if the library fails. */
static int64_t find_forced(void *context, uint8_t *text) {
    search_context *search = context;
    matcher_row *row = search->row;
    char error[FAULT_BYTES];
    count(search->link, LOOKS, 1);
    int64_t before = before_marker_end(&row->marker) ? forced_marker_text(&row->marker, text, FORCED_BYTES) : 0;
    if (before_marker_end(&row->marker) && !before) return 0;
    double start = start_of_call(row);
    int size = row->library->forced(row->library, row->matcher, (char *)text + before, FORCED_BYTES - before, error);
    if (size < 0) fail(row, "%s", error);
    else end_of_call(row, start);
    return faulted(row) ? -1 : before + size;
}

static void fill(host_link *link, int64_t slot, matcher_row *row, int64_t index, int64_t stage) {
    count(link, FILLS, 1);
    int64_t index_of_mask = stage * link->shape.slots + slot;
    int32_t *mask = link->shape.masks + index_of_mask * link->shape.words;
    int32_t status = fill_mask(row, mask, link->shape.words, link->shape.contents + index_of_mask);
    if (status < 0) return;
    row->last_mask_status = status;
    tag(link, slot, row, index, stage);
    if (!link->shape.forced || status != OK || stage != index || index + 1 == link->shape.stages) return;
    search_context context = {link, row};
    link->shape.forced[index * link->shape.slots + slot] =
        forced_token(&row->forced, link->shape.tokens, row->committed + index, mask, link->shape.words, find_forced, &context);
}

static void commit(host_link *link, int64_t slot, matcher_row *row, const int64_t *state, int64_t stage) {
    int64_t generated = state[GENERATED];
    int fresh = generated == row->committed;
    int64_t accepted = fresh ? 0 : state[ACCEPTED];
    if (accepted < 0 || accepted > row->pending_drafts || !(fresh || generated == row->committed + accepted + 1)) {
        fail(row, "RuntimeError: the history has %lld tokens, %lld from drafts; the matcher had %lld + %lld", (long long)generated,
             (long long)accepted, (long long)row->committed, (long long)row->pending_drafts);
        return;
    }
    if (row->pending_drafts > accepted) {
        if (!roll_back(row, row->pending_drafts - accepted)) return;
        count(link, ROLLBACKS, 1);
    }
    row->pending_drafts = 0;
    row->next_mask = 1;
    if (!fresh) {
        count(link, ACCEPTS, 1);
        if (accept_token(row, state[LAST_TOKEN]) != 1) {
            fail(row, "RuntimeError: token %lld was sampled under a mask of this grammar, and the matcher does not accept it",
                 (long long)state[LAST_TOKEN]);
            return;
        }
        follow_forced(&row->forced, generated - 1, state[LAST_TOKEN]);
        row->committed = generated;
    }
    fill(link, slot, row, 0, stage);
}

static int64_t draft_of(const link_shape *shape, int64_t slot, int64_t stage) { return shape->drafts[(stage - 1) * shape->slots + slot]; }

/* Accept this draft and fill mask `index`. */
static void advance(host_link *link, int64_t slot, matcher_row *row, int64_t token, int64_t index, int64_t stage) {
    row->next_mask = index + 1;
    if (token < 0 || row->pending_drafts != index - 1 || row->last_mask_status != OK) return; /* an earlier draft ended the walk */
    count(link, ACCEPTS, 1);
    int accepted = accept_token(row, token);
    if (accepted > 0) {
        follow_forced(&row->forced, row->committed + index - 1, token);
        row->pending_drafts = index;
        fill(link, slot, row, index, stage);
    }
    if (accepted > 0 && !faulted(row)) return;
    row->last_mask_status = faulted(row) ? FAULT : ILLEGAL; /* the draft itself was still verified, by the mask before it */
    tag(link, slot, row, index, stage);
}

/* Fill the next missing mask: the history may have changed since the last fill. */
static void fill_next(host_link *link, int64_t slot, matcher_row *row, const int64_t *state, int64_t stage) {
    if (row->last_mask_status == NONE || row->committed != state[GENERATED]) commit(link, slot, row, state, stage);
    else advance(link, slot, row, draft_of(&link->shape, slot, stage), row->next_mask, stage);
}

/* one node */

static void begin(host_link *link) {
    int64_t round = atomic_load_explicit(&link->begun, memory_order_relaxed);
    link->batch = NULL;
    atomic_store_explicit(&link->counts[ENDED], round, memory_order_release); /* in case the previous round had no END_ROUND */
    if (round < atomic_load_explicit(&link->pushed, memory_order_acquire)) {
        link->batch = link->rows + round % link->shape.depth * link->shape.slots;
        atomic_store_explicit(&link->begun, round + 1, memory_order_relaxed);
    } else {
        count(link, MISSED, 1);
    }
    for (int64_t mask = 0, masks = link->shape.stages * link->shape.slots; mask < masks; mask++) {
        int64_t *tags = link->shape.tags + mask * TAG_FIELDS;
        tags[0] = tags[1] = tags[3] = 0;
        tags[2] = mask / link->shape.slots;
    }
    int64_t forced = link->shape.forced ? (link->shape.stages - 1) * link->shape.slots : 0;
    if (forced) memset(link->shape.forced, -1, (size_t)forced * sizeof *link->shape.forced);
}

static void end(host_link *link) {
    link->batch = NULL;
    atomic_store_explicit(&link->counts[ENDED], atomic_load_explicit(&link->begun, memory_order_relaxed), memory_order_release);
}

static void process_row(const host_node *node, int64_t slot) {
    host_link *link = node->link;
    int64_t token;
    matcher_row *row = link->batch[slot];
    for (int64_t step = 0; step < node->count && !faulted(row); step++) {
        int32_t stage = node->steps[step].stage;
        switch (node->steps[step].action) {
        case NEXT:
            fill_next(link, slot, row, link->shape.state + slot * HOST_COLUMNS, stage);
            break;
        case COMMIT:
            commit(link, slot, row, link->shape.state + slot * HOST_COLUMNS, 0);
            break;
        case ADVANCE:
            advance(link, slot, row, draft_of(&link->shape, slot, stage), stage, stage);
            break;
        case FOLLOW:
            token = link->shape.forced ? link->shape.forced[(stage - 1) * link->shape.slots + slot] : -1;
            advance(link, slot, row, token < 0 ? draft_of(&link->shape, slot, stage) : token, stage, stage);
            break;
        }
    }
}

/* Process one row whose library computes masks, or a block of rows that look up masks. */
static void process_item(void *context, unsigned item) {
    const host_node *node = context;
    const host_link *link = node->link;
    if (item < link->computing) {
        process_row(node, link->active[item]);
        return;
    }
    unsigned first = link->computing + (item - link->computing) * LOOK_UP_ROWS, last = first + LOOK_UP_ROWS;
    for (unsigned row = first; row < last && row < link->num_active; row++) process_row(node, link->active[row]);
}

/* Collects the slots whose request is the owner of the device row, is running and has no fault; slots that compute masks come first. */
static unsigned find_active(host_link *link) {
    link->num_active = link->computing = 0;
    for (int64_t slot = 0; link->batch && slot < link->shape.slots; slot++) {
        matcher_row *row = link->batch[slot];
        const int64_t *state = link->shape.state + slot * HOST_COLUMNS;
        if (row && !faulted(row) && state[OWNER] == row->owner && state[FINISH] == ROW_RUNNING) {
            unsigned place = link->num_active++;
            if (!row->grammar) {
                link->active[place] = link->active[link->computing];
                place = link->computing++;
            }
            link->active[place] = (int32_t)slot;
        }
    }
    return link->computing + (link->num_active - link->computing + LOOK_UP_ROWS - 1) / LOOK_UP_ROWS;
}

static void count_time(host_link *link, int64_t taken) {
    int bucket = 0;
    while (bucket < NODE_BOUNDS && taken > link->shape.node_bounds_ns[bucket]) bucket++;
    count(link, NODES + bucket, 1);
    count(link, NODE_NS, taken);
    if (taken > atomic_load_explicit(&link->counts[LONGEST_NODE_NS], memory_order_relaxed))
        atomic_store_explicit(&link->counts[LONGEST_NODE_NS], taken, memory_order_relaxed);
}

static void log_node(host_link *link, int64_t first, int64_t begun, int64_t ended) {
    int64_t *log = atomic_load_explicit(&link->log, memory_order_acquire);
    if (!log || log[0] >= link->log_room) return;
    int64_t *entry = log + 3 * ++log[0];
    entry[0] = first, entry[1] = begun, entry[2] = ended;
}

void stepgraph_node(void *data) {
    host_node *node = data;
    int64_t begun = ns_of(CLOCK_MONOTONIC), ended;
    if (node->steps[0].action == BEGIN_ROUND) begin(node->link);
    unsigned items = find_active(node->link);
    pool_run(node->link->pool, process_item, node, items, items - 1);
    ended = ns_of(CLOCK_MONOTONIC);
    log_node(node->link, node->steps[0].action == BEGIN_ROUND, begun, ended);
    count_time(node->link, ended - begun); /* before END_ROUND: a reader that sees the end of the round sees its times */
    if (node->steps[node->count - 1].action == END_ROUND) end(node->link);
}

/* called from Python */

host_link *stepgraph_open(const link_shape *shape) {
    host_link *link = calloc(1, sizeof *link);
    if (!link) return NULL;
    link->shape = *shape;
    link->rows = calloc((size_t)(shape->depth * shape->slots), sizeof *link->rows);
    link->active = calloc((size_t)shape->slots, sizeof *link->active);
    link->pool = link->rows && link->active ? pool_open((unsigned)shape->helpers) : NULL;
    if (link->pool) return link;
    stepgraph_close(link);
    return NULL;
}

void stepgraph_close(host_link *link) {
    if (link->pool) pool_close(link->pool);
    free(link->rows);
    free(link->active);
    free(link);
}

/* Returns -1 if `depth` rounds are pushed and not ended. Called by the launching thread only. */
int stepgraph_push_batch(host_link *link, matcher_row *const *rows, int64_t count) {
    int64_t round = atomic_load_explicit(&link->pushed, memory_order_relaxed);
    if (round - atomic_load_explicit(&link->counts[ENDED], memory_order_acquire) >= link->shape.depth) return -1;
    matcher_row **batch = link->rows + round % link->shape.depth * link->shape.slots;
    memset(batch, 0, (size_t)link->shape.slots * sizeof *batch);
    memcpy(batch, rows, (size_t)count * sizeof *batch);
    atomic_store_explicit(&link->pushed, round + 1, memory_order_release);
    return 0;
}

/* Called while no node is running. */
void stepgraph_log(host_link *link, int64_t *log, int64_t room) {
    link->log_room = room;
    atomic_store_explicit(&link->log, log, memory_order_release);
}

/* Reads ENDED first: the times of every round that it counts are then included. */
void stepgraph_counts(const host_link *link, int64_t *counts) {
    for (int index = 0; index < COUNTS; index++) counts[index] = atomic_load_explicit(&link->counts[index], memory_order_acquire);
}

const char *stepgraph_fault(matcher_row *row) {
    return atomic_load_explicit(&row->faulted, memory_order_acquire) ? row->fault : "";
}

/* LINK_LAYOUT of c_declarations.py. */
STEPGRAPH_API const int64_t stepgraph_link_sizes[] = {
    LAYOUT_VERSION, sizeof(image_row), sizeof(image_vocabulary), sizeof(image_place), sizeof(image_walk), sizeof(image_written),
    sizeof(parsed_grammar), sizeof(token_table), sizeof(forced_text), sizeof(marker_table), sizeof(marker_progress),
    sizeof(matcher_library), sizeof(mask_content), sizeof(matcher_row), sizeof(link_shape), sizeof(host_step), sizeof(host_node),
    sizeof(xgrammar_library), sizeof(llguidance_library),
};
