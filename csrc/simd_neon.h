// The operations of simd_portable.h with NEON and its dot products (Armv8.2 and later): eight lanes
// are two registers of four.
#pragma once
#include <arm_neon.h>

#include <cstdint>

#include "quant.h"

#define FORERUN_INLINE static inline __attribute__((always_inline))

namespace {

using forerun::Group;
using forerun::kGroup;

struct F8 {
    float32x4_t low, high;
};
struct I8 {
    int32x4_t low, high;
};

FORERUN_INLINE F8 load8(const float* at) { return {vld1q_f32(at), vld1q_f32(at + 4)}; }
FORERUN_INLINE void store8(float* at, F8 a) {
    vst1q_f32(at, a.low);
    vst1q_f32(at + 4, a.high);
}
FORERUN_INLINE F8 splat8(float a) { return {vdupq_n_f32(a), vdupq_n_f32(a)}; }
FORERUN_INLINE F8 add8(F8 a, F8 b) {
    return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)};
}
FORERUN_INLINE F8 sub8(F8 a, F8 b) {
    return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)};
}
FORERUN_INLINE F8 mul8(F8 a, F8 b) {
    return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)};
}
FORERUN_INLINE F8 div8(F8 a, F8 b) {
    return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)};
}
FORERUN_INLINE F8 fma8(F8 a, F8 b, F8 c) {
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}

// NEON's own max and min prefer NaN; x86 and the definition take b.
FORERUN_INLINE F8 max8(F8 a, F8 b) {
    return {vbslq_f32(vcgtq_f32(a.low, b.low), a.low, b.low),
            vbslq_f32(vcgtq_f32(a.high, b.high), a.high, b.high)};
}
FORERUN_INLINE F8 min8(F8 a, F8 b) {
    return {vbslq_f32(vcltq_f32(a.low, b.low), a.low, b.low),
            vbslq_f32(vcltq_f32(a.high, b.high), a.high, b.high)};
}

FORERUN_INLINE F8 first8(int count, F8 a, F8 b) {
    const int32_t lanes[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    const int32x4_t n = vdupq_n_s32(count);
    return {vbslq_f32(vcgtq_s32(n, vld1q_s32(lanes)), a.low, b.low),
            vbslq_f32(vcgtq_s32(n, vld1q_s32(lanes + 4)), a.high, b.high)};
}

FORERUN_INLINE float sum8(F8 a) {
    const float32x4_t half = vaddq_f32(a.low, a.high);
    const float32x2_t pair = vadd_f32(vget_low_f32(half), vget_high_f32(half));
    return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
}

FORERUN_INLINE F8 fold_four(const F8 (&a)[4]) {
    float32x4_t pairs[2];
    for (int i = 0; i < 2; i++) {  // vectors 2 i and 2 i + 1
        const float32x4_t x = vaddq_f32(a[2 * i].low, a[2 * i].high);
        const float32x4_t y = vaddq_f32(a[2 * i + 1].low, a[2 * i + 1].high);
        pairs[i] = vaddq_f32(vcombine_f32(vget_low_f32(x), vget_low_f32(y)),
                             vcombine_f32(vget_high_f32(x), vget_high_f32(y)));
    }
    return {pairs[0], pairs[1]};
}
FORERUN_INLINE F8 sum_folded(F8 a, F8 b) {
    return {vpaddq_f32(a.low, a.high), vpaddq_f32(b.low, b.high)};
}

// Not measured.
constexpr bool kConvertsBeside = false;

FORERUN_INLINE F8 load_half8(const void* at) {
    const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16((const uint16_t*)at));
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_f32_f16(vget_high_f16(halves))};
}
FORERUN_INLINE F8 splat_half8(const void* at) {
    uint16_t half;
    memcpy(&half, at, sizeof half);
    const float32x4_t four = vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half)));
    return {four, four};
}
template <bool Signed>
FORERUN_INLINE F8 load_bytes8(const uint8_t* at) {
    const uint8x8_t bytes = vld1_u8(at);
    const int16x8_t wide = Signed ? vmovl_s8(vreinterpret_s8_u8(bytes))
                                  : vreinterpretq_s16_u16(vmovl_u8(bytes));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))),
            vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)))};
}
FORERUN_INLINE void store_half8(void* at, F8 a) {
    const float16x8_t halves = vcombine_f16(vcvt_f16_f32(a.low), vcvt_f16_f32(a.high));
    vst1q_u16((uint16_t*)at, vreinterpretq_u16_f16(halves));
}

