// Products of packed weights with quantised activations.
//
// For one channel and one row, group after group in this order and no other:
//     acc += (d * x.scale) * sum(q * x.q)        low += m * x.sum
// and the result is acc + low; where d belongs to 16 inputs, one after the other. Nothing depends on
// the other rows, so a row's bits are the same alone and among 64. d of a tile with a table of its own
// is its half times the tile's unit, a power of two, so that no bit is lost.

#include "k_bits.inl"

namespace {

using forerun::kBlock;
using forerun::kLanes;
using forerun::kQ4;
using forerun::kQ4K;
using forerun::kQ4M;
using forerun::kL4;
using forerun::kL4K;
using forerun::kQ2K;
using forerun::kQ3K;
using forerun::kL3K;
using forerun::kQ5;
using forerun::kQ5K;
using forerun::kQ5M;
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

    // Eight scales of part `p` of a group, the channels from 8 h on.
    FORERUN_MEMBER F8 scale(int group, int p, int h) const {
        if (forerun::is_k_quant(Format)) {
            constexpr bool is_signed = !forerun::has_offset(Format);
            return mul8(d[h], load_bytes8<is_signed>(small + small_at<Format>(group, p) + 8 * h));
        }
        return load_half8(tile + forerun::scales_at(Format) + 16 * h);
    }
    FORERUN_MEMBER F8 offset(int group, int p, int h, F8 scale) const {
        if (forerun::is_k_quant(Format)) {
            const uint8_t* offsets = small + kOffsets<Format> + small_at<Format>(group, p);
            return forerun::has_offset(Format) ? mul8(m[h], load_bytes8<false>(offsets + 8 * h)) : scale;
        }
        if (Format == kQ4M || Format == kQ5M) {
            return load_half8(tile + forerun::scales_at(Format) + 32 + 16 * h);
        }
        if (Format == kQ4Z) return mul8(scale, load_bytes8<true>(tile + 32 + 8 * h));
        return mul8(scale, splat8(-8.0f));
    }
};

template <int Format>
FORERUN_INLINE Scales<Format> scales_of(const uint8_t* tile, uint8_t* room) {
    Scales<Format> scales;
    scales.tile = tile;
    if (!forerun::is_k_quant(Format)) return scales;
    const F8 unit = splat8(unit_of<Format>(tile));
    for (int h = 0; h < 2; h++) {
        scales.d[h] = load_half8(tile + 16 * h);
        if (forerun::has_own_table(Format)) scales.d[h] = mul8(scales.d[h], unit);
        if (forerun::has_offset(Format)) scales.m[h] = load_half8(tile + 32 + 16 * h);
    }
    scales.small = small_scales<Format>(tile, room);
    return scales;
}

template <int Format>
constexpr int kParts = forerun::group_parts(Format);
// Formats whose products read quants as they are stored. Those of others are spread into bytes.
template <int Format>
constexpr bool kAsStored =
    !forerun::has_fifths(Format) && !forerun::has_table(Format) && kParts<Format> == 1;
// How much larger spread bytes are than the numbers of a table; the larger levels keep their sign.
template <int Format>
constexpr int kPlus = Format == kMX4 ? 12 : 0;

// The quants of one group of `tile`, which lie at `quants`.
template <int Format>
FORERUN_INLINE void spread(const uint8_t* tile, const uint8_t* quants, uint8_t* bytes) {
    if (forerun::has_fifths(Format)) return spread_fives(quants, bytes);
    if (Format == kQ6K) {
        spread_sixes(quants, bytes);
        return spread_sixes(quants + 192, bytes + 256);
    }
    if (Format == kQ2K || forerun::has_thirds(Format)) {
        spread_twos<forerun::has_thirds(Format)>(quants, bytes);
    } else {
        spread_nibbles(quants, bytes);
    }
    if (forerun::has_table(Format)) look_up(levels_of<Format>(tile), kPlus<Format>, bytes);
}

// The sums of part `p` of a group that is spread.
template <int Format, int R>
FORERUN_INLINE void dot_spread(const uint8_t* bytes, int p, const Group& x, I8 (&sum)[R][2]) {
    if constexpr (Format == kL4 || Format == kL4K) return dot_bytes<R>(bytes, x, sum);
    if constexpr (Format == kL3K) {
        if (p == 0) return dot_bytes<R, 0, 4>(bytes, x, sum);
        return dot_bytes<R, 4, 8>(bytes, x, sum);
    }
    constexpr int most = Format == kQ6K                 ? 63
                         : forerun::has_fifths(Format) ? 31
                         : Format == kMX4              ? 24
                         : Format == kQ3K              ? 7
                         : Format == kQ2K              ? 3
                                                       : 15;
    for (int r = 0; r < R; r++) {
        sum[r][0] = sum[r][1] = splat_int8(first_sum_of<Format>(x, r, p, kPlus<Format>));
    }
    if (kParts<Format> == 1) return dot_small<R, 0, 8, most>(bytes, x, sum);
    if (p == 0) return dot_small<R, 0, 4, most>(bytes, x, sum);
    dot_small<R, 4, 8, most>(bytes, x, sum);
}

