/* Forced tokens: if the grammar allows only one text, the tokens in which the tokenizer would write it. forced.py is the reference. */

#ifndef STEPGRAPH_FORCED_H
#define STEPGRAPH_FORCED_H

#include "host_link.h"

/* Record that `token` was accepted at `position` of the history. */
void follow_forced(matcher_row *row, int64_t position, int64_t token);

/* The token that is forced at `position`, given its mask; -1 if none is, or on a fault. Increments `looks` when the library
   is asked for forced text. */
int64_t forced_token(matcher_row *row, const token_table *table, int64_t position, const int32_t *mask, int64_t words,
                     _Atomic int64_t *looks);

#endif
