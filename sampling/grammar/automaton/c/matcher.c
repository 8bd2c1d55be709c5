/* The matcher of an automaton: its place after each token, so that a rollback drops places. */

#include "image.h"

#include "../../link/c/host_link.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const int32_t *image;
    const image_vocabulary *vocabulary;
    image_place *places; /* [room]; the last one is places[tokens] */
    int64_t tokens, room;
    image_stack stack;
} automaton_matcher;

enum { FIRST_ROOM = 64 };

static int no_memory(char *error) {
    snprintf(error, FAULT_BYTES, "the matcher is out of memory");
    return -1;
}

static int grow_stack(automaton_matcher *matcher, int64_t nodes) {
    if (!matcher->image[IMAGE_SYMBOLS] || nodes <= matcher->stack.capacity) return 0;
    int32_t capacity = (int32_t)(nodes * 2);
    int32_t *symbols = realloc(matcher->stack.symbols, (size_t)capacity * sizeof *symbols);
    if (!symbols) return -1;
    matcher->stack.symbols = symbols;
    int32_t *parents = realloc(matcher->stack.parents, (size_t)capacity * sizeof *parents);
    if (!parents) return -1;
    matcher->stack.parents = parents;
    matcher->stack.capacity = capacity;
    return 0;
}

/* Room for one more place, and for as many nodes as a token may push. */
static int reserve(automaton_matcher *matcher) {
    if (matcher->tokens + 1 >= matcher->room) {
        image_place *places = realloc(matcher->places, (size_t)matcher->room * 2 * sizeof *places);
        if (!places) return -1;
        matcher->places = places;
        matcher->room *= 2;
    }
    return grow_stack(matcher, matcher->places[matcher->tokens].free + matcher->vocabulary->longest);
}

static int accept(const matcher_library *self, void *handle, int64_t token, char *error) {
    (void)self;
    automaton_matcher *matcher = handle;
    const image_vocabulary *vocabulary = matcher->vocabulary;
    if (token < 0 || token >= vocabulary->num_tokens || matcher->places[matcher->tokens].state < 0) return 0;
    if (reserve(matcher)) return no_memory(error);
    image_place now = matcher->places[matcher->tokens];
    if (vocabulary->stop_words[token / 32] >> (token % 32) & 1) {
        if (matcher->image[matcher->image[IMAGE_LEAVE] + now.state] != -2) return 0;
        now.state = -1;
    } else {
        const int32_t *start = vocabulary->starts + token;
        if (start[0] == start[1]) return 0; /* not text */
        if (image_walk(matcher->image, &now, &matcher->stack, vocabulary->text + start[0], start[1] - start[0]) <= 0) return 0;
    }
    matcher->places[++matcher->tokens] = now;
    return 1;
}

static int fill(const matcher_library *self, void *handle, int32_t *words, int64_t count, char *error) {
    (void)self, (void)count;
    automaton_matcher *matcher = handle;
    if (reserve(matcher)) return no_memory(error);
    return image_fill(matcher->image, matcher->vocabulary, matcher->places + matcher->tokens, &matcher->stack, words);
}

static int rollback(const matcher_library *self, void *handle, int64_t tokens, char *error) {
    (void)self;
    automaton_matcher *matcher = handle;
    if (tokens < 0 || tokens > matcher->tokens) {
        snprintf(error, FAULT_BYTES, "rollback: got %lld tokens, expected 0..%lld", (long long)tokens, (long long)matcher->tokens);
        return -1;
    }
    matcher->tokens -= tokens;
    return 0;
}

static int is_terminated(const matcher_library *self, void *handle, char *error) {
    (void)self, (void)error;
    const automaton_matcher *matcher = handle;
    return matcher->places[matcher->tokens].state < 0;
}

static int forced(const matcher_library *self, void *handle, char *text, int64_t room, char *error) {
    (void)self;
    automaton_matcher *matcher = handle;
    const image_place *now = matcher->places + matcher->tokens;
    if (grow_stack(matcher, now->free + room)) return no_memory(error);
    return (int)image_forced(matcher->image, now, &matcher->stack, (uint8_t *)text, room);
}

STEPGRAPH_API void stepgraph_close_automaton(void *handle) {
    automaton_matcher *matcher = handle;
    if (!matcher) return;
    free(matcher->places);
    free(matcher->stack.symbols);
    free(matcher->stack.parents);
    free(matcher);
}

/* A matcher at the start of a text; it borrows image and vocabulary. NULL without memory. */
STEPGRAPH_API void *stepgraph_open_automaton(const int32_t *image, const image_vocabulary *vocabulary) {
    automaton_matcher *matcher = calloc(1, sizeof *matcher);
    if (!matcher) return NULL;
    *matcher = (automaton_matcher){.image = image, .vocabulary = vocabulary, .room = FIRST_ROOM};
    matcher->places = malloc(FIRST_ROOM * sizeof *matcher->places);
    if (!matcher->places) {
        stepgraph_close_automaton(matcher);
        return NULL;
    }
    matcher->places[0] = image_start(image);
    return matcher;
}

STEPGRAPH_API const matcher_library stepgraph_automaton_functions = {accept, fill, rollback, is_terminated, forced};
