// Products with AVX-512's dot products on 256-bit vectors (Ice Lake, Zen 4 and later).
#include "kernels.h"
#if defined(__AVX512VL__) && defined(__AVX512VNNI__)
#include <cstring>

#define FORERUN_VNNI _mm256_dpbusd_epi32
#include "simd_avx2.h"
#include "matmul.inl"

const forerun::Product forerun::kAvx512VnniProduct = product;
#else
const forerun::Product forerun::kAvx512VnniProduct = nullptr;
#endif
