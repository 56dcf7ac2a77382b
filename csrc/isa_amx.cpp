// Products by AMX's tiles of bytes (Sapphire Rapids and later), beside isa_avx512.cpp's kernels.
#include "kernels.h"
#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AVX512F__) && defined(__AVX512BW__) && \
    defined(__AVX512VL__) && defined(__AVX512VNNI__) && defined(__F16C__)
#include <cstring>

#include "half.h"
#include "simd_avx512.h"
#include "simd_amx.h"
#include "matmul_amx.inl"

const forerun::Product forerun::kAmxProduct = product_by_tiles;
#else
const forerun::Product forerun::kAmxProduct = nullptr;
#endif
