/* llguidance's matcher through the C API of its wheel. LLGuidanceMatcher in Python is the reference, fault by fault.

   Its errors are states that cannot be left again, and a dead end is one of them to it; to a round it is one draft's end. So the
   accepted tokens are kept here, and where a dead end is taken back they are accepted once more by a clone of the matcher that
   none has moved; and where a lexer has no room for another state, which others may have filled, by a clone of the one that has
   learnt nothing yet. Stop tokens are kept from the library, whose rollback miscounts them. */

#include "host_link.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST_ROOM = 256 };

struct llguidance_text {
    const void *pristine, *cold; /* what it began with, and that without what former texts have left in its lexer */
    void *matcher;
    const int32_t *stop_words; /* [words] a bit per stop token */
    uint32_t *history;         /* [room] text tokens that the library has taken */
    int64_t taken, room;
    int64_t filled; /* how many of them there were when a mask was last computed */
    int ended, dead_end, anew;
};

static int failed(const llguidance_library *library, const llguidance_text *text, const char *what, char *why) {
    const char *error = library->get_error(text->matcher);
    if (!error) error = "the library failed without an error";
    snprintf(why, FAULT_BYTES, "%s: %.*s", what, (int)strcspn(error, "\n"), error);
    return -1;
}

/* Whether the library has come to its end for want of a token that may follow. */
static int meets_dead_end(const llguidance_library *library, llguidance_text *text) {
    static const char told[] = "NoExtensionBias";
    const char *error = library->get_error(text->matcher);
    text->filled = text->taken;
    text->dead_end = error && !strncmp(error, told, sizeof told - 1);
    return text->dead_end;
}

static int remember(llguidance_text *text, uint32_t token) {
    if (text->taken == text->room) {
        int64_t room = 2 * text->room;
        uint32_t *history = realloc(text->history, (size_t)room * sizeof *history);
        if (!history) return 0;
        text->history = history;
        text->room = room;
    }
    text->history[text->taken++] = token;
    return 1;
}

static int begin_again(const llguidance_library *library, llguidance_text *text, char *why) {
    void *fresh = library->clone(text->pristine);
    library->free(text->matcher);
    text->matcher = fresh;
    text->dead_end = 0;
    text->filled = 0;
    if (!text->taken || !library->consume_tokens(fresh, text->history, (size_t)text->taken)) return 0;
    snprintf(why, FAULT_BYTES, "rollback: the tokens that were accepted are not accepted again");
    return -1;
}

static int is_full(const llguidance_library *library, void *matcher) {
    const char *error = library->get_error(matcher);
    return error && strstr(error, "too many states");
}

/* Whether the lexer was full, and a new one has taken the text so far. What still fails takes more than it may all by itself. */
static int begun_anew(const llguidance_library *library, llguidance_text *text) {
    char why[FAULT_BYTES];
    if (!is_full(library, text->matcher)) return 0;
    text->pristine = text->cold;
    text->anew = 1;
    return !begin_again(library, text, why);
}

/* A full lexer refuses tokens without a word: only a clone that is made to consume one says why. The first lexer of a text has met all
   that its masks allow; another one has not. */
static int refused_full(const llguidance_library *library, llguidance_text *text, uint32_t token) {
    if (!text->anew) return 0;
    void *asked = library->clone(text->matcher);
    library->consume_token(asked, token);
    char why[FAULT_BYTES];
    int full = is_full(library, asked);
    library->free(asked);
    return full && !begin_again(library, text, why);
}

/* 1 taken, 0 not allowed here, -1 where the library fails. */
static int take(const llguidance_library *library, llguidance_text *text, uint32_t token) {
    int32_t valid = library->validate_tokens(text->matcher, &token, 1);
    return valid > 0 && library->consume_token(text->matcher, token) ? -1 : valid;
}

/* Into `words`, or nowhere; 0 where the library did not fail. */
static int32_t compute(const llguidance_library *library, llguidance_text *text, int32_t *words, int64_t count) {
    if (!words) return library->compute_mask(text->matcher);
    return library->compute_mask_into(text->matcher, (uint32_t *)words, (size_t)count * sizeof *words);
}

