// matmul.inl on vectors that hold a block's 16 channels: the same integers and, group after group,
// the same order of float32, so the same bits.
//
// Up to eight rows meet one block at a time, which is then read from memory in one sweep; more rows
// meet two blocks, four rows at a time, so that each broadcast of activations serves both, or, of
// K-quants and fives, whose bits take longer to spread, one block, eight rows at a time.

#include "wide_operands.inl"

namespace {

constexpr int kWideRowsAtOnce = 64;  // whose activations stay in the near cache over a block

// sum[r][v] += piece J of V groups' quants times row r, exact.
template <int Format, int R, int V, int J>
FORERUN_INLINE void dot_piece(const uint8_t* const (&quants)[V], const Scales<Format> (&scales)[V],
                              const Group* x, int groups, I16 (&sum)[R][V]) {
    constexpr int K = kOperands<Format>;
    I16 w[V][K];
    for (int v = 0; v < V; v++) {
        load_operands<Format, J>(scales[v].tile, quants[v], w[v]);
        for (int k = 0; k < K; k++) FORERUN_PIN(w[v][k]);
    }
#pragma GCC unroll 4
    for (int k = 0; k < K; k++) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const int8_t* q = x[r / kLanes * groups].q[r % kLanes] + 4 * (K * J + k);
            for (int v = 0; v < V; v++) {
                sum[r][v] = dot16(sum[r][v], w[v][k], q);
                FORERUN_PIN(sum[r][v]);
            }
        }
    }
}

// Formats of nibbles alone.
template <int Format>
constexpr bool kNibbles =
    Format == kQ4 || Format == kQ4M || Format == kQ4K || Format == kQ4Z;
// Up to so many rows, what is done to a weight weighs more than what is done to its products.
constexpr int kFewRows = 2;

// What four pieces of nibbles give, for a few rows: the high nibbles stay where they are in their
// bytes, and their sums, kept apart, are sixteen times as large.
template <int R, int V>
FORERUN_INLINE void dot_nibbles(const uint8_t* const (&quants)[V], const Group* x, int groups,
                                I16 (&sum)[R][V]) {
    I16 high[R][V];
    for (int r = 0; r < R; r++) {
        for (int v = 0; v < V; v++) high[r][v] = splat_int16(0);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        for (int v = 0; v < V; v++) {
            I16 both = load_bytes16(quants[v] + 64 * j);
            FORERUN_PIN(both);  // loaded once
            for (int r = 0; r < R; r++) {
                const int8_t* q = x[r / kLanes * groups].q[r % kLanes] + 8 * j;
                sum[r][v] = dot16(sum[r][v], low_nibbles16(both), q);
                high[r][v] = dot16(high[r][v], upper_nibbles16(both), q + 4);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int v = 0; v < V; v++) sum[r][v] = plus_sixteenth16(sum[r][v], high[r][v]);
    }
}

// All pieces of V groups, or of those with two parts one.
template <int Format, int R, int V, int Half>
FORERUN_INLINE void dot_pieces(const uint8_t* const (&quants)[V], const Scales<Format> (&scales)[V],
                               const Group* x, int groups, I16 (&sum)[R][V]) {
    dot_piece<Format, R, V, Half>(quants, scales, x, groups, sum);
    if (forerun::group_parts(Format) == 1) {
        dot_piece<Format, R, V, 1>(quants, scales, x, groups, sum);
        dot_piece<Format, R, V, 2>(quants, scales, x, groups, sum);
        dot_piece<Format, R, V, 3>(quants, scales, x, groups, sum);
    }
    if (Format == kQ8) {
        dot_piece<Format, R, V, 4>(quants, scales, x, groups, sum);
        dot_piece<Format, R, V, 5>(quants, scales, x, groups, sum);
        dot_piece<Format, R, V, 6>(quants, scales, x, groups, sum);
        dot_piece<Format, R, V, 7>(quants, scales, x, groups, sum);
    }
}

// acc and low of group `group` of V tiles; with Q6_K of the half `Half` of its inputs.
template <int Format, int R, int V, int Half>
FORERUN_INLINE void groups_times_rows(const uint8_t* const (&quants)[V],
                                      const Scales<Format> (&scales)[V], int group, const Group* x,
                                      int groups, F16 (&acc)[R][V], F16 (&low)[R][V]) {
    constexpr bool offset = forerun::has_offset(Format);
    I16 sum[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const I16 begin = splat_int16(first_sum<Format>(x[r / kLanes * groups], r, Half));
        for (int v = 0; v < V; v++) sum[r][v] = begin;
    }
    if constexpr (kNibbles<Format> && R <= kFewRows) {
        dot_nibbles<R, V>(quants, x, groups, sum);
    } else {
        dot_pieces<Format, R, V, Half>(quants, scales, x, groups, sum);
    }
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
        const F16 d = scales[v].scale(group, Half), m = scales[v].offset(group, Half, d);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const Group& lanes = x[r / kLanes * groups];
            const F16 scale = mul16(d, splat16(lanes.scale[r % kLanes]));
            acc[r][v] = fma16(float16(sum[r][v]), scale, acc[r][v]);
            if (!offset) continue;
            const F16 sums = splat16(sum_of_part<Format>(lanes, r % kLanes, Half));
            low[r][v] = fma16(m, sums, low[r][v]);
        }
    }
}

