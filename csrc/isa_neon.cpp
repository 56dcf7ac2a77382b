// The kernels for 64-bit ARM with dot products (Armv8.2: most phones and servers since 2018, all
// Apple silicon).
#include "kernels.h"
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include <cmath>
#include <cstring>

#include "half.h"
#include "simd_neon.h"
#include "widths.h"
#include "matmul.inl"
#include "matmul_float.inl"
#include "rows.inl"
#include "attention.inl"
#include "sample.inl"
#define FORERUN_COLUMNS 8
#include "delta.inl"

namespace forerun {
static const Kernels kTable = {"neon", FORERUN_KERNELS};
const Kernels* const kNeon = &kTable;
}  // namespace forerun
#else
const forerun::Kernels* const forerun::kNeon = nullptr;
#endif
