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
using forerun::kQ2K;
using forerun::kQ3K;
using forerun::kL3K;
using forerun::kL4;
using forerun::kL4K;
using forerun::kQ5;
using forerun::kQ5K;
using forerun::kQ5M;
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

    // The scales of part `p` of a group.
    FORERUN_MEMBER F16 scale(int group, int p) const {
        if (forerun::is_k_quant(Format)) {
            constexpr bool is_signed = !forerun::has_offset(Format);
            return mul16(d, load_bytes_as_floats16<is_signed>(small + small_at<Format>(group, p)));
        }
        return load_half16(tile + forerun::scales_at(Format));
    }
    FORERUN_MEMBER F16 offset(int group, int p, F16 scale) const {
        if (forerun::is_k_quant(Format)) {
            const uint8_t* offsets = small + kOffsets<Format> + small_at<Format>(group, p);
            return forerun::has_offset(Format) ? mul16(m, load_bytes_as_floats16<false>(offsets)) : scale;
        }
        if (Format == kQ4M || Format == kQ5M) {
            return load_half16(tile + forerun::scales_at(Format) + 32);
        }
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
    if (forerun::has_own_table(Format)) scales.d = mul16(scales.d, splat16(unit_of<Format>(tile)));
    if (forerun::has_offset(Format)) scales.m = load_half16(tile + 32);
    scales.small = small_scales<Format>(tile, room);
    return scales;
}

// How many times four inputs a piece of the stored quants has.
template <int Format>
constexpr int kOperands = Format == kQ8 ? 1 : forerun::group_parts(Format) == 2 ? 4 : 2;

// Unsigned bytes of piece J of the quants of a group of `tile`: lane c of operand k has inputs 4 k to
// 4 k + 3.
template <int Format, int J>
FORERUN_INLINE void load_operands(const uint8_t* tile, const uint8_t* quants,
                                  I16 (&w)[kOperands<Format>]) {
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
    if (Format == kQ2K || forerun::has_thirds(Format)) {
        const I16 third = load_bytes16(quants + (forerun::has_thirds(Format) ? 128 : 0));
        w[0] = two_bits16<0>(bytes), w[1 % (last + 1)] = two_bits16<2>(bytes);
        w[2 % (last + 1)] = two_bits16<4>(bytes), w[last] = two_bits16<6>(bytes);
        if (Format == kQ2K) return;
        w[0] = with_bit16<4 * J % 8, 2>(w[0], third);
        w[1 % (last + 1)] = with_bit16<(4 * J + 1) % 8, 2>(w[1 % (last + 1)], third);
        w[2 % (last + 1)] = with_bit16<(4 * J + 2) % 8, 2>(w[2 % (last + 1)], third);
        w[last] = with_bit16<(4 * J + 3) % 8, 2>(w[last], third);
    } else {
        w[0] = Format == kQ8 ? plus_128(bytes) : low_nibbles16(bytes);
        if (Format == kQ8) return;
        w[last] = high_nibbles16(bytes);
    }
    for (int k = 0; forerun::has_table(Format) && k <= last; k++) {
        w[k] = plus_128(found_in16(levels_of<Format>(tile), w[k]));
    }
    if (!forerun::has_fifths(Format)) return;
    const I16 fifth = load_bytes16(quants + 256);
    w[0] = with_bit16<2 * J % 8, 4>(w[0], fifth);
    w[last] = with_bit16<(2 * J + 1) % 8, 4>(w[last], fifth);
}

// Where the sums of row r begin. Operands of 8 bits and of tables are 128 larger than what they stand for.
template <int Format>
FORERUN_INLINE int32_t first_sum(const Group& lanes, int r, int half) {
    return Format == kQ8 ? lanes.excess[r % kLanes] : first_sum_of<Format>(lanes, r % kLanes, half, 128);
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
