/* Small operations on the rows of a round: positions and cache slots of tokens, rotary angles, mask rows, and the drafts of a row. */

#include "kernels.h"

enum { REFUSED = -2 }; /* as in row_layout.py */

/* The cache slot of a position, or -1 if its page lies outside of the row's table. */
INLINED int64_t slot_of(const int64_t *table, int64_t pages, int64_t position, int64_t page_size) {
    int64_t page = position / page_size;
    return page < pages ? table[page] * page_size + position % page_size : -1;
}

/* tokens [batch, count]; length, end [batch] of any stride; tables [batch, pages]; offset, page_size, max_length; live, used [batch] or
   NULL; known, positions, slots [batch, count]. */
EXPORTED int stepgraph_place_tokens(const argument *args) {
    const int64_t *tokens = args[0].data, *length = args[1].data, *end = args[2].data, *tables = args[3].data, *used = args[8].data;
    const bool *live = args[7].data;
    int64_t batch = args[0].size[0], count = args[0].size[1], pages = args[3].size[1];
    int64_t offset = args[4].integer, page_size = args[5].integer, max_length = args[6].integer;
    int64_t *known = args[9].data, *positions = args[10].data, *slots = args[11].data;
    for (int64_t i = 0; i < batch * count; i++) {
        int64_t row = i / count, position = length[row * args[1].stride[0]] + offset + i % count;
        bool inside = tokens[i] >= 0 && position >= 0 && position < end[row * args[2].stride[0]];
        inside = inside && (!live || live[row]) && (!used || i % count < used[row]);
        position = position < 0 ? 0 : position >= max_length ? max_length - 1 : position;
        int64_t slot = slot_of(tables + row * pages, pages, position, page_size);
        if (slot < 0 && inside) return 1;
        known[i] = tokens[i] < 0 ? 0 : tokens[i];
        positions[i] = position;
        slots[i] = inside ? slot : position % page_size;
    }
    return 0;
}

/* positions, slots [batch, count]; tables [batch, pages]; page_size, by; earlier, earlier_slots [batch, count]. */
EXPORTED int stepgraph_shift_entries(const argument *args) {
    const int64_t *positions = args[0].data, *slots = args[1].data, *tables = args[2].data;
    int64_t batch = args[0].size[0], count = args[0].size[1], pages = args[2].size[1];
    int64_t page_size = args[3].integer, by = args[4].integer;
    int64_t *earlier = args[5].data, *earlier_slots = args[6].data;
    for (int64_t i = 0; i < batch * count; i++) {
        bool used = slots[i] >= page_size && positions[i] >= by;
        int64_t position = positions[i] < by ? 0 : positions[i] - by;
        int64_t slot = slot_of(tables + i / count * pages, pages, position, page_size);
        if (slot < 0 && used) return 1;
        earlier[i] = position;
        earlier_slots[i] = used ? slot : position % page_size;
    }
    return 0;
}

/* positions [tokens]; frequencies [half] float32; dtype, not read; factor; cosines, sines [tokens, 1, 2 * half]. */
EXPORTED int stepgraph_rope_angles(const argument *args) {
    const int64_t *positions = args[0].data;
    const float *frequencies = args[1].data;
    float factor = (float)args[3].real;
    int64_t half = args[1].size[0];
    for (int64_t token = 0; token < args[0].size[0]; token++)
        for (int64_t i = 0; i < half; i++) {
            float angle = (float)positions[token] * frequencies[i], cosine = cosf(angle) * factor, sine = sinf(angle) * factor;
            for (int64_t at = 2 * token * half + i, twice = 0; twice < 2; at += half, twice++) {
                put(args[4].data, at, cosine, args[4].bfloat16);
                put(args[5].data, at, sine, args[5].bfloat16);
            }
        }
    return 0;
}

/* rows [batch]; tags [batch, TAG_FIELDS], with the index of each mask in its row; masks [batch, words]; row_tags, row_masks
   [table_rows, positions, ...]; forced, batch_forced [batch], or NULL. */
