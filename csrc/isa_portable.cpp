// The kernels in plain C++, for every machine.
#include "kernels.h"
#include "simd_portable.h"
#include "matmul.inl"
#include "rows.inl"
#include "attention.inl"

namespace forerun {
const Kernels kPortable = {"portable", product, quantise,  norm_quantise, silu_quantise,
                           rotate,     to_halves, attend};
}  // namespace forerun
