// The AVX2 kernels with AVX-512's dot products on 256-bit vectors (Ice Lake, Zen 4 and later).
#if defined(__x86_64__)
#include <cmath>
#include <cstring>

#include "half.h"
#include "kernels.h"
#define FORERUN_VNNI _mm256_dpbusd_epi32
#include "simd_avx2.h"
#include "matmul.inl"
#include "rows.inl"
#include "attention.inl"
#include "sample.inl"

namespace forerun {
const Kernels kAvx512Vnni = {"avx512-vnni", FORERUN_KERNELS};
}  // namespace forerun
#endif
