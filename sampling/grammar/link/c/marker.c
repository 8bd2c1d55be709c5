/* See marker.h. */

#include "host_link.h"

#include <string.h>

static int32_t current_state(const marker_progress *marker) { return marker->states[marker->num_free % marker->room]; }

int before_marker_end(const marker_progress *marker) { return marker->table && current_state(marker) < marker->table->complete; }

static int32_t next_state(const marker_table *table, int32_t state, int32_t symbol) {
    while (state && table->symbols[state] != symbol) state = table->fallback[state];
    return state + (table->symbols[state] == symbol);
}

static int at_limit(const marker_progress *marker) { return marker->num_free >= marker->table->limit; }

static const int32_t *free_mask(const marker_progress *marker) {
    const marker_table *table = marker->table;
    return table->masks + table->mask_index[current_state(marker) + (at_limit(marker) ? table->complete : 0)] * table->words;
}

int accept_free_token(marker_progress *marker, int64_t token) {
    const marker_table *table = marker->table;
    if (token < 0 || token >= table->num_tokens) return 0;
    if (!((uint32_t)free_mask(marker)[token / 32] >> (token % 32) & 1)) return 0;
    int32_t state = current_state(marker);
    if (!table->bytes) state = next_state(table, state, (int32_t)token);
    else for (int32_t index = table->starts[token]; index < table->starts[token + 1]; index++)
        state = next_state(table, state, table->bytes[index]);
    marker->states[++marker->num_free % marker->room] = state;
    return 1;
}

int32_t fill_free_mask(const marker_progress *marker, int32_t *mask, int64_t words) {
    memcpy(mask, free_mask(marker), (size_t)words * sizeof *mask);
    for (int64_t word = 0; word < words; word++)
        if (mask[word]) return OK;
    return DEAD_END;
}

int64_t forced_marker_text(const marker_progress *marker, uint8_t *text, int64_t room) {
    const marker_table *table = marker->table;
    int64_t size = 0;
    if (!table->bytes || !at_limit(marker)) return 0;
    for (int32_t state = current_state(marker); state < table->complete && size < room; state++)
        text[size++] = (uint8_t)table->symbols[state];
    return size;
}

int64_t roll_back_marker(marker_progress *marker, int64_t tokens) {
    if (!marker->table) return tokens;
    int64_t inner = tokens < marker->num_inner ? tokens : marker->num_inner;
    marker->num_inner -= inner;
    marker->num_free -= tokens - inner;
    return inner;
}
