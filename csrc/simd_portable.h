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

// Compilers turn these into whatever vectors the machine is sure to have.
typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));

#define FORERUN_EACH for (int i = 0; i < 8; i++)

FORERUN_INLINE F8 load8(const float* at) {
    F8 a;
    memcpy(&a, at, sizeof a);
    return a;
}
FORERUN_INLINE void store8(float* at, F8 a) { memcpy(at, &a, sizeof a); }
FORERUN_INLINE F8 splat8(float a) { return F8{a, a, a, a, a, a, a, a}; }
FORERUN_INLINE F8 add8(F8 a, F8 b) { return a + b; }
FORERUN_INLINE F8 sub8(F8 a, F8 b) { return a - b; }
FORERUN_INLINE F8 mul8(F8 a, F8 b) { return a * b; }
FORERUN_INLINE F8 div8(F8 a, F8 b) { return a / b; }

// a * b + c, rounded once. Without the instruction this is a slow library call, but the bits stay.
FORERUN_INLINE F8 fma8(F8 a, F8 b, F8 c) {
    FORERUN_EACH c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}

// As x86 does it: where either is NaN the result is b.
FORERUN_INLINE F8 max8(F8 a, F8 b) { return a > b ? a : b; }
FORERUN_INLINE F8 min8(F8 a, F8 b) { return a < b ? a : b; }

// The first `count` lanes of a, the others of b.
FORERUN_INLINE F8 first8(int count, F8 a, F8 b) {
    FORERUN_EACH b[i] = i < count ? a[i] : b[i];
    return b;
}

// ((0+4)+(2+6)) + ((1+5)+(3+7)): the order in which a sum over lanes is taken, everywhere.
FORERUN_INLINE float sum8(F8 a) {
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

// sum8 of eight vectors in two steps: of four vectors, lanes 2 i and 2 i + 1 of the first step's result
// are what sum8 adds last of a[i]; lane i of the second step's is the sum of vector i of both fours.
FORERUN_INLINE F8 fold_four(const F8 (&a)[4]) {
    F8 r;
    FORERUN_EACH {
        const F8 each = a[i / 2];
        const int k = i % 2;
        r[i] = (each[k] + each[k + 4]) + (each[k + 2] + each[k + 6]);
    }
    return r;
}
FORERUN_INLINE F8 sum_folded(F8 a, F8 b) {
    F8 r;
    FORERUN_EACH {
        const F8 both = i < 4 ? a : b;
        const int k = 2 * (i % 4);
        r[i] = both[k] + both[k + 1];
    }
    return r;
}

// Halves become floats beside multiplications, not instead of them.
constexpr bool kConvertsBeside = false;

FORERUN_INLINE F8 load_half8(const void* at) {
    uint16_t halves[8];
    memcpy(halves, at, 16);
    F8 r;
    FORERUN_EACH r[i] = forerun::float_from_half(halves[i]);
    return r;
}

// One half in every lane.
FORERUN_INLINE F8 splat_half8(const void* at) {
    uint16_t half;
    memcpy(&half, at, sizeof half);
    return splat8(forerun::float_from_half(half));
}

// Eight bytes, with a sign or without.
template <bool Signed>
FORERUN_INLINE F8 load_bytes8(const uint8_t* at) {
    F8 r;
    FORERUN_EACH r[i] = Signed ? (float)(int8_t)at[i] : (float)at[i];
    return r;
}

FORERUN_INLINE void store_half8(void* at, F8 a) {
    uint16_t halves[8];
    FORERUN_EACH halves[i] = forerun::half_from_float(a[i]);
    memcpy(at, halves, 16);
}

// Bfloats that lie alternately: the even ones and the odd ones.
FORERUN_INLINE void split_bfloats(const void* at, F8& even, F8& odd) {
    uint16_t both[16];
    memcpy(both, at, 32);
    FORERUN_EACH {
        even[i] = forerun::float_from_bfloat(both[2 * i]);
        odd[i] = forerun::float_from_bfloat(both[2 * i + 1]);
    }
}

// 2^n for whole n in [-126, 127].
FORERUN_INLINE F8 power8(F8 n) {
    FORERUN_EACH n[i] = forerun::float_of((uint32_t)((int32_t)n[i] + 127) << 23);
    return n;
}

// To the nearest whole number, ties to even, for |a| < 2^22.
FORERUN_INLINE F8 round8(F8 a) { return (a + splat8(12582912.0f)) - splat8(12582912.0f); }

FORERUN_INLINE I8 splat_int8(int32_t a) { return I8{a, a, a, a, a, a, a, a}; }
FORERUN_INLINE F8 float8(I8 a) {
    F8 r;
    FORERUN_EACH r[i] = (float)a[i];
    return r;
}

// One group's nibbles as 512 bytes, in the order of bytes.
static void spread_nibbles(const uint8_t* quants, uint8_t* out) {
    for (int i = 0; i < 256; i++) {
        const int at = i / 64 * 128 + i % 64;
        out[at] = quants[i] & 15;
        out[at + 64] = quants[i] >> 4;
    }
}

// 512 places in a table of 16 numbers become what stands there, `plus` larger.
static void look_up(const int8_t* numbers, int plus, uint8_t* out) {
    for (int i = 0; i < 512; i++) out[i] = (uint8_t)(numbers[out[i]] + plus);
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
            sum[r][c / 8][c % 8] = total;
        }
    }
}

