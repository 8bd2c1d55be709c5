/* See image.h. */

#include "image.h"

#include <string.h>

enum { OK = 1, COMPLETE = 2, TERMINATED = 3, DEAD_END = 4, FAULT = 6 }; /* mask status, as in status.py */
enum { TARGET, PUSH, COUNTER, LAST_TARGET, SETS, LAST_SETS = 8 }; /* fields of a move */
enum { CAN_END = -2 }; /* value in IMAGE_LEAVE */
enum { TOO_DEEP = -1 };

image_place image_start(const int32_t *image) {
    image_place place = {.state = image[IMAGE_START], .depth = 0};
    memcpy(place.counters, image + IMAGE_START_COUNTERS, sizeof place.counters);
    return place;
}

static void set_counters(image_place *place, const int32_t *pairs) {
    for (int at = 0; at < 4 && pairs[at] >= 0; at += 2) place->counters[pairs[at]] = pairs[at + 1];
}

/* Returns 1, 0 if the move is not legal, or TOO_DEEP. */
static int special_move(const int32_t *image, image_walk *walk, const int32_t *move, int32_t most_pushed) {
    image_place *place = &walk->place;
    if (move[COUNTER] >= 0 && --place->counters[move[COUNTER]] == 0) {
        place->state = move[LAST_TARGET];
        set_counters(place, move + LAST_SETS);
    } else {
        place->state = move[TARGET];
        set_counters(place, move + SETS);
    }
    if (move[PUSH] >= 0) {
        int32_t pushed = place->depth - walk->kept;
        if (pushed >= most_pushed) return 0;
        if (place->depth >= image[IMAGE_DEPTH]) return TOO_DEEP;
        walk->pushed[pushed] = move[PUSH];
        place->depth++;
    }
    return place->state >= 0;
}

static int32_t pop(image_walk *walk) {
    int32_t at = --walk->place.depth;
    if (at >= walk->kept) return walk->pushed[at - walk->kept];
    walk->kept = at;
    return walk->stack[at];
}

static int32_t entry_at(const int32_t *next, int32_t narrow, int64_t index) {
    return narrow ? (int16_t)(next[index >> 1] >> (index & 1) * 16) : next[index];
}

/* Follow bytes. Returns 1, 0 if they are not legal, or TOO_DEEP. */
static int follow(const int32_t *image, image_walk *walk, const uint8_t *text, int64_t size, int32_t most_pushed) {
    const int32_t *class_of = image + image[IMAGE_CLASS_OF], *next = image + image[IMAGE_NEXT], *leave = image + image[IMAGE_LEAVE];
    const int64_t classes = image[IMAGE_CLASSES];
    const int32_t narrow = image[IMAGE_NARROW];
    image_place *place = &walk->place;
    for (int64_t at = 0; at < size; at++) {
        int32_t entry = entry_at(next, narrow, place->state * classes + class_of[text[at]]);
        if (entry == -1) return 0;
        if (entry >= 0) {
            place->state = entry;
        } else {
            int done = special_move(image, walk, image + image[IMAGE_MOVES] + (-2 - entry) * IMAGE_MOVE_INTS, most_pushed);
            if (done <= 0) return done;
        }
        while (leave[place->state] >= 0) {
            place->state = image[image[IMAGE_RETURN] + leave[place->state] * image[IMAGE_SYMBOLS] + pop(walk)];
            if (place->state < 0) return 0;
        }
    }
    return 1;
}

/* As `follow`, for a token of free text, which must not extend beyond the end of the marker. */
static int follow_free(const int32_t *image, image_walk *walk, const uint8_t *text, int64_t size) {
    for (int64_t at = 0; at < size; at++)
        if (walk->place.state < image[IMAGE_FREE] || follow(image, walk, text + at, 1, 0) <= 0) return 0;
    return 1;
}

static int follow_token(const int32_t *image, const image_vocabulary *vocabulary, image_walk *walk, int64_t token) {
    const int32_t *start = vocabulary->starts + token;
    if (start[0] == start[1]) return 0; /* not text */
    if (walk->place.state >= image[IMAGE_FREE]) return follow_free(image, walk, vocabulary->text + start[0], start[1] - start[0]);
    return follow(image, walk, vocabulary->text + start[0], start[1] - start[0], image[IMAGE_PUSHES]);
}

int image_accept(const int32_t *image, const image_vocabulary *vocabulary, image_walk *walk, int64_t token) {
    if (token < 0 || token >= vocabulary->num_tokens || walk->place.state < 0) return 0;
    if (vocabulary->stop_words[token / 32] >> (token % 32) & 1) {
        if (image[image[IMAGE_LEAVE] + walk->place.state] != CAN_END) return 0;
        walk->place.state = IMAGE_ENDED;
        return 1;
    }
    const int32_t *hidden = walk->place.state < image[IMAGE_FREE] ? vocabulary->hidden_words : 0;
    if (hidden && hidden[token / 32] >> (token % 32) & 1) return 0;
    int found = follow_token(image, vocabulary, walk, token);
    if (found == TOO_DEEP) walk->place.state = IMAGE_TOO_DEEP;
    return found != 0;
}

