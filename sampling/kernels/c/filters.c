/* The distribution that a request asks for, tokens drawn from one, and acceptance of drafts: sampler.py, rng.py and rejection.py are
   the reference. */

#include "lanes.h"

enum { BUCKETS = 2048, NEITHER = -1, MOST_ADDED = 2047 * PART }; /* MOST_ADDED: sums of so many units fit int32 */
enum { TEMPERATURE, TOP_K, TOP_P, MIN_P };
enum { PURPOSE_ACCEPT = 2, PURPOSE_TARGET };
static const float LOWEST = -86.0f; /* MIN_LOG_WEIGHT of sampler.py */
static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

INLINED part portable_exp(part values) {
    int_part below = values < LOWEST;
    part bounded = select_lanes(below, (part){0} + LOWEST, values), shifted = bounded * 1.4426950408889634f + 0.5f;
    int_part power = __builtin_convertvector(shifted, int_part);
    power += __builtin_convertvector(power, part) > shifted; /* rounds down: true is -1 */
    part whole = __builtin_convertvector(power, part);
    part rest = (bounded - whole * 0.693359375f) - whole * -0.00021219444005471377f;
    part series = rest * 0.0013933652080595493f + 0.008363181725144386f;
    series = series * rest + 0.04166646674275398f;
    series = series * rest + 0.16666576266288757f;
    series = series * rest + 0.5f;
    part scale = (part)((power + 127) << 23);
    return select_lanes(below, (part){0}, (series * rest * rest + rest + 1.0f) * scale);
}

/* The weights of at least `least`, counted or in units of 2^-40. Weights are at most 1; their units are added up in two halves of 20
   bits. */
INLINED int64_t total(const float *weights, int64_t count, float least, int counted) {
    int64_t sum = 0;
    for (int64_t i = 0; i < count;) {
        int64_t end = count - i < MOST_ADDED ? count : i + MOST_ADDED;
        int_part found = {0}, high = {0}, low = {0};
        for (; i < end; i += PART) {
            part values = load_lanes(weights, i, count, -1.0f, 0);
            int_part in_range = values >= least;
            part units = select_lanes(in_range, values, (part){0}) * 0x1p20f;
            int_part whole = __builtin_convertvector(units, int_part);
            found -= in_range;
            high += whole;
            low += __builtin_convertvector((units - __builtin_convertvector(whole, part)) * 0x1p20f, int_part);
        }
        for (int lane = 0; lane < PART; lane++) sum += counted ? found[lane] : ((int64_t)high[lane] << 20) + low[lane];
    }
    return sum;
}

/* The largest weight x of at least `least` for which the weights of at least x are `enough`, counted or in units; 0 if those of all
   positive ones are not. Weights are not negative, so their bits are ordered as they are. */
INLINED float threshold(const float *weights, int64_t count, float least, double enough, int counted) {
    int64_t above = 0;
    uint32_t lowest, beyond = 0x3f800001; /* the bits of x are in [lowest, beyond) */
    for (float level = 0.5f; level > least && level > 0x1p-100f; level *= level)
        if ((double)total(weights, count, level, counted) >= enough) least = level; /* few weights are left for what follows */
    memcpy(&lowest, &least, sizeof lowest);
    lowest = lowest ? lowest : 1;
    for (int shift = 19; shift >= 0; shift = shift == 19 ? 8 : shift == 8 ? 0 : -1) {
        uint32_t first_bucket = lowest >> shift, bucket = (beyond - 1 - (lowest >> shift << shift)) >> shift;
        int64_t amounts[BUCKETS] = {0};
        for (int64_t first = 0; first < count; first += PART) {
            part values = load_lanes(weights, first, count, 0.0f, 0);
            word_part bits = (word_part)values;
            int_part in_range = bits - lowest < beyond - lowest;
            if (!any(in_range)) continue;
            for (int lane = 0; lane < PART; lane++)
                if (in_range[lane]) amounts[(bits[lane] >> shift) - first_bucket] += counted ? 1 : (int64_t)(values[lane] * 0x1p40f);
        }
        while ((double)(above + amounts[bucket]) < enough) {
            if (!bucket) return 0.0f;
            above += amounts[bucket--];
        }
        uint32_t begin = (first_bucket + bucket) << shift, end = begin + (1u << shift);
        lowest = begin > lowest ? begin : lowest;
        beyond = end < beyond ? end : beyond;
    }
    float found;
    memcpy(&found, &lowest, sizeof found);
    return found;
}

