/* The tokens that followed an earlier occurrence of a text's last tokens. */

#include "native.h"

/* How many tokens before `column` equal the last ones of the history: -1 before the text; a history that is shorter matches no further. */
INLINED int64_t matched(const int32_t *text, int64_t length, int64_t column, int64_t most) {
    int64_t equal = 0;
    while (equal < most && equal < length && (column > equal ? text[column - 1 - equal] : -1) == text[length - 1 - equal]) equal++;
    return equal;
}

/* text [batch, width] int32; length, generated [batch] of any stride; start; count; most; least; chains [batch, count]. */
EXPORTED int stepgraph_ngram_chains(const argument *given) {
    int64_t width = given->size[1], start = given[3].integer, count = given[4].integer, most = given[5].integer, least = given[6].integer;
    for (int64_t row = 0; row < given->size[0]; row++) {
        const int32_t *text = (const int32_t *)given->data + row * given->stride[0];
        int64_t length = ((const int64_t *)given[1].data)[row * given[1].stride[0]];
        int64_t expected = start + ((const int64_t *)given[2].data)[row * given[2].stride[0]];
        int64_t best = -1, from = 0, *chain = (int64_t *)given[7].data + row * count;
        if (length < 1 || length > width) return 1;
        for (int64_t column = 0; column < width; column++) {
            if (column >= length && (column < start || text[column] < 0)) continue;
            int64_t equal = matched(text, length, column, most), distance = column - expected;
            if (equal < least) continue;
            int64_t preference = column < start ? column : 3 * width - 2 * (distance < 0 ? -distance : distance) - (distance < 0);
            if (equal * 4 * width + preference > best) best = equal * 4 * width + preference, from = column;
        }
        for (int64_t i = 0; i < count; i++) {
            int64_t copied = from + (from < start && length > from ? i % (length - from) : i);
            chain[i] = best < 0 ? -1 : text[copied < width ? copied : width - 1];
        }
    }
    return 0;
}
