// Products with AVX-512's dot products on 512-bit vectors (Ice Lake, Zen 4 and later).
#include "kernels.h"
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include "simd_avx512.h"
#include "matmul_wide.inl"

const forerun::Product forerun::kAvx512WideProduct = product;
#else
const forerun::Product forerun::kAvx512WideProduct = nullptr;
#endif