// V neighbouring blocks times R rows.
template <int Format, int R, int V>
FORERUN_INLINE void blocks_times_rows(const Matrix& w, int block, const Group* x, Lines ahead,
                                      F16 (&out)[R][V]) {
    constexpr int step = forerun::tile_groups(Format);
    constexpr int bytes = forerun::tile_bytes(Format) / step;
    const int groups = w.groups();
    const uint8_t* tile[V];
    uint8_t room[V][kRoom<Format>];
    F16 acc[R][V], low[R][V];
    for (int v = 0; v < V; v++) {
        tile[v] = w.tiles + (block + v) * w.block_bytes();
        for (int r = 0; r < R; r++) acc[r][v] = low[r][v] = splat16(0.0f);
    }
    const uint8_t* far = tile[0] + ahead.distance;
    for (int g = 0; g < groups; g += step) {
        const uint8_t* quants[V];
        Scales<Format> scales[V];
        for (int v = 0; v < V; v++) {
            quants[v] = tile[v] + forerun::quants_at(Format);
            scales[v] = scales_of<Format>(tile[v], room[v]);
            tile[v] += forerun::tile_bytes(Format);
        }
        for (int k = 0; k < step; k++, x++, far += V * bytes) {
            fetch<(V * bytes + 63) / 64>(far, ahead);
            groups_times_rows<Format, R, V, 0>(quants, scales, k, x, groups, acc, low);
            if (forerun::group_parts(Format) == 2) {
                groups_times_rows<Format, R, V, 1>(quants, scales, k, x, groups, acc, low);
            }
            for (int v = 0; v < V; v++) quants[v] += forerun::group_bytes(Format);
        }
    }
    for (int r = 0; r < R; r++) {
        for (int v = 0; v < V; v++) {
            out[r][v] = forerun::has_offset(Format) ? add16(acc[r][v], low[r][v]) : acc[r][v];
        }
    }
}

template <int Format, int R, int V>
static void rows_of_blocks(const Matrix& w, int block, const Group* x, int row, Lines ahead,
                           Target out) {
    F16 result[R][V];
    blocks_times_rows<Format, R, V>(w, block, x, ahead, result);
    for (int r = 0; r < R; r++) {
        for (int v = 0; v < V; v++) put_channels(w, block + v, result[r][v], out, row + r);
    }
}

using RowsOfBlocks = void (*)(const Matrix&, int, const Group*, int, Lines, Target);

template <int Format, int V>
constexpr RowsOfBlocks kRowsOfBlocks[] = {
    rows_of_blocks<Format, 1, V>, rows_of_blocks<Format, 2, V>, rows_of_blocks<Format, 3, V>,
    rows_of_blocks<Format, 4, V>, rows_of_blocks<Format, 5, V>, rows_of_blocks<Format, 6, V>,
    rows_of_blocks<Format, 7, V>, rows_of_blocks<Format, 8, V>,
};
template <int Format>
constexpr RowsOfBlocks kRowsOfBlocks<Format, 2>[] = {
    rows_of_blocks<Format, 1, 2>,
    rows_of_blocks<Format, 2, 2>,
    rows_of_blocks<Format, 3, 2>,
    rows_of_blocks<Format, 4, 2>,
};

// A single pass whose rows have so many bytes of a group each, or more, asks for none where the
// processor is not Intel's: they are done so soon that it reads ahead by itself, and asking took the
// room that it needs (one row of 8 bits at .72 of the speed, of Q4_K at .97 to 1.03, two rows of
// Q4_K at 1.5; Zen 4). Intel's reads ahead too little: one row of Q4_K_M at 1.48 of the speed with
// asking, of Q5_K 1.7, Q6_K 1.45, Q4_1 1.38, 8 bits 1.13, two rows of 8 bits 1.28 (Xeon model 207).
constexpr int kBytesPerRow = 256;

// Rows [begin, end) of V blocks, as many at a time as there are versions. Weights come from memory
// once, for the first pass: each fetches its part of the blocks that follow; a single pass fetches
// a little ahead.
template <int Format, int V>
static void passes_over_blocks(const Matrix& w, int block, const Group* x, int begin, int end,
                               Target out) {
    constexpr int most = sizeof kRowsOfBlocks<Format, V> / sizeof(RowsOfBlocks);
    constexpr int bytes = forerun::tile_bytes(Format) / forerun::tile_groups(Format);
    constexpr int lines = V * (bytes + 63) / 64;
    const int passes = (end - begin + most - 1) / most;
    const bool asks = bytes < kBytesPerRow * (end - begin) || __builtin_cpu_is("intel");
    for (int row = begin, pass = 0; row < end; row += most, pass++) {
        Lines ahead = {8192, 0, asks ? lines : 0};
        if (passes > 1) {
            ahead = {(int64_t)(V * w.block_bytes()), pass * lines / passes,
                     (pass + 1) * lines / passes};
        }
        const Group* lanes = x + (int64_t)(row / kLanes) * w.groups();
        const int rows = end - row < most ? end - row : most;
        kRowsOfBlocks<Format, V>[rows - 1](w, block, lanes, row, ahead, out);
    }
}

template <int Format>
static void product_as(const Matrix& w, const Group* x, int rows, int first, int last, Target out) {
    constexpr bool slow = forerun::is_k_quant(Format) || forerun::has_fifths(Format);  // to spread
    const bool alone = rows <= 8 || slow;
    for (int begin = 0; begin < rows; begin += kWideRowsAtOnce) {
        const int end = rows - begin < kWideRowsAtOnce ? rows : begin + kWideRowsAtOnce;
        int block = first;
        for (; !alone && block + 2 <= last; block += 2) {
            passes_over_blocks<Format, slow ? 1 : 2>(w, block, x, begin, end, out);
        }
        for (; block < last; block++) passes_over_blocks<Format, 1>(w, block, x, begin, end, out);
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
