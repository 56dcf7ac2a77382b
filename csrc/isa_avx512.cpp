// Products with AVX-512's dot products on 512-bit vectors (Ice Lake, Zen 4 and later).
#include "kernels.h"
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include "simd_avx512.h"
#include "matmul_float.inl"
#include "matmul_wide.inl"
#define FORERUN_COLUMNS 16
#include "delta.inl"

const forerun::Product forerun::kAvx512WideProduct = product;
const forerun::FloatProduct forerun::kAvx512FloatProduct = float_product;
const forerun::GatedDelta forerun::kAvx512GatedDelta = gated_delta;
#else
const forerun::Product forerun::kAvx512WideProduct = nullptr;
const forerun::FloatProduct forerun::kAvx512FloatProduct = nullptr;
const forerun::GatedDelta forerun::kAvx512GatedDelta = nullptr;
#endif
