/* Experts: which ones a token takes, the products with their weights, and the sums of their results. */

#include "kernels.h"

enum { MOST_EXPERTS = 1024, GATHERED_BYTES = 1 << 17, GATHERED_ROWS = 8, COLUMNS = 64, LISTED = 1024 };

/* logits [rows, experts]; count; normalised; shares [rows, count] float32, experts [rows, count]. */
EXPORTED FOR_EACH_PROCESSOR int stepgraph_choose_experts(const argument *given) {
    int64_t experts = given->size[1], count = given[1].integer;
    for (int64_t row = 0; row < given->size[0]; row++) {
        float powers[MOST_EXPERTS], highest = -INFINITY, total = 0, chosen = 0;
        float *shares = (float *)given[3].data + row * count;
        for (int64_t i = 0; i < experts; i++) {
            powers[i] = number(given->data, row * experts + i, given->bfloat16);
            highest = powers[i] > highest ? powers[i] : highest;
        }
        for (int64_t i = 0; i < experts; i++) total += powers[i] = expf(powers[i] - highest);
        for (int64_t place = 0; place < count; place++) {
            int64_t best = 0; /* also where no power is a number */
            for (int64_t i = 1; i < experts; i++) best = powers[i] > powers[best] ? i : best;
            chosen += shares[place] = powers[best];
            ((int64_t *)given[4].data)[row * count + place] = best;
            powers[best] = -1.0f;
        }
        for (int64_t place = 0; place < count; place++) shares[place] /= given[2].integer ? chosen : total;
    }
    return 0;
}

/* The place of the largest of `count` numbers, the first one of equal ones; 0 if none is a number above -INFINITY. */
INLINED int64_t largest(const float *numbers, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++) best = numbers[i] > numbers[best] ? i : best;
    return best;
}

/* logits [rows, experts], correction [experts], both float32; count; groups; groups taken; normalised; factor; shares [rows, count],
   experts [rows, count]. */
EXPORTED FOR_EACH_PROCESSOR int stepgraph_choose_grouped_experts(const argument *given) {
    int64_t experts = given->size[1], count = given[2].integer, groups = given[3].integer, size = experts / groups;
    for (int64_t row = 0; row < given->size[0]; row++) {
        const float *logits = (const float *)given->data + row * experts, *correction = given[1].data;
        float scores[MOST_EXPERTS], compared[MOST_EXPERTS], pairs[MOST_EXPERTS], open[MOST_EXPERTS], total = 0;
        float *shares = (float *)given[7].data + row * count;
        int64_t *chosen = (int64_t *)given[8].data + row * count;
        for (int64_t i = 0; i < experts; i++) {
            scores[i] = 1.0f / (1.0f + expf(-logits[i]));
            compared[i] = scores[i] + correction[i];
            open[i] = -INFINITY;
        }
        for (int64_t group = 0; group < groups; group++) {
            float first = -INFINITY, second = -INFINITY;
            for (int64_t i = group * size; i < (group + 1) * size; i++) {
                float score = compared[i];
                second = score > first ? first : score > second ? score : second;
                first = score > first ? score : first;
            }
            pairs[group] = first + second;
        }
        for (int64_t place = 0; place < given[4].integer; place++) {
            int64_t group = largest(pairs, groups);
            memcpy(open + group * size, compared + group * size, (size_t)size * sizeof *open);
            pairs[group] = -INFINITY;
        }
        for (int64_t place = 0; place < count; place++) {
            int64_t best = largest(open, experts);
            total += shares[place] = scores[best];
            chosen[place] = best;
            open[best] = -INFINITY;
        }
        for (int64_t place = 0; place < count; place++) shares[place] = shares[place] / (given[5].integer ? total + 1e-20f : 1.0f) * (float)given[6].real;
    }
    return 0;
}

typedef struct {
    const argument *weights, *biases, *output;
    const char *gathered;
    const int64_t *order; /* the rows of the output */
    int64_t expert, rows, inner, bfloat16;
} expert_call;

