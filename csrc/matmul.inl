// Products of packed weights with quantised activations.
//
// For one channel and one row, group after group in this order and no other:
//     acc += (d * x.scale) * sum(q * x.q)        low += m * x.sum
// and the result is acc + low; where d belongs to 16 inputs, one after the other. Nothing depends on the other rows, so a row's bits are the same
// alone and among 64.

#include "k_bits.inl"

namespace {

using forerun::kBlock;
using forerun::kLanes;
using forerun::kQ4;
using forerun::kQ4K;
using forerun::kQ4M;
using forerun::kQ5K;
using forerun::kQ6K;
using forerun::kMX4;
using forerun::kQ4Z;
using forerun::kQ8;
using forerun::Matrix;
using forerun::Target;

// Rows whose activations stay in the near cache while the weights of a block pass once.
constexpr int kRowsAtOnce = 64;

// What to fetch while a group is worked on: bytes [first, last) of the group that lies `distance`
// bytes further on.
struct Ahead {
    int64_t distance;
    int first, last;
};

// What a tile's scales are taken from: the tile itself or, of K-quants, their halves as floats and
// the 256 small numbers.
template <int Format>
struct Scales {
    const uint8_t* tile;
    F8 d[2], m[2];
    const uint8_t* small;

    // Eight scales of a group, the channels from 8 h on: d, or of Q6_K that of inputs from 16 p on.
    FORERUN_MEMBER F8 scale(int group, int p, int h) const {
        if (Format == kQ6K) {
            return mul8(d[h], load_bytes8<true>(small + 32 * group + 16 * p + 8 * h));
        }
        if (Format == kQ4K || Format == kQ5K) {
            return mul8(d[h], load_bytes8<false>(small + 16 * group + 8 * h));
        }
        return load_half8(tile + forerun::scales_at(Format) + 16 * h);
    }
    FORERUN_MEMBER F8 offset(int group, int h, F8 scale) const {
        if (Format == kQ4K || Format == kQ5K) {
            return mul8(m[h], load_bytes8<false>(small + 128 + 16 * group + 8 * h));
        }
        if (Format == kQ4M) return load_half8(tile + forerun::scales_at(Format) + 32 + 16 * h);
        if (Format == kQ4Z) return mul8(scale, load_bytes8<true>(tile + 32 + 8 * h));
        return mul8(scale, splat8(-8.0f));
    }
};

template <int Format>
FORERUN_INLINE Scales<Format> scales_of(const uint8_t* tile, uint8_t* room) {
    Scales<Format> scales;
    scales.tile = tile;
    if (!forerun::is_k_quant(Format)) return scales;
    for (int h = 0; h < 2; h++) {
        scales.d[h] = load_half8(tile + 16 * h);
        if (Format != kQ6K) scales.m[h] = load_half8(tile + 32 + 16 * h);
    }
    scales.small = small_scales<Format>(tile, room);
    return scales;
}

// acc and low of group `group` of a tile, whose quants lie at `quants`.
template <int Format, int R>
FORERUN_INLINE void group_times_rows(const uint8_t* quants, const Scales<Format>& scales, int group,
                                     const Group& x, F8 (&acc)[R][2], F8 (&low)[R][2]) {
    constexpr int pieces = Format == kQ6K ? 2 : 1;  // that have a scale of their own
    uint8_t bytes[Format == kQ5K || Format == kQ6K || Format == kMX4 ? 512 : 1];
    if (Format == kQ5K) spread_fives(quants, bytes);
    if (Format == kMX4) spread_fp4(quants, bytes);
    if (Format == kQ6K) {
        spread_sixes(quants, bytes);
        spread_sixes(quants + 192, bytes + 256);
    }
#pragma GCC unroll 2
    for (int p = 0; p < pieces; p++) {
        I8 sum[R][2];
        for (int r = 0; r < R; r++) {
            sum[r][0] = sum[r][1] = splat_int8(Format == kQ6K ? x.excess32[r][p] : 0);
        }
        if (Format == kQ8) {
            dot_bytes<R>(quants, x, sum);
        } else if (Format == kMX4) {
            dot_bytes<R>(bytes, x, sum);
        } else if (Format == kQ5K) {
            dot_sixes<R, 0, 8>(bytes, x, sum);
        } else if (Format == kQ6K && p == 0) {
            dot_sixes<R, 0, 4>(bytes, x, sum);
        } else if (Format == kQ6K) {
            dot_sixes<R, 4, 8>(bytes, x, sum);
        } else {
            dot_nibbles<R>(quants, x, sum);
        }
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const F8 d = scales.scale(group, p, h), m = scales.offset(group, h, d);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                acc[r][h] = fma8(float8(sum[r][h]), mul8(d, splat8(x.scale[r])), acc[r][h]);
                if (forerun::has_offset(Format)) {
                    low[r][h] = fma8(m, splat8(x.sum[r]), low[r][h]);
                }
            }
        }
    }
}

