/* Experts: which ones a token uses, the rows of each, and the sums of their results. */

#include "kernels.h"

enum { MAX_EXPERTS = 1024, GATHERED_BYTES = 1 << 17 }; /* as in experts.py */

/* The place of the largest of `count` numbers, the first of equal ones; 0 if none is greater than -INFINITY. */
INLINED int64_t largest(const float *numbers, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++) best = numbers[i] > numbers[best] ? i : best;
    return best;
}

/* logits [rows, experts]; count; normalised; correction [experts] float32, or NULL: scores are probabilities, not sigmoids; groups; groups
   taken; factor; shares [rows, count] float32, experts [rows, count]. */
EXPORTED FOR_EACH_PROCESSOR int stepgraph_choose_experts(const argument *args) {
    int64_t experts = args->size[1], count = args[1].integer, groups = args[4].integer, size = experts / groups;
    const float *correction = args[3].data;
    for (int64_t row = 0; row < args->size[0]; row++) {
        float scores[MAX_EXPERTS], compared[MAX_EXPERTS], pairs[MAX_EXPERTS], open[MAX_EXPERTS], highest = -INFINITY, total = 0, taken = 0;
        float *shares = (float *)args[7].data + row * count;
        int64_t *chosen = (int64_t *)args[8].data + row * count;
        for (int64_t i = 0; i < experts; i++) {
            scores[i] = number(args->data, row * experts + i, args->bfloat16);
            highest = scores[i] > highest ? scores[i] : highest;
        }
        for (int64_t i = 0; i < experts; i++) {
            total += scores[i] = correction ? 1.0f / (1.0f + expf(-scores[i])) : expf(scores[i] - highest);
            compared[i] = correction ? scores[i] + correction[i] : scores[i];
            open[i] = groups > 1 ? -INFINITY : compared[i];
        }
        for (int64_t group = 0; groups > 1 && group < groups; group++) {
            float first = -INFINITY, second = -INFINITY;
            for (int64_t i = group * size; i < (group + 1) * size; i++) {
                float score = compared[i];
                second = score > first ? first : score > second ? score : second;
                first = score > first ? score : first;
            }
            pairs[group] = first + second;
        }
        for (int64_t place = 0; groups > 1 && place < args[5].integer; place++) {
            int64_t group = largest(pairs, groups);
            memcpy(open + group * size, compared + group * size, (size_t)size * sizeof *open);
            pairs[group] = -INFINITY;
        }
        for (int64_t place = 0; place < count; place++) {
            int64_t best = largest(open, experts);
            taken += shares[place] = scores[best];
            chosen[place] = best;
            open[best] = -INFINITY;
        }
        float divisor = args[2].integer ? taken + 1e-20f : correction ? 1.0f : total;
        for (int64_t place = 0; place < count; place++) shares[place] = shares[place] / divisor * (float)args[6].real;
    }
    return 0;
}

int each_expert(const argument *args, expert_rows run) {
    const int64_t *chosen = args[1].data;
    int64_t choices = args[5].size[0], experts = args[3].integer, per_state = choices / args->size[0], number = args->bfloat16 ? 2 : 4;
    int64_t row_bytes = args->size[1] * number, fitting = GATHERED_BYTES / row_bytes,
        most = fitting < GATHERED_ROWS ? fitting : GATHERED_ROWS;
    int64_t places[GATHERED_ROWS], rows = 0;
    char gathered[GATHERED_BYTES];
    for (int64_t i = 0; i < choices; i++)
        if (chosen[i] < 0 || chosen[i] >= experts) return 1;
    for (int64_t expert = 0; expert < experts; expert++)
        for (int64_t i = 0; i < choices; i++) {
            if (chosen[i] == expert) {
                const char *from = (const char *)args->data + i / per_state * args->stride[0] * number;
                memcpy(gathered + rows * row_bytes, from, (size_t)row_bytes);
                places[rows++] = i;
            }
            if (rows < most && (!rows || i < choices - 1)) continue;
            run(args, expert, gathered, places, rows);
            rows = 0;
        }
    return 0;
}

/* parts [rows * count, size]; shares [rows, count] float32; output [rows, size]. */
EXPORTED FOR_EACH_PROCESSOR int stepgraph_combine_experts(const argument *args) {
    const float *shares = args[1].data;
    int64_t count = args[1].size[1], size = args[2].size[1];
    for (int64_t row = 0; row < args[2].size[0]; row++)
        for (int64_t i = 0; i < size; i++) {
            float total = 0;
            for (int64_t index = row * count; index < (row + 1) * count; index++)
                total += number(args->data, index * size + i, args->bfloat16) * shares[index];
            put(args[2].data, row * size + i, total, args->bfloat16);
        }
    return 0;
}