EXPORTED int stepgraph_scatter_masks(const argument *args) {
    const int64_t *rows = args[0].data, *tags = args[1].data;
    const int32_t *masks = args[2].data;
    int64_t *row_tags = args[3].data, words = args[2].size[1], table_rows = args[4].size[0], positions = args[4].size[1];
    int32_t *row_masks = args[4].data;
    size_t batch = (size_t)args[0].size[0], mask_bytes = (size_t)words * sizeof *masks, tag_bytes = TAG_FIELDS * sizeof *tags;
    if (args[5].data && args[6].data) memcpy(args[6].data, args[5].data, batch * sizeof(int64_t));
    for (size_t i = 0; i < batch; i++) {
        int64_t row = rows[i], index = tags[i * TAG_FIELDS + 2];
        if (row < 0 || row >= table_rows || index < 0 || index >= positions) return 1;
        int64_t to = row * positions + index;
        memcpy(row_masks + to * words, masks + (int64_t)i * words, mask_bytes);
        memcpy(row_tags + to * TAG_FIELDS, tags + i * TAG_FIELDS, tag_bytes);
    }
    return 0;
}

/* As row_layout.Column numbers them. */
enum { GENERATED = 1, LAST_TOKEN, ACCEPTED, FINISH, DRAFT_COUNT, LENGTH, MAX_LENGTH, CONSTRAINED };

/* As row_layout.ResultLayout orders a result; the tokens are followed by the statuses, the drafts, and the bits of both flags. */
enum { RESULT_EMITTED, RESULT_FINISH, RESULT_ACCEPTED, RESULT_DRAFT_COUNT, RESULT_TOKENS };

/* rows [batch]; state [batch, columns]; tokens, status [batch, positions]; drafts [batch, positions - 1]; emitted, accepted, finish
   [batch]; row_state [table_rows, columns]; results [batch, width]; row_forced, row_looked_up [table_rows, most], or NULL; out: emitted,
   finish [batch], state [batch, columns]. */
EXPORTED int stepgraph_write_emission(const argument *args) {
    const int64_t *rows = args[0].data, *tokens = args[2].data, *status = args[3].data, *drafts = args[4].data;
    int64_t columns = args[1].size[1], positions = args[2].size[1], table_rows = args[8].size[0], width = args[9].size[1];
    size_t number = sizeof(int64_t);
    for (int64_t i = 0; i < args[0].size[0]; i++) {
        const int64_t *before = (const int64_t *)args[1].data + i * columns, *token = tokens + i * positions;
        int64_t *after = (int64_t *)args[14].data + i * columns, *line = (int64_t *)args[9].data + i * width;
        bool live = before[FINISH] == FINISH_RUNNING;
        int64_t emitted = live ? ((const int64_t *)args[5].data)[i] : 0, accepted = ((const int64_t *)args[6].data)[i];
        int64_t finish = live ? ((const int64_t *)args[7].data)[i] : before[FINISH];
        if (rows[i] < 0 || rows[i] >= table_rows || emitted < 0 || emitted > positions) return 1;
        memcpy(after, before, (size_t)columns * number);
        if (live) {
            after[GENERATED] += emitted;
            if (emitted > 0) after[LAST_TOKEN] = token[emitted - 1];
            after[ACCEPTED] = accepted;
            after[FINISH] = finish;
            after[DRAFT_COUNT] = 0;
            after[LENGTH] += emitted;
        }
        memcpy((int64_t *)args[8].data + rows[i] * columns, after, (size_t)columns * number);
        ((int64_t *)args[12].data)[i] = line[RESULT_EMITTED] = emitted;
        ((int64_t *)args[13].data)[i] = line[RESULT_FINISH] = finish;
        line[RESULT_ACCEPTED] = accepted;
        line[RESULT_DRAFT_COUNT] = before[DRAFT_COUNT];
        int64_t *written = line + RESULT_TOKENS;
        memcpy(written, token, (size_t)positions * number);
        memcpy(written + positions, status + i * positions, (size_t)positions * number);
        memcpy(written + 2 * positions, drafts + i * (positions - 1), (size_t)(positions - 1) * number);
        for (int kind = 0; kind < 2; kind++) {
            const argument *table = args + 10 + kind;
            const bool *flags = table->data ? (const bool *)table->data + rows[i] * table->size[1] : NULL;
            int64_t bits = 0, verified = kind == 0 && !before[CONSTRAINED] ? 0 : before[DRAFT_COUNT];
            for (int64_t at = 0; flags && at < positions - 1 && at < verified; at++) bits |= (int64_t)flags[at] << at;
            if (flags) written[3 * positions - 1 + kind] = bits;
        }
    }
    return 0;
}

/* number [1]; ring [slots, ...]; batch_rows [batch]. */
EXPORTED int stepgraph_take_batch(const argument *args) {
    int64_t number = *(const int64_t *)args[0].data, slots = args[1].size[0], batch = args[2].size[0];
    if (number < 0 || batch > args[1].size[1]) return 1;
    memcpy(args[2].data, (const int64_t *)args[1].data + number % slots * args[1].stride[0], (size_t)batch * sizeof number);
    return 0;
}

