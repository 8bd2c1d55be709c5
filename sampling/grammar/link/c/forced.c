/* See forced.h. */

#include "forced.h"

#include <string.h>

enum { MAX_LEGAL = 64, TAIL_BYTES = 32, BLOCK = 64 };
#define KEY_FACTOR UINT64_C(0x9E3779B97F4A7C15) /* forced.KEY_FACTOR */

/* Bytes that it does not own. */
typedef struct {
    const uint8_t *bytes;
    int64_t size;
} span;

static span text_of(const token_table *table, int64_t token) {
    return (span){table->text + table->starts[token], table->starts[token + 1] - table->starts[token]};
}

static int has_prefix(span text, span prefix) {
    return prefix.size <= text.size && !memcmp(text.bytes, prefix.bytes, (size_t)prefix.size);
}

/* The token with this key, -1 if there is none. */
static int32_t find_key(const token_table *table, uint64_t key) {
    uint64_t slot = key >> (__builtin_clzll((uint64_t)table->num_slots) + 1), last = (uint64_t)table->num_slots - 1;
    while (table->slots[2 * slot + 1] >= 0 && (uint64_t)table->slots[2 * slot] != key) slot = (slot + 1) & last;
    return (int32_t)table->slots[2 * slot + 1];
}

static int32_t find(const token_table *table, span text) {
    uint64_t key = 0, power = KEY_FACTOR;
    for (int64_t at = 0; at < text.size; at++, power *= KEY_FACTOR) key += (text.bytes[at] + 1u) * power;
    return find_key(table, key);
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
                if (count == MAX_LEGAL || token >= table->num_tokens) return 0;
                legal[count++] = (int32_t)token;
                if (count == 1) continue;
                span first = text_of(table, legal[0]), text = text_of(table, token);
                if (!first.size || !text.size || *first.bytes != *text.bytes) return 0;
            }
        }
    }
    return count;
}

/* Both functions write the end of each token of the text to `ends` and return the number of tokens. */

static int32_t split_longest(const token_table *table, span text, uint8_t *ends) {
    int32_t parts = 0;
    for (int64_t begin = 0; begin < text.size; begin = ends[parts++]) {
        uint64_t key = 0, power = KEY_FACTOR;
        for (int64_t end = begin; end < text.size; end++, power *= KEY_FACTOR) {
            key += (text.bytes[end] + 1u) * power;
            if (find_key(table, key) >= 0) ends[parts] = (uint8_t)(end + 1);
        }
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
    span text = {forced->text, forced->size};
    for (int32_t index = 0; index < forced->size; index++)
        if (find(table, (span){text.bytes + index, 1}) < 0) return;
    int32_t parts = table->merges ? split_merged(table, text, ends) : split_longest(table, text, ends);
    int32_t limit = forced->size < FORCED_BYTES ? forced->size : FORCED_BYTES - TAIL_BYTES;
    for (int32_t part = 0, begin = 0; part < parts && ends[part] <= limit; begin = ends[part++]) {
        forced->tokens[part] = find(table, (span){text.bytes + begin, ends[part] - begin});
        forced->ends[part] = ends[part];
        forced->count = part + 1;
    }
}

void follow_forced(forced_text *forced, int64_t position, int64_t token) {
    int64_t index = position - forced->start;
    if (index < 0) forced->count = 0;
    else if (index < forced->count && forced->tokens[index] != token) forced->count = (int32_t)index;
}

int64_t forced_token(forced_text *forced, const token_table *table, int64_t position, const int32_t *mask, int64_t words,
                     forced_source source, void *context) {
    int32_t legal[MAX_LEGAL];
    int64_t count = legal_tokens(table, mask, words, legal);
    if (count <= 1) return count ? legal[0] : -1;
    int64_t index = position - forced->start;
    if (index < 0 || index >= forced->count) {
        forced->start = (int32_t)position;
        forced->size = forced->count = 0;
        int64_t size = source(context, forced->text);
        if (size < 0) return -1;
        forced->size = (int32_t)size;
        index = 0;
    }
    int32_t begin = index ? forced->ends[index - 1] : 0;
    span rest = {forced->text + begin, forced->size - begin};
    for (int64_t next = 0; next < count; next++)
        if (!has_prefix(rest, text_of(table, legal[next]))) return -1;
    if (!forced->count) split(table, forced);
    int32_t token = forced->count ? forced->tokens[index] : -1;
    return token >= 0 && mask[token / 32] >> (token % 32) & 1 ? token : -1;
}
