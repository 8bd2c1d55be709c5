/* Products of bfloat16 states and quantised weights by the instruction that adds up pairs of bfloat16, where processor and compiler have
   it. The fields are exact in bfloat16. */

#include "kernels.h"

#ifdef HAS_DOT_PRODUCTS
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512bf16,fma,f16c")
#include <immintrin.h>

INLINED void add_block(
    lanes *parts, const char *states, int64_t row_bytes, const char *words_at, int tall, int bits, int zero, int64_t bfloat16);
#include "quantised.h"

/* The values of a field of four bits in bfloat16, as they are and minus 8. Five bits select an entry, the highest of which belongs to the
   next field. */
#define TWICE(...) {__VA_ARGS__, __VA_ARGS__}
static const uint16_t FROM_ZERO[32] = TWICE(
    0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170);
static const uint16_t CENTRED[32] = TWICE(
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0);

/* A byte at the top of each word as float32: a signed number, or float8_e4m3fn, whose exponent is 120 too small in place of float32's. */
INLINED __m512 from_top_byte(__m512i top, int zero) {
    if (zero != FLOAT8) return _mm512_cvtepi32_ps(_mm512_srai_epi32(top, 24));
    __m512i size = _mm512_and_si512(_mm512_srli_epi32(top, 4), _mm512_set1_epi32(0x07f00000));
    __m512i found = (__m512i)_mm512_mul_ps((__m512)size, _mm512_set1_ps(0x1p120f));
    return (__m512)_mm512_or_si512(found, _mm512_and_si512(top, _mm512_set1_epi32((int)0x80000000)));
}

/* Fields of eight bits, minus 128 where they are integers: float32 numbers of at most eight significant bits, cut off after them. */
INLINED __m512i from_bytes(__m512i raw, unsigned field, int zero) {
    if (zero != FLOAT8) raw = _mm512_xor_si512(raw, _mm512_set1_epi8((char)0x80));
    __m512 even = from_top_byte(_mm512_slli_epi32(raw, 24 - field), zero);
    __m512 odd = from_top_byte(_mm512_slli_epi32(raw, 8 - field), zero);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32((__m512i)even, 16), (__m512i)odd);
}

INLINED void add_block(
    lanes *parts, const char *states, int64_t row_bytes, const char *words_at, int tall, int bits, int zero, int64_t bfloat16) {
    (void)bfloat16;
    __m512i low = _mm512_loadu_si512(zero == 8 ? CENTRED : FROM_ZERO);
#pragma GCC unroll 16
    for (int pair = 0; pair < taken_at_once(bits) / 2; pair++) {
        __m512i raw = _mm512_loadu_si512(words_at + pair * bits / 16 * 64);
        unsigned field = (unsigned)(pair * bits % 16);
        __m512i right = bits == 8 ? from_bytes(raw, field, zero) : _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, field), low);
#pragma GCC unroll 8
        for (int row = 0; row < tall; row++) {
            int32_t two;
            memcpy(&two, states + row * row_bytes + pair * 4, sizeof two);
            __m512bh left = (__m512bh)_mm512_set1_epi32(two);
            parts[row] = (lanes)_mm512_dpbf16_ps((__m512)parts[row], left, (__m512bh)right);
        }
    }
}

void quantised_by_pairs(const quantised_call *call) {
    quantised_call same = *call;
    same.bfloat16 = 1;
    FOR_FIELDS(all_tiles, &same);
}
#endif
