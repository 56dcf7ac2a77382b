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
using forerun::kQ4M;
using forerun::kQ8;
using forerun::Matrix;
using forerun::Target;

// Rows whose activations stay in the near cache while the weights of a block pass once.
constexpr int kRowsAtOnce = 64;

template <int Format, int R>
FORERUN_INLINE void block_times_rows(const uint8_t* tile, const Group* x, int groups, F8 (&out)[R]) {
    F8 acc[R], low[R];
    for (int r = 0; r < R; r++) acc[r] = low[r] = splat8(0.0f);
    for (int g = 0; g < groups; g++, x++, tile += forerun::tile_bytes(Format)) {
        I8 sum[R];
        if (Format == kQ8) {
            dot_bytes<R>(tile, *x, sum);
        } else {
            dot_nibbles<R>(tile, *x, sum);
        }
        const uint8_t* scales = tile + (Format == kQ8 ? 256 : 128);
        const F8 d = load_half8(scales);
        const F8 m = Format == kQ4M ? load_half8(scales + 16) : mul8(d, splat8(-8.0f));
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            acc[r] = fma8(float8(sum[r]), mul8(d, splat8(x->scale[r])), acc[r]);
            if (Format != kQ8) low[r] = fma8(m, splat8(x->sum[r]), low[r]);
        }
    }
    for (int r = 0; r < R; r++) out[r] = Format == kQ8 ? acc[r] : add8(acc[r], low[r]);
}

static void write_block(const Matrix& w, int block, F8 result, float* at, bool add) {
    const int first = block * kBlock;
    const int count = w.channels - first < kBlock ? w.channels - first : kBlock;
    float values[kBlock];
    store8(values, result);
    for (int c = 0; c < count; c++) {
        float value = values[c];
        if (w.bias) value += w.bias[first + c];
        at[first + c] = add ? at[first + c] + value : value;
    }
}

template <int Format, int R>
static void rows_of_block(const Matrix& w, int block, const Group* x, int row, Target out) {
    F8 result[R];
    block_times_rows<Format, R>(w.tiles + block * w.block_bytes(), x, w.groups(), result);
    for (int r = 0; r < R; r++) {
        write_block(w, block, result[r], out.data + (row + r) * out.stride, out.add);
    }
}

template <int Format>
static void product_as(const Matrix& w, const Group* x, int rows, int first, int last, Target out) {
    const int groups = w.groups();
    for (int begin = 0; begin < rows; begin += kRowsAtOnce) {
        const int end = rows - begin < kRowsAtOnce ? rows : begin + kRowsAtOnce;
        for (int block = first; block < last; block++) {
            for (int row = begin; row < end; row += kLanes) {
                const Group* lanes = x + (int64_t)(row / kLanes) * groups;
                switch (end - row) {
                    case 1: rows_of_block<Format, 1>(w, block, lanes, row, out); break;
                    case 2: rows_of_block<Format, 2>(w, block, lanes, row, out); break;
                    case 3: rows_of_block<Format, 3>(w, block, lanes, row, out); break;
                    default: rows_of_block<Format, 4>(w, block, lanes, row, out);
                }
            }
        }
    }
}

static void product(const Matrix& w, const Group* x, int rows, int first, int last, Target out) {
    switch (w.format) {
        case kQ4: return product_as<kQ4>(w, x, rows, first, last, out);
        case kQ4M: return product_as<kQ4M>(w, x, rows, first, last, out);
        default: return product_as<kQ8>(w, x, rows, first, last, out);
    }
}

}  // namespace