// acc and low of half `h` of the channels, of part `p` of a group; d and m are their scales.
template <int Format, int R>
FORERUN_INLINE void add_scaled(const I8 (&sum)[R][2], int p, int h, F8 d, F8 m, const Group& x,
                               F8 (&acc)[R][2], F8 (&low)[R][2]) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        acc[r][h] = fma8(float8(sum[r][h]), mul8(d, splat8(x.scale[r])), acc[r][h]);
        if (!forerun::has_offset(Format)) continue;
        low[r][h] = fma8(m, splat8(sum_of_part<Format>(x, r, p)), low[r][h]);
    }
}

// acc and low of group `group` of a tile, whose quants lie at `quants`.
template <int Format, int R>
FORERUN_INLINE void group_times_rows(const uint8_t* quants, const Scales<Format>& scales, int group,
                                     const Group& x, F8 (&acc)[R][2], F8 (&low)[R][2]) {
    uint8_t bytes[kAsStored<Format> ? 1 : 512];
    if constexpr (!kAsStored<Format>) spread<Format>(scales.tile, quants, bytes);
#pragma GCC unroll 2
    for (int p = 0; p < kParts<Format>; p++) {
        I8 sum[R][2];
        if constexpr (!kAsStored<Format>) {
            dot_spread<Format, R>(bytes, p, x, sum);
        } else if (Format == kQ8) {
            dot_bytes<R>(quants, x, sum);
        } else {
            dot_nibbles<R>(quants, x, sum);
        }
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const F8 d = scales.scale(group, p, h), m = scales.offset(group, p, h, d);
            add_scaled<Format, R>(sum, p, h, d, m, x, acc, low);
        }
    }
}

