/* See matcher.h. */

#include "matcher.h"

#include "checked.h"
#include "marker.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

double seconds_of(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Reading a thread's processor time is a system call, and a call of the library may take less than that: it is read once
   in a tenth of the fuel, and again where a call took longer than its fuel by the clock on the wall. */
static _Thread_local struct { double wall, processor; } stamp;

double start_of_call(const matcher_row *row) {
    double wall = seconds_of(CLOCK_MONOTONIC);
    if (!(wall - stamp.wall < row->fuel_seconds / 10)) {
        stamp.wall = wall;
        stamp.processor = seconds_of(CLOCK_THREAD_CPUTIME_ID);
    }
    return wall;
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

void end_of_call(matcher_row *row, double start) {
    if (seconds_of(CLOCK_MONOTONIC) - start <= row->fuel_seconds) return;
    double spent = seconds_of(CLOCK_THREAD_CPUTIME_ID) - stamp.processor - (start - stamp.wall); /* at least this much was this call's */
    if (spent > row->fuel_seconds)
        fail(row, "one step of the grammar took %.3f s, more than the %g s that it may take", spent, row->fuel_seconds);
}

static int may_be_heard(const matcher_row *row, int64_t token) {
    if (!row->text_words) return 1;
    if (token < 0 || token >= row->num_tokens) return 0;
    uint32_t word = (uint32_t)(row->text_words[token / 32] | row->stop_words[token / 32]);
    return word >> (token % 32) & 1;
}

/* 1, 0, or -1 and a fault. Only a stop token ends a text, and a text that is not over is so at all its places: the library is asked
   once, and behind a stop token each time, for a rollback may take it back. */
static int terminated(matcher_row *row) {
    if (row->open) return 0;
    char why[FAULT_BYTES];
    int answer = row->library->is_terminated(row->library, row->matcher, why);
    if (answer < 0) fail(row, "%s", why);
    row->open = !answer;
    return answer;
}

/* The library truncates ids to 32 bits (2**32 + 5 would pass for 5) and logs every refusal of these kinds to stderr. */
static int accept_behind(matcher_row *row, int64_t token) {
    if (!may_be_heard(row, token)) return 0;
    int over = terminated(row);
    if (over) return over < 0 ? -1 : 0;
    char why[FAULT_BYTES];
    double start = start_of_call(row);
    int accepted = row->library->accept(row->library, row->matcher, token, why);
    if (accepted < 0) {
        fail(row, "%s", why);
        return 0;
    }
    if (row->stop_words && row->stop_words[token / 32] >> (token % 32) & 1) row->open = 0;
    end_of_call(row, start);
    row->marker.behind += accepted;
    return accepted;
}

int accept_token(matcher_row *row, int64_t token) {
    if (faulted(row)) return 0;
    int accepted = in_front(&row->marker) ? follow_marker(&row->marker, token) : accept_behind(row, token);
    hold_against_mask(row, token, accepted);
    return accepted;
}

/* Most words are passed over sixty-four at a time; `text` is read only where some bit is set. */
static int any_text(const int32_t *mask, const int32_t *text, int64_t words) {
    for (int64_t word = 0; word < words; word += 64) {
        int64_t end = word + 64 < words ? word + 64 : words;
        int32_t some = 0, some_text = 0;
        for (int64_t next = word; next < end; next++) some |= mask[next];
        if (!some) continue;
        for (int64_t next = word; next < end; next++) some_text |= mask[next] & text[next];
        if (some_text) return 1;
    }
    return 0;
}

/* Clears what is no text and no stop token (the library also sets bits beyond the vocabulary), and says what is left.
   A word of which every id is text needs no clearing. */
static int32_t keep_legal(const matcher_row *row, int32_t *mask, int64_t words) {
    int32_t any_stop = 0;
    for (int64_t place = 0; place < row->num_mixed; place++) {
        int32_t word = row->mixed[place];
        mask[word] &= row->text_words[word] | row->stop_words[word];
        any_stop |= mask[word] & row->stop_words[word];
    }
    return any_text(mask, row->text_words, words) ? OK : any_stop ? COMPLETE : DEAD_END;
}

static int32_t fill_behind(matcher_row *row, int32_t *mask, int64_t words) {
    int over = faulted(row) ? 0 : terminated(row);
    if (!over && !faulted(row)) {
        char why[FAULT_BYTES];
        double start = start_of_call(row);
        int32_t status = row->library->fill(row->library, row->matcher, mask, words, why);
        if (status < 0) fail(row, "%s", why);
        else end_of_call(row, start);
        if (!faulted(row)) return status > 0 ? status : keep_legal(row, mask, words);
    }
    memset(mask, 0, (size_t)words * sizeof *mask);
    return over > 0 ? TERMINATED : over < 0 ? -1 : FAULT;
}

int32_t fill_mask(matcher_row *row, int32_t *mask, int64_t words) {
    int front = in_front(&row->marker) && !faulted(row);
    int32_t status = front ? fill_in_front(&row->marker, mask, words) : fill_behind(row, mask, words);
    keep_mask(&row->checked, mask);
    return status;
}

int roll_back(matcher_row *row, int64_t tokens) {
    row->checked.accepted -= tokens;
    tokens = take_back(&row->marker, tokens);
    if (!tokens) return !faulted(row);
    char why[FAULT_BYTES];
    double start = start_of_call(row);
    if (row->library->rollback(row->library, row->matcher, tokens, why) < 0) fail(row, "%s", why);
    else end_of_call(row, start);
    return !faulted(row);
}
