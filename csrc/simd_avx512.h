// What matmul_wide.inl needs, on 512-bit vectors with AVX-512's dot products of bytes.
// tests/cpu/wide_portable.h has the same in plain C++.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "quant.h"

#define FORERUN_INLINE static inline __attribute__((always_inline))

namespace {

using forerun::Group;

using F16 = __m512;
using I16 = __m512i;

FORERUN_INLINE F16 load16(const void* at) { return _mm512_loadu_ps(at); }
FORERUN_INLINE F16 load_half16(const void* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
}
FORERUN_INLINE F16 splat_half16(const void* at) {
    int16_t half;
    memcpy(&half, at, sizeof half);
    return _mm512_cvtph_ps(_mm256_set1_epi16(half));
}
// Sixteen bytes, with a sign or without.
template <bool Signed>
FORERUN_INLINE F16 load_bytes_as_floats16(const uint8_t* at) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)at);
    return _mm512_cvtepi32_ps(Signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}
FORERUN_INLINE F16 splat16(float a) { return _mm512_set1_ps(a); }
FORERUN_INLINE F16 add16(F16 a, F16 b) { return _mm512_add_ps(a, b); }
FORERUN_INLINE F16 mul16(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
FORERUN_INLINE F16 fma16(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
FORERUN_INLINE F16 float16(I16 a) { return _mm512_cvtepi32_ps(a); }

FORERUN_INLINE void store16(float* at, F16 a) { _mm512_storeu_ps(at, a); }
FORERUN_INLINE F16 sub16(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
FORERUN_INLINE F16 div16(F16 a, F16 b) { return _mm512_div_ps(a, b); }
FORERUN_INLINE F16 max16(F16 a, F16 b) { return _mm512_max_ps(a, b); }
FORERUN_INLINE F16 min16(F16 a, F16 b) { return _mm512_min_ps(a, b); }
FORERUN_INLINE F16 round16(F16 a) {
    const F16 magic = _mm512_set1_ps(12582912.0f);
    return _mm512_sub_ps(_mm512_add_ps(a, magic), magic);
}
FORERUN_INLINE F16 power16(F16 n) {
    const I16 biased = _mm512_add_epi32(_mm512_cvttps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}

// Eight numbers at `a`, then eight at `b`.
FORERUN_INLINE F16 load_twice16(const float* a, const float* b) {
    const __m512d low = _mm512_castpd256_pd512(_mm256_loadu_pd((const double*)a));
    return _mm512_castpd_ps(_mm512_insertf64x4(low, _mm256_loadu_pd((const double*)b), 1));
}
FORERUN_INLINE F16 load_eight_twice16(const float* at) {
    return _mm512_castpd_ps(_mm512_broadcast_f64x4(_mm256_loadu_pd((const double*)at)));
}
FORERUN_INLINE F16 load_halves_twice16(const uint16_t* a, const uint16_t* b) {
    const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)a));
    return _mm512_cvtph_ps(_mm256_inserti128_si256(low, _mm_loadu_si128((const __m128i*)b), 1));
}
// The same of signed bytes.
FORERUN_INLINE F16 load_bytes_twice16(const uint8_t* a, const uint8_t* b) {
    const __m128i both = _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i*)a),
                                            _mm_loadl_epi64((const __m128i*)b));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(both));
}
// The sums of the halves of eight vectors, each added as sum8 adds eight lanes: of a[0] to a[3] the
// first halves, the second halves, and the same of a[4] to a[7].
FORERUN_INLINE F16 sum_rows16(const F16 (&a)[8]) {
    F16 half[4], pair[2];
    for (int i = 0; i < 4; i++) {  // lanes k and k + 4
        half[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88),
                                _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
    }
    for (int i = 0; i < 2; i++) {  // lanes k and k + 2
        pair[i] = _mm512_add_ps(_mm512_shuffle_ps(half[2 * i], half[2 * i + 1], 0x44),
                                _mm512_shuffle_ps(half[2 * i], half[2 * i + 1], 0xee));
    }
    return _mm512_add_ps(_mm512_shuffle_ps(pair[0], pair[1], 0x88),
                         _mm512_shuffle_ps(pair[0], pair[1], 0xdd));
}

FORERUN_INLINE void split_bfloats(const void* at, F16& even, F16& odd) {
    const I16 both = _mm512_loadu_si512(at);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int32_t)0xffff0000)));
}

// The first `count` of 16 numbers; what is missing is zero.
FORERUN_INLINE __mmask16 first16(int count) { return (__mmask16)((1u << count) - 1); }
FORERUN_INLINE F16 load_first16(const float* at, int count) {
    return _mm512_maskz_loadu_ps(first16(count), at);
}
FORERUN_INLINE void store_first16(float* at, int count, F16 a) {
    _mm512_mask_storeu_ps(at, first16(count), a);
}

