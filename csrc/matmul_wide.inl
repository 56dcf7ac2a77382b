// matmul.inl on vectors that hold a block's 16 channels: the same integers and, group after group,
// the same order of float32, so the same bits.
//
// Up to eight rows meet one block at a time, which is then read from memory in one sweep; more rows
// meet two blocks, four rows at a time, so that each broadcast of activations serves both.

namespace {

using forerun::kBlock;
using forerun::kLanes;
using forerun::kQ4;
using forerun::kQ4K;
using forerun::kQ4M;
using forerun::kQ8;
using forerun::Matrix;
using forerun::Target;

constexpr int kWideRowsAtOnce = 64;  // whose activations stay in the near cache over a block

// What to fetch while a tile is worked on: lines [first, last) from `distance` bytes further on.
struct Lines {
    int64_t distance;
    int first, last;
};

// Sixteen scales of a tile: d of all channels (index 0) or m (index 1).
template <int Format>
FORERUN_INLINE F16 scale16(const uint8_t* scales, int index) {
    return Format == kQ4K ? load16(scales + 64 * index) : load_half16(scales + 32 * index);
}

// sum[r][v] = block v's weights times row r of one group, exact.
template <int Format, int R, int V>
FORERUN_INLINE void dot_tiles(const uint8_t* const (&tile)[V], const Group* x, int groups,
                              I16 (&sum)[R][V]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const Group& lanes = x[r / kLanes * groups];
        const I16 begin = splat_int16(Format == kQ8 ? lanes.excess[r % kLanes] : 0);
        for (int v = 0; v < V; v++) sum[r][v] = begin;
    }
#pragma GCC unroll 8
    for (int j = 0; j < (Format == kQ8 ? 8 : 4); j++) {
        I16 first[V], second[V];
        for (int v = 0; v < V; v++) {
            const I16 bytes = load_bytes16(tile[v] + 64 * j);
            first[v] = Format == kQ8 ? plus_128(bytes) : low_nibbles16(bytes);
            second[v] = Format == kQ8 ? first[v] : high_nibbles16(bytes);
            FORERUN_PIN(first[v]);
            FORERUN_PIN(second[v]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const int8_t* q = x[r / kLanes * groups].q[r % kLanes] + (Format == kQ8 ? 4 : 8) * j;
            for (int v = 0; v < V; v++) {
                sum[r][v] = dot16(sum[r][v], first[v], q);
                FORERUN_PIN(sum[r][v]);
            }
        }
        if (Format == kQ8) continue;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const int8_t* q = x[r / kLanes * groups].q[r % kLanes] + 8 * j + 4;
            for (int v = 0; v < V; v++) {
                sum[r][v] = dot16(sum[r][v], second[v], q);
                FORERUN_PIN(sum[r][v]);
            }
        }
    }
}

// V neighbouring blocks times R rows.
template <int Format, int R, int V>
FORERUN_INLINE void blocks_times_rows(const Matrix& w, int block, const Group* x, Lines ahead,
                                      F16 (&out)[R][V]) {
    constexpr bool kOffset = Format != kQ8;
    const int groups = w.groups();
    const uint8_t* tile[V];
    F16 acc[R][V], low[R][V];
    for (int v = 0; v < V; v++) {
        tile[v] = w.tiles + (block + v) * w.block_bytes();
        for (int r = 0; r < R; r++) acc[r][v] = low[r][v] = splat16(0.0f);
    }
    const uint8_t* far = tile[0] + ahead.distance;
    for (int g = 0; g < groups; g++, x++, far += V * forerun::tile_bytes(Format)) {
        for (int i = ahead.first; i < ahead.last; i++) __builtin_prefetch(far + 64 * i, 0, 3);
        I16 sum[R][V];
        dot_tiles<Format, R, V>(tile, x, groups, sum);
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) {
            const uint8_t* scales = tile[v] + forerun::scales_at(Format);
            const F16 d = scale16<Format>(scales, 0);
            F16 m = mul16(d, splat16(-8.0f));
            if (Format == kQ4M || Format == kQ4K) m = scale16<Format>(scales, 1);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const Group& lanes = x[r / kLanes * groups];
                const F16 scale = mul16(d, splat16(lanes.scale[r % kLanes]));
                acc[r][v] = fma16(float16(sum[r][v]), scale, acc[r][v]);
                if (kOffset) low[r][v] = fma16(m, splat16(lanes.sum[r % kLanes]), low[r][v]);
            }
            tile[v] += forerun::tile_bytes(Format);
        }
    }
    for (int r = 0; r < R; r++) {
        for (int v = 0; v < V; v++) out[r][v] = kOffset ? add16(acc[r][v], low[r][v]) : acc[r][v];
    }
}

