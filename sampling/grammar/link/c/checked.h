/* `check_masks`: every token is held against the mask that was filled at its place. checked_matcher.py is the reference. */

#ifndef STEPGRAPH_CHECKED_H
#define STEPGRAPH_CHECKED_H

#include "host_link.h"

/* A token was accepted, or not: a fault where the mask of its place says otherwise. */
void hold_against_mask(matcher_row *row, int64_t token, int accepted);

/* A mask was filled; each place's before a token is accepted there. */
void keep_mask(checked_masks *checked, const int32_t *mask);

#endif
