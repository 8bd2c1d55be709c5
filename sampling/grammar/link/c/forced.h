/* Forced tokens: if the grammar allows only one text, the tokens in which the tokenizer would write it. forced.py is the reference. */

#pragma once

#include <stdint.h>

enum { FORCED_BYTES = 128 };

/* The texts of a vocabulary: forced.TokenLookup. */
typedef struct {
    const uint8_t *text;   /* the bytes of all tokens; tokens that are not text have none */
    const int32_t *starts; /* [num_tokens + 1] */
    const int64_t *slots;  /* [num_slots, 2] hash table: key and token of each text; token -1: free */
    int64_t num_tokens;
    int64_t num_slots; /* a power of two */
    int32_t merges;    /* 1: split texts by merging pairs (BPE); 0: by longest match */
} token_table;

/* A row's forced text, split into tokens. Valid as long as the history agrees with it. Also a row of row_forced_text on a device. */
typedef struct {
    int32_t start; /* length of the history at which the text begins */
    int32_t size, count;
    int32_t tokens[FORCED_BYTES];
    uint8_t ends[FORCED_BYTES]; /* end of each token in the text */
    uint8_t text[FORCED_BYTES];
} forced_text;

/* Writes bytes that must come next to `text` [FORCED_BYTES]. Returns their number, -1 on a fault. */
typedef int64_t (*forced_source)(void *context, uint8_t *text);

/* Record that `token` was accepted at `position` of the history. */
void follow_forced(forced_text *forced, int64_t position, int64_t token);

/* The token that is forced at `position`, given its mask; -1 if none is, or on a fault. Calls `source` if the text is not known. */
int64_t forced_token(forced_text *forced, const token_table *table, int64_t position, const int32_t *mask, int64_t words,
                     forced_source source, void *context);
