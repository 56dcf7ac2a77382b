// Products with AVX-VNNI's dot products (Intel since 2021, AMD Zen 5).
#include "kernels.h"
#if defined(__AVX2__) && defined(__AVXVNNI__)
#include <cstring>

#define FORERUN_VNNI _mm256_dpbusd_avx_epi32
#include "simd_avx2.h"
#include "matmul.inl"

const forerun::Product forerun::kAvxVnniProduct = product;
#else
const forerun::Product forerun::kAvxVnniProduct = nullptr;
#endif
