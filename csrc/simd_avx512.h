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

// See simd_portable.h.
using W = F16;
constexpr int kWide = 16, kFloatRows = 8;
FORERUN_INLINE W loadw(const float* at) { return load16(at); }
FORERUN_INLINE void storew(float* at, W a) { _mm512_storeu_ps(at, a); }
FORERUN_INLINE W splatw(float a) { return splat16(a); }
FORERUN_INLINE W addw(W a, W b) { return add16(a, b); }
FORERUN_INLINE W fmaw(W a, W b, W c) { return fma16(a, b, c); }
FORERUN_INLINE W load_halfw(const void* at) { return load_half16(at); }
FORERUN_INLINE void split_bfloats(const void* at, W& even, W& odd) {
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
// Bit J of every byte as bit 4, with the low nibbles of `a`.
template <int J>
FORERUN_INLINE I16 with_fifth16(I16 a, I16 fifth) {
    const I16 bit = J < 4 ? _mm512_slli_epi16(fifth, J < 4 ? 4 - J : 0)
                          : _mm512_srli_epi16(fifth, J < 4 ? 0 : J - 4);
    return _mm512_ternarylogic_epi32(a, bit, _mm512_set1_epi8(16), 0xf8);  // a | (bit & 16)
}
FORERUN_INLINE I16 low_sixes16(I16 a) { return _mm512_and_si512(a, _mm512_set1_epi8(63)); }
// The bytes made of the two high bits of a, b and c, lowest first.
FORERUN_INLINE I16 high_bits16(I16 a, I16 b, I16 c) {
    const I16 two = _mm512_and_si512(_mm512_srli_epi16(a, 6), _mm512_set1_epi8(3));
    const I16 four = _mm512_ternarylogic_epi32(two, _mm512_srli_epi16(b, 4),
                                               _mm512_set1_epi8(12), 0xf8);
    return _mm512_ternarylogic_epi32(four, _mm512_srli_epi16(c, 2), _mm512_set1_epi8(48), 0xf8);
}
// 128 more than what nibbles stand for in E2M1, twice (kFp4).
FORERUN_INLINE I16 fp4_plus_128(I16 nibbles) {
    const __m128i table = _mm_loadu_si128((const __m128i*)forerun::kFp4);
    const I16 found = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles);
    return _mm512_xor_si512(found, _mm512_set1_epi8((char)0x80));
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

// Keeps GCC from reordering the additions, which would spill the accumulators.
#define FORERUN_PIN(vector) __asm__ volatile("" : "+v"(vector))

}  // namespace
