/* Free text up to a marker, after which the grammar applies. marker.py is the reference. */

#ifndef STEPGRAPH_MARKER_H
#define STEPGRAPH_MARKER_H

#include "host_link.h"

/* Whether the text has not reached the end of the marker. The grammar is not consulted before. */
int before_marker_end(const marker_progress *marker);

/* Accept a token before the marker's end. Returns 1, or 0 and no change if it is not legal here. */
int accept_free_token(marker_progress *marker, int64_t token);

/* Write the mask of the tokens that are legal before the marker's end; returns its status. */
int32_t fill_free_mask(const marker_progress *marker, int32_t *mask, int64_t words);

/* Roll back the latest tokens. Returns how many of them the grammar must roll back: those after the marker. */
int64_t roll_back_marker(marker_progress *marker, int64_t tokens);

#endif
