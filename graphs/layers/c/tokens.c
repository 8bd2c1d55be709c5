/* Layers that work on each token alone: rotary positions and the write into the cache, norms, SiLU. Each step is rounded as torch rounds
   it, so that bfloat16 results have the same bits as in torch. */

#include "kernels.h"

typedef struct {
    const void *query, *key, *value, *cosines, *sines; /* the heads of a token are adjacent, tokens `*_step` numbers apart */
    const int64_t *slots;                              /* [tokens] */
    void *output, *keys, *values;
    int64_t tokens, heads, kv_heads, size, query_step, key_step, value_step, cache_slots, bfloat16;
} rope_call;

typedef struct {
    const void *states, *weight; /* [outer, inner, size], outer ones `step` numbers apart; [size] */
    void *output;
    int64_t outer, inner, size, step;
    float epsilon;
} norm_call;

typedef struct {
    const void *pairs; /* [rows, 2 * size]: gate, then up */
    void *output;
    int64_t rows, size;
} silu_call;

/* The compiler must not fuse products and sums across this point: torch rounds both. */
#define ROUNDED_HERE(numbers) __asm__ volatile("" ::"r"(numbers) : "memory")

INLINED void rotate(const rope_call *call, const float *cosines, const float *sines, const void *from, int64_t first, void *to, int64_t at) {
    float states[MOST_SIZE], straight[MOST_SIZE], crossed[MOST_SIZE];
    int64_t size = call->size, half = size / 2, bfloat16 = call->bfloat16;
    read_numbers(states, from, first, size, bfloat16);
    for (int64_t i = 0; i < size; i++) straight[i] = rounded(states[i] * cosines[i], bfloat16);
    for (int64_t i = 0; i < half; i++) crossed[i] = rounded(-states[i + half] * sines[i], bfloat16);
    for (int64_t i = half; i < size; i++) crossed[i] = rounded(states[i - half] * sines[i], bfloat16);
    ROUNDED_HERE(straight);
    for (int64_t i = 0; i < size; i++) straight[i] += crossed[i];
    write_numbers(to, at, straight, size, bfloat16);
}

INLINED int rope_all(const rope_call *call) {
    int64_t size = call->size, bytes = call->bfloat16 ? 2 : 4;
    for (int64_t token = 0; token < call->tokens; token++)
        if (call->slots[token] < 0 || call->slots[token] >= call->cache_slots) return 1;
    for (int64_t token = 0; token < call->tokens; token++) {
        float cosines[MOST_SIZE], sines[MOST_SIZE];
        read_numbers(cosines, call->cosines, token * size, size, call->bfloat16);
        read_numbers(sines, call->sines, token * size, size, call->bfloat16);
        for (int64_t head = 0; head < call->heads; head++)
            rotate(call, cosines, sines, call->query, token * call->query_step + head * size, call->output, (token * call->heads + head) * size);
        int64_t kept = call->slots[token] * call->kv_heads * size;
        for (int64_t head = 0; head < call->kv_heads; head++)
            rotate(call, cosines, sines, call->key, token * call->key_step + head * size, call->keys, kept + head * size);
        const char *value = (const char *)call->value + token * call->value_step * bytes;
        memcpy((char *)call->values + kept * bytes, value, (size_t)(call->kv_heads * size * bytes));
    }
    return 0;
}

EXPORTED FOR_EACH_PROCESSOR int stepgraph_rope_and_write_kv(const argument *given) {
    const argument *query = given, *key = given + 1, *value = given + 2, *keys = given + 6;
    rope_call call = {
        .query = query->data, .key = key->data, .value = value->data, .cosines = given[3].data, .sines = given[4].data,
        .slots = given[5].data, .output = given[8].data, .keys = keys->data, .values = given[7].data,
        .tokens = query->size[0], .heads = query->size[1], .kv_heads = key->size[1], .size = query->size[2],
        .query_step = query->stride[0], .key_step = key->stride[0], .value_step = value->stride[0], .cache_slots = keys->size[0],
        .bfloat16 = query->bfloat16,
    };
    if (call.size == 64 && call.bfloat16) { /* sizes that the compiler knows */
        call.size = 64, call.bfloat16 = 1;
        return rope_all(&call);
    }
    return rope_all(&call);
}

