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
    for (int field = 0; field < 32; field++) FROM_ZERO[field] = narrowed((float)(field % 16)), CENTRED[field] = narrowed((float)(field % 16 - 8));
    for (int field = 0; field < 256; field++) {
        uint16_t value = narrowed((float)(field - 128));
        LOWS[field / 128][field % 128] = (uint8_t)value, HIGHS[field / 128][field % 128] = (uint8_t)(value >> 8);
    }
}

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi,fma,f16c")
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
    return field ? _mm512_mask_blend_epi8(odd, _mm512_srli_epi16(low, 8), high) : _mm512_mask_blend_epi8(odd, low, _mm512_slli_epi16(high, 8));
}

/* Fields in float8_e4m3fn: bfloat16 has the same bits with an exponent that is 120 larger, except for the eight numbers whose exponent is 0. */
static const uint16_t SMALL[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};

INLINED __m512i from_float8_fields(__m512i raw, unsigned field) {
    __m512i shifted = _mm512_srli_epi16(raw, field), size = _mm512_and_si512(shifted, _mm512_set1_epi16(0x7f));
    __m512i found = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
    __mmask32 small = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8));
    found = _mm512_mask_permutexvar_epi16(found, small, size, _mm512_loadu_si512(SMALL));
    return _mm512_or_si512(found, _mm512_and_si512(_mm512_slli_epi16(shifted, 8), _mm512_set1_epi16((short)0x8000)));
}

INLINED void add_block(
    part (*parts)[PARTS], const char *states, int64_t row_bytes, const char *from, int64_t apart, int tall, int wide, int bits, int zero) {
    __m512i low = _mm512_loadu_si512(zero == 8 ? CENTRED : FROM_ZERO);
#pragma GCC unroll 16
    for (int pair = 0; pair < indices_per_step(bits) / 2; pair++) {
        unsigned field = (unsigned)(pair * bits % 16);
        __m512i right[2];
#pragma GCC unroll 2
        for (int side = 0; side < wide; side++) {
            __m512i raw = _mm512_loadu_si512(from + side * apart + pair * bits / 16 * 64);
            right[side] = zero == FLOAT8 ? from_float8_fields(raw, field)
                          : bits == 8    ? (tall > 4 ? from_bytes(raw, field) : from_tables(raw, field))
                                         : _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, field), low);
        }
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
#endif
