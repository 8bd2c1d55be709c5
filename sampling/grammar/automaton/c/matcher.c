/* The matcher of an automaton: its place after each token and the symbols that each token popped, so that a rollback restores a place. */

#include "compile.h"

#include "../../link/c/host_link.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    image_place place;
    int32_t kept; /* number of symbols of the stack before the token that remain after it */
} token_place;

typedef struct {
    const int32_t *image;
    const image_vocabulary *vocabulary;
    token_place *places; /* [room]; the last one is places[tokens] */
    int64_t tokens, room;
    int32_t *stack; /* [IMAGE_DEPTH] */
    int32_t *popped; /* [popped_room] the symbols popped by each token, in the order of the tokens */
    int64_t num_popped, popped_room;
} automaton_matcher;

enum { FIRST_ROOM = 64 };
_Static_assert(sizeof(image_written) == WRITTEN * sizeof(int32_t), "image_written must fill mask_content.written");

static int no_memory(char *error) {
    snprintf(error, FAULT_BYTES, "the matcher is out of memory");
    return -1;
}

/* `array` with room for `size` > 0 elements, reallocated if it had less. NULL if out of memory; then nothing has changed. */
static void *with_room(void *array, int64_t *room, int64_t size, size_t element) {
    if (size <= *room) return array;
    void *grown = realloc(array, (size_t)size * 2 * element);
    if (grown) *room = size * 2;
    return grown;
}

static int accept(const matcher_library *self, void *handle, int64_t token, char *error) {
    (void)self;
    automaton_matcher *matcher = handle;
    const image_place *before = &matcher->places[matcher->tokens].place;
    image_walk walk;
    image_begin(&walk, before, matcher->stack);
    if (!image_accept(matcher->image, matcher->vocabulary, &walk, token)) return 0;
    int32_t num_popped = before->depth - walk.kept;
    int32_t *popped = with_room(matcher->popped, &matcher->popped_room, matcher->num_popped + num_popped + 1, sizeof *popped);
    if (!popped) return no_memory(error);
    matcher->popped = popped;
    token_place *places = with_room(matcher->places, &matcher->room, matcher->tokens + 2, sizeof *places);
    if (!places) return no_memory(error);
    matcher->places = places;
    memcpy(popped + matcher->num_popped, matcher->stack + walk.kept, (size_t)num_popped * sizeof *matcher->popped);
    matcher->num_popped += num_popped;
    image_copy_stack(&walk, matcher->stack);
    matcher->tokens++;
    places[matcher->tokens] = (token_place){image_within_limit(matcher->image, walk.place, matcher->tokens), walk.kept};
    return 1;
}

static int fill(const matcher_library *self, void *handle, int32_t *words, int64_t count, int32_t *written, char *error) {
    (void)self, (void)count, (void)error;
    automaton_matcher *matcher = handle;
    const image_place *place = &matcher->places[matcher->tokens].place;
    return image_fill(matcher->image, matcher->vocabulary, place, matcher->stack, words, (image_written *)written);
}

static int rollback(const matcher_library *self, void *handle, int64_t tokens, char *error) {
    (void)self;
    automaton_matcher *matcher = handle;
    if (tokens < 0 || tokens > matcher->tokens) {
        snprintf(error, FAULT_BYTES, "rollback of %lld of %lld tokens", (long long)tokens, (long long)matcher->tokens);
        return -1;
    }
    for (; tokens > 0; tokens--) {
        int32_t kept = matcher->places[matcher->tokens--].kept, popped = matcher->places[matcher->tokens].place.depth - kept;
        matcher->num_popped -= popped;
        memcpy(matcher->stack + kept, matcher->popped + matcher->num_popped, (size_t)popped * sizeof *matcher->stack);
    }
    return 0;
}

static int is_terminated(const matcher_library *self, void *handle, char *error) {
    (void)self, (void)error;
    const automaton_matcher *matcher = handle;
    return matcher->places[matcher->tokens].place.state == IMAGE_ENDED;
}

static int forced(const matcher_library *self, void *handle, char *text, int64_t room, char *error) {
    (void)self, (void)error;
    automaton_matcher *matcher = handle;
    return (int)image_forced(matcher->image, &matcher->places[matcher->tokens].place, matcher->stack, (uint8_t *)text, room);
}

void stepgraph_close_automaton(void *handle) {
    automaton_matcher *matcher = handle;
    if (!matcher) return;
    free(matcher->places);
    free(matcher->stack);
    free(matcher->popped);
    free(matcher);
}

void *stepgraph_open_automaton(const int32_t *image, const image_vocabulary *vocabulary) {
    automaton_matcher *matcher = calloc(1, sizeof *matcher);
    if (!matcher) return NULL;
    *matcher = (automaton_matcher){.image = image, .vocabulary = vocabulary, .room = FIRST_ROOM};
    matcher->places = malloc(FIRST_ROOM * sizeof *matcher->places);
    matcher->stack = malloc((size_t)(image[IMAGE_DEPTH] + 1) * sizeof *matcher->stack); /* + 1: malloc(0) may return NULL */
    if (!matcher->places || !matcher->stack) {
        stepgraph_close_automaton(matcher);
        return NULL;
    }
    matcher->places[0] = (token_place){.place = image_start(image)};
    return matcher;
}

STEPGRAPH_API const matcher_library stepgraph_automaton_functions = {accept, fill, rollback, is_terminated, forced};
