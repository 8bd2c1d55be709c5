/* What a layer does to each token alone: rotary positions on the way into the cache, norms, gates. Each step is rounded as torch
   rounds it, so that bfloat16 has the bits of the same sums in torch. */

#include "kernels.h"

/* The compiler may not join products and sums across this: torch rounds both. */
#define ROUNDED_HERE(numbers) __asm__ volatile("" ::"r"(numbers) : "memory")

INLINED void turn(const turn_call *call, const float *cosines, const float *sines, const void *from, int64_t first, void *to, int64_t at) {
    float states[MOST_SIZE], straight[MOST_SIZE], crossed[MOST_SIZE];
    int64_t size = call->size, half = size / 2, narrow = call->narrow;
    read_numbers(states, from, first, size, narrow);
    for (int64_t i = 0; i < size; i++) straight[i] = rounded(states[i] * cosines[i], narrow);
    for (int64_t i = 0; i < half; i++) crossed[i] = rounded(-states[i + half] * sines[i], narrow);
    for (int64_t i = half; i < size; i++) crossed[i] = rounded(states[i - half] * sines[i], narrow);
    ROUNDED_HERE(straight);
    for (int64_t i = 0; i < size; i++) straight[i] += crossed[i];
    write_numbers(to, at, straight, size, narrow);
}

INLINED int turn_all(const turn_call *call) {
    int64_t size = call->size, bytes = call->narrow ? 2 : 4;
    for (int64_t token = 0; token < call->tokens; token++)
        if (call->slots[token] < 0 || call->slots[token] >= call->cache_slots) return 1;
    for (int64_t token = 0; token < call->tokens; token++) {
        float cosines[MOST_SIZE], sines[MOST_SIZE];
        read_numbers(cosines, call->cosines, token * size, size, call->narrow);
        read_numbers(sines, call->sines, token * size, size, call->narrow);
        for (int64_t head = 0; head < call->heads; head++)
            turn(call, cosines, sines, call->query, token * call->query_step + head * size, call->output, (token * call->heads + head) * size);
        int64_t kept = call->slots[token] * call->kv_heads * size;
        for (int64_t head = 0; head < call->kv_heads; head++)
            turn(call, cosines, sines, call->key, token * call->key_step + head * size, call->keys, kept + head * size);
        const char *value = (const char *)call->value + token * call->value_step * bytes;
        memcpy((char *)call->values + kept * bytes, value, (size_t)(call->kv_heads * size * bytes));
    }
    return 0;
}

EXPORTED FOR_EACH_PROCESSOR int stepgraph_turn_and_keep(const turn_call *call) {
    if (call->size == 64 && call->narrow) {
        turn_call known = *call;
        known.size = 64, known.narrow = 1;
        return turn_all(&known);
    }
    return turn_all(call);
}

enum { LANES = 16 };

INLINED void norm_all(const norm_call *call, int64_t narrow) {
    int64_t size = call->size;
    for (int64_t row = 0; row < call->outer * call->inner; row++) {
        int64_t first = row / call->inner * call->step + row % call->inner * size, whole = size / LANES * LANES;
        float parts[LANES] = {0};
        for (int64_t i = 0; i < whole; i += LANES)
            for (int lane = 0; lane < LANES; lane++) {
                float value = number(call->states, first + i + lane, narrow);
                parts[lane] += value * value;
            }
        for (int64_t i = whole; i < size; i++) {
            float value = number(call->states, first + i, narrow);
            parts[i - whole] += value * value;
        }
        for (int half = LANES / 2; half; half /= 2)
            for (int lane = 0; lane < half; lane++) parts[lane] += parts[lane + half];
        float scale = 1.0f / sqrtf(parts[0] / (float)size + call->epsilon);
        for (int64_t i = 0; i < size; i++) {
            float value = rounded(number(call->states, first + i, narrow) * scale, narrow);
            put(call->output, row * size + i, value * number(call->weight, i, narrow), narrow);
        }
    }
}

EXPORTED FOR_EACH_PROCESSOR int stepgraph_rms_norm(const norm_call *call) {
    if (call->narrow) norm_all(call, 1);
    else norm_all(call, 0);
    return 0;
}

enum { STRETCH = 128 };

INLINED void gate_stretch(const gate_call *call, int64_t row, int64_t first, int64_t count, int64_t narrow) {
    float gate[STRETCH], up[STRETCH];
    read_numbers(gate, call->pairs, 2 * row * call->size + first, count, narrow);
    read_numbers(up, call->pairs, (2 * row + 1) * call->size + first, count, narrow);
    for (int64_t i = 0; i < count; i++) {
        float opened = gate[i] / (1.0f + power_of_e(gate[i] < -87.0f ? 87.0f : -gate[i]));
        up[i] *= rounded(opened, narrow);
    }
    write_numbers(call->output, row * call->size + first, up, count, narrow);
}

INLINED void gate_all(const gate_call *call, int64_t narrow) {
    int64_t whole = call->size / STRETCH * STRETCH;
    for (int64_t row = 0; row < call->rows; row++) {
        for (int64_t first = 0; first < whole; first += STRETCH) gate_stretch(call, row, first, STRETCH, narrow);
        if (whole < call->size) gate_stretch(call, row, whole, call->size - whole, narrow);
    }
}

EXPORTED FOR_EACH_PROCESSOR int stepgraph_gate(const gate_call *call) {
    if (call->narrow) gate_all(call, 1);
    else gate_all(call, 0);
    return 0;
}

EXPORTED int64_t stepgraph_kernels_layout(int64_t *values) {
    int64_t known[] = {
        KERNELS_VERSION,    sizeof(attention_call), sizeof(turn_call),  sizeof(norm_call), sizeof(gate_call),   sizeof(product_call),
        sizeof(place_call), sizeof(shift_call),     sizeof(angle_call), sizeof(mask_call), sizeof(settle_call), MOST_SIZE,
    };
    memcpy(values, known, sizeof known);
    return sizeof known / sizeof *known;
}