// The two halves of a block's 16 channels for R rows.
template <int Format, int R>
FORERUN_INLINE void block_times_rows(const uint8_t* tile, const Group* x, int groups, Ahead ahead,
                                     F8 (&out)[R][2]) {
    constexpr int step = forerun::tile_groups(Format);
    uint8_t room[kRoom<Format>];
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
    const int first = block * kBlock, count = w.channels - first;
    at += first;
    if (count >= kBlock) {
        for (int i = 0; i < kBlock; i += 8) {
            F8 value = result[i / 8];
            if (w.bias) value = add8(value, load8(w.bias + first + i));
            store8(at + i, add ? add8(load8(at + i), value) : value);
        }
        return;
    }
    float values[kBlock];
    store8(values, result[0]);
    store8(values + 8, result[1]);
    for (int c = 0; c < count; c++) {
        const float value = w.bias ? values[c] + w.bias[first + c] : values[c];
        at[c] = add ? at[c] + value : value;
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
static void passes_over_block(const Matrix& w, int block, const Group* x, int begin, int end,
                              Target out) {
    const int passes = (end - begin + kLanes - 1) / kLanes;
    for (int row = begin, pass = 0; row < end; row += kLanes, pass++) {
        const Ahead ahead = ahead_of<Format>(w, pass, passes);
        const Group* lanes = x + (int64_t)(row / kLanes) * w.groups();
        switch (end - row) {
            case 1: rows_of_block<Format, 1>(w, block, lanes, row, ahead, out); break;
            case 2: rows_of_block<Format, 2>(w, block, lanes, row, ahead, out); break;
            case 3: rows_of_block<Format, 3>(w, block, lanes, row, ahead, out); break;
            default: rows_of_block<Format, 4>(w, block, lanes, row, ahead, out);
        }
    }
}

// A tile made ready once for many rows: its quants spread, its scales as floats.
template <int Format>
struct Ready {
    static constexpr int groups = forerun::tile_groups(Format);
    uint8_t bytes[groups][512];
    float d[groups][kParts<Format>][kBlock], m[groups][kParts<Format>][kBlock];

    void fill(const uint8_t* tile) {
        uint8_t room[kRoom<Format>];
        const Scales<Format> scales = scales_of<Format>(tile, room);
        const uint8_t* quants = tile + forerun::quants_at(Format);
        for (int g = 0; g < groups; g++) {
            spread<Format>(tile, quants + g * forerun::group_bytes(Format), bytes[g]);
            for (int h = 0; h < 2; h++) {
                for (int p = 0; p < kParts<Format>; p++) {
                    const F8 scale = scales.scale(g, p, h);
                    store8(d[g][p] + 8 * h, scale);
                    if (!forerun::has_offset(Format)) continue;
                    store8(m[g][p] + 8 * h, scales.offset(g, p, h, scale));
                }
            }
        }
    }
};

// What a tile adds to acc and low of R rows.
template <int Format, int R>
static void tile_times_rows(const Ready<Format>& tile, const Group* x, float (*acc)[kBlock],
                            float (*low)[kBlock]) {
    F8 a[R][2], l[R][2];
    for (int r = 0; r < R; r++) {
        for (int h = 0; h < 2; h++) a[r][h] = load8(acc[r] + 8 * h), l[r][h] = load8(low[r] + 8 * h);
    }
    for (int g = 0; g < tile.groups; g++, x++) {
#pragma GCC unroll 2
        for (int p = 0; p < kParts<Format>; p++) {
            I8 sum[R][2];
            dot_spread<Format, R>(tile.bytes[g], p, *x, sum);
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                const F8 d = load8(tile.d[g][p] + 8 * h), m = load8(tile.m[g][p] + 8 * h);
                add_scaled<Format, R>(sum, p, h, d, m, *x, a, l);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int h = 0; h < 2; h++) store8(acc[r] + 8 * h, a[r][h]), store8(low[r] + 8 * h, l[r][h]);
    }
}

// Rows [begin, end) of a block tile after tile, each made ready once for all of them.
template <int Format>
static void tiles_of_block(const Matrix& w, int block, const Group* x, int begin, int end,
                           Target out) {
    constexpr int lines = (forerun::tile_bytes(Format) + 63) / 64;
    const int rows = end - begin, groups = w.groups(), passes = (rows + kLanes - 1) / kLanes;
    float acc[kRowsAtOnce][kBlock], low[kRowsAtOnce][kBlock];
    memset(acc, 0, sizeof acc[0] * rows);
    memset(low, 0, sizeof low[0] * rows);
    const uint8_t* tile = w.tiles + block * w.block_bytes();
    Ready<Format> ready;
    for (int g = 0; g < groups; g += ready.groups, tile += forerun::tile_bytes(Format)) {
        ready.fill(tile);
        const Group* lanes = x + (int64_t)(begin / kLanes) * groups + g;
        for (int row = 0, pass = 0; row < rows; row += kLanes, pass++, lanes += groups) {
            // Each pass fetches its part of the next block.
            for (int i = pass * lines / passes; i < (pass + 1) * lines / passes; i++) {
                __builtin_prefetch(tile + w.block_bytes() + 64 * i, 0, 2);
            }
            switch (rows - row) {
                case 1: tile_times_rows<Format, 1>(ready, lanes, acc + row, low + row); break;
                case 2: tile_times_rows<Format, 2>(ready, lanes, acc + row, low + row); break;
                case 3: tile_times_rows<Format, 3>(ready, lanes, acc + row, low + row); break;
                default: tile_times_rows<Format, 4>(ready, lanes, acc + row, low + row);
            }
        }
    }
    for (int row = 0; row < rows; row++) {
        F8 result[2];
        for (int h = 0; h < 2; h++) {
            const F8 a = load8(acc[row] + 8 * h);
            result[h] = forerun::has_offset(Format) ? add8(a, load8(low[row] + 8 * h)) : a;
        }
        write_block(w, block, result, out.data + (begin + row) * out.stride, out.add);
    }
}

// Up to so many rows a tile is read anew by each four of them.
template <int Format>
constexpr int kFewRows = !kAsStored<Format> ? kLanes : Format == kQ4K ? 2 * kLanes : kRowsAtOnce;

template <int Format>
static void product_as(const Matrix& w, const Group* x, int rows, int first, int last, Target out) {
    for (int begin = 0; begin < rows; begin += kRowsAtOnce) {
        const int end = rows - begin < kRowsAtOnce ? rows : begin + kRowsAtOnce;
        for (int block = first; block < last; block++) {
            if constexpr (kFewRows<Format> < kRowsAtOnce) {
                if (end - begin > kFewRows<Format>) {
                    tiles_of_block<Format>(w, block, x, begin, end, out);
                    continue;
                }
            }
            passes_over_block<Format>(w, block, x, begin, end, out);
        }
    }
}

static void product(const Matrix& w, const Group* x, int rows, int first, int last, Target out) {
    switch (w.format) {
        case kQ4: return product_as<kQ4>(w, x, rows, first, last, out);
        case kQ4M: return product_as<kQ4M>(w, x, rows, first, last, out);
        case kQ4K: return product_as<kQ4K>(w, x, rows, first, last, out);
        case kQ5: return product_as<kQ5>(w, x, rows, first, last, out);
        case kQ5K: return product_as<kQ5K>(w, x, rows, first, last, out);
        case kQ6K: return product_as<kQ6K>(w, x, rows, first, last, out);
        case kQ4Z: return product_as<kQ4Z>(w, x, rows, first, last, out);
        case kMX4: return product_as<kMX4>(w, x, rows, first, last, out);
        case kL4: return product_as<kL4>(w, x, rows, first, last, out);
        case kL4K: return product_as<kL4K>(w, x, rows, first, last, out);
        case kQ5M: return product_as<kQ5M>(w, x, rows, first, last, out);
        case kQ3K: return product_as<kQ3K>(w, x, rows, first, last, out);
        case kQ2K: return product_as<kQ2K>(w, x, rows, first, last, out);
        case kL3K: return product_as<kL3K>(w, x, rows, first, last, out);
        default: return product_as<kQ8>(w, x, rows, first, last, out);
    }
}

}  // namespace
