/* The most probable tokens of each position, for the rows that ask for them. */

#include "native.h"

enum { TOP_LOGPROBS = 8 }; /* sampler.Param */

typedef struct {
    const void *values; /* [width] */
    int64_t width, bfloat16;
} scores;

/* The `count` greatest scores above `least` in falling order, ties by lower id; then minus infinity and -1. */
INLINED void rank(const scores *from, float least, int64_t count, float *values, int32_t *ids) {
    for (int64_t i = 0; i < count; i++) {
        values[i] = -INFINITY;
        ids[i] = -1;
    }
    for (int64_t id = 0; id < from->width; id++) {
        float value = number(from->values, id, from->bfloat16);
        if (!(value > least && value > values[count - 1])) continue;
        int64_t at = count - 1;
        for (; at > 0 && value > values[at - 1]; at--) {
            values[at] = values[at - 1];
            ids[at] = ids[at - 1];
        }
        values[at] = value;
        ids[at] = (int32_t)id;
    }
}

/* The logarithm of the sum of exponentials, relative to the greatest score. */
INLINED float log_total(const scores *from, float best) {
    double sum = 0;
    for (int64_t id = 0; id < from->width; id++) sum += expf(number(from->values, id, from->bfloat16) - best);
    return best + (float)log(sum);
}

/* logits, probs [batch, positions, width]; rows [batch]; params [table rows, columns], of which TOP_LOGPROBS is the number of tokens;
   published [1]; ids_ring, values_ring [slots, row slots, position slots, 2 * most]. */
EXPORTED int stepgraph_top_logprobs(const argument *args) {
    const argument *logits = args, *probs = args + 1, *params = args + 3, *ring = args + 5;
    const int64_t *rows = args[2].data;
    int64_t most = ring->size[3] / 2, slot = *(const int64_t *)args[4].data % ring->size[0];
    for (int64_t row = 0; row < logits->size[0]; row++) {
        int64_t table_row = index_in(rows[row], params->size[0]);
        if (table_row < 0) return 1;
        int64_t asked = (int64_t)((const float *)params->data)[table_row * params->size[1] + TOP_LOGPROBS];
        asked = asked < most ? asked : most;
        for (int64_t position = 0; asked > 0 && position < logits->size[1]; position++) {
            int64_t at = slot * ring->stride[0] + row * ring->stride[1] + position * ring->stride[2];
            int32_t *ids = (int32_t *)ring->data + at;
            float *values = (float *)args[6].data + at;
            int64_t start = row * logits->stride[0] + position * logits->stride[1];
            scores own = {(const char *)logits->data + start * (logits->bfloat16 ? 2 : 4), logits->size[2], logits->bfloat16};
            rank(&own, -INFINITY, asked, values, ids);
            float total = log_total(&own, values[0]);
            for (int64_t i = 0; i < asked; i++) values[i] -= total;
            start = row * probs->stride[0] + position * probs->stride[1];
            scores kept = {(const float *)probs->data + start, probs->size[2], 0};
            rank(&kept, 0, asked, values + most, ids + most);
            for (int64_t i = 0; i < asked; i++) values[most + i] = ids[most + i] < 0 ? -INFINITY : logf(values[most + i]);
        }
    }
    return 0;
}
