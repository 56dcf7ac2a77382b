// The AVX2 kernels with AVX-512's dot products on 256-bit vectors (Ice Lake, Zen 4 and later).
#include "kernels.h"
#if defined(__AVX512VL__) && defined(__AVX512VNNI__)
#include <cmath>
#include <cstring>

#include "half.h"
#define FORERUN_VNNI _mm256_dpbusd_epi32
#include "simd_avx2.h"
#include "matmul.inl"
#include "rows.inl"
#include "attention.inl"
#include "sample.inl"

namespace forerun {
static const Kernels kTable = {"avx512-vnni", FORERUN_KERNELS};
const Kernels* const kAvx512Vnni = &kTable;
}  // namespace forerun
#else
const forerun::Kernels* const forerun::kAvx512Vnni = nullptr;
#endif
