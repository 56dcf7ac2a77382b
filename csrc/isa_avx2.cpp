// The kernels for x86-64 with AVX2, FMA and F16C (2013 and later).
#if defined(__x86_64__)
#include <cmath>
#include <cstring>

#include "half.h"
#include "kernels.h"
#include "simd_avx2.h"
#include "matmul.inl"
#include "rows.inl"
#include "attention.inl"
#include "sample.inl"

namespace forerun {
const Kernels kAvx2 = {"avx2", FORERUN_KERNELS};
}  // namespace forerun
#endif