/* results [batch, width]; logprobs [batch, positions, 2]; published [1]; ring [slots, most, width]; logprobs_ring [slots, most, positions,
   2]. */
EXPORTED int stepgraph_publish_results(const argument *args) {
    const argument *results = args, *logprobs = args + 1, *ring = args + 3, *logprobs_ring = args + 4;
    int64_t *published = args[2].data, slot = *published % ring->size[0], batch = results->size[0];
    if (*published < 0 || batch > ring->size[1]) return 1;
    memcpy((int64_t *)ring->data + slot * ring->stride[0], results->data, (size_t)(batch * ring->stride[1]) * sizeof(int64_t));
    memcpy((float *)logprobs_ring->data + slot * logprobs_ring->stride[0], logprobs->data,
        (size_t)(batch * logprobs_ring->stride[1]) * sizeof(float));
    ++*published;
    return 0;
}

/* rows [batch]; chain [batch, drafts], row_counts [table_rows] of any stride; row_drafts [table_rows, drafts]. */
EXPORTED int stepgraph_store_drafts(const argument *args) {
    const int64_t *rows = args[0].data, *chain = args[1].data;
    int64_t drafts = args[1].size[1], table_rows = args[2].size[0], *row_drafts = args[2].data, *row_counts = args[3].data;
    for (int64_t i = 0; i < args[0].size[0]; i++) {
        int64_t row = rows[i], count = 0;
        if (row < 0 || row >= table_rows) return 1;
        for (int64_t j = 0; j < drafts; j++) {
            int64_t token = chain[i * args[1].stride[0] + j * args[1].stride[1]];
            row_drafts[row * drafts + j] = token;
            count += token >= 0;
        }
        row_counts[row * args[3].stride[0]] = count;
    }
    return 0;
}

/* tokens, finite, alive, limit [batch]; step; rows [batch]; drafts [most, batch]; chain [batch, most] or NULL, forced_ids [batch] or NULL;
   masks [table_rows, words], constrained, status [batch], or NULL, all three; row_looked_up, row_forced, row_certain [table_rows, most],
   or NULL; out: selected [batch]. */
EXPORTED int stepgraph_select_draft(const argument *args) {
    const int64_t *tokens = args[0].data, *limit = args[3].data, *rows = args[5].data, *forced = args[8].data, *status = args[11].data;
    const bool *finite = args[1].data, *alive = args[2].data, *constrained = args[10].data;
    const int32_t *masks = args[9].data;
    int64_t at = args[4].integer - 1, words = args[9].size[1], most = args[7].size[1], *selected = args[15].data;
    for (int64_t i = 0; i < args[0].size[0]; i++) {
        int64_t *chain = args[7].data ? (int64_t *)args[7].data + i * most : NULL;
        int64_t token = tokens[i], candidate = chain ? chain[at] : -1;
        bool masked = masks && constrained[i], valid = masks && status[i] == STATUS_OK;
        bool taken = candidate >= 0, is_forced = forced && forced[i] >= 0 && masked && valid;
        if (taken && masked) {
            int64_t row = index_in(rows[i], args[9].size[0]);
            if (candidate / WORD >= words || row < 0) return 1;
            taken = valid && masks[row * args[9].stride[0] + candidate / WORD] >> (candidate % WORD) & 1;
        }
        if (taken) token = candidate;
        if (is_forced) token = forced[i];
        bool goes_on = alive[i] && limit[i * args[3].stride[0]] > at && (finite[i] || taken || is_forced);
        selected[i] = goes_on ? token : -1;
        ((int64_t *)args[6].data)[at * args[6].stride[0] + i] = selected[i];
        for (int64_t j = 0; chain && selected[i] != candidate && j < most; j++) chain[j] = -1;
        const bool flags[] = {taken, is_forced, taken || is_forced};
        for (int kind = 0; kind < 3; kind++) {
            const argument *table = args + 12 + kind;
            int64_t row = table->data ? index_in(rows[i], table->size[0]) : 0;
            if (row < 0) return 1;
            if (table->data) ((bool *)table->data)[row * table->stride[0] + at * table->stride[1]] = flags[kind];
        }
    }
    return 0;
}

