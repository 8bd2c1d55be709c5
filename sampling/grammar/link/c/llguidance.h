/* llguidance's C API, and the matcher that a row holds for it. */

#pragma once

#include "host_link.h"

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

STEPGRAPH_API void stepgraph_bind_llguidance(llguidance_library *library);
STEPGRAPH_API llguidance_matcher *stepgraph_open_llguidance(const llguidance_library *library, const void *start,
                                                                const void *cold_start, const int32_t *stop_words,
                                                                const uint32_t *tokens, int64_t count);
STEPGRAPH_API void *stepgraph_close_llguidance(const llguidance_library *library, llguidance_matcher *matcher, int keep);
