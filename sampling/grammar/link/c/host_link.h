/* Structs and constants that Python and C share for the native host link. c_declarations.py reads them from this text and from the headers
   included here; the loader compares sizes with those of the compiled library.

   Nothing here uses the Python interpreter: a host node runs without the GIL on whatever thread calls it. */

#pragma once

#include "forced.h"
#include "marker.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { LAYOUT_VERSION = 16, FAULT_BYTES = 480, NODE_BOUNDS = 9, WRITTEN = 32 };

/* Same values as in status.py. */
enum { OWNER, GENERATED, LAST_TOKEN, ACCEPTED, FINISH, HOST_COLUMNS };
enum { TAG_FIELDS = 4, ROW_RUNNING = 1 };
enum { NONE, OK, COMPLETE, TERMINATED, DEAD_END, ILLEGAL, FAULT };

/* The steps of a host node. Same values as protocol.HostAction. */
enum { BEGIN_ROUND, NEXT, COMMIT, ADVANCE, FOLLOW, END_ROUND };

typedef struct matcher_row matcher_row;

/* The functions of a grammar library. A function that fails returns -1 and writes the reason to `error` (FAULT_BYTES). */
typedef struct matcher_library matcher_library;
struct matcher_library {
    int (*accept)(const matcher_library *self, void *matcher, int64_t token, char *error); /* 1 accepted, 0 not legal here */
    /* Returns 0 if the caller must clear illegal bits and derive the status; or the status, if the library has done both. A library may
       write WRITTEN numbers to `written`. The next fill of the same words for the same grammar gets these numbers if nothing else was
       written to the words; otherwise the first one is -1. */
    int (*fill)(const matcher_library *self, void *matcher, int32_t *words, int64_t count, int32_t *written, char *error);
    int (*rollback)(const matcher_library *self, void *matcher, int64_t tokens, char *error);
    int (*is_terminated)(const matcher_library *self, void *matcher, char *error);
    /* Writes the bytes that must come next, at most `room`, and returns their number. */
    int (*forced)(const matcher_library *self, void *matcher, char *text, int64_t room, char *error);
};

/* The content of a mask: the grammar for which it was filled, and the numbers `written` by the library. Grammar 0: unknown. */
typedef struct {
    int64_t grammar;
    int32_t written[WRITTEN];
} mask_content;

/* One constrained request. Only host nodes access it from its first round to its last. Python reads the fault with
   `stepgraph_fault` and keeps row and matcher alive until every round that was pushed with them has ended. */
struct matcher_row {
    const matcher_library *library;
    void *matcher;
    const int32_t *text_words;    /* [words] one bit per text token; NULL if the library checks ids itself */
    const int32_t *stop_words;    /* [words] one bit per stop token */
    const int32_t *partial_words; /* [num_partial] indices of the text_words that are not all ones */
    int64_t num_partial;
    int64_t num_tokens;
    int64_t owner;
    int64_t grammar;          /* positive number of a grammar whose masks are looked up; 0: they are computed, `written` is not used */
    int64_t committed;        /* tokens of the history that the matcher has accepted permanently */
    int64_t pending_drafts;   /* drafts accepted after the committed tokens */
    int64_t next_mask;        /* index after the latest mask that was due */
    double fuel_seconds;      /* processor time limit of one library call */
    int32_t last_mask_status; /* drafts are accepted only after OK */
    int32_t known_open;       /* the library has reported "not terminated" and no stop token was accepted since */
    atomic_int faulted;       /* set after `fault` was written */
    marker_progress marker;
    forced_text forced;
    char fault[FAULT_BYTES];
};

/* The pinned memory of a round and its sizes. */
typedef struct {
    const int64_t *state;  /* [slots, HOST_COLUMNS] */
    const int64_t *drafts; /* [stages - 1, slots], -1: no draft */
    int32_t *masks;        /* [stages, slots, words] */
    mask_content *contents; /* [stages, slots] content of each mask */
    int64_t *tags;         /* [stages, slots, TAG_FIELDS] */
    int64_t *forced;       /* [stages - 1, slots] the forced token after each mask, -1: none; NULL: forced tokens are not searched */
    const token_table *tokens;
    int64_t slots;
    int64_t stages;
    int64_t words;
    int64_t depth;   /* maximum number of rounds that are pushed and not ended */
    int64_t helpers; /* threads in addition to the one that calls a node */
    int64_t node_bounds_ns[NODE_BOUNDS]; /* bounds of the histogram of node times */
} link_shape;

