// matmul_wide.inl for many rows, on tiles: 16 rows of activations meet a block's 16 channels, a scale's
// inputs at a time, in one instruction. The same integers and, group after group, the same order of
// float32, so the same bits.
//
// Every scale has sums of its own, which leave the tile for memory, become floats and are scaled there: that
// takes longer than the product, and goes on beside the next one's.
#include <cstdlib>

#include "wide_operands.inl"

namespace {

constexpr int kTileRows = 16;
constexpr int kPackedRows = 64;  // that meet a block before the next one is read

// Inputs that share a scale, in a group.
template <int Format>
constexpr int kTileInputs = forerun::kGroup / forerun::group_parts(Format);

// Activations of 16 rows at the inputs of one scale; rows that there are not are zero.
template <int Inputs>
struct TileRows {
    int8_t q[kTileRows][Inputs];
    int32_t begin[kTileRows];  // first_sum
    float scale[kTileRows], sum[kTileRows];
};

// Memory of a thread that grows with what is asked of it.
class Room {
public:
    ~Room() { free(data_); }
    void* of(size_t bytes) {
        if (bytes <= bytes_) return data_;
        free(data_);
        bytes_ = (bytes + 63) / 64 * 64;
        data_ = aligned_alloc(64, bytes_);
        if (!data_) abort();  // As operator new would, which has no way back through a product.
        return data_;
    }

private:
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

template <int Format>
static void pack_rows(const Group* x, int rows, int groups, TileRows<kTileInputs<Format>>* out) {
    constexpr int inputs = kTileInputs<Format>;
    for (int g = 0; g < groups; g++) {
        for (int half = 0; half < forerun::kGroup / inputs; half++, out++) {
            memset(out, 0, sizeof *out);
            for (int r = 0; r < rows; r++) {
                const Group& lanes = x[r / kLanes * groups + g];
                memcpy(out->q[r], lanes.q[r % kLanes] + half * inputs, inputs);
                out->begin[r] = Format == kQ8 ? 0 : first_sum<Format>(lanes, r, half);
                out->scale[r] = lanes.scale[r % kLanes];
                out->sum[r] = sum_of_part<Format>(lanes, r % kLanes, half);
            }
        }
    }
}

// Pieces [J, last) of a group's quants, as tiles read them.
template <int Format, int J, int Last>
FORERUN_INLINE void spread(const uint8_t* tile, const uint8_t* quants, uint8_t* out) {
    if constexpr (J < Last) {
        I16 w[kOperands<Format>];
        load_operands<Format, J>(tile, quants, w);
        for (int k = 0; k < kOperands<Format>; k++) store_bytes16(out + 64 * k, w[k]);
        spread<Format, J + 1, Last>(tile, quants, out + 64 * kOperands<Format>);
    }
}

// The sums of half `Half` of a group, whose number is `number`. Bytes of 8 bits are read where they are.
template <int Format, int Half>
FORERUN_INLINE void sum_group(const uint8_t* tile, const uint8_t* quants,
                              const TileRows<kTileInputs<Format>>& x, int number, uint8_t* bytes,
                              int32_t* sums) {
    constexpr int inputs = kTileInputs<Format>;
    if (Format == kQ8) return tile_sums<true, inputs>(x.q[0], quants, sums, number % 2);
    constexpr int pieces = inputs / 4 / kOperands<Format>;
    spread<Format, Half * pieces, Half * pieces + pieces>(tile, quants, bytes);
    tile_sums<false, inputs>(x.q[0], bytes, sums, number % 2);
}

// One block times 16 rows, of which `rows` are there, from row `row` of `out` on.
template <int Format>
static void tile_block(const Matrix& w, int block, const TileRows<kTileInputs<Format>>* x, int row,
                       int rows, Target out) {
    constexpr int step = forerun::tile_groups(Format), halves = forerun::kGroup / kTileInputs<Format>;
    constexpr int bytes = forerun::tile_bytes(Format) / step;
    alignas(64) uint8_t spread_out[2][512];
    alignas(64) int32_t sums[2][kTileRows * kBlock];
    uint8_t room[kRoom<Format>];
    F16 acc[kTileRows], low[kTileRows];
    for (int r = 0; r < kTileRows; r++) acc[r] = low[r] = splat16(0.0f);
    const uint8_t* tile = w.tiles + block * w.block_bytes();
    const uint8_t* far = tile + 8192;
    for (int g = 0, number = 0; g < w.groups(); g += step, tile += forerun::tile_bytes(Format)) {
        const Scales<Format> scales = scales_of<Format>(tile, room);
        const uint8_t* quants = tile + forerun::quants_at(Format);
        for (int k = 0; k < step; k++, quants += forerun::group_bytes(Format), far += bytes) {
            fetch<(bytes + 63) / 64>(far, {8192, 0, row ? 0 : (bytes + 63) / 64});
            for (int half = 0; half < halves; half++, x++, number++) {
                int32_t* mine = sums[number % 2];
                if (half == 0) {
                    sum_group<Format, 0>(tile, quants, *x, number, spread_out[number % 2], mine);
                } else {
                    sum_group<Format, halves - 1>(tile, quants, *x, number, spread_out[number % 2],
                                                  mine);
                }
                const F16 d = scales.scale(k, half), m = scales.offset(k, half, d);
#pragma GCC unroll 16
                for (int r = 0; r < kTileRows; r++) {
                    I16 sum = load_bytes16((const uint8_t*)(mine + r * kBlock));
                    if (Format != kQ8) sum = add_ints16(sum, splat_int16(x->begin[r]));
                    const F16 scale = mul16(d, splat16(x->scale[r]));
                    acc[r] = fma16(float16(sum), scale, acc[r]);
                    if (forerun::has_offset(Format)) low[r] = fma16(m, splat16(x->sum[r]), low[r]);
                }
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        put_channels(w, block, forerun::has_offset(Format) ? add16(acc[r], low[r]) : acc[r], out, row + r);
    }
}

template <int Format>
static void tiled_product(const Matrix& w, const Group* x, int rows, int first, int last, Target out) {
    constexpr int inputs = kTileInputs<Format>;
    static thread_local Room room;
    const int groups = w.groups(), pieces = groups * (forerun::kGroup / inputs);
    const int most = rows < kPackedRows ? rows : kPackedRows, parts = (most + kTileRows - 1) / kTileRows;
    auto* packed = (TileRows<inputs>*)room.of(sizeof(TileRows<inputs>) * pieces * parts);
    begin_tiles(inputs);
    for (int begin = 0; begin < rows; begin += kPackedRows) {
        const int end = rows - begin < kPackedRows ? rows : begin + kPackedRows;
        for (int row = begin; row < end; row += kTileRows) {
            const int some = end - row < kTileRows ? end - row : kTileRows;
            pack_rows<Format>(x + (int64_t)(row / kLanes) * groups, some, groups,
                              packed + (row - begin) / kTileRows * pieces);
        }
        for (int block = first; block < last; block++) {
            for (int row = begin; row < end; row += kTileRows) {
                const int some = end - row < kTileRows ? end - row : kTileRows;
                tile_block<Format>(w, block, packed + (row - begin) / kTileRows * pieces, row, some, out);
            }
        }
    }
    end_tiles();
}

static void product_by_tiles(const Matrix& w, const Group* x, int rows, int first, int last, Target out) {
    if (first >= last) return;
    switch (w.format) {
        case kQ4: return tiled_product<kQ4>(w, x, rows, first, last, out);
        case kQ4M: return tiled_product<kQ4M>(w, x, rows, first, last, out);
        case kQ4K: return tiled_product<kQ4K>(w, x, rows, first, last, out);
        case kQ5: return tiled_product<kQ5>(w, x, rows, first, last, out);
        case kQ5K: return tiled_product<kQ5K>(w, x, rows, first, last, out);
        case kQ6K: return tiled_product<kQ6K>(w, x, rows, first, last, out);
        case kQ4Z: return tiled_product<kQ4Z>(w, x, rows, first, last, out);
        case kMX4: return tiled_product<kMX4>(w, x, rows, first, last, out);
        case kL4: return tiled_product<kL4>(w, x, rows, first, last, out);
        case kL4K: return tiled_product<kL4K>(w, x, rows, first, last, out);
        case kQ5M: return tiled_product<kQ5M>(w, x, rows, first, last, out);
        case kQ3K: return tiled_product<kQ3K>(w, x, rows, first, last, out);
        case kQ2K: return tiled_product<kQ2K>(w, x, rows, first, last, out);
        case kL3K: return tiled_product<kL3K>(w, x, rows, first, last, out);
        default: return tiled_product<kQ8>(w, x, rows, first, last, out);
    }
}

}  // namespace