FORERUN_INLINE I16 load_bytes16(const uint8_t* at) { return _mm512_loadu_si512(at); }
FORERUN_INLINE void store_bytes16(uint8_t* at, I16 a) { _mm512_storeu_si512(at, a); }
FORERUN_INLINE I16 add_ints16(I16 a, I16 b) { return _mm512_add_epi32(a, b); }
FORERUN_INLINE I16 splat_int16(int32_t a) { return _mm512_set1_epi32(a); }
FORERUN_INLINE I16 low_nibbles16(I16 both) {
    return _mm512_and_si512(both, _mm512_set1_epi8(15));
}
FORERUN_INLINE I16 high_nibbles16(I16 both) {
    return low_nibbles16(_mm512_srli_epi16(both, 4));
}
// High nibbles in their place, sixteen times as large; sums of them, divided by that and added.
FORERUN_INLINE I16 upper_nibbles16(I16 both) {
    return _mm512_and_si512(both, _mm512_set1_epi8((char)0xf0));
}
FORERUN_INLINE I16 plus_sixteenth16(I16 sum, I16 high) {
    return _mm512_add_epi32(sum, _mm512_srai_epi32(high, 4));
}
// Bit J of every byte of `bits` as bit To, with the bits of `a`.
template <int J, int To>
FORERUN_INLINE I16 with_bit16(I16 a, I16 bits) {
    const I16 bit = J < To ? _mm512_slli_epi16(bits, J < To ? To - J : 0)
                           : _mm512_srli_epi16(bits, J < To ? 0 : J - To);
    return _mm512_ternarylogic_epi32(a, bit, _mm512_set1_epi8(1 << To), 0xf8);  // a | (bit & mask)
}
// Bits J and J + 1 of every byte.
template <int J>
FORERUN_INLINE I16 two_bits16(I16 a) {
    return _mm512_and_si512(J ? _mm512_srli_epi16(a, J) : a, _mm512_set1_epi8(3));
}
FORERUN_INLINE I16 low_sixes16(I16 a) { return _mm512_and_si512(a, _mm512_set1_epi8(63)); }
// The bytes made of the two high bits of a, b and c, lowest first.
FORERUN_INLINE I16 high_bits16(I16 a, I16 b, I16 c) {
    const I16 two = _mm512_and_si512(_mm512_srli_epi16(a, 6), _mm512_set1_epi8(3));
    const I16 four = _mm512_ternarylogic_epi32(two, _mm512_srli_epi16(b, 4),
                                               _mm512_set1_epi8(12), 0xf8);
    return _mm512_ternarylogic_epi32(four, _mm512_srli_epi16(c, 2), _mm512_set1_epi8(48), 0xf8);
}
// What stands in a table of 16 bytes at each nibble.
FORERUN_INLINE I16 found_in16(const int8_t* table, I16 nibbles) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)table);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), nibbles);
}
// Signed bytes as unsigned ones that are 128 larger.
FORERUN_INLINE I16 plus_128(I16 bytes) {
    return _mm512_xor_si512(bytes, _mm512_set1_epi8((char)0x80));
}

// sum[lane] += the lane's four unsigned bytes of `w` times the four signed bytes at `q`.
FORERUN_INLINE I16 dot16(I16 sum, I16 w, const int8_t* q) {
    int32_t four;
    memcpy(&four, q, 4);
    return _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(four));
}

FORERUN_INLINE uint32_t largest_bits(const float* x) {
    const I16 mask = _mm512_set1_epi32(0x7fffffff);
    const I16 a = _mm512_and_si512(_mm512_loadu_si512(x), mask);
    const I16 b = _mm512_and_si512(_mm512_loadu_si512(x + 16), mask);
    return (uint32_t)_mm512_reduce_max_epi32(_mm512_max_epi32(a, b));
}

FORERUN_INLINE void round_to_bytes(const float* x, float inverse, int8_t* q, int32_t (&sums)[2]) {
    __m128i bytes[2];
    for (int h = 0; h < 2; h++) {
        bytes[h] = _mm512_cvtsepi32_epi8(
            _mm512_cvtps_epi32(mul16(load16(x + 16 * h), splat16(inverse))));
    }
    const __m256i all = _mm256_set_m128i(bytes[1], bytes[0]);
    _mm256_storeu_si256((__m256i*)q, all);
    __m256i sum = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), all);
    sum = _mm256_add_epi32(sum, _mm256_shuffle_epi32(sum, 0x4e));
    sum = _mm256_add_epi32(sum, _mm256_shuffle_epi32(sum, 0xb1));
    sums[0] = _mm256_cvtsi256_si32(sum);
    sums[1] = _mm256_extract_epi32(sum, 4);
}

// Keeps GCC from reordering the additions, which would spill the accumulators.
#undef FORERUN_PIN
#define FORERUN_PIN(vector) __asm__ volatile("" : "+v"(vector))

}  // namespace
