// The operations of simd_portable.h with AVX2, FMA and F16C.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "quant.h"

#define FORERUN_INLINE static inline __attribute__((always_inline))

namespace {

using forerun::Group;
using forerun::kGroup;

using F8 = __m256;
using I8 = __m256i;

FORERUN_INLINE F8 load8(const float* at) { return _mm256_loadu_ps(at); }
FORERUN_INLINE void store8(float* at, F8 a) { _mm256_storeu_ps(at, a); }
FORERUN_INLINE F8 splat8(float a) { return _mm256_set1_ps(a); }
FORERUN_INLINE F8 add8(F8 a, F8 b) { return _mm256_add_ps(a, b); }
FORERUN_INLINE F8 sub8(F8 a, F8 b) { return _mm256_sub_ps(a, b); }
FORERUN_INLINE F8 mul8(F8 a, F8 b) { return _mm256_mul_ps(a, b); }
FORERUN_INLINE F8 div8(F8 a, F8 b) { return _mm256_div_ps(a, b); }
FORERUN_INLINE F8 fma8(F8 a, F8 b, F8 c) { return _mm256_fmadd_ps(a, b, c); }
FORERUN_INLINE F8 max8(F8 a, F8 b) { return _mm256_max_ps(a, b); }
FORERUN_INLINE F8 min8(F8 a, F8 b) { return _mm256_min_ps(a, b); }

FORERUN_INLINE F8 first8(int count, F8 a, F8 b) {
    const I8 lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes)));
}

FORERUN_INLINE float sum8(F8 a) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}

// A transposing sum: three levels, each adding what sum8 adds at that level. Of two vectors some lanes
// stay where they are and meet what is moved to them, which takes one shuffle where two are obvious.
FORERUN_INLINE F8 fold_four(const F8 (&a)[4]) {
    F8 half[2];
    for (int i = 0; i < 2; i++) {  // vectors i and i + 2: lanes k and k + 4
        half[i] = _mm256_add_ps(_mm256_blend_ps(a[i], a[i + 2], 0xf0),
                                _mm256_permute2f128_ps(a[i], a[i + 2], 0x21));
    }
    // Vectors 0 1 | 2 3: lanes k and k + 2.
    return _mm256_add_ps(_mm256_blend_ps(half[0], half[1], 0xcc),
                         _mm256_shuffle_ps(half[0], half[1], 0x4e));
}
FORERUN_INLINE F8 sum_folded(F8 a, F8 b) {
    const F8 even = _mm256_shuffle_ps(a, b, 0x88);  // vectors 0 1 4 5 | 2 3 6 7, lanes k
    const F8 odd = _mm256_shuffle_ps(a, b, 0xdd);   // and k + 1
    const __m256d sum = _mm256_castps_pd(_mm256_add_ps(even, odd));
    return _mm256_castpd_ps(_mm256_permute4x64_pd(sum, 0xd8));
}

constexpr bool kConvertsBeside = true;

FORERUN_INLINE F8 load_half8(const void* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
}
FORERUN_INLINE F8 splat_half8(const void* at) {
    int16_t half;
    memcpy(&half, at, sizeof half);
    return _mm256_cvtph_ps(_mm_set1_epi16(half));
}
template <bool Signed>
FORERUN_INLINE F8 load_bytes8(const uint8_t* at) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i*)at);
    return _mm256_cvtepi32_ps(Signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
}
FORERUN_INLINE void store_half8(void* at, F8 a) {
    _mm_storeu_si128((__m128i*)at, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

// Bfloats that lie alternately: the even ones and the odd ones.
FORERUN_INLINE void split_bfloats(const void* at, F8& even, F8& odd) {
    const I8 both = _mm256_loadu_si256((const I8*)at);
    even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int32_t)0xffff0000)));
}

FORERUN_INLINE F8 power8(F8 n) {
    const I8 biased = _mm256_add_epi32(_mm256_cvttps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
FORERUN_INLINE F8 round8(F8 a) {
    const F8 magic = _mm256_set1_ps(12582912.0f);
    return _mm256_sub_ps(_mm256_add_ps(a, magic), magic);
}
FORERUN_INLINE I8 splat_int8(int32_t a) { return _mm256_set1_epi32(a); }
FORERUN_INLINE F8 float8(I8 a) { return _mm256_cvtepi32_ps(a); }

FORERUN_INLINE I8 load_bytes(const uint8_t* at) { return _mm256_loadu_si256((const I8*)at); }

// Four activations in every lane.
FORERUN_INLINE I8 splat_bytes(const int8_t* at) {
    int32_t four;
    memcpy(&four, at, 4);
    return _mm256_set1_epi32(four);
}

// Keeps GCC from reordering the additions, which would spill the accumulators.
#define FORERUN_PIN(vector) __asm__ volatile("" : "+x"(vector))

// Every byte's low or high nibble.
FORERUN_INLINE I8 nibbles(I8 both, bool high) {
    return _mm256_and_si256(high ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
}

// One group's nibbles as 512 bytes, in the order of bytes.
FORERUN_INLINE void spread_nibbles(const uint8_t* quants, uint8_t* out) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const I8 both = load_bytes(quants + 32 * i);
        uint8_t* at = out + i / 2 * 128 + i % 2 * 32;
        _mm256_storeu_si256((__m256i*)at, nibbles(both, false));
        _mm256_storeu_si256((__m256i*)(at + 64), nibbles(both, true));
    }
}

// 512 places in a table of 16 numbers become what stands there, `plus` larger.
FORERUN_INLINE void look_up(const int8_t* numbers, int plus, uint8_t* out) {
    const I8 twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)numbers));
    const I8 table = _mm256_add_epi8(twice, _mm256_set1_epi8((char)plus));
