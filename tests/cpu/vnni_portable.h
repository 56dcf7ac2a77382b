// VNNI's one instruction in AVX2's: define FORERUN_VNNI by this before simd_avx2.h.
#pragma once
#include <immintrin.h>

static inline __m256i emulated_vnni(__m256i sum, __m256i u, __m256i s) {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i low = _mm256_madd_epi16(_mm256_unpacklo_epi8(u, zero),
                                          _mm256_srai_epi16(_mm256_unpacklo_epi8(s, s), 8));
    const __m256i high = _mm256_madd_epi16(_mm256_unpackhi_epi8(u, zero),
                                           _mm256_srai_epi16(_mm256_unpackhi_epi8(s, s), 8));
    return _mm256_add_epi32(sum, _mm256_hadd_epi32(low, high));
}
