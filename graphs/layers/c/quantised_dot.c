/* Products of bfloat16 states and quantised weights by the instruction that adds up pairs of bfloat16, where processor and compiler have
   it. The fields are exact in bfloat16. */

#define WIDE_VECTORS
#include "kernels.h"

#ifdef HAS_WIDE_VECTORS
/* The values of a 4-bit field in bfloat16, unchanged and minus 8. Five bits select an entry, the highest of which belongs to the next
   field. LOWS, HIGHS: the two bytes of the bfloat16 of an 8-bit field minus 128, first of negative numbers, then of the others. */
static uint16_t FROM_ZERO[32], CENTRED[32];
static uint8_t LOWS[2][128], HIGHS[2][128];

static __attribute__((constructor)) void fill_tables(void) { /* above the pragma: runs on every processor */
    for (int field = 0; field < 32; field++)
        FROM_ZERO[field] = narrowed((float)(field % 16)), CENTRED[field] = narrowed((float)(field % 16 - 8));
    for (int field = 0; field < 256; field++) {
        uint16_t value = narrowed((float)(field - 128));
        LOWS[field / 128][field % 128] = (uint8_t)value, HIGHS[field / 128][field % 128] = (uint8_t)(value >> 8);
    }
}

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi,fma,f16c,amx-tile,amx-bf16")
#include <immintrin.h>

#define EVERY_HEIGHT 1
#define STATE_SIZE 2 /* bytes: bfloat16 */
#define FROM_FLOAT16(from) ((part)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from))))
#include "quantised.h"

/* An 8-bit field minus 128 as float32: the field becomes the lowest bits of 2^23, from which 2^23 + 128 is subtracted. */
INLINED __m512i byte_number(__m512i shifted) {
    __m512i found = _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi32(0xff), _mm512_set1_epi32(0x4b000000), 0xea); /* a & b | c */
    return (__m512i)_mm512_sub_ps((__m512)found, _mm512_set1_ps(0x1p23f + 128));
}

/* Both numbers have at most eight significant bits, so that cutting them off to bfloat16 is exact. */
INLINED __m512i from_bytes(__m512i raw, unsigned field) {
    __m512i even = byte_number(_mm512_srli_epi32(raw, field)), odd = byte_number(_mm512_srli_epi32(raw, field + 16));
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd);
}

/* The same for few rows, by the tables LOWS and HIGHS: half the instructions. With the sums of more rows there are no registers for the
   tables. */
INLINED __m512i look_up(__m512i raw, __mmask64 positive, const uint8_t tables[2][128]) {
    __m512i found = _mm512_mask2_permutex2var_epi8(_mm512_loadu_si512(tables[1]), raw, positive, _mm512_loadu_si512(tables[1] + 64));
    return _mm512_mask2_permutex2var_epi8(_mm512_loadu_si512(tables[0]), found, ~positive, _mm512_loadu_si512(tables[0] + 64));
}

INLINED __m512i from_tables(__m512i raw, unsigned field) {
    __mmask64 positive = _mm512_movepi8_mask(raw), odd = 0xaaaaaaaaaaaaaaaa;
    __m512i low = look_up(raw, positive, LOWS), high = look_up(raw, positive, HIGHS); /* the compiler shares them between both fields */
    return field ? _mm512_mask_blend_epi8(odd, _mm512_srli_epi16(low, 8), high)
        : _mm512_mask_blend_epi8(odd, low, _mm512_slli_epi16(high, 8));
}

/* Fields in float8_e4m3fn: bfloat16 has the same bits with an exponent that is 120 larger, except for the eight numbers whose exponent is
   0. */
static const uint16_t SMALL[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};

INLINED __m512i from_float8_fields(__m512i raw, unsigned field) {
    __m512i shifted = _mm512_srli_epi16(raw, field), size = _mm512_and_si512(shifted, _mm512_set1_epi16(0x7f));
    __m512i found = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
    __mmask32 small = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8));
    found = _mm512_mask_permutexvar_epi16(found, small, size, _mm512_loadu_si512(SMALL));
    return _mm512_or_si512(found, _mm512_and_si512(_mm512_slli_epi16(shifted, 8), _mm512_set1_epi16((short)0x8000)));
}

