/* Forced tokens: where a grammar leaves one text, the tokens that the tokenizer would write it in. forced_tokens.py is the reference. */

#ifndef STEPGRAPH_FORCED_H
#define STEPGRAPH_FORCED_H

#include "host_link.h"

/* A token was accepted behind `place` others. */
void follow_forced(matcher_row *row, int64_t place, int64_t token);

/* The token that the place behind `place` tokens is forced to, under its mask; -1 where none is, or for a fault.
   Counts in `looks` when the library is asked. */
int64_t forced_token(matcher_row *row, const token_table *table, int64_t place, const int32_t *mask, int64_t words,
                     _Atomic int64_t *looks);

#endif