#pragma GCC unroll 16
    for (int i = 0; i < 512; i += 32) {
        const I8 bytes = _mm256_shuffle_epi8(table, load_bytes(out + i));
        _mm256_storeu_si256((__m256i*)(out + i), bytes);
    }
}

#ifndef FORERUN_VNNI

// u8 x s8 products of nibbles fit 16 bits even when eight are added: 8 * 2 * 15 * 127 < 2^15.
template <int R>
FORERUN_INLINE void dot_nibbles(const uint8_t* tile, const Group& x, I8 (&sum)[R][2]) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        I8 w[2];
        for (int h = 0; h < 2; h++) {
            w[h] = nibbles(load_bytes(tile + 64 * (j / 2) + 32 * h), j % 2);
            FORERUN_PIN(w[h]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const I8 q = splat_bytes(x.q[r] + 4 * j);
            for (int h = 0; h < 2; h++) {
                const I8 part = _mm256_maddubs_epi16(w[h], q);
                sum[r][h] = j ? _mm256_add_epi16(sum[r][h], part) : part;
                FORERUN_PIN(sum[r][h]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int h = 0; h < 2; h++) {
            sum[r][h] = _mm256_madd_epi16(sum[r][h], _mm256_set1_epi16(1));
        }
    }
}

// u8 x s8 wants an unsigned side: |w| times x with w's sign. Two products fit 16 bits, no more.
template <int R, int First = 0, int Last = 8>
FORERUN_INLINE void dot_bytes(const uint8_t* tile, const Group& x, I8 (&sum)[R][2]) {
    const I8 ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int j = First; j < Last; j++) {
        I8 w[2], size[2];
        for (int h = 0; h < 2; h++) {
            w[h] = load_bytes(tile + 64 * j + 32 * h);
            FORERUN_PIN(w[h]);
            size[h] = _mm256_abs_epi8(w[h]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const I8 q = splat_bytes(x.q[r] + 4 * j);
            for (int h = 0; h < 2; h++) {
                const I8 pairs = _mm256_maddubs_epi16(size[h], _mm256_sign_epi8(q, w[h]));
                const I8 part = _mm256_madd_epi16(pairs, ones);
                sum[r][h] = j > First ? _mm256_add_epi32(sum[r][h], part) : part;
                FORERUN_PIN(sum[r][h]);
            }
        }
    }
}

// So many products of numbers up to Most fit 16 bits, two at a time.
template <int R, int First, int Last, int Most>
FORERUN_INLINE void dot_small(const uint8_t* bytes, const Group& x, I8 (&sum)[R][2]) {
    constexpr int fit = 32767 / (2 * 127 * Most);
    constexpr int step = fit >= 8 && Last - First >= 8 ? 8 : fit >= 4 ? 4 : 2;
    static_assert(fit >= 2, "two pairs of products must fit 16 bits");
    const I8 ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
    for (int from = First; from < Last; from += step) {
        I8 part[R][2];
#pragma GCC unroll 8
        for (int j = from; j < from + step; j++) {
            I8 w[2];
            for (int h = 0; h < 2; h++) {
                w[h] = load_bytes(bytes + 64 * j + 32 * h);
                FORERUN_PIN(w[h]);
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const I8 q = splat_bytes(x.q[r] + 4 * j);
                for (int h = 0; h < 2; h++) {
                    const I8 pairs = _mm256_maddubs_epi16(w[h], q);
                    part[r][h] = j > from ? _mm256_add_epi16(part[r][h], pairs) : pairs;
                    FORERUN_PIN(part[r][h]);
                }
            }
        }
        for (int r = 0; r < R; r++) {
            for (int h = 0; h < 2; h++) {
                sum[r][h] = _mm256_add_epi32(sum[r][h], _mm256_madd_epi16(part[r][h], ones));
            }
        }
    }
}

#else

// VNNI adds four products straight into 32 bits.
template <int R>
FORERUN_INLINE void dot_nibbles(const uint8_t* tile, const Group& x, I8 (&sum)[R][2]) {
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        for (int h = 0; h < 2; h++) {
            const I8 w = nibbles(load_bytes(tile + 64 * (j / 2) + 32 * h), j % 2);
            for (int r = 0; r < R; r++) {
                sum[r][h] = FORERUN_VNNI(sum[r][h], w, splat_bytes(x.q[r] + 4 * j));
            }
        }
    }
}

