/* What Python and C share of the native host link. layout.py holds the same structs, field by field, and compares their sizes.

   Nothing here knows the Python interpreter: a host node runs on whatever thread calls it, without the GIL. */

#ifndef STEPGRAPH_HOST_LINK_H
#define STEPGRAPH_HOST_LINK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { LAYOUT_VERSION = 9, FAULT_BYTES = 480, MAX_SLOTS = 4096, FORCED_BYTES = 128, NODE_BOUNDS = 9 };

/* status.py, number by number. */
enum { OWNER, GENERATED, LAST_TOKEN, ACCEPTED, FINISH, HOST_COLUMNS };
enum { TAG_FIELDS = 4, ROW_RUNNING = 1 };
enum { NONE, OK, COMPLETE, TERMINATED, DEAD_END, ILLEGAL, FAULT };

/* host_link.py, number by number: what a host node does, in the order of its steps. */
enum { BEGIN_ROUND, FILL_NEW, COMMIT, ADVANCE, END_ROUND };

/* All that a row asks of a grammar library. A function that fails returns -1 and says why in FAULT_BYTES of text. `fill`
   returns 0, and the row sorts out what is legal and what that means; or, of a library that does so itself, the status. */
typedef struct matcher_library matcher_library;
struct matcher_library {
    int (*accept)(const matcher_library *self, void *matcher, int64_t token, char *why); /* 1 taken, 0 not allowed here */
    int (*fill)(const matcher_library *self, void *matcher, int32_t *words, int64_t count, char *why);
    int (*rollback)(const matcher_library *self, void *matcher, int64_t tokens, char *why);
    int (*is_terminated)(const matcher_library *self, void *matcher, char *why);
    int (*forced)(const matcher_library *self, void *matcher, char *text, int64_t room, char *why); /* how much must come next */
};

/* The texts of a vocabulary in sorted order, to be looked up by their bytes: forced_tokens.TokenTable. */
typedef struct {
    const uint8_t *texts;
    const int32_t *starts;  /* [texts + 1] */
    const int32_t *ids;     /* [texts] */
    const int32_t *places;  /* [num_tokens] of each token's text, -1 where it has none */
    const int32_t *buckets; /* [65537] where the texts start that begin with two bytes */
    const int32_t *singles; /* [256] the token of a byte, -1 where there is none */
    int64_t num_tokens;
    int32_t longest; /* bytes of a text */
    int32_t merges;  /* 1: made by merging neighbours; 0: the longest token that fits is taken */
} token_table;

/* A row's forced text, in tokens from the place where it was looked for; it serves as long as the history follows it. */
typedef struct {
    int64_t start; /* tokens in front of it */
    int32_t size, count;
    int32_t tokens[FORCED_BYTES];
    uint8_t ends[FORCED_BYTES]; /* where in the text each token ends */
    char text[FORCED_BYTES];
} forced_text;

/* What a text has to come to before its grammar begins: marker.Marker. A state is how much of it the text ends with. */
typedef struct {
    const int32_t *symbols;    /* [complete] its bytes, or its token ids */
    const int32_t *shorter;    /* [complete] of each beginning of it: the longest shorter one that it ends with */
    const int32_t *rows;       /* [complete] which mask is that of a state */
    const int32_t *masks;      /* [.., words] */
    const int32_t *text_words; /* [words] a bit per id that stands for text */
    const uint8_t *bytes;      /* of all tokens, one behind the other; NULL where the marker is of ids */
    const int32_t *starts;     /* [num_tokens + 1] */
    int64_t num_tokens;
    int32_t complete; /* the state in which the text ends with all of it */
} marker_table;

typedef struct {
    const marker_table *table; /* NULL: the grammar begins at once */
    int32_t *states;           /* [room] behind each of the latest tokens up to the marker's end */
    int64_t room;              /* one more than may be taken back */
    int64_t taken;             /* tokens up to the marker's end */
    int64_t behind;            /* it */
} marker_text;

/* The masks that tokens are held against, each at the place where it was filled. */
typedef struct {
    const char *backend; /* the library's name; NULL: nothing is checked */
    int32_t *masks;      /* [room, words] */
    int64_t *places;     /* [room] how many tokens were in front of each; -1 where there is none */
    int64_t room, words;
    int64_t accepted;
} checked_masks;

/* One constrained request. From its first round to its last only host nodes touch it; Python reads the fault through
   `stepgraph_fault`, and keeps row and matcher alive until every round that was announced with them has ended. */
