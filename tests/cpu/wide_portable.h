// csrc/simd_avx512.h in plain C++, for machines that have no such vectors.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "quant.h"

#define FORERUN_INLINE static inline __attribute__((always_inline))
#undef FORERUN_PIN
#define FORERUN_PIN(vector)

namespace {

using forerun::Group;

struct F16 {
    float of[16];
};
struct I16 {
    int32_t of[16];
};

template <class Of>
static F16 floats(Of of) {
    F16 made;
    for (int i = 0; i < 16; i++) made.of[i] = of(i);
    return made;
}

template <class Of>
static I16 words(Of of) {
    I16 made;
    for (int i = 0; i < 16; i++) made.of[i] = (int32_t)of(i);
    return made;
}

// Every byte of every lane by `of`.
template <class Of>
static I16 bytes(I16 a, Of of) {
    uint8_t all[64];
    memcpy(all, a.of, 64);
    for (uint8_t& byte : all) byte = (uint8_t)of(byte);
    memcpy(a.of, all, 64);
    return a;
}

static F16 load16(const void* at) {
    F16 made;
    memcpy(made.of, at, 64);
    return made;
}
static F16 load_half16(const void* at) {
    uint16_t halves[16];
    memcpy(halves, at, 32);
    return floats([&](int i) { return forerun::float_from_half(halves[i]); });
}
static F16 splat_half16(const void* at) {
    uint16_t half;
    memcpy(&half, at, sizeof half);
    return floats([&](int) { return forerun::float_from_half(half); });
}
template <bool Signed>
static F16 load_bytes_as_floats16(const uint8_t* at) {
    return floats([&](int i) { return Signed ? (float)(int8_t)at[i] : (float)at[i]; });
}
static F16 splat16(float a) { return floats([&](int) { return a; }); }
static F16 add16(F16 a, F16 b) { return floats([&](int i) { return a.of[i] + b.of[i]; }); }
static F16 mul16(F16 a, F16 b) { return floats([&](int i) { return a.of[i] * b.of[i]; }); }
static F16 fma16(F16 a, F16 b, F16 c) {
    return floats([&](int i) { return std::fmaf(a.of[i], b.of[i], c.of[i]); });
}
static F16 float16(I16 a) { return floats([&](int i) { return (float)a.of[i]; }); }
static void store16(float* at, F16 a) { memcpy(at, a.of, 64); }
static F16 sub16(F16 a, F16 b) { return floats([&](int i) { return a.of[i] - b.of[i]; }); }
static F16 div16(F16 a, F16 b) { return floats([&](int i) { return a.of[i] / b.of[i]; }); }
static F16 max16(F16 a, F16 b) {
    return floats([&](int i) { return a.of[i] > b.of[i] ? a.of[i] : b.of[i]; });
}
static F16 min16(F16 a, F16 b) {
    return floats([&](int i) { return a.of[i] < b.of[i] ? a.of[i] : b.of[i]; });
}
static F16 round16(F16 a) {
    return floats([&](int i) { return (a.of[i] + 12582912.0f) - 12582912.0f; });
}
static F16 power16(F16 n) {
    return floats([&](int i) { return forerun::float_of((uint32_t)((int32_t)n.of[i] + 127) << 23); });
}
static F16 load_twice16(const float* a, const float* b) {
    return floats([&](int i) { return i < 8 ? a[i] : b[i - 8]; });
}
static F16 load_eight_twice16(const float* at) {
    return floats([&](int i) { return at[i % 8]; });
}
static F16 load_halves_twice16(const uint16_t* a, const uint16_t* b) {
    return floats([&](int i) { return forerun::float_from_half(i < 8 ? a[i] : b[i - 8]); });
}
static F16 load_bytes_twice16(const uint8_t* a, const uint8_t* b) {
    return floats([&](int i) { return (float)(int8_t)(i < 8 ? a[i] : b[i - 8]); });
}
// Of a[0] to a[3] the sums of the first halves, of the second halves, then the same of a[4] to a[7].
static F16 sum_rows16(const F16 (&a)[8]) {
    return floats([&](int i) {
        const float* x = a[i / 8 * 4 + i % 4].of + i / 4 % 2 * 8;
        return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
    });
}
static void split_bfloats(const void* at, F16& even, F16& odd) {
    uint16_t both[32];
    memcpy(both, at, 64);
    even = floats([&](int i) { return forerun::float_from_bfloat(both[2 * i]); });
    odd = floats([&](int i) { return forerun::float_from_bfloat(both[2 * i + 1]); });
}
static F16 load_first16(const float* at, int count) {
    return floats([&](int i) { return i < count ? at[i] : 0.0f; });
}
static void store_first16(float* at, int count, F16 a) {
    memcpy(at, a.of, count * sizeof(float));
}

static I16 load_bytes16(const uint8_t* at) {
    I16 made;
    memcpy(made.of, at, 64);
    return made;
}
static void store_bytes16(uint8_t* at, I16 a) { memcpy(at, a.of, 64); }
static I16 add_ints16(I16 a, I16 b) { return words([&](int i) { return a.of[i] + b.of[i]; }); }
static I16 splat_int16(int32_t a) { return words([&](int) { return a; }); }
static I16 low_nibbles16(I16 both) { return bytes(both, [](uint8_t a) { return a & 15; }); }
static I16 high_nibbles16(I16 both) { return bytes(both, [](uint8_t a) { return a >> 4; }); }
static I16 upper_nibbles16(I16 both) { return bytes(both, [](uint8_t a) { return a & 240; }); }
static I16 plus_sixteenth16(I16 sum, I16 high) {
    return words([&](int i) { return sum.of[i] + high.of[i] / 16; });
}
template <int J, int To>
static I16 with_bit16(I16 a, I16 bits) {
    uint8_t low[64], from[64];
    memcpy(low, a.of, 64);
    memcpy(from, bits.of, 64);
    for (int i = 0; i < 64; i++) low[i] |= (from[i] >> J & 1) << To;
    memcpy(a.of, low, 64);
    return a;
}
template <int J>
static I16 two_bits16(I16 a) {
    return bytes(a, [](uint8_t byte) { return byte >> J & 3; });
}
static I16 low_sixes16(I16 a) { return bytes(a, [](uint8_t byte) { return byte & 63; }); }
static I16 high_bits16(I16 a, I16 b, I16 c) {
    uint8_t from[3][64];
    memcpy(from[0], a.of, 64);
    memcpy(from[1], b.of, 64);
    memcpy(from[2], c.of, 64);
    for (int i = 0; i < 64; i++) {
        from[0][i] = (uint8_t)(from[0][i] >> 6 | from[1][i] >> 6 << 2 | from[2][i] >> 6 << 4);
    }
    memcpy(a.of, from[0], 64);
    return a;
}
static I16 found_in16(const int8_t* table, I16 nibbles) {
    return bytes(nibbles, [table](uint8_t a) { return table[a]; });
}
static I16 plus_128(I16 all) { return bytes(all, [](uint8_t a) { return a ^ 0x80; }); }

static I16 dot16(I16 sum, I16 w, const int8_t* q) {
    return words([&](int i) {
        uint8_t four[4];
        memcpy(four, &w.of[i], 4);
        return sum.of[i] + four[0] * q[0] + four[1] * q[1] + four[2] * q[2] + four[3] * q[3];
    });
}

}  // namespace
