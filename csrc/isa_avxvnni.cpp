// The AVX2 kernels with AVX-VNNI's dot products (Intel since 2021, AMD Zen 5).
#include "kernels.h"
#if defined(__AVX2__) && defined(__AVXVNNI__)
#include <cmath>
#include <cstring>

#include "half.h"
#define FORERUN_VNNI _mm256_dpbusd_avx_epi32
#include "simd_avx2.h"
#include "matmul.inl"
#include "rows.inl"
#include "attention.inl"
#include "sample.inl"

namespace forerun {
static const Kernels kTable = {"avx-vnni", FORERUN_KERNELS};
const Kernels* const kAvxVnni = &kTable;
}  // namespace forerun
#else
const forerun::Kernels* const forerun::kAvxVnni = nullptr;
#endif