/* rows, emitted [batch], tokens [batch, count], length [batch] of any stride; row_text [table_rows, width]. */
EXPORTED int stepgraph_append_tokens(const argument *args) {
    const int64_t *rows = args[0].data, *tokens = args[1].data, *emitted = args[2].data;
    int64_t count = args[1].size[1], width = args[4].size[1];
    for (int64_t i = 0; i < args[0].size[0]; i++) {
        int64_t row = index_in(rows[i], args[4].size[0]), begin = ((const int64_t *)args[3].data)[i * args[3].stride[0]];
        if (row < 0 || begin < 0 || emitted[i] > count || begin + emitted[i] > width) return 1;
        for (int64_t at = 0; at < emitted[i]; at++) ((int32_t *)args[4].data)[row * width + begin + at] = (int32_t)tokens[i * count + at];
    }
    return 0;
}

/* proposed [batch, drafts]; finish, limit [batch] of any stride; num_tokens; rows [batch]; masks [table_rows, positions, words],
   constrained [batch], status [batch, drafts], or NULL; forced [drafts, batch] and row_forced [table_rows, most], or NULL; out: chosen
   [batch, drafts]. */
EXPORTED int stepgraph_choose_chain(const argument *args) {
    const argument *finish = args + 1, *limits = args + 2, *masks = args + 5, *status = args + 7, *forced = args + 8, *flags = args + 9;
    const int64_t *proposed = args[0].data, *rows = args[4].data;
    const bool *constrained = args[6].data;
    int64_t drafts = args[0].size[1], num_tokens = args[3].integer, *chosen = args[10].data;
    for (int64_t i = 0; i < args[0].size[0]; i++, proposed += drafts, chosen += drafts) {
        int64_t row = masks->data ? index_in(rows[i], masks->size[0]) : 0, limit = ((const int64_t *)limits->data)[i * limits->stride[0]];
        bool goes_on = ((const int64_t *)finish->data)[i * finish->stride[0]] == FINISH_RUNNING, follows = goes_on;
        if (row < 0) return 1;
        for (int64_t at = 0; at < drafts; at++) {
            int64_t token = follows && proposed[at] >= 0 && proposed[at] < num_tokens ? proposed[at] : -1;
            if (masks->data && constrained[i]) {
                const int32_t *mask = (const int32_t *)masks->data + row * masks->stride[0] + at * masks->stride[1];
                bool valid = ((const int64_t *)status->data)[i * status->stride[0] + at * status->stride[1]] == STATUS_OK;
                int64_t forced_token = forced->data && valid ? ((const int64_t *)forced->data)[at * forced->stride[0] + i] : -1;
                if (token >= masks->size[2] * WORD) return 1;
                if (token >= 0 && !(valid && mask[token / WORD] >> (token % WORD) & 1)) token = REFUSED;
                if (forced_token >= 0) token = forced_token;
                if (forced->data) ((bool *)flags->data)[row * flags->stride[0] + at * flags->stride[1]] = forced_token >= 0;
            } else if (forced->data)
                ((bool *)flags->data)[row * flags->stride[0] + at * flags->stride[1]] = false;
            chosen[at] = goes_on && limit > at ? token : -1;
            goes_on = chosen[at] >= 0;
            follows = follows && chosen[at] == proposed[at];
        }
    }
    return 0;
}

/* text [batch, width] int32; length, generated [batch] of any stride; start of the given text, count, longest, shortest; chain [batch,
   count]. As the reference in proposing.py: the longest match wins, then the latest one, or the one that is nearest in the given text. */
EXPORTED int stepgraph_look_up(const argument *args) {
    const int32_t *text = args[0].data;
    int64_t width = args[0].size[1], start = args[3].integer, count = args[4].integer, longest = args[5].integer,
        shortest = args[6].integer;
    int64_t *chain = args[7].data;
    for (int64_t row = 0; row < args[0].size[0]; row++, text += width, chain += count) {
        int64_t length = ((const int64_t *)args[1].data)[row * args[1].stride[0]], best = -1, found = 0;
        int64_t expected = start + ((const int64_t *)args[2].data)[row * args[2].stride[0]];
        if (length < 1 || length > width) return 1;
        for (int64_t at = 0; at < width; at++) {
            int64_t matched = 0, distance = at < expected ? expected - at : at - expected;
            if (at >= length && (at < start || text[at] < 0)) continue;
            while (matched < longest && matched < length && text[length - 1 - matched] == (matched < at ? text[at - 1 - matched] : -1))
                matched++;
            int64_t score = matched * 4 * width + (at < start ? at : 3 * width - 2 * distance - (at < expected));
            if (matched >= shortest && score > best) best = score, found = at;
        }
        for (int64_t i = 0; i < count; i++) {
            int64_t from = found + (found < start ? i % (length > found ? length - found : 1) : i);
            chain[i] = best < 0 ? -1 : text[from < width ? from : width - 1];
        }
    }
    return 0;
}
