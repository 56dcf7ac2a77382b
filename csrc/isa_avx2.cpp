// The kernels for x86-64 with AVX2, FMA and F16C (2013 and later).
#include "kernels.h"
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <cmath>
#include <cstring>

#include "half.h"
#include "simd_avx2.h"
#include "widths.h"
#include "matmul.inl"
#include "matmul_float.inl"
#include "rows.inl"
#include "attention.inl"
#include "sample.inl"
#define FORERUN_COLUMNS 8
#include "delta.inl"

namespace forerun {
static const Kernels kTable = {"avx2", FORERUN_KERNELS};
const Kernels* const kAvx2 = &kTable;
}  // namespace forerun
#else
const forerun::Kernels* const forerun::kAvx2 = nullptr;
#endif
