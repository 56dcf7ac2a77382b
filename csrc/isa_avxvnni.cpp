// The AVX2 kernels with AVX-VNNI's dot products (Intel since 2021, AMD Zen 5).
#if defined(__x86_64__)
#include <cmath>
#include <cstring>

#include "half.h"
#include "kernels.h"
#define FORERUN_VNNI _mm256_dpbusd_avx_epi32
#include "simd_avx2.h"
#include "matmul.inl"
#include "rows.inl"
#include "attention.inl"
#include "sample.inl"

namespace forerun {
const Kernels kAvxVnni = {"avx-vnni", FORERUN_KERNELS};
}  // namespace forerun
#endif
