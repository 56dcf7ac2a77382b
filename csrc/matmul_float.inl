// Products of weights that are floats with activations in float32.
//
// For one channel and one row, input after input in this order and no other:
//     even += w[i] * x[i] for even i        odd += w[i] * x[i] for odd i
// each a fused multiplication and addition on weights widened to float32, which is exact, and the
// result is even + odd. So the bits are the same on every width of vectors, alone and among 64 rows.
//
// Written on W (widths.h).

namespace {

constexpr int kFloatVectors = forerun::kBlock / kWide;  // of a block's channels
constexpr int kFloatRowsAtOnce = 64;  // whose activations stay in the near caches over a block

// Vector v of a block's weights of inputs 2 j and 2 j + 1.
template <int Format>
FORERUN_INLINE void load_two(const uint8_t* tiles, int64_t j, int v, W& even, W& odd) {
    if (Format == forerun::kBF16) return split_bfloats(tiles + 64 * j + 4 * kWide * v, even, odd);
    constexpr int item = Format == forerun::kF32 ? 4 : 2;
    const uint8_t* at = tiles + item * (2 * forerun::kBlock * j + kWide * v);
    even = Format == forerun::kF32 ? loadw((const float*)at) : load_halfw(at);
    at += item * forerun::kBlock;
    odd = Format == forerun::kF32 ? loadw((const float*)at) : load_halfw(at);
}

// One block times R rows of `x`, w.inputs numbers each.
template <int Format, int R>
static void float_rows_of_block(const forerun::Matrix& w, int block, const float* x, int64_t ahead,
                                float* out, int64_t stride, bool add) {
    const uint8_t* tiles = w.tiles + block * w.block_bytes();
    const int64_t inputs = w.inputs, pairs = inputs / 2;
    constexpr int bytes = (Format == forerun::kF32 ? 8 : 4) * forerun::kBlock;  // of two inputs
    W even[R][kFloatVectors], odd[R][kFloatVectors];
    for (int r = 0; r < R; r++) {
        for (int v = 0; v < kFloatVectors; v++) even[r][v] = odd[r][v] = splatw<W>(0.0f);
    }
    for (int64_t j = 0; j < pairs; j++, x += 2) {
        for (int i = 0; i < bytes; i += 64) {
            __builtin_prefetch(tiles + ahead + bytes * j + i, 0, 3);
        }
#pragma GCC unroll 2
        for (int v = 0; v < kFloatVectors; v++) {
            W first, second;
            load_two<Format>(tiles, j, v, first, second);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                even[r][v] = fmaw(first, splatw<W>(x[r * inputs]), even[r][v]);
                odd[r][v] = fmaw(second, splatw<W>(x[r * inputs + 1]), odd[r][v]);
            }
        }
    }
    for (int v = 0; inputs % 2 && v < kFloatVectors; v++) {
        W first, second;
        load_two<Format>(tiles, pairs, v, first, second);
        for (int r = 0; r < R; r++) {
            even[r][v] = fmaw(first, splatw<W>(x[r * inputs]), even[r][v]);
        }
    }
    const int base = block * forerun::kBlock, left = w.channels - base;
    const int count = left < forerun::kBlock ? left : forerun::kBlock;
    for (int r = 0; r < R; r++) {
        float values[forerun::kBlock], *at = out + r * stride + base;
        for (int v = 0; v < kFloatVectors; v++) {
            storew(values + kWide * v, addw(even[r][v], odd[r][v]));
        }
        for (int c = 0; c < count; c++) {
            const float value = w.bias ? values[c] + w.bias[base + c] : values[c];
            at[c] = add ? at[c] + value : value;
        }
    }
}

using FloatRows = void (*)(const forerun::Matrix&, int, const float*, int64_t, float*, int64_t,
                           bool);

template <int Format>
constexpr FloatRows kFloatRowsOfBlock[] = {
    float_rows_of_block<Format, 1>, float_rows_of_block<Format, 2>, float_rows_of_block<Format, 3>,
    float_rows_of_block<Format, 4>, float_rows_of_block<Format, 5>, float_rows_of_block<Format, 6>,
    float_rows_of_block<Format, 7>, float_rows_of_block<Format, 8>,
};

// As many rows at a time as there are registers for. Weights come from memory once for
// kFloatRowsAtOnce rows, fetched a little ahead.
template <int Format>
static void float_product_as(const forerun::Matrix& w, const float* x, int rows, int first, int last,
                             forerun::Target out) {
    constexpr int64_t ahead = 4096;
    for (int begin = 0; begin < rows; begin += kFloatRowsAtOnce) {
        const int end = rows - begin < kFloatRowsAtOnce ? rows : begin + kFloatRowsAtOnce;
        for (int block = first; block < last; block++) {
            for (int row = begin; row < end; row += kFloatRows) {
                const int count = end - row < kFloatRows ? end - row : kFloatRows;
                kFloatRowsOfBlock<Format>[count - 1](w, block, x + (int64_t)row * w.inputs, ahead,
                                                     out.data + row * out.stride, out.stride,
                                                     out.add);
            }
        }
    }
}

static void float_product(const forerun::Matrix& w, const float* x, int rows, int first, int last,
                          forerun::Target out) {
    switch (w.format) {
        case forerun::kF16: return float_product_as<forerun::kF16>(w, x, rows, first, last, out);
        case forerun::kBF16: return float_product_as<forerun::kBF16>(w, x, rows, first, last, out);
        default: return float_product_as<forerun::kF32>(w, x, rows, first, last, out);
    }
}

}  // namespace
