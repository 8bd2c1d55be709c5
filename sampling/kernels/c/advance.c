/* Masks of rows whose grammars are images in device memory: the place of a row after each token, and the mask there. */

#include "native.h"

#include "../../grammar/automaton/c/image.h"
#include "../../grammar/link/c/forced.h"

enum { OWNER, GENERATED, LAST_TOKEN, ACCEPTED, FINISH }; /* columns of the rows' state, as in status.py */
enum { PLACE_INTS = 8 };

typedef struct {
    const argument *state, *drafts;
    const int32_t *arena;
    image_vocabulary vocabulary;
    int32_t *places, *stacks, *masks; /* [rows, ring, PLACE_INTS], [rows, ring, room], [rows, positions, words] */
    int64_t *tags; /* [rows, positions, TAG_FIELDS] */
    int64_t ring, room, positions;
    forced_text *texts; /* [rows]; NULL: without forced tokens */
    token_table table;
    int64_t *forced, forced_step; /* [positions - 1, slots]; NULL: forced tokens are followed but not searched */
} advance_call;

typedef struct {
    const advance_call *call;
    const int32_t *image;
    int64_t row, owner, generated, *forced;
} advance_row;

typedef struct {
    const advance_row *row;
    int64_t tokens;
} row_place;

static int64_t number_at(const argument *table, int64_t line, int64_t column) {
    return ((const int64_t *)table->data)[line * table->stride[0] + column * table->stride[1]];
}

static int32_t *place_at(const advance_row *row, int64_t tokens) {
    return row->call->places + (row->row * row->call->ring + tokens % row->call->ring) * PLACE_INTS;
}

static int32_t *stack_at(const advance_row *row, int64_t tokens) {
    return row->call->stacks + (row->row * row->call->ring + tokens % row->call->ring) * row->call->room;
}

static int64_t *tag_at(const advance_row *row, int64_t index) {
    return row->call->tags + (row->row * row->call->positions + index) * TAG_FIELDS;
}

static void set_tag(const advance_row *row, int64_t owner, int64_t generated, int64_t index, int64_t status) {
    const int64_t tag[TAG_FIELDS] = {owner, generated, index, status};
    memcpy(tag_at(row, index), tag, sizeof tag);
}

/* Whether mask `index` of the text's first `generated` tokens was filled. */
static bool is_filled(const advance_row *row, int64_t generated, int64_t index) {
    const int64_t *tag = tag_at(row, index);
    return tag[0] == row->owner && tag[1] == generated && tag[2] == index && tag[3] != STATUS_NONE;
}

/* Whether that mask allows a token; then its place is valid, too. */
static bool is_open(const advance_row *row, int64_t generated, int64_t index) {
    return is_filled(row, generated, index) && tag_at(row, index)[3] == STATUS_OK;
}

static image_place load_place(const advance_row *row, int64_t tokens) {
    image_place place;
    memcpy(&place, place_at(row, tokens), sizeof place);
    return place;
}

static int64_t find_forced(void *context, uint8_t *text) {
    const row_place *at = context;
    image_place place = load_place(at->row, at->tokens);
    return image_forced(at->row->image, &place, stack_at(at->row, at->tokens), text, FORCED_BYTES);
}

static void fill(const advance_row *row, int64_t index) {
    const advance_call *call = row->call;
    int64_t tokens = row->generated + index;
    image_place place = load_place(row, tokens);
    int32_t *mask = call->masks + (row->row * call->positions + index) * call->vocabulary.words;
    image_written written = {.state = -1};
    int64_t status = image_fill(row->image, &call->vocabulary, &place, stack_at(row, tokens), mask, &written);
    set_tag(row, row->owner, row->generated, index, status);
    if (!row->forced || index + 1 == call->positions || status != STATUS_OK) return;
    row_place at = {row, tokens};
    row->forced[index * call->forced_step] =
        forced_token(call->texts + row->row, &call->table, tokens, mask, call->vocabulary.words, find_forced, &at);
}

/* Step from the place after `tokens` tokens, whose mask is mask `index`, to the next one. Returns whether `token` is legal. */
static bool step(const advance_row *row, int64_t tokens, int64_t index, int64_t token) {
    const int32_t *mask = row->call->masks + (row->row * row->call->positions + index) * row->call->vocabulary.words;
    if (token < 0 || token >= row->call->vocabulary.num_tokens || !(mask[token / 32] >> (token % 32) & 1)) return false;
    image_place place = load_place(row, tokens);
    image_walk walk;
    image_begin(&walk, &place, stack_at(row, tokens));
    if (!image_accept(row->image, &row->call->vocabulary, &walk, token)) return false;
    place = image_within_limit(row->image, walk.place, tokens + 1);
    memcpy(place_at(row, tokens + 1), &place, sizeof place);
    image_copy_stack(&walk, stack_at(row, tokens + 1));
    if (row->call->texts) follow_forced(row->call->texts + row->row, tokens, token);
    return true;
}