/* Writes probabilities [count]; returns whether there is a finite best logit. `params` are those of the row. */
INLINED int distribute(const void *logits, const float *params, float *probabilities, int64_t count, int64_t bfloat16) {
    float best = largest(logits, count, bfloat16), temperature = params[TEMPERATURE], least = 0.0f;
    if (!isfinite(best) || temperature <= 0) {
        memset(probabilities, 0, (size_t)count * sizeof *probabilities);
        for (int64_t i = 0; isfinite(best) && i < count; i++)
            if (number(logits, i, bfloat16) == best) {
                probabilities[i] = 1.0f;
                break;
            }
        return isfinite(best);
    }
    for (int64_t i = 0; i < count; i += PART)
        store_lanes(probabilities, i, count, portable_exp((load_lanes(logits, i, count, -INFINITY, bfloat16) - best) / temperature));
    if (params[TOP_K] > 0) {
        int64_t last = (int64_t)params[TOP_K] - 1;
        least = threshold(probabilities, count, 0.0f, (double)(last < 0 ? 0 : last < count ? last : count - 1) + 1, 1);
    }
    least = params[MIN_P] > least ? params[MIN_P] : least;
    int64_t sum = total(probabilities, count, least, 0);
    if (params[TOP_P] < 1) {
        double enough = (double)params[TOP_P] * (double)sum;
        float share = enough > 0 ? threshold(probabilities, count, least, enough, 0) : 1.0f;
        least = share > least ? share : least;
        sum = total(probabilities, count, least, 0);
    }
    float scale = (float)sum * 0x1p-40f;
    for (int64_t i = 0; i < count; i += PART) {
        part values = load_lanes(probabilities, i, count, 0.0f, 0);
        store_lanes(probabilities, i, count, select_lanes(values >= least, values / scale, (part){0}));
    }
    return 1;
}

/* logits [B, Q, V]; params [B, 4 or more]; output [B, Q, V]. */
EXPORTED FOR_EACH_PROCESSOR int stepgraph_distribution(const argument *args) {
    const argument *logits = args, *params = args + 1;
    int64_t bytes = logits->bfloat16 ? 2 : 4, width = logits->size[2];
    float *output = args[2].data;
    for (int64_t row = 0; row < logits->size[0]; row++)
        for (int64_t position = 0; position < logits->size[1]; position++, output += width) {
            const char *from = (const char *)logits->data + (row * logits->stride[0] + position * logits->stride[1]) * bytes;
            const float *settings = (const float *)params->data + row * params->stride[0];
            if (logits->bfloat16) distribute(from, settings, output, width, 1);
            else distribute(from, settings, output, width, 0);
        }
    return 0;
}

INLINED uint64_t mix(uint64_t value) {
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
    value = (value ^ value >> 27) * 0x94D049BB133111EBu;
    return value ^ value >> 31;
}

INLINED uint64_t stream(int64_t seed, int64_t position, int64_t purpose) {
    return mix(mix((uint64_t)seed + (uint64_t)purpose * GOLDEN) + (uint64_t)position * GOLDEN);
}

INLINED float uniform(uint64_t key) {
    float number = ((float)(int64_t)(key >> 1) + 0.5f) * 0x1p-63f;
    return number > 1.0f - 0x1p-24f ? 1.0f - 0x1p-24f : number;
}

/* Weights max(p - q, 0). */
typedef struct {
    const float *target, *draft; /* p and q; q may be NULL: zero */
} residual;

INLINED float residual_at(const residual *from, int64_t token) {
    float rest = from->target[token] - (from->draft ? from->draft[token] : 0.0f);
    return rest > 0 ? rest : 0.0f;
}

/* The token with the largest weight over noise, the lowest of equal ones. Noise is at least its uniform number, so that its logarithm is
   computed for few tokens only. ids: the token of each weight, which selects its noise, or NULL. */
INLINED int64_t race_winner(const residual *from, int64_t count, const int64_t *ids, uint64_t key) {
    float most = 0.0f;
    int64_t winner = 0;
    for (int64_t first = 0; first < count; first += PART) {
        int64_t end = first + PART < count ? first + PART : count;
        float weights[PART] = {0}, numbers[PART];
        int32_t any = 0;
        for (int64_t i = first; i < end; i++) weights[i - first] = residual_at(from, i);
        for (int lane = 0; lane < PART; lane++) any |= weights[lane] > 0;
        if (!any) continue;
        for (int lane = 0; lane < PART; lane++) {
            int64_t at = first + lane < count ? first + lane : first;
            numbers[lane] = uniform(mix(key + (uint64_t)(ids ? ids[at] : at) * GOLDEN));
        }
        for (int64_t i = first; i < end; i++) {
            float weight = weights[i - first], number = numbers[i - first];
            if (!(weight > 0) || weight < most * number * 0.99999f) continue;
            float quotient = weight / -log1pf(-number);
            int64_t token = ids ? ids[i] : i;
            if (quotient > most || (quotient == most && token < winner)) {
                most = quotient;
                winner = token;
            }
        }
    }
    return winner;
}

