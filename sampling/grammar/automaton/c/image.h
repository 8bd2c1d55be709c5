/* A compiled grammar as one block of int32, without pointers: the same on the host and in device memory, and in the cache. */

#pragma once

#include <stdint.h>

enum { IMAGE_VERSION = 7, IMAGE_COUNTERS = 3, IMAGE_MOVE_INTS = 12, IMAGE_MAX_PUSHES = 64, IMAGE_CROSSED = 30 };

/* The header. Fields from IMAGE_ROW_OF on are offsets of tables, in int32 from the start of the image; the tables have this order. */
enum image_field {
    IMAGE_FORMAT, /* IMAGE_VERSION */
    IMAGE_SIZE,
    IMAGE_STATES,
    IMAGE_CLASSES,
    IMAGE_SYMBOLS,
    IMAGE_FINISH_SETS,
    IMAGE_START,
    IMAGE_START_COUNTERS, /* [IMAGE_COUNTERS] */
    IMAGE_DEPTH = IMAGE_START_COUNTERS + IMAGE_COUNTERS, /* maximum stack depth of a text; 0 without symbols */
    IMAGE_PUSHES, /* upper bound of the symbols that a legal token has on the stack at a time; at most IMAGE_MAX_PUSHES */
    IMAGE_FREE, /* the first of the states before the end of a marker, in which the text is free; IMAGE_STATES without a marker */
    IMAGE_NARROW, /* 1: an entry of IMAGE_NEXT has 16 bits, two entries per int32, the first one in the low half; 0: 32 bits */
    IMAGE_LIMIT, /* number of tokens after which only the marker is legal; INT32_MAX without a limit */
    IMAGE_LIMITED, /* the first of the states that replace the free states at the limit; IMAGE_STATES without a limit */
    IMAGE_ROW_OF, /* [states] image_row, without the crossing tokens; at a multiple of four, as the next one */
    IMAGE_DENSE, /* [dense rows, mask words] */
    IMAGE_CLASS_OF, /* [256] byte class of each byte */
    IMAGE_BYTE_OF, /* [classes] the only byte of a class, or -1 */
    IMAGE_NEXT, /* [states, classes] state; -1: not legal; -2 - n: move n */
    IMAGE_MOVES, /* [moves, IMAGE_MOVE_INTS] target, push, counter, last target, two (counter, value) pairs to set, two for the last */
    IMAGE_LEAVE, /* [states] finish set of a state that is left at once; -1: none; -2: none, and the text may end here */
    IMAGE_RETURN, /* [finish sets, symbols] state after a nested part, or -1 */
    IMAGE_CHANGE_WORD, /* word of the row that differs from the base */
    IMAGE_CHANGE_VALUE,
    IMAGE_CROSS_START, /* [states + 1]; tokens that the stack may allow; only with symbols */
    IMAGE_CROSS,
    IMAGE_HEADER, /* number of header fields */
};

/* A mask row and its status. */
typedef struct {
    int32_t base; /* dense row; -1: no bit set; -2 - n: row n of the vocabulary's plain text */
    int32_t status;
    int32_t change, end; /* range of the tables IMAGE_CHANGE_WORD and IMAGE_CHANGE_VALUE */
} image_row;

/* The tokens of a vocabulary, shared by the images compiled for it. */
typedef struct {
    const uint8_t *text; /* the bytes of all tokens; tokens that are not text have none */
    const int32_t *starts; /* [num_tokens + 1] */
    const int32_t *plain; /* [plain_rows, words] row n: tokens of at most n characters that are plain inside any JSON string */
    const int32_t *stop_words; /* [words] one bit per stop token */
    const int32_t *hidden_words; /* [words] one bit per token that is text only before the end of a marker; NULL: the caller has a mask */
    int64_t num_tokens, plain_rows, words, longest; /* longest: size of the longest token in bytes */
} image_vocabulary;

enum {
    IMAGE_ENDED = -1, /* a stop token ended the text */
    IMAGE_TOO_DEEP = -2, /* the text nests deeper than IMAGE_DEPTH */
};

/* The position of a text in a grammar. */
typedef struct {
    int32_t state; /* or IMAGE_ENDED, IMAGE_TOO_DEEP */
    int32_t depth; /* number of symbols on the stack */
    int32_t counters[IMAGE_COUNTERS];
} image_place;

/* A place that advances byte by byte. It reads the stack of the place where it began, and does not change it. */
typedef struct {
    image_place place;
    const int32_t *stack;
    int32_t kept; /* number of symbols of `stack` that remain, below the pushed ones */
    int32_t pushed[IMAGE_MAX_PUSHES]; /* [place.depth - kept] */
} image_walk;

image_place image_start(const int32_t *image);

/* The place after this number of tokens: a place in free text is replaced if the text has reached the limit. */
static inline image_place image_within_limit(const int32_t *image, image_place place, int64_t tokens) {
    if (tokens >= image[IMAGE_LIMIT] && place.state >= image[IMAGE_FREE] && place.state < image[IMAGE_LIMITED])
        place.state += image[IMAGE_LIMITED] - image[IMAGE_FREE];
    return place;
}

static inline void image_begin(image_walk *walk, const image_place *place, const int32_t *stack) {
    walk->place = *place;
    walk->stack = stack;
    walk->kept = place->depth;
}

/* Append a token. Returns 1, or 0 if the token is not legal; the walk must not be used after that. */
int image_accept(const int32_t *image, const image_vocabulary *vocabulary, image_walk *walk, int64_t token);

/* Write the stack of the walk's place. */
void image_copy_stack(const image_walk *walk, int32_t *stack);

/* The content of a mask that image_fill wrote. */
typedef struct {
    int32_t state; /* a state with the same row; -1: unknown */
    int32_t crossed; /* number of crossing tokens that are set; `words` is valid if it is at most IMAGE_CROSSED */
    int32_t words[IMAGE_CROSSED];
} image_written;

/* Write the mask row [words] of a place and return its status. Words that are already right according to `written` are not written. */
int32_t image_fill(const int32_t *image, const image_vocabulary *vocabulary, const image_place *place, const int32_t *stack, int32_t *mask,
                   image_written *written);

/* Write bytes that must come next, at most `room`; returns their number. The text may not end before them. */
int64_t image_forced(const int32_t *image, const image_place *place, const int32_t *stack, uint8_t *text, int64_t room);