/* Blocks of columns of one expert. */
static void columns_of_expert(const void *given, int64_t block, int64_t last) {
    const expert_call *call = given;
    char found[GATHERED_ROWS * COLUMNS * sizeof(float)];
    int64_t bytes = call->bfloat16 ? 2 : 4, outer = call->output->size[1];
    for (; block < last; block++) {
        int64_t first = block * COLUMNS, column = call->expert * outer + first, wide = outer - first < COLUMNS ? outer - first : COLUMNS;
        all_columns(&(product_call){
            .states = call->gathered, .weight = (const char *)call->weights->data + column * call->inner * bytes,
            .bias = call->biases->data ? (const char *)call->biases->data + column * bytes : NULL, .output = found,
            .rows = call->rows, .inner = call->inner, .outer = wide, .step = call->inner, .bfloat16 = call->bfloat16,
        });
        for (int64_t row = 0; row < call->rows; row++) {
            char *to = (char *)call->output->data + (call->order[row] * outer + first) * bytes;
            memcpy(to, found + row * wide * bytes, (size_t)(wide * bytes));
        }
    }
}

/* Rows of states `order`, `count` of them, by the weights of one expert. Rows are gathered, so that a weight is read once for several. */
INLINED void rows_of_expert(const argument *given, int64_t expert, const int64_t *order, int64_t count) {
    const argument *states = given, *output = given + 5;
    char gathered[GATHERED_BYTES];
    int64_t bytes = states->bfloat16 ? 2 : 4, inner = states->size[1], outer = output->size[1], per_state = output->size[0] / states->size[0];
    int64_t most = GATHERED_BYTES / (inner * bytes) < GATHERED_ROWS ? GATHERED_BYTES / (inner * bytes) : GATHERED_ROWS;
    expert_call call = {
        .weights = given + 2, .biases = given + 4, .output = output, .gathered = gathered, .expert = expert, .inner = inner, .bfloat16 = states->bfloat16,
    };
    for (int64_t start = 0; start < count; start += most) {
        call.order = order + start, call.rows = count - start < most ? count - start : most;
        for (int64_t row = 0; row < call.rows; row++) {
            int64_t from = call.order[row] / per_state * states->stride[0];
            memcpy(gathered + row * inner * bytes, (const char *)states->data + from * bytes, (size_t)(inner * bytes));
        }
        divide_work(columns_of_expert, &call, (outer + COLUMNS - 1) / COLUMNS, outer * inner * bytes);
    }
}

/* states [choices / per_state, inner]; experts [choices]; weights [experts * outer, inner]; experts; biases [experts * outer] or NULL;
   output [choices, outer]. */
EXPORTED int stepgraph_expert_product(const argument *given) {
    const int64_t *chosen = given[1].data;
    int64_t choices = given[5].size[0], experts = given[3].integer, order[LISTED];
    for (int64_t i = 0; i < choices; i++)
        if (chosen[i] < 0 || chosen[i] >= experts) return 1;
    for (int64_t first = 0; first < choices; first += LISTED) {
        int64_t end = first + LISTED < choices ? first + LISTED : choices;
        for (int64_t expert = 0; expert < experts; expert++) {
            int64_t count = 0;
            for (int64_t i = first; i < end; i++)
                if (chosen[i] == expert) order[count++] = i;
            if (count) rows_of_expert(given, expert, order, count);
        }
    }
    return 0;
}

/* parts [rows * count, size]; shares [rows, count] float32; output [rows, size]. */
EXPORTED FOR_EACH_PROCESSOR int stepgraph_combine_experts(const argument *given) {
    const float *shares = given[1].data;
    int64_t count = given[1].size[1], size = given[2].size[1];
    for (int64_t row = 0; row < given[2].size[0]; row++)
        for (int64_t i = 0; i < size; i++) {
            float total = 0;
            for (int64_t index = row * count; index < (row + 1) * count; index++)
                total += number(given->data, index * size + i, given->bfloat16) * shares[index];
            put(given[2].data, row * size + i, total, given->bfloat16);
        }
    return 0;
}
