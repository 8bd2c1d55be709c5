/* Products of states and quantised weights, and rows of quantised weights as numbers. */

#define EVERY_HEIGHT 0
#define STATE_SIZE 4 /* bytes: float32 */
#include "quantised.h"

/* Fields as float32. */
INLINED part numbers_of(word_part fields, int zero) {
    if (zero != FLOAT8) return __builtin_convertvector((int_part)fields - zero, part);
    part found = float_of(fields & 0x7f, 3, 7);
    return (part)((word_part)found | (fields & 0x80) << 24);
}

INLINED void add_block(
    part (*parts)[PARTS], const char *states, int64_t row_bytes, const char *from, int64_t apart, int tall, int wide, int bits, int zero) {
    (void)apart, (void)wide; /* wide is 1 */
#pragma GCC unroll 16
    for (int pair = 0; pair < indices_per_step(bits) / 2; pair++) {
        int at = pair * bits % 16; /* fields `at` and `at` + 16 of every word */
#pragma GCC unroll 2
        for (int one = 0; one < PARTS; one++) {
            word_part raw = ((const word_part *)(from + pair * bits / 16 * 64))[one];
            part even = numbers_of(raw >> at & ((1u << bits) - 1), zero), odd = numbers_of(raw >> (at + 16) & ((1u << bits) - 1), zero);
#pragma GCC unroll 4
            for (int row = 0; row < tall; row++) {
                const float *two = (const float *)(states + row * row_bytes) + 2 * pair;
                parts[row][one] += even * two[0];
                parts[row][one] += odd * two[1];
            }
        }
    }
}

/* Sums the states of every block of a row. MAX_BLOCKS is a multiple of LANES. */
INLINED void sum_states(const quantised_call *call, int64_t row, float *totals) {
    int64_t group = call->kind.group;
    for (int64_t block = 0; block < call->blocks; block += LANES) {
        part sums[LANES] = {{0}};
        for (int64_t one = 0; one < LANES && block + one < call->blocks; one++) {
            part parts[PARTS] = {{0}}, taken[PARTS];
            for (int64_t i = 0; i < group; i += LANES) {
                read_numbers((float *)taken, call->states, row * call->step + (block + one) * group + i, LANES, call->bfloat16);
                for (int half = 0; half < PARTS; half++) parts[half] += taken[half];
            }
            sums[one] = joined(parts);
        }
        sum_lanes(sums);
        memcpy(totals + block, sums, LANES * sizeof *totals);
    }
}

/* The kind with the last dimension of this packed weight. */
INLINED quantised_kind kind_of(const argument *weight) {
    size_t index = 0;
    while (block_bytes(KINDS[index]) * KINDS[index].together != weight->size[2]) index++;
    return KINDS[index];
}

static FOR_EACH_PROCESSOR void run_tiles(const void *call, int64_t first, int64_t end) {
    FOR_FIELDS(tiles_of, (const quantised_call *)call, first, end);
}

/* All rows, at most GATHERED_ROWS of them at once. */
static FOR_EACH_PROCESSOR void all_rows(quantised_call call) {
    float totals[GATHERED_ROWS][MAX_BLOCKS], converted[STATE_BYTES / 4];
    int64_t inner = call.blocks * call.kind.group, size = call.bfloat16 ? 2 : 4, left = call.rows;
    range_work run = run_tiles;
#ifdef HAS_WIDE_VECTORS
    if (call.bfloat16 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi")) run = quantised_by_pairs;
    if (run == quantised_by_pairs && call.kind.group >= 32 && has_tiles_for(0)) run = quantised_by_matrix_tiles;
#endif
    for (call.totals = totals; left; left -= call.rows) {
        call.rows = fitting_rows(left < GATHERED_ROWS ? left : GATHERED_ROWS, run == run_tiles ? inner * 4 : 0);
        for (int64_t one = 0; call.kind.ranged && one < call.rows; one++) sum_states(&call, one, totals[one]);
        quantised_call some = call;
        if (run == run_tiles) {
            for (int64_t one = 0; one < call.rows; one++)
                read_numbers(converted + one * inner, call.states, one * call.step, inner, call.bfloat16);
            some.states = (const char *)converted, some.step = inner;
        }
        divide_work(run, &some, call.tiles, call.tiles * call.blocks * block_bytes(call.kind));
        call.states += call.rows * call.step * size;
        if (call.places) call.places += call.rows;
        else call.output += call.rows * call.tiles * LANES * size;
    }
}

static quantised_call call_of(const argument *states, const argument *weight) {
    quantised_kind kind = kind_of(weight);
    return (quantised_call){
        .weight = weight->data, .blocks = weight->size[1] * kind.together, .tiles = weight->size[0], .step = states->stride[0],
        .bfloat16 = states->bfloat16, .kind = kind,
    };
}

int quantised_product(const argument *args) {
    quantised_call call = call_of(args, args + 1);
    call.states = args->data, call.rows = args->size[0], call.bias = args[2].data, call.output = args[3].data;
    all_rows(call);
    return 0;
}

void quantised_rows_of_expert(const argument *args, int64_t expert, const char *gathered, const int64_t *places, int64_t rows) {
    quantised_call call = call_of(args, args + 2);
    call.tiles /= args[3].integer;
    call.weight += expert * call.tiles * call.blocks * block_bytes(call.kind);
    call.bias = args[4].data ? (const char *)args[4].data + expert * call.tiles * LANES * (call.bfloat16 ? 2 : 4) : NULL;
    call.states = gathered, call.step = args->size[1], call.rows = rows, call.output = args[5].data, call.places = places;
    all_rows(call);
}

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
            part scale[PARTS], minimum[PARTS] = {{0}};
            read_scales(scale, scales, kind.wide);
            if (kind.ranged) read_scales(minimum, scales + scale_bytes(kind), kind.wide);
            float found[MAX_GROUP];
            for (int at = 0; at < kind.group; at++) {
                int pair = at / 2 % (16 / bits);
                uint32_t word;
                memcpy(&word, block + (at / (32 / bits) * LANES + lane) * 4, sizeof word);
                part value = numbers_of((word_part){0} + (word >> (at % 2 * 16 + pair * bits) & ((1u << bits) - 1)), kind.zero);
                found[at] = ((float *)scale)[lane] * value[0] + ((float *)minimum)[lane];
            }
            write_numbers(output->data, (i * blocks + index) * kind.group, found, kind.group, output->bfloat16);
        }
    }
    return 0;
}