static int accept(const matcher_library *self, void *matcher, int64_t wide, char *why) {
    const llguidance_library *library = (const llguidance_library *)self;
    llguidance_text *text = matcher;
    uint32_t token = (uint32_t)wide; /* below the row's number of tokens */
    if (text->dead_end) return 0;
    if ((uint32_t)text->stop_words[token / 32] >> (token % 32) & 1) return text->ended = library->is_accepting(text->matcher);
    int valid = take(library, text, token);
    if (valid < 0 ? begun_anew(library, text) : !valid && refused_full(library, text, token)) valid = take(library, text, token);
    if (valid < 0) return failed(library, text, "accept_token", why);
    if (valid && !remember(text, token)) {
        snprintf(why, FAULT_BYTES, "accept_token: no memory for %lld tokens", (long long)text->taken);
        return -1;
    }
    return valid;
}

static int fill(const matcher_library *self, void *matcher, int32_t *words, int64_t count, char *why) {
    const llguidance_library *library = (const llguidance_library *)self;
    llguidance_text *text = matcher;
    int32_t wrong = text->dead_end ? 0 : compute(library, text, words, count);
    if (wrong && begun_anew(library, text)) wrong = compute(library, text, words, count);
    if (!text->dead_end && !meets_dead_end(library, text)) return wrong ? failed(library, text, "fill_next_token_bitmask", why) : 0;
    memset(words, 0, (size_t)count * sizeof *words);
    return DEAD_END;
}

static int rollback(const matcher_library *self, void *matcher, int64_t tokens, char *why) {
    const llguidance_library *library = (const llguidance_library *)self;
    llguidance_text *text = matcher;
    int64_t count = tokens - text->ended;
    text->ended = 0;
    if (count <= 0) return 0;
    text->taken -= count;
    if (text->dead_end) return begin_again(library, text, why);
    if (library->rollback(text->matcher, (size_t)count)) return begun_anew(library, text) ? 0 : failed(library, text, "rollback", why);
    if (text->taken >= text->filled) return 0;
    /* The library keeps its latest mask by the number of items and the state of its lexer. Along another path both may come up
       again over other items: only a mask computed here, where the paths part, drops the old one. */
    int32_t wrong = compute(library, text, NULL, 0);
    if (wrong && begun_anew(library, text)) return 0;
    return !meets_dead_end(library, text) && wrong ? failed(library, text, "rollback", why) : 0;
}

static int is_terminated(const matcher_library *self, void *matcher, char *why) {
    (void)self, (void)why;
    return ((const llguidance_text *)matcher)->ended;
}

/* Its C API tells forced tokens only, as a tokenizer of its own would write them. */
static int forced(const matcher_library *self, void *matcher, char *text, int64_t room, char *why) {
    (void)self, (void)matcher, (void)text, (void)room, (void)why;
    return 0;
}

void stepgraph_bind_llguidance(llguidance_library *library) {
    library->functions = (matcher_library){accept, fill, rollback, is_terminated, forced};
}

/* A text that begins with these tokens; NULL where there is no memory, or where it may not. */
llguidance_text *stepgraph_open_llguidance(const llguidance_library *library, const void *pristine, const void *cold,
                                           const int32_t *stop_words, const uint32_t *tokens, int64_t count) {
    llguidance_text *text = calloc(1, sizeof *text);
    uint32_t *history = malloc(FIRST_ROOM * sizeof *history);
    void *matcher = text && history ? library->clone(pristine) : NULL;
    if (!matcher) {
        free(history);
        free(text);
        return NULL;
    }
    *text = (llguidance_text){
        .pristine = pristine, .cold = cold, .matcher = matcher, .stop_words = stop_words, .history = history, .room = FIRST_ROOM,
    };
    char why[FAULT_BYTES];
    for (int64_t place = 0; place < count; place++) {
        if (accept(&library->functions, text, tokens[place], why) == 1) continue;
        stepgraph_close_llguidance(library, text, 0);
        return NULL;
    }
    return text;
}

/* The matcher, back at the start of a text and with all that its lexer has learnt on the way; NULL where it is not kept, or failed.
   The mask that is computed drops the one that the library kept, as in `rollback`. */
void *stepgraph_close_llguidance(const llguidance_library *library, llguidance_text *text, int keep) {
    void *matcher = text->matcher;
    if (!keep || text->dead_end || library->get_error(matcher) || library->reset(matcher) || library->compute_mask(matcher)) {
        library->free(matcher);
        matcher = NULL;
    }
    free(text->history);
    free(text);
    return matcher;
}