typedef struct host_link host_link;

typedef struct {
    int32_t action;
    int32_t stage; /* NEXT, ADVANCE, FOLLOW: the mask row to fill, from 1; its draft is in row stage - 1 */
} host_step;

/* The data of one host node. */
typedef struct {
    host_link *link;
    const host_step *steps;
    int64_t count;
} host_node;

/* Counters of a link, then its histogram of node times: the number of nodes up to each bound of node_bounds_ns, and beyond the last.
   ENDED: rounds whose rows no node will access again. MISSED: rounds without a pushed batch. LOOKS: searches for forced text. */
enum { ENDED, MISSED, FILLS, ACCEPTS, ROLLBACKS, LOOKS, NODE_NS, LONGEST_NODE_NS, NODES, COUNTS = NODES + NODE_BOUNDS + 1 };

/* xgrammar over tvm-ffi's C ABI. Python keeps the function objects alive. */
typedef struct tvm_any tvm_any;
typedef struct {
    matcher_library functions;
    int (*call)(void *function, tvm_any *arguments, int32_t count, tvm_any *result); /* TVMFFIFunctionCall */
    void (*take_error)(void **error);                                               /* TVMFFIErrorMoveFromRaised */
    int (*release)(void *object);                                                   /* TVMFFIObjectDecRef */
    void *accept_token, *fill_next_token_bitmask, *rollback, *is_terminated, *find_jump_forward_string;
    int32_t matcher_type;
} xgrammar_library;

/* llguidance's C API, and the matcher of a row that uses it. */
typedef struct llguidance_matcher llguidance_matcher; /* the library's matcher and the history needed to rebuild it */
typedef struct {
    matcher_library functions;
    int32_t (*compute_mask_into)(void *matcher, uint32_t *words, size_t bytes);
    int32_t (*compute_mask)(void *matcher);
    int32_t (*validate_tokens)(void *matcher, const uint32_t *tokens, size_t count);
    int32_t (*consume_token)(void *matcher, uint32_t token);
    int32_t (*consume_tokens)(void *matcher, const uint32_t *tokens, size_t count);
    int32_t (*rollback)(void *matcher, size_t tokens);
    int32_t (*reset)(void *matcher);
    bool (*is_accepting)(void *matcher);
    const char *(*get_error)(void *matcher); /* NULL: no error */
    void *(*clone)(const void *matcher);
    void (*free)(void *matcher);
} llguidance_library;

#define STEPGRAPH_API __attribute__((visibility("default")))

STEPGRAPH_API host_link *stepgraph_open(const link_shape *shape);
STEPGRAPH_API void stepgraph_close(host_link *link);
STEPGRAPH_API int stepgraph_push_batch(host_link *link, matcher_row *const *rows, int64_t count);
STEPGRAPH_API void stepgraph_log(host_link *link, int64_t *log, int64_t room);
STEPGRAPH_API void stepgraph_counts(const host_link *link, int64_t *counts);
STEPGRAPH_API const char *stepgraph_fault(matcher_row *row);
STEPGRAPH_API void stepgraph_node(void *node); /* as CUhostFn */
STEPGRAPH_API void stepgraph_bind_xgrammar(xgrammar_library *library);
STEPGRAPH_API void stepgraph_bind_llguidance(llguidance_library *library);
STEPGRAPH_API llguidance_matcher *stepgraph_open_llguidance(const llguidance_library *library, const void *start,
                                                                const void *cold_start, const int32_t *stop_words,
                                                                const uint32_t *tokens, int64_t count);
STEPGRAPH_API void *stepgraph_close_llguidance(const llguidance_library *library, llguidance_matcher *matcher, int keep);