// It wants unsigned weights: 128 larger than they are, which the beginning takes back.
template <int R, int First = 0, int Last = 8>
FORERUN_INLINE void dot_bytes(const uint8_t* tile, const Group& x, I8 (&sum)[R][2]) {
    for (int r = 0; r < R; r++) {
        const int32_t half = 4 * x.excess32[r][First / 4];
        sum[r][0] = sum[r][1] = splat_int8(Last - First == 8 ? x.excess[r] : half);
    }
#pragma GCC unroll 8
    for (int j = First; j < Last; j++) {
        for (int h = 0; h < 2; h++) {
            const I8 w = _mm256_xor_si256(load_bytes(tile + 64 * j + 32 * h),
                                          _mm256_set1_epi8((char)0x80));
            for (int r = 0; r < R; r++) {
                sum[r][h] = FORERUN_VNNI(sum[r][h], w, splat_bytes(x.q[r] + 4 * j));
            }
        }
    }
}

template <int R, int First, int Last, int Most>
FORERUN_INLINE void dot_small(const uint8_t* bytes, const Group& x, I8 (&sum)[R][2]) {
#pragma GCC unroll 8
    for (int j = First; j < Last; j++) {
        for (int h = 0; h < 2; h++) {
            const I8 w = load_bytes(bytes + 64 * j + 32 * h);
            for (int r = 0; r < R; r++) {
                sum[r][h] = FORERUN_VNNI(sum[r][h], w, splat_bytes(x.q[r] + 4 * j));
            }
        }
    }
}

#endif

using U8 = __m256i;
FORERUN_INLINE void multiply8(U8 x, uint32_t factor, U8& high, U8& low) {
    const U8 f = _mm256_set1_epi32((int32_t)factor);
    const U8 even = _mm256_mul_epu32(x, f), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), f);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}
FORERUN_INLINE U8 xor8(U8 a, U8 b) { return _mm256_xor_si256(a, b); }
FORERUN_INLINE U8 words8(uint32_t a) { return _mm256_set1_epi32((int32_t)a); }
FORERUN_INLINE U8 count8(uint32_t first) {
    return _mm256_add_epi32(words8(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
FORERUN_INLINE void store_turned(uint32_t* at, U8 a, U8 b, U8 c, U8 d) {
    const U8 ab[2] = {_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)};
    const U8 cd[2] = {_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d)};
    for (int i = 0; i < 2; i++) {  // counters 2 i and 2 i + 1, and four further on
        const U8 even = _mm256_unpacklo_epi64(ab[i], cd[i]);
        const U8 odd = _mm256_unpackhi_epi64(ab[i], cd[i]);
        _mm_storeu_si128((__m128i*)(at + 8 * i), _mm256_castsi256_si128(even));
        _mm_storeu_si128((__m128i*)(at + 8 * i + 4), _mm256_castsi256_si128(odd));
        _mm_storeu_si128((__m128i*)(at + 8 * i + 16), _mm256_extracti128_si256(even, 1));
        _mm_storeu_si128((__m128i*)(at + 8 * i + 20), _mm256_extracti128_si256(odd, 1));
    }
}
FORERUN_INLINE F8 half_complement8(const uint32_t* at) {
    const U8 word = _mm256_loadu_si256((const U8*)at);
    return float8(_mm256_srli_epi32(xor8(word, _mm256_set1_epi32(-1)), 1));
}
FORERUN_INLINE bool any_at_most8(F8 a, F8 b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LE_OQ)) != 0;
}

#ifndef FORERUN_WIDE  // simd_avx512.h has its own

FORERUN_INLINE uint32_t largest_bits(const float* x) {
    const I8 mask = _mm256_set1_epi32(0x7fffffff);
    I8 most = _mm256_setzero_si256();
    for (int i = 0; i < kGroup; i += 8) {
        const I8 bits = _mm256_castps_si256(load8(x + i));
        most = _mm256_max_epi32(most, _mm256_and_si256(bits, mask));
    }
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(half);
}

FORERUN_INLINE int32_t sum_of(I8 total) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    return _mm_cvtsi128_si32(half);
}

FORERUN_INLINE void round_to_bytes(const float* x, float inverse, int8_t* q, int32_t (&sums)[2]) {
    const F8 scale = splat8(inverse);
    I8 wide[4];
    for (int i = 0; i < 4; i++) wide[i] = _mm256_cvtps_epi32(mul8(load8(x + 8 * i), scale));
    const I8 low = _mm256_packs_epi32(wide[0], wide[1]), high = _mm256_packs_epi32(wide[2], wide[3]);
    // The packs work within 128-bit halves; put the groups of four back in order.
    const I8 order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const I8 bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    _mm256_storeu_si256((I8*)q, bytes);
    sums[0] = sum_of(_mm256_add_epi32(wide[0], wide[1]));
    sums[1] = sum_of(_mm256_add_epi32(wide[2], wide[3]));
}

#endif

}  // namespace
