// The kernels with 512-bit vectors and AVX-512's dot products (Ice Lake, Zen 4 and later).
#include "kernels.h"
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__) && defined(__FMA__) && defined(__F16C__)
#include <cmath>
#include <cstring>

#define FORERUN_WIDE
#include "half.h"
#include "simd_avx2.h"
#include "simd_avx512.h"
#include "widths.h"
#include "matmul_float.inl"
#include "matmul_wide.inl"
#include "rows.inl"
#include "attention.inl"
#include "sample.inl"
#define FORERUN_COLUMNS 16
#include "delta.inl"

namespace forerun {
static const Kernels kTable = {"avx512-vnni-512", FORERUN_KERNELS};
const Kernels* const kAvx512 = &kTable;
}  // namespace forerun
#else
const forerun::Kernels* const forerun::kAvx512 = nullptr;
#endif
