/* See forced.h. */

#include "matcher.h"

#include <string.h>

enum { MOST_LEGAL = 64, TAIL_BYTES = 32, BLOCK = 64 };

/* Borrowed bytes. */
typedef struct {
    const uint8_t *bytes;
    int64_t size;
} span;

static span text_at(const token_table *table, int64_t index) {
    return (span){table->texts + table->starts[index], table->starts[index + 1] - table->starts[index]};
}

static int compare(span one, span other) {
    int64_t size = one.size < other.size ? one.size : other.size;
    int order = memcmp(one.bytes, other.bytes, (size_t)size);
    return order ? order : (one.size > other.size) - (one.size < other.size);
}

static int has_prefix(span text, span prefix) {
    return prefix.size <= text.size && !memcmp(text.bytes, prefix.bytes, (size_t)prefix.size);
}

/* The token with this text, -1 if there is none. */
static int32_t find(const token_table *table, span text) {
    if (text.size == 1) return table->singles[text.bytes[0]];
    int32_t pair = text.bytes[0] << 8 | text.bytes[1], low = table->buckets[pair], high = table->buckets[pair + 1];
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        int order = compare(text_at(table, middle), text);
        if (!order) return table->ids[middle];
        if (order < 0) low = middle + 1;
        else high = middle;
    }
    return -1;
}

/* Writes the legal tokens to `legal` and returns their number; 0 if they cannot all be prefixes of one text. */
static int64_t legal_tokens(const token_table *table, const int32_t *mask, int64_t words, int32_t *legal) {
    int64_t count = 0;
    for (int64_t block = 0; block < words; block += BLOCK) {
        int64_t end = block + BLOCK < words ? block + BLOCK : words;
        int32_t some = 0;
        for (int64_t word = block; word < end; word++) some |= mask[word];
        for (int64_t word = block; some && word < end; word++) {
            for (uint32_t bits = (uint32_t)mask[word]; bits; bits &= bits - 1) {
                int64_t token = word * 32 + __builtin_ctz(bits);
                if (count == MOST_LEGAL || token >= table->num_tokens) return 0;
                legal[count++] = (int32_t)token;
                if (count == 1) continue;
                int32_t first = table->text_index[legal[0]], text = table->text_index[token];
                if (first < 0 || text < 0 || *text_at(table, first).bytes != *text_at(table, text).bytes) return 0;
            }
        }
    }
    return count;
}

/* Asks the library for the forced text; before the end of a marker there is none. Returns 0 and sets a fault if it fails. */
static int look(matcher_row *row, int64_t position) {
    char error[FAULT_BYTES];
    forced_text *forced = &row->forced;
    forced->start = position;
    forced->size = forced->count = 0;
    if (before_marker_end(&row->marker)) return 1;
    double start = start_of_call(row);
    int size = row->library->forced(row->library, row->matcher, forced->text, FORCED_BYTES, error);
    if (size < 0) {
        fail(row, "%s", error);
        return 0;
    }
    end_of_call(row, start);
    forced->size = size;
    return !faulted(row);
}

/* Both functions write the end of each token of the text to `ends` and return the number of tokens. */

static int32_t split_longest(const token_table *table, span text, uint8_t *ends) {
    int32_t parts = 0, end = 0;
    while (end < text.size) {
        int64_t size = text.size - end < table->longest ? text.size - end : table->longest;
        while (find(table, (span){text.bytes + end, size}) < 0) size--;
        end += (int32_t)size;
        ends[parts++] = (uint8_t)end;
    }
    return parts;
}

/* Byte-pair merging: merges the adjacent pair whose token has the lowest id until no pair is a token. */
static int32_t split_merged(const token_table *table, span text, uint8_t *ends) {
    int32_t pairs[FORCED_BYTES], parts = (int32_t)text.size;
    for (int32_t part = 0; part < parts; part++) {
        ends[part] = (uint8_t)(part + 1);
        if (part + 1 < parts) pairs[part] = find(table, (span){text.bytes + part, 2});
    }
    for (;;) {
        int32_t best = -1;
        for (int32_t part = 0; part + 1 < parts; part++)
            if (pairs[part] >= 0 && (best < 0 || pairs[part] < pairs[best])) best = part;
        if (best < 0) return parts;
        memmove(ends + best, ends + best + 1, (size_t)(parts - best - 1) * sizeof *ends);
        memmove(pairs + best, pairs + best + 1, (size_t)(parts - best - 1) * sizeof *pairs);
        parts--;
        for (int32_t left = best ? best - 1 : 0; left <= best && left + 1 < parts; left++) {
            int32_t begin = left ? ends[left - 1] : 0;
            pairs[left] = find(table, (span){text.bytes + begin, ends[left + 1] - begin});
        }
    }
}

static void split(const token_table *table, forced_text *forced) {
    uint8_t ends[FORCED_BYTES];
    span text = {(const uint8_t *)forced->text, forced->size};
    for (int32_t index = 0; index < forced->size; index++)
        if (table->singles[text.bytes[index]] < 0) return;
    int32_t parts = table->merges ? split_merged(table, text, ends) : split_longest(table, text, ends);
    int32_t limit = forced->size < FORCED_BYTES ? forced->size : FORCED_BYTES - TAIL_BYTES;
    for (int32_t part = 0, begin = 0; part < parts && ends[part] <= limit; begin = ends[part++]) {
        forced->tokens[part] = find(table, (span){text.bytes + begin, ends[part] - begin});
        forced->ends[part] = ends[part];
        forced->count = part + 1;
    }
}

void follow_forced(matcher_row *row, int64_t position, int64_t token) {
    forced_text *forced = &row->forced;
    int64_t index = position - forced->start;
    if (index < 0) forced->count = 0;
    else if (index < forced->count && forced->tokens[index] != token) forced->count = (int32_t)index;
}

int64_t forced_token(matcher_row *row, const token_table *table, int64_t position, const int32_t *mask, int64_t words,
                     _Atomic int64_t *looks) {
    int32_t legal[MOST_LEGAL];
    forced_text *forced = &row->forced;
    int64_t count = legal_tokens(table, mask, words, legal);
    if (count <= 1) return count ? legal[0] : -1;
    int64_t index = position - forced->start;
    if (index < 0 || index >= forced->count) {
        atomic_fetch_add_explicit(looks, 1, memory_order_relaxed);
        if (!look(row, position)) return -1;
        index = 0;
    }
    int32_t begin = index ? forced->ends[index - 1] : 0;
    span rest = {(const uint8_t *)forced->text + begin, forced->size - begin};
    for (int64_t next = 0; next < count; next++)
        if (!has_prefix(rest, text_at(table, table->text_index[legal[next]]))) return -1;
    if (!forced->count) split(table, forced);
    int32_t token = forced->count ? forced->tokens[index] : -1;
    return token >= 0 && mask[token / 32] >> (token % 32) & 1 ? token : -1;
}
