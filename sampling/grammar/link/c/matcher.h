/* One row's matcher: takes tokens, takes them back, says which may come next, within its fuel. matcher.py is the reference. */

#ifndef STEPGRAPH_MATCHER_H
#define STEPGRAPH_MATCHER_H

#include "host_link.h"

#include <time.h>

/* Whether the row has a fault: nothing more is asked of its matcher then. */
int faulted(matcher_row *row);

/* Give the row a fault, if it has none yet: the first one is the one that is told. */
__attribute__((format(printf, 2, 3))) void fail(matcher_row *row, const char *format, ...);

/* 1 taken; 0 no change, where the grammar does not allow the token here, or for a fault; -1 where nothing can be said. */
int accept_token(matcher_row *row, int64_t token);

/* Writes the mask and returns its status, or -1 where nothing can be said. Whatever goes wrong, the mask is zero. */
int32_t fill_mask(matcher_row *row, int32_t *mask, int64_t words);

/* 0 and a fault where the library fails. */
int roll_back(matcher_row *row, int64_t tokens);

/* Around a call of the library, which costs a row its fault where it takes longer than its fuel. */
double start_of_call(const matcher_row *row);
void end_of_call(matcher_row *row, double start);

double seconds_of(clockid_t clock);

#endif