// Bfloats that lie alternately: the even ones and the odd ones.
FORERUN_INLINE void split_bfloats(const void* at, F8& even, F8& odd) {
    const uint16x8x2_t both = vld2q_u16((const uint16_t*)at);
    even = {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(both.val[0]), 16)),
            vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(both.val[0]), 16))};
    odd = {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(both.val[1]), 16)),
           vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(both.val[1]), 16))};
}

FORERUN_INLINE F8 power8(F8 n) {
    const int32x4_t bias = vdupq_n_s32(127);
    const int32x4_t low = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.low), bias), 23);
    const int32x4_t high = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.high), bias), 23);
    return {vreinterpretq_f32_s32(low), vreinterpretq_f32_s32(high)};
}
FORERUN_INLINE F8 round8(F8 a) { return {vrndnq_f32(a.low), vrndnq_f32(a.high)}; }
FORERUN_INLINE I8 splat_int8(int32_t a) { return {vdupq_n_s32(a), vdupq_n_s32(a)}; }
FORERUN_INLINE F8 float8(I8 a) { return {vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)}; }

// Four activations in every lane of four.
FORERUN_INLINE int8x16_t splat_bytes(const int8_t* at) {
    int32_t four;
    memcpy(&four, at, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

// One group's nibbles as 512 bytes, in the order of bytes.
FORERUN_INLINE void spread_nibbles(const uint8_t* quants, uint8_t* out) {
    for (int i = 0; i < 16; i++) {
        const uint8x16_t both = vld1q_u8(quants + 16 * i);
        uint8_t* at = out + i / 4 * 128 + i % 4 * 16;
        vst1q_u8(at, vandq_u8(both, vdupq_n_u8(15)));
        vst1q_u8(at + 64, vshrq_n_u8(both, 4));
    }
}

// 512 places in a table of 16 numbers become what stands there, `plus` larger.
FORERUN_INLINE void look_up(const int8_t* numbers, int plus, uint8_t* out) {
    const int8x16_t table = vaddq_s8(vld1q_s8(numbers), vdupq_n_s8((int8_t)plus));
    for (int i = 0; i < 512; i += 16) {
        vst1q_s8((int8_t*)out + i, vqtbl1q_s8(table, vld1q_u8(out + i)));
    }
}

template <int R>
FORERUN_INLINE void dot_nibbles(const uint8_t* tile, const Group& x, I8 (&sum)[R][2]) {
    const uint8x16_t mask = vdupq_n_u8(15);
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = {vdupq_n_s32(0), vdupq_n_s32(0)};
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        int8x16_t w[4];
        for (int i = 0; i < 4; i++) {
            const uint8x16_t both = vld1q_u8(tile + 64 * (j / 2) + 16 * i);
            w[i] = vreinterpretq_s8_u8(j % 2 ? vshrq_n_u8(both, 4) : vandq_u8(both, mask));
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const int8x16_t q = splat_bytes(x.q[r] + 4 * j);
            for (int h = 0; h < 2; h++) {
                sum[r][h].low = vdotq_s32(sum[r][h].low, w[2 * h], q);
                sum[r][h].high = vdotq_s32(sum[r][h].high, w[2 * h + 1], q);
            }
        }
    }
}

// Bytes from 0 to Most, or with a sign, of inputs 4 First to 4 Last alone, added to `sum`.
template <int R, int First, int Last, int Most>
FORERUN_INLINE void dot_small(const uint8_t* bytes, const Group& x, I8 (&sum)[R][2]) {
#pragma GCC unroll 8
    for (int j = First; j < Last; j++) {
        int8x16_t w[4];
        for (int i = 0; i < 4; i++) w[i] = vld1q_s8((const int8_t*)bytes + 64 * j + 16 * i);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const int8x16_t q = splat_bytes(x.q[r] + 4 * j);
            for (int h = 0; h < 2; h++) {
                sum[r][h].low = vdotq_s32(sum[r][h].low, w[2 * h], q);
                sum[r][h].high = vdotq_s32(sum[r][h].high, w[2 * h + 1], q);
            }
        }
    }
}