/* logits [N, V]; params [N, 4 or more]; seed, position [N]; purpose; rows [N]; row_probs [R, W]; ids [V], ascending, or NULL; output
   [N]. */
EXPORTED FOR_EACH_PROCESSOR int stepgraph_draw(const argument *args) {
    const argument *logits = args, *params = args + 1, *table = args + 6;
    const int64_t *seed = args[2].data, *position = args[3].data, *rows = args[5].data, *ids = args[7].data;
    int64_t bytes = logits->bfloat16 ? 2 : 4, width = logits->size[1];
    for (int64_t row = 0; row < logits->size[0]; row++) {
        const char *from = (const char *)logits->data + row * logits->stride[0] * bytes;
        const float *settings = (const float *)params->data + row * params->stride[0];
        int64_t at = index_in(rows[row], table->size[0]);
        if (at < 0) return 1;
        float *probabilities = (float *)table->data + at * table->stride[0];
        int alive = logits->bfloat16 ? distribute(from, settings, probabilities, width, 1)
            : distribute(from, settings, probabilities, width, 0);
        residual weights = {.target = probabilities};
        ((int64_t *)args[8].data)[row] = alive ? race_winner(&weights, width, ids, stream(seed[row], position[row], args[4].integer)) : 0;
        for (int64_t i = width - 1; ids && i >= 0; i--) { /* ids[i] >= i: from the last on, none is overwritten before it moved */
            float probability = probabilities[i];
            probabilities[i] = 0.0f;
            probabilities[ids[i]] = probability;
        }
    }
    return 0;
}

/* The inputs of rejection.reject_sample, in order; output tokens [B, K + 1] and accepted [B]. */
EXPORTED FOR_EACH_PROCESSOR int stepgraph_reject_sample(const argument *args) {
    const argument *target = args, *draft = args + 1;
    const int64_t *rows = args[2].data, *drafts = args[5].data, *draft_count = args[6].data, *status = args[7].data;
    const int64_t *seed = args[8].data, *length = args[9].data;
    const bool *certain = args[3].data, *finite = args[4].data;
    int64_t *tokens = args[10].data, *accepted = args[11].data, count = target->size[1] - 1, width = target->size[2];
    for (int64_t row = 0; row < target->size[0]; row++) {
        const float *p = (const float *)target->data + row * target->stride[0], *q;
        const int64_t *own = drafts + row * count, *states = status + row * (count + 1);
        int64_t at = draft->size[1] ? index_in(rows[row], draft->size[0]) : 0, last = 0, token = NEITHER;
        residual weights = {.target = p};
        if (at < 0) return 1;
        for (; last < count; last++, weights.target = p += target->stride[1]) {
            int64_t proposed = own[last] < 0 ? 0 : own[last], next = states[last + 1];
            bool legal = states[last] == STATUS_OK && next != STATUS_NONE && next != STATUS_ILLEGAL, holds;
            if (proposed >= width) return 1;
            if (last >= draft_count[row]) break;
            if (draft->size[1] && !certain[row * count + last]) {
                q = (const float *)draft->data + at * draft->stride[0] + last * draft->stride[1];
                holds = uniform(stream(seed[row], length[row] + last, PURPOSE_ACCEPT)) * q[proposed] < p[proposed];
            } else {
                q = NULL;
                token = race_winner(&weights, width, NULL, stream(seed[row], length[row] + last, PURPOSE_TARGET));
                holds = token == own[last];
            }
            if (!(holds && legal && finite[row * (count + 1) + last])) {
                weights.draft = q;
                break;
            }
            token = NEITHER;
        }
        if (token == NEITHER) {
            bool any = !weights.draft;
            for (int64_t i = 0; !any && i < width; i++) any = residual_at(&weights, i) > 0;
            if (!any) weights.draft = NULL; /* p = q up to rounding */
            token = race_winner(&weights, width, NULL, stream(seed[row], length[row] + last, PURPOSE_TARGET));
        }
        for (int64_t i = 0; i <= count; i++) tokens[row * (count + 1) + i] = i < last ? own[i] : token;
        accepted[row] = last;
    }
    return 0;
}