enum { LANES = 16 };

INLINED void norm_all(const norm_call *call, int64_t bfloat16) {
    int64_t size = call->size;
    for (int64_t row = 0; row < call->outer * call->inner; row++) {
        int64_t first = row / call->inner * call->step + row % call->inner * size, whole = size / LANES * LANES;
        float parts[LANES] = {0};
        for (int64_t i = 0; i < whole; i += LANES)
            for (int lane = 0; lane < LANES; lane++) {
                float value = number(call->states, first + i + lane, bfloat16);
                parts[lane] += value * value;
            }
        for (int64_t i = whole; i < size; i++) {
            float value = number(call->states, first + i, bfloat16);
            parts[i - whole] += value * value;
        }
        for (int half = LANES / 2; half; half /= 2)
            for (int lane = 0; lane < half; lane++) parts[lane] += parts[lane + half];
        float scale = 1.0f / sqrtf(parts[0] / (float)size + call->epsilon);
        for (int64_t i = 0; i < size; i++) {
            float value = rounded(number(call->states, first + i, bfloat16) * scale, bfloat16);
            put(call->output, row * size + i, value * number(call->weight, i, bfloat16), bfloat16);
        }
    }
}

EXPORTED FOR_EACH_PROCESSOR int stepgraph_rms_norm(const argument *given) {
    const argument *states = given;
    int64_t wide = states->size[2] > 0; /* [N, inner, size], else [N, size] */
    norm_call call = {
        .states = states->data, .weight = given[1].data, .output = given[3].data, .outer = states->size[0],
        .inner = wide ? states->size[1] : 1, .size = states->size[1 + wide], .step = states->stride[0], .epsilon = (float)given[2].real,
    };
    if (states->bfloat16) norm_all(&call, 1);
    else norm_all(&call, 0);
    return 0;
}

enum { STRETCH = 128 };

INLINED void silu_stretch(const silu_call *call, int64_t row, int64_t first, int64_t count, int64_t bfloat16) {
    float gate[STRETCH], up[STRETCH];
    read_numbers(gate, call->pairs, 2 * row * call->size + first, count, bfloat16);
    read_numbers(up, call->pairs, (2 * row + 1) * call->size + first, count, bfloat16);
    for (int64_t i = 0; i < count; i++) {
        float opened = gate[i] / (1.0f + power_of_e(gate[i] < -87.0f ? 87.0f : -gate[i]));
        up[i] *= rounded(opened, bfloat16);
    }
    write_numbers(call->output, row * call->size + first, up, count, bfloat16);
}

INLINED void silu_all(const silu_call *call, int64_t bfloat16) {
    int64_t whole = call->size / STRETCH * STRETCH;
    for (int64_t row = 0; row < call->rows; row++) {
        for (int64_t first = 0; first < whole; first += STRETCH) silu_stretch(call, row, first, STRETCH, bfloat16);
        if (whole < call->size) silu_stretch(call, row, whole, call->size - whole, bfloat16);
    }
}

EXPORTED FOR_EACH_PROCESSOR int stepgraph_silu_and_mul(const argument *given) {
    const argument *pairs = given, *output = given + 1;
    int64_t last = pairs->size[3] ? 3 : pairs->size[2] ? 2 : 1, rows = 1;
    for (int64_t i = 0; i < last; i++) rows *= pairs->size[i];
    silu_call call = {.pairs = pairs->data, .output = output->data, .rows = rows, .size = output->size[last]};
    if (pairs->bfloat16) silu_all(&call, 1);
    else silu_all(&call, 0);
    return 0;
}
