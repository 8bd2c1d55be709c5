/* Products of states and quantised weights, and rows of quantised weights as numbers. */

#define EVERY_HEIGHT 0
#include "quantised.h"

/* Fields as float32. The bits of float8_e4m3fn are placed as those of a float32, whose exponent is then 120 too small. */
INLINED void numbers_of(words fields, int zero, lanes *to) {
    if (zero == FLOAT8) {
        lanes found = (lanes)((fields & 0x7f) << 20) * 0x1p120f;
        *to = (lanes)((words)found | (fields & 0x80) << 24);
    } else
        *to = __builtin_convertvector((ints)fields - zero, lanes);
}

/* Fields `at` and `at` + 16 of every word. */
INLINED void fields(words raw, int at, int bits, int zero, lanes pair[2]) {
    numbers_of(raw >> at & ((1u << bits) - 1), zero, pair);
    numbers_of(raw >> (at + 16) & ((1u << bits) - 1), zero, pair + 1);
}

INLINED void add_block(
    lanes *parts, const char *states, int64_t row_bytes, const char *from, int64_t apart, int tall, int wide, int bits, int zero, int64_t bfloat16) {
    (void)apart, (void)wide; /* wide is 1 */
#pragma GCC unroll 16
    for (int pair = 0; pair < indices_per_step(bits) / 2; pair++) {
        lanes both[2];
        fields(*(const words *)(from + pair * bits / 16 * 64), pair * bits % 16, bits, zero, both);
#pragma GCC unroll 8
        for (int row = 0; row < tall; row++) {
            parts[row] += both[0] * number(states + row * row_bytes, 2 * pair, bfloat16);
            parts[row] += both[1] * number(states + row * row_bytes, 2 * pair + 1, bfloat16);
        }
    }
}

INLINED void in_numbers(const quantised_call *call, int64_t first, int64_t end, int bits, int zero) {
    quantised_call same = *call;
    same.bfloat16 = 1; /* a constant in each of the two calls */
    if (call->bfloat16) tiles_of(&same, first, end, bits, zero);
    same.bfloat16 = 0;
    if (!call->bfloat16) tiles_of(&same, first, end, bits, zero);
}

/* Sums the states of every block of a row. MAX_BLOCKS is a multiple of LANES. */
INLINED void sum_states(const quantised_call *call, int64_t row, float *totals) {
    int64_t group = call->kind.group;
    for (int64_t block = 0; block < call->blocks; block += LANES) {
        lanes parts[LANES] = {0}, taken;
        for (int64_t one = 0; one < LANES && block + one < call->blocks; one++)
            for (int64_t i = 0; i < group; i += LANES, parts[one] += taken)
                read_numbers((float *)&taken, call->states, row * call->step + (block + one) * group + i, LANES, call->bfloat16);
        sum_lanes(parts);
        memcpy(totals + block, parts, sizeof *parts);
    }
}

/* The kind with the last dimension of this packed weight. */
INLINED quantised_kind kind_of(const argument *weight) {
    size_t index = 0;
    while (block_bytes(KINDS[index]) * KINDS[index].together != weight->size[2]) index++;
    return KINDS[index];
}

static FOR_EACH_PROCESSOR void run_tiles(const void *context, int64_t first, int64_t end) {
    const quantised_call *call = context;
#ifdef HAS_DOT_PRODUCTS
    if (call->bfloat16 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi")) {
        quantised_by_pairs(call, first, end);
        return;
    }
#endif
    FOR_FIELDS(in_numbers, call, first, end);
}

/* At most GATHERED_ROWS rows. */
static FOR_EACH_PROCESSOR void rows_at_once(quantised_call call) {
    float totals[GATHERED_ROWS][MAX_BLOCKS];
    call.totals = totals;
    for (int64_t one = 0; call.kind.ranged && one < call.rows; one++) sum_states(&call, one, totals[one]);
    divide_work(run_tiles, &call, call.tiles, call.tiles * call.blocks * block_bytes(call.kind));
}

static quantised_call call_of(const argument *states, const argument *weight) {
    quantised_kind kind = kind_of(weight);
    return (quantised_call){
        .weight = weight->data, .blocks = weight->size[1] * kind.together, .tiles = weight->size[0], .step = states->stride[0],
        .bfloat16 = states->bfloat16, .kind = kind,
    };
}

EXPORTED int stepgraph_quantised_product(const argument *args) {
    const argument *states = args;
    quantised_call call = call_of(states, args + 1);
    int64_t number_bytes = call.bfloat16 ? 2 : 4;
    call.bias = args[2].data;
    for (int64_t row = 0; row < states->size[0]; row += GATHERED_ROWS) {
        call.states = (const char *)states->data + row * call.step * number_bytes;
        call.output = (char *)args[3].data + row * call.tiles * LANES * number_bytes;
        call.rows = states->size[0] - row < GATHERED_ROWS ? states->size[0] - row : GATHERED_ROWS;
        rows_at_once(call);
    }
    return 0;
}

static void rows_of_expert(const argument *args, int64_t expert, const char *gathered, const int64_t *places, int64_t rows) {
    quantised_call call = call_of(args, args + 2);
    call.tiles /= args[3].integer;
    call.weight += expert * call.tiles * call.blocks * block_bytes(call.kind);
    call.bias = args[4].data ? (const char *)args[4].data + expert * call.tiles * LANES * (call.bfloat16 ? 2 : 4) : NULL;
    call.states = gathered, call.step = args->size[1], call.rows = rows, call.output = args[5].data, call.places = places;
    rows_at_once(call);
}

EXPORTED int stepgraph_quantised_expert_product(const argument *args) { return each_expert(args, rows_of_expert); }

/* Arguments: indices [N] int64, weight, None (the dtype), output [N, inner]. */
EXPORTED FOR_EACH_PROCESSOR int stepgraph_quantised_rows(const argument *args) {
    const argument *weight = args + 1, *output = args + 3;
    quantised_kind kind = kind_of(weight);
    int64_t blocks = weight->size[1] * kind.together, bytes = block_bytes(kind), columns = weight->size[0] * LANES;
    int bits = kind.bits;
    for (int64_t i = 0; i < args->size[0]; i++)
        if (index_in(((const int64_t *)args->data)[i], columns) < 0) return 1;
    for (int64_t i = 0; i < args->size[0]; i++) {
        int64_t column = index_in(((const int64_t *)args->data)[i], columns), lane = column % LANES;
        const char *block = (const char *)weight->data + column / LANES * blocks * bytes;
        for (int64_t index = 0; index < blocks; index++, block += bytes) {
            const char *scales = block + word_bytes(kind);
            lanes scale, minimum = {0};
            read_scales(&scale, scales, kind.wide);
            if (kind.ranged) read_scales(&minimum, scales + scale_bytes(kind), kind.wide);
            float found[MAX_GROUP];
            for (int at = 0; at < kind.group; at++) {
                int pair = at / 2 % (16 / bits);
                uint32_t word;
                memcpy(&word, block + (at / (32 / bits) * LANES + lane) * 4, sizeof word);
                lanes value;
                numbers_of((words){0} + (word >> (at % 2 * 16 + pair * bits) & ((1u << bits) - 1)), kind.zero, &value);
                found[at] = scale[lane] * value[0] + minimum[lane];
            }
            write_numbers(output->data, (i * blocks + index) * kind.group, found, kind.group, output->bfloat16);
        }
    }
    return 0;
}
