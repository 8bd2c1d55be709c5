/* llguidance's matcher through the C API of its wheel. LLGuidanceText in Python is the reference, including its faults.

   An error of the library is permanent, and the library treats a dead end as an error, while for a round a dead end only ends one
   draft. So the accepted tokens are kept here. When a dead end is rolled back, a clone of the unused start matcher accepts them
   again. When the lexer has no room for another state, possibly because of earlier texts, a clone of the start matcher with an
   empty lexer accepts them again. Stop tokens are not passed to the library because its rollback miscounts them. */

#include "host_link.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INITIAL_ROOM = 256 };

struct llguidance_matcher {
    const void *start;         /* matcher at the start of the text, used for clones only */
    const void *cold_start;    /* as `start`, with an empty lexer */
    void *current;
    const int32_t *stop_words; /* [words] one bit per stop token */
    uint32_t *history;         /* [room] text tokens that the library has accepted */
    int64_t size, room;
    int64_t filled; /* size of the history when a mask was last computed */
    int ended, dead_end, restarted_cold;
};

static int failed(const llguidance_library *library, const llguidance_matcher *matcher, const char *what, char *error) {
    const char *message = library->get_error(matcher->current);
    if (!message) message = "the library failed without an error";
    snprintf(error, FAULT_BYTES, "%s: %.*s", what, (int)strcspn(message, "\n"), message);
    return -1;
}

/* Updates and returns `dead_end`: whether the library stopped because no token can follow. */
static int update_dead_end(const llguidance_library *library, llguidance_matcher *matcher) {
    static const char prefix[] = "NoExtensionBias";
    const char *message = library->get_error(matcher->current);
    matcher->filled = matcher->size;
    matcher->dead_end = message && !strncmp(message, prefix, sizeof prefix - 1);
    return matcher->dead_end;
}

static int append(llguidance_matcher *matcher, uint32_t token) {
    if (matcher->size == matcher->room) {
        int64_t room = 2 * matcher->room;
        uint32_t *history = realloc(matcher->history, (size_t)room * sizeof *history);
        if (!history) return 0;
        matcher->history = history;
        matcher->room = room;
    }
    matcher->history[matcher->size++] = token;
    return 1;
}

/* Replaces the current matcher with a clone of the start that has accepted the history. */
static int restart(const llguidance_library *library, llguidance_matcher *matcher, char *error) {
    void *fresh = library->clone(matcher->start);
    library->free(matcher->current);
    matcher->current = fresh;
    matcher->dead_end = 0;
    matcher->filled = 0;
    if (!matcher->size || !library->consume_tokens(fresh, matcher->history, (size_t)matcher->size)) return 0;
    snprintf(error, FAULT_BYTES, "rollback: the tokens that were accepted are not accepted again");
    return -1;
}

static int is_lexer_full(const llguidance_library *library, void *current) {
    const char *message = library->get_error(current);
    return message && strstr(message, "too many states");
}

/* Whether the lexer was full and has been replaced by an empty one. If the step fails again, it exceeds the limit by itself. */
static int restarted_full(const llguidance_library *library, llguidance_matcher *matcher) {
    char error[FAULT_BYTES];
    if (!is_lexer_full(library, matcher->current)) return 0;
    matcher->start = matcher->cold_start;
    matcher->restarted_cold = 1;
    return !restart(library, matcher, error);
}

/* As `restarted_full`, for a rejected token. A full lexer rejects tokens without an error; only a clone that must consume the token
   reports one. The first lexer of a text already has every state that its masks allow; a lexer from `cold_start` does not. */
static int restarted_rejecting(const llguidance_library *library, llguidance_matcher *matcher, uint32_t token) {
    if (!matcher->restarted_cold) return 0;
    void *clone = library->clone(matcher->current);
    library->consume_token(clone, token);
    char error[FAULT_BYTES];
    int full = is_lexer_full(library, clone);
    library->free(clone);
    return full && !restart(library, matcher, error);
}

/* 1 accepted, 0 not legal here, -1 if the library fails. */
static int consume(const llguidance_library *library, llguidance_matcher *matcher, uint32_t token) {
    int32_t valid = library->validate_tokens(matcher->current, &token, 1);
    return valid > 0 && library->consume_token(matcher->current, token) ? -1 : valid;
}

/* 0 unless the library fails. */
static int32_t compute(const llguidance_library *library, llguidance_matcher *matcher, int32_t *words, int64_t count) {
    if (!words) return library->compute_mask(matcher->current);
    return library->compute_mask_into(matcher->current, (uint32_t *)words, (size_t)count * sizeof *words);
}

