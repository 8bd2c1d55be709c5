/* The free text in front of a grammar, up to its marker. marker.py is the reference. */

#ifndef STEPGRAPH_MARKER_H
#define STEPGRAPH_MARKER_H

#include "host_link.h"

/* Whether the marker is still to come: the grammar is asked nothing then. */
int in_front(const marker_text *text);

/* One more token in front of the marker's end: 1 taken; 0 no change, where it may not follow. */
int follow_marker(marker_text *text, int64_t token);

/* Writes the mask of what may follow in front of the marker's end, and returns its status. */
int32_t fill_in_front(const marker_text *text, int32_t *mask, int64_t words);

/* Takes back the latest tokens; returns how many of them the grammar has to take back, those behind the marker. */
int64_t take_back(marker_text *text, int64_t tokens);

#endif