/* Find the place after the history: already known, or the start, or one token after the latest known place. */
static bool reach(const advance_row *row, int64_t last_token) {
    if (is_filled(row, row->generated, 0)) return true;
    if (row->generated == 0) {
        image_place start = image_start(row->image);
        memcpy(place_at(row, 0), &start, sizeof start);
        if (row->call->texts) row->call->texts[row->row].count = 0; /* forced tokens of the row's previous request */
        return true;
    }
    int64_t before = tag_at(row, 0)[1], emitted = row->generated - before;
    return emitted > 0 && emitted <= row->call->positions && is_open(row, before, emitted - 1) &&
        step(row, row->generated - 1, emitted - 1, last_token);
}

static void commit(const advance_row *row, int64_t last_token) {
    if (reach(row, last_token)) fill(row, 0);
    else set_tag(row, 0, 0, 0, STATUS_NONE);
}

static void advance(const advance_row *row, int64_t index, int64_t token) {
    if (token < 0 || !is_open(row, row->generated, index - 1)) set_tag(row, 0, 0, index, STATUS_NONE);
    else if (step(row, row->generated + index - 1, index - 1, token)) fill(row, index);
    else set_tag(row, row->owner, row->generated, index, STATUS_ILLEGAL);
}

EXPORTED int stepgraph_advance_fill(const argument *args) {
    const argument *images = args + 1, *rows = args + 2, *arena = args + 4, *starts = args + 6, *plain = args + 7;
    const argument *places = args + 9, *stacks = args + 10, *masks = args + 11, *slots = args + 19, *forced = args + 20;
    advance_call call = {
        .state = args, .drafts = args + 3, .arena = arena->data,
        .vocabulary = {
            .text = args[5].data, .starts = starts->data, .plain = plain->data, .stop_words = args[8].data,
            .num_tokens = starts->size[0] - 1, .plain_rows = plain->size[0], .words = masks->size[2],
        },
        .places = places->data, .stacks = stacks->data, .masks = masks->data, .tags = args[12].data,
        .ring = places->size[1], .room = stacks->size[2], .positions = masks->size[1],
        .texts = args[18].data, .forced = forced->data, .forced_step = forced->stride[0],
        .table = {
            .text = args[5].data, .starts = starts->data, .slots = slots->data, .num_tokens = starts->size[0] - 1,
            .num_slots = slots->size[0], .merges = (int32_t)args[21].integer,
        },
    };
    int64_t first = args[14].integer, last = args[15].integer, fill_new = args[16].integer, by_row = args[17].integer;
    int64_t takes_forced = args[22].integer;
    for (int64_t slot = 0; slot < rows->size[0]; slot++) {
        int64_t at = ((const int64_t *)rows->data)[slot];
        if (at < 0 || at >= masks->size[0]) return 1;
        int64_t *status = (int64_t *)args[13].data + slot, step = args[13].stride[0];
        for (int64_t index = first; index <= last; index++) status[index * step] = STATUS_NONE;
        int64_t offset = ((const int64_t *)images->data)[at * images->stride[0]];
        if (offset <= 0 || offset > arena->size[0] - IMAGE_HEADER || call.arena[offset] != IMAGE_VERSION) continue;
        advance_row row = {&call, call.arena + offset, at, number_at(call.state, at, OWNER), number_at(call.state, at, GENERATED),
                           call.forced ? call.forced + slot : NULL};
        bool running = number_at(call.state, at, FINISH) == FINISH_RUNNING && row.image[IMAGE_DEPTH] <= call.room;
        int64_t last_token = number_at(call.state, at, LAST_TOKEN);
        if (running && fill_new && !is_filled(&row, row.generated, 0)) commit(&row, last_token);
        for (int64_t index = first; row.forced && index <= last && index + 1 < call.positions; index++)
            row.forced[index * call.forced_step] = -1;
        for (int64_t index = first; index <= last; index++) {
            int64_t forced_draft = takes_forced && index > 0 ? row.forced[(index - 1) * call.forced_step] : -1;
            if (!running) set_tag(&row, 0, 0, index, STATUS_NONE);
            else if (index > 0)
                advance(&row, index, forced_draft < 0 ? number_at(call.drafts, by_row ? at : slot, index - 1) : forced_draft);
            else commit(&row, last_token);
            status[index * step] = tag_at(&row, index)[3];
        }
    }
    return 0;
}
