// Products of packed weights with quantised activations.
//
// For one channel and one row, group after group in this order and no other:
//     acc += (d * x.scale) * sum(q * x.q)        low += m * x.sum
// and the result is acc + low. Nothing depends on the other rows, so a row's bits are the same
// alone and among 64.

namespace {

using forerun::kBlock;
using forerun::kLanes;
using forerun::kQ4;
using forerun::kQ4K;
using forerun::kQ4M;
using forerun::kQ8;
using forerun::Matrix;
using forerun::Target;

// Rows whose activations stay in the near cache while the weights of a block pass once.
constexpr int kRowsAtOnce = 64;

// What to fetch while a tile is worked on: bytes [first, last) of the tile that lies `distance`
// bytes further on.
struct Ahead {
    int64_t distance;
    int first, last;
};

// Eight scales of a tile: d of channels 0 to 7, 8 to 15, then m of the same.
template <int Format>
FORERUN_INLINE F8 scale8(const uint8_t* scales, int index) {
    if (Format != kQ4K) return load_half8(scales + 16 * index);
    float floats[8];
    memcpy(floats, scales + 32 * index, sizeof floats);
    return load8(floats);
}

// The two halves of a block's 16 channels for R rows.
template <int Format, int R>
FORERUN_INLINE void block_times_rows(const uint8_t* tile, const Group* x, int groups, Ahead ahead,
                                     F8 (&out)[R][2]) {
    F8 acc[R][2], low[R][2];
    for (int r = 0; r < R; r++) {
        for (int h = 0; h < 2; h++) acc[r][h] = low[r][h] = splat8(0.0f);
    }
    for (int g = 0; g < groups; g++, x++, tile += forerun::tile_bytes(Format)) {
        for (int i = ahead.first; i < ahead.last; i += 64) {
            __builtin_prefetch(tile + ahead.distance + i, 0, 2);
        }
        I8 sum[R][2];
        if (Format == kQ8) {
            dot_bytes<R>(tile, *x, sum);
        } else {
            dot_nibbles<R>(tile, *x, sum);
        }
        const uint8_t* scales = tile + forerun::scales_at(Format);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const F8 d = scale8<Format>(scales, h);
            F8 m = mul8(d, splat8(-8.0f));
            if (Format == kQ4M || Format == kQ4K) m = scale8<Format>(scales, h + 2);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                acc[r][h] = fma8(float8(sum[r][h]), mul8(d, splat8(x->scale[r])), acc[r][h]);
                if (Format != kQ8) low[r][h] = fma8(m, splat8(x->sum[r]), low[r][h]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int h = 0; h < 2; h++) {
            out[r][h] = Format == kQ8 ? acc[r][h] : add8(acc[r][h], low[r][h]);
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
    if (passes == 1) return {2048, 0, forerun::tile_bytes(Format)};
    const int lines = (forerun::tile_bytes(Format) + 63) / 64;
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
        default: return product_as<kQ8>(w, x, rows, first, last, out);
    }
}

}  // namespace