template <int Format, int R, int V>
static void rows_of_blocks(const Matrix& w, int block, const Group* x, int row, Lines ahead,
                           Target out) {
    F16 result[R][V];
    blocks_times_rows<Format, R, V>(w, block, x, ahead, result);
    for (int r = 0; r < R; r++) {
        for (int v = 0; v < V; v++) {
            const int first = (block + v) * kBlock, left = w.channels - first;
            const int count = left < kBlock ? left : kBlock;
            float* at = out.data + (row + r) * out.stride + first;
            F16 value = result[r][v];
            if (w.bias) value = add16(value, load_first16(w.bias + first, count));
            if (out.add) value = add16(load_first16(at, count), value);
            store_first16(at, count, value);
        }
    }
}

// Rows [begin, end) of V blocks, `Most` rows at a time. Weights come from memory once, for the first
// pass: each fetches its part of the blocks that follow; a single pass fetches a little ahead.
template <int Format, int V, int Most>
static void passes_over_blocks(const Matrix& w, int block, const Group* x, int begin, int end,
                               Target out) {
    constexpr int lines = V * (forerun::tile_bytes(Format) + 63) / 64;
    const int passes = (end - begin + Most - 1) / Most;
    for (int row = begin, pass = 0; row < end; row += Most, pass++) {
        Lines ahead = {8192, 0, lines};
        if (passes > 1) {
            ahead = {(int64_t)(V * w.block_bytes()), pass * lines / passes,
                     (pass + 1) * lines / passes};
        }
        const Group* lanes = x + (int64_t)(row / kLanes) * w.groups();
        const int left = end - row;
        if (Most > 4 && left >= 5) {
            constexpr int M = Most > 4 ? 8 : 4;  // no more versions than are used
            if (left == 5) rows_of_blocks<Format, M == 8 ? 5 : 4, V>(w, block, lanes, row, ahead, out);
            else if (left == 6) rows_of_blocks<Format, M == 8 ? 6 : 4, V>(w, block, lanes, row, ahead, out);
            else if (left == 7) rows_of_blocks<Format, M == 8 ? 7 : 4, V>(w, block, lanes, row, ahead, out);
            else rows_of_blocks<Format, M, V>(w, block, lanes, row, ahead, out);
            continue;
        }
        switch (left) {
            case 1: rows_of_blocks<Format, 1, V>(w, block, lanes, row, ahead, out); break;
            case 2: rows_of_blocks<Format, 2, V>(w, block, lanes, row, ahead, out); break;
            case 3: rows_of_blocks<Format, 3, V>(w, block, lanes, row, ahead, out); break;
            default: rows_of_blocks<Format, 4, V>(w, block, lanes, row, ahead, out);
        }
    }
}

template <int Format>
static void product_as(const Matrix& w, const Group* x, int rows, int first, int last, Target out) {
    if (rows <= 8) {
        for (int block = first; block < last; block++) {
            passes_over_blocks<Format, 1, 8>(w, block, x, 0, rows, out);
        }
        return;
    }
    for (int begin = 0; begin < rows; begin += kWideRowsAtOnce) {
        const int end = rows - begin < kWideRowsAtOnce ? rows : begin + kWideRowsAtOnce;
        int block = first;
        for (; block + 2 <= last; block += 2) {
            passes_over_blocks<Format, 2, 4>(w, block, x, begin, end, out);
        }
        if (block < last) passes_over_blocks<Format, 1, 8>(w, block, x, begin, end, out);
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