// The same for signed bytes, of inputs 4 First to 4 Last alone.
template <int R, int First = 0, int Last = 8>
FORERUN_INLINE void dot_bytes(const uint8_t* tile, const Group& x, I8 (&sum)[R][2]) {
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < forerun::kBlock; c++) {
            int32_t total = 0;
            for (int i = 4 * First; i < 4 * Last; i++) {
                total += (int8_t)tile[64 * (i / 4) + 4 * c + i % 4] * x.q[r][i];
            }
            sum[r][c / 8][c % 8] = total;
        }
    }
}

// The same for bytes from 0 to Most, of inputs 4 First to 4 Last alone, added to `sum`.
template <int R, int First, int Last, int Most>
FORERUN_INLINE void dot_small(const uint8_t* bytes, const Group& x, I8 (&sum)[R][2]) {
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < forerun::kBlock; c++) {
            for (int i = 4 * First; i < 4 * Last; i++) {
                sum[r][c / 8][c % 8] += bytes[64 * (i / 4) + 4 * c + i % 4] * x.q[r][i];
            }
        }
    }
}

// 32-bit words: x * factor + 0 as 64 bits, apart; exclusive or; lane i holds first + i.
typedef uint32_t U8 __attribute__((vector_size(32)));
FORERUN_INLINE void multiply8(U8 x, uint32_t factor, U8& high, U8& low) {
    FORERUN_EACH {
        const uint64_t product = (uint64_t)x[i] * factor;
        high[i] = (uint32_t)(product >> 32);
        low[i] = (uint32_t)product;
    }
}
FORERUN_INLINE U8 xor8(U8 a, U8 b) { return a ^ b; }
FORERUN_INLINE U8 words8(uint32_t a) { return U8{a, a, a, a, a, a, a, a}; }
FORERUN_INLINE U8 count8(uint32_t first) { return words8(first) + U8{0, 1, 2, 3, 4, 5, 6, 7}; }
// a0 b0 c0 d0 a1 b1 ... d7
FORERUN_INLINE void store_turned(uint32_t* at, U8 a, U8 b, U8 c, U8 d) {
    FORERUN_EACH { at[4 * i] = a[i], at[4 * i + 1] = b[i], at[4 * i + 2] = c[i], at[4 * i + 3] = d[i]; }
}
// Half of each word's complement, as a float.
FORERUN_INLINE F8 half_complement8(const uint32_t* at) {
    F8 r;
    FORERUN_EACH r[i] = (float)(int32_t)(~at[i] >> 1);
    return r;
}
FORERUN_INLINE bool any_at_most8(F8 a, F8 b) {
    bool any = false;
    FORERUN_EACH any |= a[i] <= b[i];
    return any;
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

// q = x * inverse to nearest, all within [-127, 127], and the sum of each half of q.
FORERUN_INLINE void round_to_bytes(const float* x, float inverse, int8_t* q, int32_t (&sums)[2]) {
    sums[0] = sums[1] = 0;
    for (int i = 0; i < kGroup; i++) {
        const float scaled = x[i] * inverse;
        q[i] = (int8_t)(int32_t)((scaled + 12582912.0f) - 12582912.0f);
        sums[i / 16] += q[i];
    }
}

}  // namespace