template <int R, int First = 0, int Last = 8>
FORERUN_INLINE void dot_bytes(const uint8_t* tile, const Group& x, I8 (&sum)[R][2]) {
    for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = splat_int8(0);
    dot_small<R, First, Last, 127>(tile, x, sum);
}

struct U8 {
    uint32x4_t low, high;
};
FORERUN_INLINE void multiply4(uint32x4_t x, uint32_t factor, uint32x4_t& high, uint32x4_t& low) {
    const uint32x4_t first = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(x), factor));
    const uint32x4_t second = vreinterpretq_u32_u64(vmull_n_u32(vget_high_u32(x), factor));
    low = vuzp1q_u32(first, second);
    high = vuzp2q_u32(first, second);
}
FORERUN_INLINE void multiply8(U8 x, uint32_t factor, U8& high, U8& low) {
    multiply4(x.low, factor, high.low, low.low);
    multiply4(x.high, factor, high.high, low.high);
}
FORERUN_INLINE U8 xor8(U8 a, U8 b) { return {veorq_u32(a.low, b.low), veorq_u32(a.high, b.high)}; }
FORERUN_INLINE U8 words8(uint32_t a) { return {vdupq_n_u32(a), vdupq_n_u32(a)}; }
FORERUN_INLINE U8 count8(uint32_t first) {
    static const uint32_t steps[4] = {0, 1, 2, 3};
    const uint32x4_t low = vaddq_u32(vdupq_n_u32(first), vld1q_u32(steps));
    return {low, vaddq_u32(low, vdupq_n_u32(4))};
}
FORERUN_INLINE void store_turned(uint32_t* at, U8 a, U8 b, U8 c, U8 d) {
    vst4q_u32(at, (uint32x4x4_t{{a.low, b.low, c.low, d.low}}));
    vst4q_u32(at + 16, (uint32x4x4_t{{a.high, b.high, c.high, d.high}}));
}
FORERUN_INLINE F8 half_complement8(const uint32_t* at) {
    const uint32x4_t low = vshrq_n_u32(vmvnq_u32(vld1q_u32(at)), 1);
    const uint32x4_t high = vshrq_n_u32(vmvnq_u32(vld1q_u32(at + 4)), 1);
    return {vcvtq_f32_u32(low), vcvtq_f32_u32(high)};
}
FORERUN_INLINE bool any_at_most8(F8 a, F8 b) {
    return vmaxvq_u32(vorrq_u32(vcleq_f32(a.low, b.low), vcleq_f32(a.high, b.high))) != 0;
}

FORERUN_INLINE uint32_t largest_bits(const float* x) {
    const uint32x4_t mask = vdupq_n_u32(0x7fffffff);
    uint32x4_t most = vdupq_n_u32(0);
    for (int i = 0; i < kGroup; i += 4) {
        most = vmaxq_u32(most, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i)), mask));
    }
    return vmaxvq_u32(most);
}

FORERUN_INLINE void round_to_bytes(const float* x, float inverse, int8_t* q, int32_t (&sums)[2]) {
    int32x4_t total = vdupq_n_s32(0);
    for (int i = 0; i < kGroup; i += 8) {
        if (i == 16) sums[0] = vaddvq_s32(total), total = vdupq_n_s32(0);
        const int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i), inverse));
        const int32x4_t high = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i + 4), inverse));
        total = vaddq_s32(total, vaddq_s32(low, high));
        vst1_s8(q + i, vmovn_s16(vcombine_s16(vmovn_s32(low), vmovn_s32(high))));
    }
    sums[1] = vaddvq_s32(total);
}

}  // namespace