typedef struct {
    const matcher_library *library;
    void *matcher;
    const int32_t *text_words; /* [words] a bit per id that stands for text; NULL where the library knows such things itself */
    const int32_t *stop_words; /* [words] a bit per stop token */
    const int32_t *mixed;      /* [num_mixed] which of text_words are not all ones */
    int64_t num_mixed;
    int64_t num_tokens;
    int64_t owner;
    int64_t committed; /* tokens of the history that the matcher has accepted for good */
    int64_t pending_drafts;    /* drafts accepted on top of them */
    int64_t fills;
    double fuel_seconds; /* processor time that one call of the library may take */
    int32_t last_mask_status;       /* status of the newest mask row; drafts go on only after OK */
    int32_t open;        /* the library has said that the text is not over, and no stop token was accepted since */
    atomic_int faulted;  /* set after `fault` was written */
    char fault[FAULT_BYTES];
    forced_text forced;
    marker_text marker;
    checked_masks checked;
} matcher_row;

/* The pinned memory of a round, and how much of everything there is. */
typedef struct {
    const int64_t *state;  /* [slots, HOST_COLUMNS] */
    const int64_t *drafts; /* [stages - 1, slots], -1 where there is none */
    int32_t *masks;        /* [stages, slots, words] */
    int64_t *tags;         /* [stages, slots, TAG_FIELDS] */
    int64_t *forced;       /* [stages - 1, slots] the token that a place is forced to, -1 where none is; NULL: none is looked for */
    const token_table *tokens;
    int64_t slots;
    int64_t stages;
    int64_t words;
    int64_t depth;   /* rounds that may be announced and not yet ended */
    int64_t helpers; /* threads besides the one that calls a node */
} link_shape;

typedef struct host_link host_link;

typedef struct {
    int32_t action;
    int32_t index; /* of FILL_NEW: the stage; of ADVANCE: the draft, from 1 */
} host_step;

/* The data of one host node. */
typedef struct {
    host_link *link;
    const host_step *steps;
    int64_t count;
} host_node;

typedef struct {
    int64_t fills, accepts, rollbacks;
    int64_t looks;                    /* for a forced text */
    int64_t node_ns, longest_node_ns; /* by the clock */
    int64_t nodes[NODE_BOUNDS + 1];   /* that took at most each of host_link.py's bounds, then the rest */
    int64_t ended;                    /* rounds whose rows no node will touch again */
    int64_t missed;                   /* rounds that began without an announcement */
} link_counts;

/* xgrammar behind tvm-ffi's C ABI. The function objects are kept alive by Python. */
typedef struct tvm_any tvm_any;
typedef struct {
    matcher_library functions;
    int (*call)(void *function, tvm_any *arguments, int32_t count, tvm_any *result); /* TVMFFIFunctionCall */
    void (*take_error)(void **error);                                               /* TVMFFIErrorMoveFromRaised */
    int (*release)(void *object);                                                   /* TVMFFIObjectDecRef */
    void *accept_token, *fill_next_token_bitmask, *rollback, *is_terminated, *find_jump_forward_string;
    int32_t matcher_type;
} xgrammar_library;

/* llguidance's C API. */
typedef struct llguidance_text llguidance_text; /* a matcher, and what it takes to leave its dead ends */
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
    const char *(*get_error)(void *matcher); /* NULL where there is none */
    void *(*clone)(const void *matcher);
    void (*free)(void *matcher);
} llguidance_library;

/* One of several calls that `stepgraph_run_calls` makes in a row. */
typedef struct {
    void (*function)(void *data);
    void *data;
    double finished; /* CLOCK_MONOTONIC, in seconds */
} timed_call;

typedef struct {
    timed_call *calls;
    int64_t count;
} call_list;

#define STEPGRAPH_API __attribute__((visibility("default")))

STEPGRAPH_API int64_t stepgraph_layout(int64_t *values, int64_t room);
STEPGRAPH_API host_link *stepgraph_open(const link_shape *shape);
STEPGRAPH_API void stepgraph_close(host_link *link);
STEPGRAPH_API int stepgraph_push_batch(host_link *link, matcher_row *const *rows, int64_t count);
STEPGRAPH_API void stepgraph_log(host_link *link, int64_t *log, int64_t room);
STEPGRAPH_API void stepgraph_counts(host_link *link, link_counts *counts);
STEPGRAPH_API const char *stepgraph_fault(matcher_row *row);
STEPGRAPH_API void stepgraph_node(void *node);
STEPGRAPH_API void stepgraph_bind_xgrammar(xgrammar_library *library);
STEPGRAPH_API void stepgraph_bind_llguidance(llguidance_library *library);
STEPGRAPH_API llguidance_text *stepgraph_open_llguidance(const llguidance_library *library, const void *pristine, const void *cold,
                                                             const int32_t *stop_words, const uint32_t *tokens, int64_t count);
STEPGRAPH_API void *stepgraph_close_llguidance(const llguidance_library *library, llguidance_text *text, int keep);
STEPGRAPH_API void stepgraph_run_calls(void *list);

#endif
