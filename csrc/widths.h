// The operations of simd_*.h by names that do not say how many lanes there are, for loops that do not
// care. W is the widest vector: eight lanes or, with FORERUN_WIDE, simd_avx512.h's sixteen beside them.
#pragma once

// Keeps GCC from loading a vector once for each of its uses.
#ifndef FORERUN_PIN
#define FORERUN_PIN(vector) (void)(vector)
#endif

namespace {

FORERUN_INLINE F8 addw(F8 a, F8 b) { return add8(a, b); }
FORERUN_INLINE F8 subw(F8 a, F8 b) { return sub8(a, b); }
FORERUN_INLINE F8 mulw(F8 a, F8 b) { return mul8(a, b); }
FORERUN_INLINE F8 divw(F8 a, F8 b) { return div8(a, b); }
FORERUN_INLINE F8 fmaw(F8 a, F8 b, F8 c) { return fma8(a, b, c); }
FORERUN_INLINE F8 maxw(F8 a, F8 b) { return max8(a, b); }
FORERUN_INLINE F8 minw(F8 a, F8 b) { return min8(a, b); }
FORERUN_INLINE F8 roundw(F8 a) { return round8(a); }
FORERUN_INLINE F8 powerw(F8 n) { return power8(n); }
FORERUN_INLINE void storew(float* at, F8 a) { store8(at, a); }

FORERUN_INLINE F8 load_number8(const uint16_t* at) { return load_half8(at); }
FORERUN_INLINE F8 load_number8(const float* at) { return load8(at); }
FORERUN_INLINE F8 load_number8(const uint8_t* at) { return load_bytes8<true>(at); }

#ifdef FORERUN_WIDE

using W = F16;
constexpr int kWide = 16, kFloatRows = 8;

FORERUN_INLINE F16 addw(F16 a, F16 b) { return add16(a, b); }
FORERUN_INLINE F16 subw(F16 a, F16 b) { return sub16(a, b); }
FORERUN_INLINE F16 mulw(F16 a, F16 b) { return mul16(a, b); }
FORERUN_INLINE F16 divw(F16 a, F16 b) { return div16(a, b); }
FORERUN_INLINE F16 fmaw(F16 a, F16 b, F16 c) { return fma16(a, b, c); }
FORERUN_INLINE F16 maxw(F16 a, F16 b) { return max16(a, b); }
FORERUN_INLINE F16 minw(F16 a, F16 b) { return min16(a, b); }
FORERUN_INLINE F16 roundw(F16 a) { return round16(a); }
FORERUN_INLINE F16 powerw(F16 n) { return power16(n); }
FORERUN_INLINE void storew(float* at, F16 a) { store16(at, a); }
FORERUN_INLINE W loadw(const float* at) { return load16(at); }
FORERUN_INLINE W load_halfw(const void* at) { return load_half16(at); }
FORERUN_INLINE W load_numberw(const uint16_t* at) { return load_half16(at); }
FORERUN_INLINE W load_numberw(const float* at) { return load16(at); }
FORERUN_INLINE W load_numberw(const uint8_t* at) { return load_bytes_as_floats16<true>(at); }

// Eight numbers of as many rows as a vector has room for.
FORERUN_INLINE W load_rows(const uint16_t* a, const uint16_t* b) { return load_halves_twice16(a, b); }
FORERUN_INLINE W load_rows(const float* a, const float* b) { return load_twice16(a, b); }
FORERUN_INLINE W load_rows(const uint8_t* a, const uint8_t* b) { return load_bytes_twice16(a, b); }
// Eight numbers, as often as a vector has room for.
FORERUN_INLINE W load_eight(const float* at) { return load_eight_twice16(at); }

#else

using W = F8;
constexpr int kWide = 8, kFloatRows = 3;

FORERUN_INLINE W loadw(const float* at) { return load8(at); }
FORERUN_INLINE W load_halfw(const void* at) { return load_half8(at); }
FORERUN_INLINE W load_numberw(const uint16_t* at) { return load_number8(at); }
FORERUN_INLINE W load_numberw(const float* at) { return load_number8(at); }
FORERUN_INLINE W load_numberw(const uint8_t* at) { return load_number8(at); }
FORERUN_INLINE W load_rows(const uint16_t* a, const uint16_t*) { return load_number8(a); }
FORERUN_INLINE W load_rows(const float* a, const float*) { return load_number8(a); }
FORERUN_INLINE W load_rows(const uint8_t* a, const uint8_t*) { return load_bytes8<true>(a); }
FORERUN_INLINE W load_eight(const float* at) { return load8(at); }

#endif

template <class V>
V splatw(float a);
template <>
inline __attribute__((always_inline)) F8 splatw<F8>(float a) {
    return splat8(a);
}
#ifdef FORERUN_WIDE
template <>
inline __attribute__((always_inline)) F16 splatw<F16>(float a) {
    return splat16(a);
}
#endif

// What a vector of load_rows holds of 16 positions: row `half` of vector v is that of position
// row_position(v, half), so that the sums of all come out in order.
FORERUN_INLINE int row_position(int v, int half) {
    return kWide == 8 ? v : v / 4 * 8 + v % 4 + 4 * half;
}
// sum8 of the rows that vectors hold, in the order of their positions: last_sums of first_sums.
FORERUN_INLINE F8 first_sums(const F8 (&a)[4]) { return fold_four(a); }
FORERUN_INLINE F8 last_sums(const F8 (&a)[2]) { return sum_folded(a[0], a[1]); }
#ifdef FORERUN_WIDE
FORERUN_INLINE F16 first_sums(const F16 (&a)[8]) { return sum_rows16(a); }
FORERUN_INLINE F16 last_sums(const F16 (&a)[1]) { return a[0]; }
#endif

}  // namespace
