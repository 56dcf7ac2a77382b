// Eight lanes in plain C++: the definition of every operation the kernels use. The other simd_*.h
// files say the same in instructions, lane for lane and rounding for rounding.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "quant.h"

#define FORERUN_INLINE static inline __attribute__((always_inline))

namespace {

using forerun::Group;
using forerun::kGroup;

struct F8 {
    float lane[8];
};
struct I8 {
    int32_t lane[8];
};

#define FORERUN_EACH for (int i = 0; i < 8; i++)

FORERUN_INLINE F8 load8(const float* at) { F8 r; FORERUN_EACH r.lane[i] = at[i]; return r; }
FORERUN_INLINE void store8(float* at, F8 a) { FORERUN_EACH at[i] = a.lane[i]; }
FORERUN_INLINE F8 splat8(float a) { F8 r; FORERUN_EACH r.lane[i] = a; return r; }
FORERUN_INLINE F8 add8(F8 a, F8 b) { FORERUN_EACH a.lane[i] += b.lane[i]; return a; }
FORERUN_INLINE F8 sub8(F8 a, F8 b) { FORERUN_EACH a.lane[i] -= b.lane[i]; return a; }
FORERUN_INLINE F8 mul8(F8 a, F8 b) { FORERUN_EACH a.lane[i] *= b.lane[i]; return a; }
FORERUN_INLINE F8 div8(F8 a, F8 b) { FORERUN_EACH a.lane[i] /= b.lane[i]; return a; }

// a * b + c, rounded once. Without the instruction this is a slow library call, but the bits stay.
FORERUN_INLINE F8 fma8(F8 a, F8 b, F8 c) {
    FORERUN_EACH a.lane[i] = __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]);
    return a;
}

// As x86 does it: where either is NaN the result is b.
FORERUN_INLINE F8 max8(F8 a, F8 b) {
    FORERUN_EACH a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}
FORERUN_INLINE F8 min8(F8 a, F8 b) {
    FORERUN_EACH a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}

// ((0+4)+(2+6)) + ((1+5)+(3+7)): the order in which a sum over lanes is taken, everywhere.
FORERUN_INLINE float sum8(F8 a) {
    return ((a.lane[0] + a.lane[4]) + (a.lane[2] + a.lane[6])) +
           ((a.lane[1] + a.lane[5]) + (a.lane[3] + a.lane[7]));
}

// Lane i of the result is sum8(a[i]).
FORERUN_INLINE F8 sum8_each(const F8 a[8]) {
    F8 r;
    FORERUN_EACH r.lane[i] = sum8(a[i]);
    return r;
}

FORERUN_INLINE F8 load_half8(const void* at) {
    uint16_t halves[8];
    memcpy(halves, at, 16);
    F8 r;
    FORERUN_EACH r.lane[i] = forerun::float_from_half(halves[i]);
    return r;
}

FORERUN_INLINE void store_half8(void* at, F8 a) {
    uint16_t halves[8];
    FORERUN_EACH halves[i] = forerun::half_from_float(a.lane[i]);
    memcpy(at, halves, 16);
}

// 2^n for whole n in [-126, 127].
FORERUN_INLINE F8 power8(F8 n) {
    FORERUN_EACH n.lane[i] = forerun::float_of((uint32_t)((int32_t)n.lane[i] + 127) << 23);
    return n;
}

// To the nearest whole number, ties to even, for |a| < 2^22.
FORERUN_INLINE F8 round8(F8 a) {
    FORERUN_EACH a.lane[i] = (a.lane[i] + 12582912.0f) - 12582912.0f;
    return a;
}

FORERUN_INLINE F8 float8(I8 a) {
    F8 r;
    FORERUN_EACH r.lane[i] = (float)a.lane[i];
    return r;
}

// For channel c = 8 h + lane: sum[r][h] becomes the sum over 32 inputs of the channel's nibbles
// times row r's activations.
template <int R>
FORERUN_INLINE void dot_nibbles(const uint8_t* tile, const Group& x, I8 (&sum)[R][2]) {
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < forerun::kBlock; c++) {
            int32_t total = 0;
            for (int i = 0; i < kGroup; i++) {
                const uint8_t both = tile[64 * (i / 8) + 4 * c + i % 4];
                total += (i % 8 < 4 ? both & 15 : both >> 4) * x.q[r][i];
            }
            sum[r][c / 8].lane[c % 8] = total;
        }
    }
}

// The same for signed bytes.
template <int R>
FORERUN_INLINE void dot_bytes(const uint8_t* tile, const Group& x, I8 (&sum)[R][2]) {
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < forerun::kBlock; c++) {
            int32_t total = 0;
            for (int i = 0; i < kGroup; i++) {
                total += (int8_t)tile[64 * (i / 4) + 4 * c + i % 4] * x.q[r][i];
            }
            sum[r][c / 8].lane[c % 8] = total;
        }
    }
}

// The largest |x| of 32 numbers as bits, whose order is that of the numbers with infinity and
// NaN above all.
FORERUN_INLINE uint32_t largest_bits(const float* x) {
    uint32_t largest = 0;
    for (int i = 0; i < kGroup; i++) {
        const uint32_t bits = forerun::bits_of(x[i]) & 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

// q = x * inverse to nearest, all within [-127, 127]; returns the sum of q.
FORERUN_INLINE int32_t round_to_bytes(const float* x, float inverse, int8_t* q) {
    int32_t sum = 0;
    for (int i = 0; i < kGroup; i++) {
        const float scaled = x[i] * inverse;
        q[i] = (int8_t)(int32_t)((scaled + 12582912.0f) - 12582912.0f);
        sum += q[i];
    }
    return sum;
}

}  // namespace
