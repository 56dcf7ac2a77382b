// IEEE half precision and bfloat16 as plain integers. Every instruction set's own conversion
// gives the same bits as these, which a test checks for all 65,536 halves.
#pragma once
#include <cstdint>
#include <cstring>

namespace forerun {

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline float float_from_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t exponent = (half >> 10) & 31, fraction = half & 1023;
    if (exponent == 0) {  // zero and subnormals: fraction * 2^-24, exact
        return float_of(sign | bits_of((float)fraction * 0x1p-24f));
    }
    if (exponent == 31) {  // infinity and NaN
        return float_of(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
    }
    return float_of(sign | ((exponent + 112) << 23) | fraction << 13);
}

// Rounds to nearest, ties to even.
static inline uint16_t half_from_float(float value) {
    uint32_t bits = bits_of(value);
    const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00 | (uint16_t)((bits >> 13) & 0x1ff);
    if (bits >= 0x47800000) return sign | 0x7c00;
    if (bits < 0x38800000) {  // below 2^-14: adding 1/2 leaves the subnormal's bits, rounded
        return sign | (uint16_t)(bits_of(float_of(bits) + 0.5f) - bits_of(0.5f));
    }
    bits += 0xfff + ((bits >> 13) & 1);
    return sign | (uint16_t)((bits - 0x38000000) >> 13);
}

static inline float float_from_bfloat(uint16_t value) { return float_of((uint32_t)value << 16); }

}  // namespace forerun