/* Fields of a pair of inner indices of 16 columns in bfloat16. few: for few rows. */
INLINED __m512i pair_of(const char *from, int pair, int bits, int zero, int few) {
    __m512i raw = _mm512_loadu_si512(from + pair * bits / 16 * 64);
    unsigned field = (unsigned)(pair * bits % 16);
    if (zero == FLOAT8) return from_float8_fields(raw, field);
    if (bits == 8) return few ? from_tables(raw, field) : from_bytes(raw, field);
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, field), _mm512_loadu_si512(zero == 8 ? CENTRED : FROM_ZERO));
}

INLINED void add_block(
    part (*parts)[PARTS], const char *states, int64_t row_bytes, const char *from, int64_t apart, int tall, int wide, int bits, int zero) {
#pragma GCC unroll 16
    for (int pair = 0; pair < indices_per_step(bits) / 2; pair++) {
        __m512i right[2];
#pragma GCC unroll 2
        for (int side = 0; side < wide; side++) right[side] = pair_of(from + side * apart, pair, bits, zero, tall <= 4);
#pragma GCC unroll 8
        for (int one = 0; one < tall * wide; one++) {
            int32_t two;
            memcpy(&two, states + one / wide * row_bytes + pair * 4, sizeof two);
            __m512bh left = (__m512bh)_mm512_set1_epi32(two);
            *parts[one] = (part)_mm512_dpbf16_ps((__m512)*parts[one], left, (__m512bh)right[one % wide]);
        }
    }
}

void quantised_by_pairs(const void *call, int64_t first, int64_t end) { FOR_FIELDS(tiles_of, (const quantised_call *)call, first, end); }

/* All rows by the fields of 16 columns, 32 inner indices at a time; each block has sums of its own. A tile is loaded from memory only after
   all earlier stores, so that several blocks are unpacked, then multiplied, then scaled. */
INLINED void matrix_tiles_of(const quantised_call *call, int64_t tile, int64_t end, int bits, int zero) {
    enum { TOGETHER = 8 };
    tile_shapes shapes = {.palette = 1, .bytes = {64, 64, 64}, .rows = {(uint8_t)call->rows, (uint8_t)call->rows, 16}};
    _tile_loadconfig(&shapes);
    for (; tile < end; tile++) {
        int64_t bytes = block_bytes(call->kind), words = word_bytes(call->kind), scaled = scale_bytes(call->kind),
            count = call->kind.group / 32;
        const char *states = call->states, *block = call->weight + tile * call->blocks * bytes;
        part sums[LANES] = {{0}};
        for (int64_t index = 0, blocks; index < call->blocks; index += blocks, block += blocks * bytes) {
            __m512i pairs[TOGETHER][16];
            part found[TOGETHER][LANES];
            blocks = call->blocks - index < TOGETHER / count ? call->blocks - index : TOGETHER / count;
            for (int64_t one = 0; one < blocks * count; one++) {
                const char *from = block + one / count * bytes + one % count * 64 * bits;
                for (int64_t line = 0; line <= bits; line++) __builtin_prefetch(from + PREFETCH_BYTES + line * 64);
#pragma GCC unroll 16
                for (int pair = 0; pair < 16; pair++) pairs[one][pair] = pair_of(from, pair, bits, zero, 0);
            }
            TILES_READ_MEMORY();
            for (int64_t one = 0; one < blocks * count; one++, states += 64) {
                if (one % count == 0) _tile_zero(0);
                _tile_loadd(1, states, call->step * 2);
                _tile_loadd(2, pairs[one], 64);
                _tile_dpbf16ps(0, 1, 2);
                if (one % count == count - 1) _tile_stored(0, found[one / count], 64);
            }
            TILES_READ_MEMORY();
            for (int64_t one = 0; one < blocks; one++) {
                const char *scales = block + one * bytes + words;
                part scale, minimum;
                read_scales(&scale, scales, call->kind.wide);
                if (call->kind.ranged) read_scales(&minimum, scales + scaled, call->kind.wide);
                for (int64_t row = 0; row < call->rows; row++) {
                    sums[row] += found[one][row] * scale;
                    if (call->kind.ranged) sums[row] += minimum * call->totals[row][index + one];
                }
            }
        }
        for (int64_t row = 0; row < call->rows; row++) write_sums(call, row, tile, (float *)(sums + row));
    }
    _tile_release();
}

void quantised_by_matrix_tiles(const void *call, int64_t first, int64_t end) {
    FOR_FIELDS(matrix_tiles_of, (const quantised_call *)call, first, end);
}
#endif
