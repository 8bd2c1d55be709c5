/* The matcher of one row: accepts tokens, rolls them back and fills masks within its fuel. LibraryMatcher is the reference. */

#pragma once

#include "host_link.h"

#include <time.h>

/* Whether the row has a fault. Its matcher is not called again. */
int faulted(matcher_row *row);

/* Set the row's fault unless it already has one. */
__attribute__((format(printf, 2, 3))) void fail(matcher_row *row, const char *format, ...);

/* 1 accepted; 0 and no change if the token is not legal here or the row has a fault; -1 if the library cannot answer. */
int accept_token(matcher_row *row, int64_t token);

/* Write the mask and return its status, or -1 if the library cannot answer. On failure the mask is zero. */
int32_t fill_mask(matcher_row *row, int32_t *mask, int64_t words, mask_content *content);

/* Returns 0 and sets a fault if the library fails. */
int roll_back(matcher_row *row, int64_t tokens);

/* Called before and after a library call: a call that takes more than the row's fuel sets a fault. */
double start_of_call(const matcher_row *row);
void end_of_call(matcher_row *row, double start);

int64_t ns_of(clockid_t clock);