void image_copy_stack(const image_walk *walk, int32_t *stack) {
    if (stack != walk->stack) memcpy(stack, walk->stack, (size_t)walk->kept * sizeof *stack);
    memcpy(stack + walk->kept, walk->pushed, (size_t)(walk->place.depth - walk->kept) * sizeof *stack);
}

/* Base row of a mask row; NULL: no bit set. */
static const int32_t *base_words(const int32_t *image, const image_vocabulary *vocabulary, int32_t base) {
    if (base == -1) return NULL;
    return base >= 0 ? image + image[IMAGE_DENSE] + base * vocabulary->words : vocabulary->plain + (-2 - base) * vocabulary->words;
}

static void set_word(int32_t *mask, int32_t word, const int32_t *source) { mask[word] = source ? source[word] : 0; }

static const image_row *row_at(const int32_t *image, int32_t state) {
    return (const image_row *)(image + image[IMAGE_ROW_OF]) + state;
}

/* Write the base row to `mask`. If the mask holds `held` with this base, only the words that differ from the base are written. */
static void write_base(const int32_t *image, const image_vocabulary *vocabulary, int32_t base, int32_t *mask, const image_row *held,
    const image_written *written) {
    const int32_t *source = base_words(image, vocabulary, base);
    if (!held || written->crossed > IMAGE_CROSSED || held->base != base) {
        if (source) memcpy(mask, source, (size_t)vocabulary->words * sizeof *mask);
        else memset(mask, 0, (size_t)vocabulary->words * sizeof *mask);
        return;
    }
    const int32_t *word = image + image[IMAGE_CHANGE_WORD];
    for (int32_t at = held->change; at < held->end; at++) set_word(mask, word[at], source);
    for (int32_t at = 0; at < written->crossed; at++) set_word(mask, written->words[at], source);
}

int32_t image_fill(const int32_t *image, const image_vocabulary *vocabulary, const image_place *place, const int32_t *stack, int32_t *mask,
                   image_written *written) {
    const image_written before = *written;
    written->state = -1;
    written->crossed = 0;
    if (place->state < 0) {
        memset(mask, 0, (size_t)vocabulary->words * sizeof *mask);
        return place->state == IMAGE_ENDED ? TERMINATED : FAULT;
    }
    const image_row *row = row_at(image, place->state), *held = before.state < 0 ? NULL : row_at(image, before.state);
    written->state = place->state;
    if (!held || before.crossed || memcmp(held, row, sizeof *row)) {
        write_base(image, vocabulary, row->base, mask, held, &before);
        const int32_t *word = image + image[IMAGE_CHANGE_WORD], *value = image + image[IMAGE_CHANGE_VALUE];
        for (int32_t at = row->change; at < row->end; at++) mask[word[at]] = value[at];
    }
    if (image[IMAGE_SYMBOLS]) {
        const int32_t *range = image + image[IMAGE_CROSS_START] + place->state, *tokens = image + image[IMAGE_CROSS];
        for (int32_t at = range[0]; at < range[1]; at++) {
            image_walk walk;
            image_begin(&walk, place, stack);
            if (follow_token(image, vocabulary, &walk, tokens[at]) <= 0) continue;
            mask[tokens[at] / 32] |= (int32_t)(1u << (tokens[at] % 32));
            if (written->crossed < IMAGE_CROSSED) written->words[written->crossed] = tokens[at] / 32;
            written->crossed++;
        }
    }
    return written->crossed ? OK : row->status;
}

int64_t image_forced(const int32_t *image, const image_place *place, const int32_t *stack, uint8_t *text, int64_t room) {
    const int32_t *byte_of = image + image[IMAGE_BYTE_OF], *next = image + image[IMAGE_NEXT], *leave = image + image[IMAGE_LEAVE];
    const int64_t classes = image[IMAGE_CLASSES];
    const int32_t narrow = image[IMAGE_NARROW];
    image_walk walk;
    image_begin(&walk, place, stack);
    const image_place *now = &walk.place;
    int64_t size = 0;
    for (; size < room && now->state >= 0 && leave[now->state] == -1; size++) {
        int64_t only = -1;
        for (int64_t at = 0; at < classes; at++) {
            if (entry_at(next, narrow, now->state * classes + at) == -1) continue;
            if (only >= 0 || byte_of[at] < 0) return size;
            only = at;
        }
        if (only < 0) break;
        text[size] = (uint8_t)byte_of[only];
        if (follow(image, &walk, text + size, 1, IMAGE_MAX_PUSHES) <= 0) break;
    }
    return size;
}
