// Tiles as products on 512-bit vectors read them: scales of a block's 16 channels, and quants as unsigned
// bytes, four inputs to a channel.

#pragma once
#include "k_bits.inl"

namespace {

using forerun::kBlock;
using forerun::kLanes;
using forerun::kQ4;
using forerun::kQ4K;
using forerun::kQ4M;
using forerun::kQ5;
using forerun::kQ5K;
using forerun::kQ6K;
using forerun::kMX4;
using forerun::kQ4Z;
using forerun::kQ8;
using forerun::Matrix;
using forerun::Target;

// What to fetch while a group is worked on: lines [first, last) from `distance` bytes further on.
struct Lines {
    int64_t distance;
    int first, last;
};

// What a tile's scales are taken from: the tile itself or, of K-quants, their halves as floats and
// the 256 small numbers.
template <int Format>
struct Scales {
    const uint8_t* tile;
    F16 d, m;
    const uint8_t* small;

    // The scales of a group: d, or of Q6_K that of inputs from 16 p on.
    FORERUN_MEMBER F16 scale(int group, int p) const {
        if (Format == kQ6K) {
            return mul16(d, load_bytes_as_floats16<true>(small + 32 * group + 16 * p));
        }
        if (Format == kQ4K || Format == kQ5K) {
            return mul16(d, load_bytes_as_floats16<false>(small + 16 * group));
        }
        return load_half16(tile + forerun::scales_at(Format));
    }
    FORERUN_MEMBER F16 offset(int group, F16 scale) const {
        if (Format == kQ4K || Format == kQ5K) {
            return mul16(m, load_bytes_as_floats16<false>(small + 128 + 16 * group));
        }
        if (Format == kQ4M) return load_half16(tile + forerun::scales_at(Format) + 32);
        if (Format == kQ4Z) return mul16(scale, load_bytes_as_floats16<true>(tile + 32));
        return mul16(scale, splat16(-8.0f));
    }
};

template <int Format>
FORERUN_INLINE Scales<Format> scales_of(const uint8_t* tile, uint8_t* room) {
    Scales<Format> scales;
    scales.tile = tile;
    if (!forerun::is_k_quant(Format)) return scales;
    scales.d = load_half16(tile);
    if (Format != kQ6K) scales.m = load_half16(tile + 32);
    scales.small = small_scales<Format>(tile, room);
    return scales;
}

// How many times four inputs a piece of the stored quants has.
template <int Format>
constexpr int kOperands = Format == kQ8 ? 1 : Format == kQ6K ? 4 : 2;

// Unsigned bytes of piece J of a group's quants: lane c of operand k has inputs 4 k to 4 k + 3.
template <int Format, int J>
FORERUN_INLINE void load_operands(const uint8_t* quants, I16 (&w)[kOperands<Format>]) {
    constexpr int last = kOperands<Format> - 1;
    if (Format == kQ6K) {
        const I16 a = load_bytes16(quants + 192 * J), b = load_bytes16(quants + 192 * J + 64);
        const I16 c = load_bytes16(quants + 192 * J + 128);
        w[0] = low_sixes16(a);
        w[1 % (last + 1)] = low_sixes16(b);
        w[2 % (last + 1)] = low_sixes16(c);
        w[last] = high_bits16(a, b, c);
        return;
    }
    const I16 bytes = load_bytes16(quants + 64 * J);
    w[0] = Format == kQ8 ? plus_128(bytes) : low_nibbles16(bytes);
    if (Format == kQ8) return;
    w[last] = high_nibbles16(bytes);
    for (int k = 0; Format == kMX4 && k <= last; k++) w[k] = fp4_plus_128(w[k]);
    if (!forerun::has_fifths(Format)) return;
    const I16 fifth = load_bytes16(quants + 256);
    w[0] = with_fifth16<2 * J % 8>(w[0], fifth);
    w[last] = with_fifth16<(2 * J + 1) % 8>(w[last], fifth);
}

// Where the sums of row r begin, so that weights stored larger than they are come out right.
template <int Format>
FORERUN_INLINE int32_t first_sum(const Group& lanes, int r, int half) {
    if (Format == kQ6K) return lanes.excess32[r % kLanes][half];
    if (Format == kQ5) return lanes.excess[r % kLanes] / 8;  // -16 times the sum
    return Format == kQ8 || Format == kMX4 ? lanes.excess[r % kLanes] : 0;
}

// One row's result of a block, or what of it there are channels for, to where it goes.
FORERUN_INLINE void put_channels(const Matrix& w, int block, F16 value, Target out, int row) {
    const int first = block * kBlock, left = w.channels - first;
    const int count = left < kBlock ? left : kBlock;
    float* at = out.data + row * out.stride + first;
    if (w.bias) value = add16(value, load_first16(w.bias + first, count));
    if (out.add) value = add16(load_first16(at, count), value);
    store_first16(at, count, value);
}

// Into the second cache: fetched into the first, weights for one row came at .78 of the speed
// (Zen 4), because what waits for memory there keeps products from what has arrived. All lines of a
// group without a loop, which costs one row 5 %.
template <int All>
FORERUN_INLINE void fetch(const uint8_t* far, Lines ahead) {
    if (ahead.last - ahead.first == All) {
#pragma GCC unroll 32
        for (int i = 0; i < All; i++) __builtin_prefetch(far + 64 * i, 0, 2);
        return;
    }
    for (int i = ahead.first; i < ahead.last; i++) __builtin_prefetch(far + 64 * i, 0, 2);
}

}  // namespace
