// The kernels in plain C++, for every machine.
#include "kernels.h"
#include "simd_portable.h"
#include "widths.h"
#include "matmul.inl"
#include "matmul_float.inl"
#include "rows.inl"
#include "attention.inl"
#include "sample.inl"
#define FORERUN_COLUMNS 8
#include "delta.inl"

namespace forerun {
static const Kernels kTable = {"portable", FORERUN_KERNELS};
const Kernels* const kPortable = &kTable;
}  // namespace forerun
