/* See marker.h. */

#include "marker.h"

#include <string.h>

static int32_t state_of(const marker_text *text) { return text->states[text->taken % text->room]; }

int in_front(const marker_text *text) { return text->table && state_of(text) < text->table->complete; }

static int is_text(const marker_table *table, int64_t token) { return (uint32_t)table->text_words[token / 32] >> (token % 32) & 1; }

/* The longest beginning of the marker that the text ends with, one symbol further. */
static int32_t step(const marker_table *table, int32_t state, int32_t symbol) {
    while (state && table->symbols[state] != symbol) state = table->shorter[state];
    return state + (table->symbols[state] == symbol);
}

/* -1 where the token reaches beyond the marker's end, or is no text. */
static int32_t behind_text(const marker_table *table, int32_t state, int64_t token) {
    if (!is_text(table, token)) return -1;
    for (int32_t place = table->starts[token]; place < table->starts[token + 1]; place++) {
        if (state == table->complete) return -1;
        state = step(table, state, table->bytes[place]);
    }
    return state;
}

/* -1 where the token is no text, and neither the marker's next nor its first. */
static int32_t behind_id(const marker_table *table, int32_t state, int64_t token) {
    if (!is_text(table, token) && token != table->symbols[state] && token != table->symbols[0]) return -1;
    return step(table, state, (int32_t)token);
}

int follow_marker(marker_text *text, int64_t token) {
    const marker_table *table = text->table;
    if (token < 0 || token >= table->num_tokens) return 0;
    int32_t state = (table->bytes ? behind_text : behind_id)(table, state_of(text), token);
    if (state < 0) return 0;
    text->states[++text->taken % text->room] = state;
    return 1;
}

int32_t fill_in_front(const marker_text *text, int32_t *mask, int64_t words) {
    const int32_t *allowed = text->table->masks + text->table->rows[state_of(text)] * words;
    memcpy(mask, allowed, (size_t)words * sizeof *mask);
    for (int64_t word = 0; word < words; word++)
        if (mask[word]) return OK;
    return DEAD_END;
}

int64_t take_back(marker_text *text, int64_t tokens) {
    int64_t behind = tokens;
    if (text->table) {
        if (behind > text->behind) behind = text->behind;
        text->behind -= behind;
        text->taken -= tokens - behind;
    }
    return behind;
}
