/* See matcher.h. */

#include "matcher.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int64_t ns_of(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static double seconds_of(clockid_t clock) { return (double)ns_of(clock) * 1e-9; }

/* Reading the processor time of a thread is a system call that can cost more than a library call. It is read at most once
   per tenth of the fuel, and again only if a call exceeded its fuel by wall clock. */
static _Thread_local struct { double wall, processor; } stamp;

double start_of_call(const matcher_row *row) {
    if (isinf(row->fuel_seconds)) return 0;
    double wall = seconds_of(CLOCK_MONOTONIC);
    if (!(wall - stamp.wall < row->fuel_seconds / 10)) {
        stamp.wall = wall;
        stamp.processor = seconds_of(CLOCK_THREAD_CPUTIME_ID);
    }
    return wall;
}

void end_of_call(matcher_row *row, double start) {
    if (isinf(row->fuel_seconds) || seconds_of(CLOCK_MONOTONIC) - start <= row->fuel_seconds) return;
    double spent = seconds_of(CLOCK_THREAD_CPUTIME_ID) - stamp.processor - (start - stamp.wall); /* lower bound for this call */
    if (spent > row->fuel_seconds)
        fail(row, "one step of the grammar took %.3f s, more than the %g s that it may take", spent, row->fuel_seconds);
}

int faulted(matcher_row *row) { return atomic_load_explicit(&row->faulted, memory_order_relaxed); }

void fail(matcher_row *row, const char *format, ...) {
    if (faulted(row)) return;
    va_list values;
    va_start(values, format);
    vsnprintf(row->fault, FAULT_BYTES, format, values);
    va_end(values);
    atomic_store_explicit(&row->faulted, 1, memory_order_release);
}

/* Whether an id may be passed to the library. xgrammar truncates ids to 32 bits (2**32 + 5 would pass as 5) and logs every
   id that it rejects for such a reason to stderr. */
static int is_valid_id(const matcher_row *row, int64_t token) {
    if (!row->text_words) return 1;
    if (token < 0 || token >= row->num_tokens) return 0;
    uint32_t word = (uint32_t)(row->text_words[token / 32] | row->stop_words[token / 32]);
    return word >> (token % 32) & 1;
}

/* 1, 0, or -1 and a fault. Only a stop token terminates a text. So the library is called once, and again after each stop token,
   because a rollback may remove it. */
static int terminated(matcher_row *row) {
    if (row->known_open) return 0;
    char error[FAULT_BYTES];
    int answer = row->library->is_terminated(row->library, row->matcher, error);
    if (answer < 0) fail(row, "%s", error);
    row->known_open = !answer;
    return answer;
}

static int accept_inner_token(matcher_row *row, int64_t token) {
    if (!is_valid_id(row, token)) return 0;
    int ended = terminated(row);
    if (ended) return ended < 0 ? -1 : 0;
    char error[FAULT_BYTES];
    double start = start_of_call(row);
    int accepted = row->library->accept(row->library, row->matcher, token, error);
    if (accepted < 0) {
        fail(row, "%s", error);
        return 0;
    }
    if (row->stop_words && row->stop_words[token / 32] >> (token % 32) & 1) row->known_open = 0;
    end_of_call(row, start);
    row->marker.num_inner += accepted;
    return accepted;
}

int accept_token(matcher_row *row, int64_t token) {
    if (faulted(row)) return 0;
    return before_marker_end(&row->marker) ? accept_free_token(&row->marker, token) : accept_inner_token(row, token);
}

/* Clears the bits that are neither text nor stop tokens (the library also sets bits beyond the vocabulary) and returns the
   status. Words in which every id is text need no clearing. */
static int32_t keep_legal(const matcher_row *row, int32_t *mask, int64_t words) {
    int32_t any_stop = 0, any_text = 0;
    for (int64_t index = 0; index < row->num_partial; index++) {
        int32_t word = row->partial_words[index];
        mask[word] &= row->text_words[word] | row->stop_words[word];
        any_stop |= mask[word] & row->stop_words[word];
    }
    for (int64_t word = 0; word < words; word++) any_text |= mask[word] & row->text_words[word];
    return any_text ? OK : any_stop ? COMPLETE : DEAD_END;
}

static int32_t fill_inner_mask(matcher_row *row, int32_t *mask, int64_t words, mask_content *content) {
    if (!row->grammar || content->grammar != row->grammar) content->written[0] = -1;
    content->grammar = 0;
    int ended = faulted(row) ? 0 : terminated(row);
    if (!ended && !faulted(row)) {
        char error[FAULT_BYTES];
        double start = start_of_call(row);
        int32_t status = row->library->fill(row->library, row->matcher, mask, words, content->written, error);
        if (status < 0) fail(row, "%s", error);
        else end_of_call(row, start);
        if (!faulted(row)) {
            content->grammar = row->grammar;
            return status > 0 ? status : keep_legal(row, mask, words);
        }
    }
    memset(mask, 0, (size_t)words * sizeof *mask);
    return ended > 0 ? TERMINATED : ended < 0 ? -1 : FAULT;
}

int32_t fill_mask(matcher_row *row, int32_t *mask, int64_t words, mask_content *content) {
    if (!before_marker_end(&row->marker) || faulted(row)) return fill_inner_mask(row, mask, words, content);
    content->grammar = 0;
    return fill_free_mask(&row->marker, mask, words);
}

int roll_back(matcher_row *row, int64_t tokens) {
    tokens = roll_back_marker(&row->marker, tokens);
    if (!tokens) return !faulted(row);
    char error[FAULT_BYTES];
    double start = start_of_call(row);
    if (row->library->rollback(row->library, row->matcher, tokens, error) < 0) fail(row, "%s", error);
    else end_of_call(row, start);
    return !faulted(row);
}
