/* Layers that work on each token alone: rotary positions and the write into the cache, norms, activations. Each step is rounded as torch
   rounds it, so that bfloat16 results have the same bits as in torch. */

#include "kernels.h"

/* The compiler must not fuse products and sums across this point: torch rounds both. */
#define ROUNDED_HERE(numbers) __asm__ volatile("" ::"r"(numbers) : "memory")

/* The first `turned` of `size` numbers; the others are copied. */
INLINED void rotate(
    const float *cosines, const float *sines, const void *from, int64_t first, void *to, int64_t at, int64_t turned, int64_t size,
    int64_t bfloat16,
    int64_t entry_bytes) {
    float states[MAX_HEAD_SIZE], straight[MAX_HEAD_SIZE], crossed[MAX_HEAD_SIZE];
    int64_t half = turned / 2;
    read_numbers(states, from, first, size, bfloat16);
    for (int64_t i = 0; i < turned; i++) straight[i] = rounded(states[i] * cosines[i], bfloat16);
    for (int64_t i = 0; i < half; i++) crossed[i] = rounded(-states[i + half] * sines[i], bfloat16);
    for (int64_t i = half; i < turned; i++) crossed[i] = rounded(states[i - half] * sines[i], bfloat16);
    ROUNDED_HERE(straight);
    for (int64_t i = 0; i < turned; i++) states[i] = straight[i] + crossed[i];
    write_entries(to, at, states, size, bfloat16, entry_bytes);
}

/* query, key, value [tokens, heads, size], the heads of a token adjacent; cosines, sines [tokens, 1, turned]; slots [tokens]; keys, values
   [slots, kv_heads, size]; output as query. */
INLINED int rope_all(const argument *args, int64_t turned, int64_t size, int64_t bfloat16, int64_t entry_bytes) {
    const argument *query = args, *key = args + 1, *value = args + 2, *keys = args + 6, *values = args + 7;
    const int64_t *slots = args[5].data;
    int64_t heads = query->size[1], kv_heads = key->size[1], bytes = bfloat16 ? 2 : 4;
    for (int64_t token = 0; token < query->size[0]; token++)
        if (slots[token] < 0 || slots[token] >= keys->size[0]) return 1;
    for (int64_t token = 0; token < query->size[0]; token++) {
        float cosines[MAX_HEAD_SIZE], sines[MAX_HEAD_SIZE];
        read_numbers(cosines, args[3].data, token * turned, turned, bfloat16);
        read_numbers(sines, args[4].data, token * turned, turned, bfloat16);
        for (int64_t head = 0; head < heads; head++)
            rotate(cosines, sines, query->data, token * query->stride[0] + head * size, args[8].data, (token * heads + head) * size, turned,
                size, bfloat16, 0);
        int64_t kept = slots[token] * kv_heads * size;
        for (int64_t head = 0; head < kv_heads; head++)
            rotate(cosines, sines, key->data, token * key->stride[0] + head * size, keys->data, kept + head * size, turned, size, bfloat16,
                entry_bytes);
        const char *from = (const char *)value->data + token * value->stride[0] * bytes;
        if (entry_bytes == 1)
            for (int64_t i = 0; i < kv_heads * size; i++) ((uint8_t *)values->data)[kept + i] = to_float8(number(from, i, bfloat16));
        else
            memcpy((char *)values->data + kept * bytes, from, (size_t)(kv_heads * size * bytes));
    }
    return 0;
}

EXPORTED FOR_EACH_PROCESSOR int stepgraph_rope_and_write_kv(const argument *args) {
    int64_t bytes = args[6].integer;
    if (args->size[2] == 64 && args[3].size[2] == 64 && bytes == 2) return rope_all(args, 64, 64, 1, 2); /* sizes that the compiler knows */
    return rope_all(args, args[3].size[2], args->size[2], args->bfloat16, bytes);
}

