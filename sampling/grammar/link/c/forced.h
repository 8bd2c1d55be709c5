/* Forced tokens: if the grammar allows only one text, the tokens in which the tokenizer would write it. forced.py is the reference. */

#pragma once

#include <stdint.h>

enum { FORCED_BYTES = 128 };

typedef struct matcher_row matcher_row;

/* The token texts of a vocabulary in sorted order, for look-up by bytes: forced.TokenTable. */
typedef struct {
    const uint8_t *texts;      /* concatenated */
    const int32_t *starts;     /* [texts + 1] */
    const int32_t *ids;        /* [texts] */
    const int32_t *text_index; /* [num_tokens] index of each token's text, -1 if it has none */
    const int32_t *buckets;    /* [65537] index of the first text that starts with a given pair of bytes */
    const int32_t *singles;    /* [256] the token of a single byte, -1 if there is none */
    int64_t num_tokens;
    int32_t longest; /* bytes of the longest text */
    int32_t merges;  /* 1: split texts by merging pairs (BPE); 0: by longest match */
} token_table;

/* A row's forced text, split into tokens. Valid for as long as the history follows it. */
typedef struct {
    int64_t start; /* length of the history at which it begins */
    int32_t size, count;
    int32_t tokens[FORCED_BYTES];
    uint8_t ends[FORCED_BYTES]; /* end of each token in the text */
    char text[FORCED_BYTES];
} forced_text;

/* Record that `token` was accepted at `position` of the history. */
void follow_forced(matcher_row *row, int64_t position, int64_t token);

/* The token that is forced at `position`, given its mask; -1 if none is, or on a fault. Increments `looks` when the library
   is asked for forced text. */
int64_t forced_token(matcher_row *row, const token_table *table, int64_t position, const int32_t *mask, int64_t words,
                     _Atomic int64_t *looks);
