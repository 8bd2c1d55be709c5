/* What Python and C share of the CPU's choices. calls.py holds the same structs, field by field, and compares their sizes.

   Nothing here knows torch or the interpreter, takes memory or starts a thread. A choice gives 0, or 1 where an index lies outside of
   its table. */

#ifndef STEPGRAPH_CHOICES_H
#define STEPGRAPH_CHOICES_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { CHOICES_VERSION = 2, WORD = 32 };

typedef struct {
    const void *logits;                /* [batch, places, width], float32, or bfloat16 where `narrow` is 1 */
    const int32_t *masks;              /* [mask_rows, places, words] */
    const int64_t *rows, *ids, *status; /* [batch], [width], [batch, places]; each may be NULL */
    const bool *ruled;                 /* [batch] */
    float *best;                       /* [batch, places] */
    int64_t *token;
    int64_t batch, places, width, row_step, place_step, mask_rows, words, mask_row_step, mask_place_step, narrow;
} argmax_call;

typedef struct {
    const int64_t *tags, *rows, *owner, *generated; /* [tag_rows, places, 4], [batch] or NULL, [batch] twice */
    const bool *constrained;
    int64_t *status; /* [batch, places] */
    int64_t batch, places, tag_rows, row_step, place_step, owner_step, generated_step, first;
} status_call;

typedef struct {
    const int64_t *sampled; /* [batch, drafts + 1], as are finite and status */
    const bool *finite;
    const int64_t *drafts, *draft_count, *status, *stop_ids, *room, *known; /* stop_ids [batch, stops]; known [batch] or NULL */
    int64_t *emitted, *accepted, *finish;
    int64_t batch, count, stops;
} chain_call;

/* As status.py and acceptance.py number them. */
enum { STATUS_NONE, STATUS_OK, STATUS_COMPLETE, STATUS_TERMINATED, STATUS_DEAD_END, STATUS_ILLEGAL };
enum { FINISH_RUNNING = 1, FINISH_STOP, FINISH_LENGTH, FINISH_COMPLETE, FINISH_DEAD_END, FINISH_MASK_FAULT, FINISH_LOGITS_FAULT };

/* One library for every processor: the loader takes the widest version that this one has. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define EXPORTED __attribute__((visibility("default")))
#define INLINED static inline __attribute__((always_inline))

/* Counted from the end where it is negative, as torch does; -1 where it lies outside of [0, size). */
INLINED int64_t inside(int64_t index, int64_t size) {
    index += index < 0 ? size : 0;
    return index < 0 || index >= size ? -1 : index;
}

#endif