// The two halves of a block's 16 channels for R rows.
template <int Format, int R>
FORERUN_INLINE void block_times_rows(const uint8_t* tile, const Group* x, int groups, Ahead ahead,
                                     F8 (&out)[R][2]) {
    constexpr int step = forerun::tile_groups(Format);
    uint8_t room[forerun::is_k_quant(Format) ? 256 : 1];
    F8 acc[R][2], low[R][2];
    for (int r = 0; r < R; r++) {
        for (int h = 0; h < 2; h++) acc[r][h] = low[r][h] = splat8(0.0f);
    }
    for (int g = 0; g < groups; g += step, tile += forerun::tile_bytes(Format)) {
        const Scales<Format> scales = scales_of<Format>(tile, room);
        const uint8_t* quants = tile + forerun::quants_at(Format);
        for (int k = 0; k < step; k++, x++) {
            for (int i = ahead.first; i < ahead.last; i += 64) {
                __builtin_prefetch(quants + ahead.distance + i, 0, 2);
            }
            group_times_rows<Format, R>(quants, scales, k, *x, acc, low);
            quants += forerun::group_bytes(Format);
        }
    }
    for (int r = 0; r < R; r++) {
        for (int h = 0; h < 2; h++) {
            out[r][h] = forerun::has_offset(Format) ? add8(acc[r][h], low[r][h]) : acc[r][h];
        }
    }
}

static void write_block(const Matrix& w, int block, const F8 (&result)[2], float* at, bool add) {
    const int first = block * kBlock;
    const int count = w.channels - first < kBlock ? w.channels - first : kBlock;
    float values[kBlock];
    store8(values, result[0]);
    store8(values + 8, result[1]);
    for (int c = 0; c < count; c++) {
        float value = values[c];
        if (w.bias) value += w.bias[first + c];
        at[first + c] = add ? at[first + c] + value : value;
    }
}

template <int Format, int R>
static void rows_of_block(const Matrix& w, int block, const Group* x, int row, Ahead ahead,
                          Target out) {
    F8 result[R][2];
    block_times_rows<Format, R>(w.tiles + block * w.block_bytes(), x, w.groups(), ahead, result);
    for (int r = 0; r < R; r++) {
        write_block(w, block, result[r], out.data + (row + r) * out.stride, out.add);
    }
}

// Weights come from memory once, for the first pass over a block. Each pass fetches its part of the
// next block, so that memory is busy all the time; a single pass fetches a little ahead.
template <int Format>
FORERUN_INLINE Ahead ahead_of(const Matrix& w, int pass, int passes) {
    constexpr int bytes = forerun::tile_bytes(Format) / forerun::tile_groups(Format);
    if (passes == 1) return {2048, 0, bytes};
    const int lines = (bytes + 63) / 64;
    return {(int64_t)w.block_bytes(), pass * lines / passes * 64, (pass + 1) * lines / passes * 64};
}

template <int Format>
static void product_as(const Matrix& w, const Group* x, int rows, int first, int last, Target out) {
    const int groups = w.groups();
    for (int begin = 0; begin < rows; begin += kRowsAtOnce) {
        const int end = rows - begin < kRowsAtOnce ? rows : begin + kRowsAtOnce;
        const int passes = (end - begin + kLanes - 1) / kLanes;
        for (int block = first; block < last; block++) {
            for (int row = begin; row < end; row += kLanes) {
                const Ahead ahead = ahead_of<Format>(w, (row - begin) / kLanes, passes);
                const Group* lanes = x + (int64_t)(row / kLanes) * groups;
                switch (end - row) {
                    case 1: rows_of_block<Format, 1>(w, block, lanes, row, ahead, out); break;
                    case 2: rows_of_block<Format, 2>(w, block, lanes, row, ahead, out); break;
                    case 3: rows_of_block<Format, 3>(w, block, lanes, row, ahead, out); break;
                    default: rows_of_block<Format, 4>(w, block, lanes, row, ahead, out);
                }
            }
        }
    }
}

static void product(const Matrix& w, const Group* x, int rows, int first, int last, Target out) {
    switch (w.format) {
        case kQ4: return product_as<kQ4>(w, x, rows, first, last, out);
        case kQ4M: return product_as<kQ4M>(w, x, rows, first, last, out);
        case kQ4K: return product_as<kQ4K>(w, x, rows, first, last, out);
        case kQ5K: return product_as<kQ5K>(w, x, rows, first, last, out);
        case kQ6K: return product_as<kQ6K>(w, x, rows, first, last, out);
        case kQ4Z: return product_as<kQ4Z>(w, x, rows, first, last, out);
        case kMX4: return product_as<kMX4>(w, x, rows, first, last, out);
        default: return product_as<kQ8>(w, x, rows, first, last, out);
    }
}

}  // namespace