static int accept(const matcher_library *self, void *opaque, int64_t id, char *error) {
    const llguidance_library *library = (const llguidance_library *)self;
    llguidance_matcher *matcher = opaque;
    uint32_t token = (uint32_t)id; /* less than the row's num_tokens */
    if (matcher->dead_end) return 0;
    if ((uint32_t)matcher->stop_words[token / 32] >> (token % 32) & 1) return matcher->ended = library->is_accepting(matcher->current);
    int valid = consume(library, matcher, token);
    int restarted = valid < 0 ? restarted_full(library, matcher) : !valid && restarted_rejecting(library, matcher, token);
    if (restarted) valid = consume(library, matcher, token);
    if (valid < 0) return failed(library, matcher, "accept_token", error);
    if (valid && !append(matcher, token)) {
        snprintf(error, FAULT_BYTES, "accept_token: no memory for %lld tokens", (long long)matcher->size);
        return -1;
    }
    return valid;
}

static int fill(const matcher_library *self, void *opaque, int32_t *words, int64_t count, int32_t *written, char *error) {
    (void)written;
    const llguidance_library *library = (const llguidance_library *)self;
    llguidance_matcher *matcher = opaque;
    int32_t failure = matcher->dead_end ? 0 : compute(library, matcher, words, count);
    if (failure && restarted_full(library, matcher)) failure = compute(library, matcher, words, count);
    if (!matcher->dead_end && !update_dead_end(library, matcher))
        return failure ? failed(library, matcher, "fill_next_token_bitmask", error) : 0;
    memset(words, 0, (size_t)count * sizeof *words);
    return DEAD_END;
}

static int rollback(const matcher_library *self, void *opaque, int64_t tokens, char *error) {
    const llguidance_library *library = (const llguidance_library *)self;
    llguidance_matcher *matcher = opaque;
    int64_t count = tokens - matcher->ended;
    matcher->ended = 0;
    if (count <= 0) return 0;
    matcher->size -= count;
    if (matcher->dead_end) return restart(library, matcher, error);
    if (library->rollback(matcher->current, (size_t)count))
        return restarted_full(library, matcher) ? 0 : failed(library, matcher, "rollback", error);
    if (matcher->size >= matcher->filled) return 0;
    /* The library caches its latest mask by the number of items and the lexer state. Another path can reach the same pair with
       other items. Only computing a mask here, at the point where the paths diverge, drops the cached one. */
    int32_t failure = compute(library, matcher, NULL, 0);
    if (failure && restarted_full(library, matcher)) return 0;
    return !update_dead_end(library, matcher) && failure ? failed(library, matcher, "rollback", error) : 0;
}

static int is_terminated(const matcher_library *self, void *opaque, char *error) {
    (void)self, (void)error;
    return ((const llguidance_matcher *)opaque)->ended;
}

/* The C API reports forced text only as tokens of its own tokenizer. */
static int forced(const matcher_library *self, void *opaque, char *text, int64_t room, char *error) {
    (void)self, (void)opaque, (void)text, (void)room, (void)error;
    return 0;
}

void stepgraph_bind_llguidance(llguidance_library *library) {
    library->functions = (matcher_library){accept, fill, rollback, is_terminated, forced};
}

/* A matcher that has accepted these tokens; NULL if memory is exhausted or a token is not accepted. */
llguidance_matcher *stepgraph_open_llguidance(const llguidance_library *library, const void *start, const void *cold_start,
                                              const int32_t *stop_words, const uint32_t *tokens, int64_t count) {
    llguidance_matcher *matcher = calloc(1, sizeof *matcher);
    uint32_t *history = malloc(INITIAL_ROOM * sizeof *history);
    void *current = matcher && history ? library->clone(start) : NULL;
    if (!current) {
        free(history);
        free(matcher);
        return NULL;
    }
    *matcher = (llguidance_matcher){
        .start = start, .cold_start = cold_start, .current = current, .stop_words = stop_words, .history = history, .room = INITIAL_ROOM,
    };
    char error[FAULT_BYTES];
    for (int64_t index = 0; index < count; index++) {
        if (accept(&library->functions, matcher, tokens[index], error) == 1) continue;
        stepgraph_close_llguidance(library, matcher, 0);
        return NULL;
    }
    return matcher;
}

/* Frees the matcher. With `keep` it returns the library's matcher, reset to the start of the text, whose lexer has all states
   that this text needed; NULL if that fails. Computing a mask drops the mask that the library has cached, as in `rollback`. */
void *stepgraph_close_llguidance(const llguidance_library *library, llguidance_matcher *matcher, int keep) {
    void *current = matcher->current;
    if (!keep || matcher->dead_end || library->get_error(current) || library->reset(current) || library->compute_mask(current)) {
        library->free(current);
        current = NULL;
    }
    free(matcher->history);
    free(matcher);
    return current;
}
