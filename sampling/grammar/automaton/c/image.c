/* See image.h. */

#include "image.h"

#include <string.h>

enum { OK = 1, COMPLETE = 2, TERMINATED = 3, DEAD_END = 4 }; /* mask status, as in status.py */
enum { TARGET, PUSH, COUNTER, LAST_TARGET, SETS, LAST_SETS = 8 }; /* of a move */

image_place image_start(const int32_t *image) {
    image_place place = {.state = image[IMAGE_START], .top = -1, .free = 0};
    memcpy(place.counters, image + IMAGE_START_COUNTERS, sizeof place.counters);
    return place;
}

static void set_counters(image_place *place, const int32_t *pairs) {
    for (int at = 0; at < 4 && pairs[at] >= 0; at += 2) place->counters[pairs[at]] = pairs[at + 1];
}

static int special_move(image_place *place, image_stack *stack, const int32_t *move) {
    if (move[COUNTER] >= 0 && --place->counters[move[COUNTER]] == 0) {
        place->state = move[LAST_TARGET];
        set_counters(place, move + LAST_SETS);
    } else {
        place->state = move[TARGET];
        set_counters(place, move + SETS);
    }
    if (move[PUSH] >= 0) {
        if (place->free >= stack->capacity) return -1;
        stack->symbols[place->free] = move[PUSH];
        stack->parents[place->free] = place->top;
        place->top = place->free++;
    }
    return place->state >= 0;
}

int image_walk(const int32_t *image, image_place *place, image_stack *stack, const uint8_t *text, int64_t size) {
    const int32_t *class_of = image + image[IMAGE_CLASS_OF], *next = image + image[IMAGE_NEXT], *leave = image + image[IMAGE_LEAVE];
    const int64_t classes = image[IMAGE_CLASSES];
    image_place now = *place;
    for (int64_t at = 0; at < size; at++) {
        int32_t entry = next[now.state * classes + class_of[text[at]]];
        if (entry < 0) return 0;
        if (entry < IMAGE_SPECIAL) {
            now.state = entry;
        } else {
            int done = special_move(&now, stack, image + image[IMAGE_MOVES] + (entry - IMAGE_SPECIAL) * IMAGE_MOVE_INTS);
            if (done <= 0) return done;
        }
        while (leave[now.state] >= 0) {
            int32_t symbol = stack->symbols[now.top];
            now.top = stack->parents[now.top];
            now.state = image[image[IMAGE_RETURN] + leave[now.state] * image[IMAGE_SYMBOLS] + symbol];
            if (now.state < 0) return 0;
        }
    }
    *place = now;
    return 1;
}

int32_t image_fill(const int32_t *image, const image_vocabulary *vocabulary, const image_place *place, image_stack *stack, int32_t *mask) {
    const size_t words = (size_t)vocabulary->words, row_bytes = words * sizeof *mask;
    if (place->state < 0) {
        memset(mask, 0, row_bytes);
        return TERMINATED;
    }
    const int32_t row = image[image[IMAGE_ROW_OF] + place->state], base = image[image[IMAGE_BASE_OF] + row];
    if (base == -1) memset(mask, 0, row_bytes);
    else memcpy(mask, base >= 0 ? image + image[IMAGE_DENSE] + (size_t)base * words : vocabulary->plain + (size_t)(-2 - base) * words, row_bytes);
    const int32_t *range = image + image[IMAGE_CHANGE_START] + row;
    const int32_t *word = image + image[IMAGE_CHANGE_WORD], *value = image + image[IMAGE_CHANGE_VALUE];
    for (int32_t at = range[0]; at < range[1]; at++) mask[word[at]] = value[at];
    int32_t status = image[image[IMAGE_STATUS_OF] + row];
    if (!image[IMAGE_SYMBOLS]) return status;
    const int32_t *crossing = image + image[IMAGE_CROSS_START] + place->state, *tokens = image + image[IMAGE_CROSS];
    for (int32_t at = crossing[0]; at < crossing[1]; at++) {
        image_place after = *place; /* nodes that this pushes are not used later */
        const int32_t *start = vocabulary->starts + tokens[at];
        if (image_walk(image, &after, stack, vocabulary->text + start[0], start[1] - start[0]) <= 0) continue;
        mask[tokens[at] / 32] |= (int32_t)(1u << (tokens[at] % 32));
        status = OK;
    }
    return status;
}

int64_t image_forced(const int32_t *image, const image_place *place, image_stack *stack, uint8_t *text, int64_t room) {
    const int32_t *byte_of = image + image[IMAGE_BYTE_OF], *next = image + image[IMAGE_NEXT], *leave = image + image[IMAGE_LEAVE];
    const int64_t classes = image[IMAGE_CLASSES];
    image_place now = *place;
    int64_t size = 0;
    for (; size < room && now.state >= 0 && leave[now.state] == -1; size++) {
        int64_t only = -1;
        for (int64_t at = 0; at < classes; at++) {
            if (next[now.state * classes + at] < 0) continue;
            if (only >= 0 || byte_of[at] < 0) return size;
            only = at;
        }
        if (only < 0) break;
        text[size] = (uint8_t)byte_of[only];
        if (image_walk(image, &now, stack, text + size, 1) <= 0) break;
    }
    return size;
}
