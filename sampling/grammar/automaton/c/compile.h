/* The C interface of automata. Python reads these declarations: see c_declarations.py. */

#pragma once

#include "image.h"

#define STEPGRAPH_API __attribute__((visibility("default")))

/* The parsed grammar of xgrammar: expressions as (kind, size, data...) at `offsets`, and the body of each rule. `formats`: 0, or a format
   that replaces the body: -1 for times; for host names twice the maximum length, plus 1 if no label may begin with "xn--".
   `shortest`: the bytes of the shortest text of each rule, or a large number. */
typedef struct {
    const int32_t *data, *offsets, *bodies, *formats, *shortest;
    int32_t num_expressions, num_rules, root;
    int32_t has_times; /* 0: the rule bodies of times are used instead of the format */
} parsed_grammar;

STEPGRAPH_API void *stepgraph_automaton_vocabulary(const uint8_t *text, const int32_t *starts, int32_t num_tokens, const int32_t *stops,
                                                   int32_t num_stops, const int32_t *hidden, int32_t num_hidden, int32_t words);
STEPGRAPH_API void stepgraph_automaton_free_vocabulary(void *vocabulary);
STEPGRAPH_API void stepgraph_automaton_view_vocabulary(const void *vocabulary, image_vocabulary *view);

/* Sets *image to the compiled grammar, or writes to `reason` why there is none. limits: the fields of Limits in nfa.h except the last. */
STEPGRAPH_API int stepgraph_automaton_compile(const parsed_grammar *grammar, const int64_t *limits, const void *vocabulary, int32_t **image,
                                              char *reason, int64_t reason_size);
STEPGRAPH_API void stepgraph_automaton_free_image(int32_t *image);

/* A matcher at the start of a text. It does not own the arguments. NULL if out of memory. */
STEPGRAPH_API void *stepgraph_open_automaton(const int32_t *image, const image_vocabulary *vocabulary);
STEPGRAPH_API void stepgraph_close_automaton(void *matcher);