/* states [N, size] or [N, inner, size]; weight [size]; epsilon; offset; output as states. */
INLINED int norm_all(const argument *args, int64_t bfloat16) {
    float offset = (float)args[3].real;
    const argument *states = args, *weight = args + 1;
    int64_t wide = states->size[2] > 0, inner = wide ? states->size[1] : 1, size = states->size[1 + wide], whole = size / LANES * LANES;
    for (int64_t row = 0; row < states->size[0] * inner; row++) {
        int64_t first = row / inner * states->stride[0] + row % inner * size;
        float parts[LANES] = {0};
        for (int64_t i = 0; i < whole; i += LANES)
            for (int lane = 0; lane < LANES; lane++) {
                float value = number(states->data, first + i + lane, bfloat16);
                parts[lane] += value * value;
            }
        for (int64_t i = whole; i < size; i++) {
            float value = number(states->data, first + i, bfloat16);
            parts[i - whole] += value * value;
        }
        for (int half = LANES / 2; half; half /= 2)
            for (int lane = 0; lane < half; lane++) parts[lane] += parts[lane + half];
        float scale = 1.0f / sqrtf(parts[0] / (float)size + (float)args[2].real);
        for (int64_t i = 0; i < size; i++) {
            float value = number(states->data, first + i, bfloat16) * scale;
            value = offset != 0 ? value : rounded(value, bfloat16);
            put(args[4].data, row * size + i, value * (number(weight->data, i, bfloat16) + offset), bfloat16);
        }
    }
    return 0;
}

EXPORTED FOR_EACH_PROCESSOR int stepgraph_rms_norm(const argument *args) { return args->bfloat16 ? norm_all(args, 1) : norm_all(args, 0); }

/* states, update [N, size]; weight [size]; epsilon; offset; sums, normed as states. */
INLINED int add_norm_all(const argument *args, int64_t bfloat16) {
    const argument call[] = {args[5], args[2], args[3], args[4], args[6]};
    for (int64_t i = 0; i < args->size[0] * args->size[1]; i++)
        put(args[5].data, i, number(args->data, i, bfloat16) + number(args[1].data, i, bfloat16), bfloat16);
    return norm_all(call, bfloat16);
}

EXPORTED FOR_EACH_PROCESSOR int stepgraph_add_rms_norm(const argument *args) {
    return args->bfloat16 ? add_norm_all(args, 1) : add_norm_all(args, 0);
}

enum { STRETCH = 128, SILU = 0, GELU_TANH = 1, LIMITED = 2 }; /* as Activation in dense.py */

INLINED void activate_stretch(
    const void *pairs, void *output, int64_t row, int64_t size, int64_t first, int64_t count, int64_t activation, int64_t bfloat16) {
    float gate[STRETCH], up[STRETCH], steep[STRETCH];
    read_numbers(gate, pairs, 2 * row * size + first, count, bfloat16);
    read_numbers(up, pairs, (2 * row + 1) * size + first, count, bfloat16);
    if (activation == LIMITED)
        for (int64_t i = 0; i < count; i++) {
            gate[i] = gate[i] > 7.0f ? 7.0f : gate[i]; /* a NaN stays */
            up[i] = up[i] > 7.0f ? 7.0f : up[i] < -7.0f ? -7.0f : up[i];
            up[i] = rounded(up[i] + 1.0f, bfloat16);
        }
    for (int64_t i = 0; i < count; i++) steep[i] = activation == LIMITED ? 1.702f * gate[i] : gate[i];
    if (activation == GELU_TANH)
        for (int64_t i = 0; i < count; i++) steep[i] = 1.59576912f * (gate[i] + 0.044715f * gate[i] * gate[i] * gate[i]);
    for (int64_t i = 0; i < count; i++) {
        float opened = gate[i] / (1.0f + power_of_e(steep[i] < -87.0f ? 87.0f : -steep[i]));
        up[i] *= rounded(opened, bfloat16);
    }
    write_numbers(output, row * size + first, up, count, bfloat16);
}

/* pairs [..., 2 * size]: gate, then up; activation; output [..., size]. */
INLINED int activate_all(const argument *args, int64_t activation, int64_t bfloat16) {
    void *output = args[2].data;
    int64_t last = args->size[3] ? 3 : args->size[2] ? 2 : 1, rows = 1, size = args[2].size[last], whole = size / STRETCH * STRETCH;
    for (int64_t i = 0; i < last; i++) rows *= args->size[i];
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t first = 0; first < whole; first += STRETCH)
            activate_stretch(args->data, output, row, size, first, STRETCH, activation, bfloat16);
        if (whole < size) activate_stretch(args->data, output, row, size, whole, size - whole, activation, bfloat16);
    }
    return 0;
}

EXPORTED FOR_EACH_PROCESSOR int stepgraph_activate_and_mul(const argument *args) {
    int64_t activation = args[1].integer;
    if (activation == SILU) return args->bfloat16 ? activate_all(args, SILU, 1) : activate_all(args, SILU, 0); /* as constants */
    return activate_all(args, activation, args->bfloat16);
}
