/* Free text up to a marker, after which the grammar applies. marker.py is the reference. */

#pragma once

#include <stdint.h>

/* marker.Marker. The state is the length of the longest marker prefix that the text ends with. */
typedef struct {
    const int32_t *symbols;    /* [complete] bytes or token ids of the marker */
    const int32_t *fallback;   /* [complete] per prefix: length of its longest proper prefix that is also a suffix */
    const int32_t *mask_index; /* [complete] row of `masks` for each state; with a limit, [2 * complete]: then those at the limit */
    const int32_t *masks;      /* [rows, words] */
    const uint8_t *bytes;      /* all token texts, concatenated; NULL if the marker consists of ids */
    const int32_t *starts;     /* [num_tokens + 1] */
    int64_t num_tokens;
    int64_t words; /* of a mask */
    int64_t limit; /* number of tokens after which only the marker is legal */
    int32_t complete; /* the state at the end of the marker */
} marker_table;

/* How far a row's text has advanced through its marker. */
typedef struct {
    const marker_table *table; /* NULL: the grammar applies from the start */
    int32_t *states;           /* [room] ring of states, indexed by the number of tokens */
    int64_t room;              /* one more than the longest rollback */
    int64_t num_free;          /* tokens up to the end of the marker */
    int64_t num_inner;         /* tokens after the marker */
} marker_progress;

/* Whether the text has not reached the end of the marker. Until then the grammar is not used. */
int before_marker_end(const marker_progress *marker);

/* Accept a token before the marker's end. Returns 1, or 0 and no change if it is not legal here. */
int accept_free_token(marker_progress *marker, int64_t token);

/* Write the mask of the tokens that are legal before the marker's end; returns its status. */
int32_t fill_free_mask(const marker_progress *marker, int32_t *mask, int64_t words);

/* Write the bytes that must come next, before the marker's end: the rest of the marker if the limit is reached. Returns their number. */
int64_t forced_marker_text(const marker_progress *marker, uint8_t *text, int64_t room);

/* Roll back the latest tokens. Returns how many of them the grammar must roll back: those after the marker. */
int64_t roll_back_marker(marker_progress *marker, int64_t tokens);
