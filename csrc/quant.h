// How weights and activations lie in memory.
//
// Both are cut into groups of 32 numbers along the input dimension, one scale per group. The
// weights of 16 output channels are interleaved, so that one 256-bit vector holds 8 channels x 4
// inputs and meets 4 activations broadcast to all lanes: no horizontal sum is ever needed.
//
//   a block = 16 channels; a tile = one block x one group; a block's tiles are contiguous
//
//   Q4    256 B nibbles, half d[16]             w = d * (q - 8)      (GGUF Q4_0)
//   Q4M   256 B nibbles, half d[16], half m[16] w = d * q + m        (GGUF Q4_1)
//   Q5    256 B nibbles, 64 B fifth bits,
//                        half d[16]             w = d * (q - 16)     (GGUF Q5_0)
//   Q5M   the same, then half m[16]             w = d * q + m        (GGUF Q5_1)
//   Q8    512 B bytes,   half d[16]             w = d * q            (GGUF Q8_0, and the rest)
//   MX4   256 B nibbles, half d[16]             w = d * e[q]         (GGUF MXFP4; kFp4 is e)
//   L4    256 B nibbles, half d[16]             w = d * l[q]         (GGUF IQ4_NL; kLevels is l)
//
// Where 128 inputs share a scale and a zero point (GPTQ, AWQ), a tile is one block x four groups:
//
//   Q4Z   half d[16], int8 -z[16], 16 B unused, then for each of 4 groups
//         256 B nibbles                         w = d * (q - z)
//
// K-quants share scales among 256 inputs, so that a tile is one block x eight groups, with as many
// bytes as the file has for it, or a few more:
//
//   Q4K   half d[16], half m[16], 192 B sixes s[8][16] and o[8][16], then for each of 8 groups
//         256 B nibbles                         w = (d s) q + (m o)  (GGUF Q4_K)
//   Q5K   the same scales, then for each group 256 B nibbles, 64 B fifth bits
//   Q6K   half d[16], int8 s[8][2][16] (one for every 16 inputs), then for each group
//         384 B sixes, 192 for every 16 inputs  w = (d s) (q - 32)   (GGUF Q6_K)
//   L4K   half d[16], int8 s[8][16], int8 l[16], float u, 12 B unused, then for each group
//         256 B nibbles                         w = (u d s) l[q]     (GGUF IQ4_XS, IQ3_XXS, IQ3_S)
//   L3K   half d[16], int8 s[8][2][16], int8 l[16], float u, 12 B unused, then for each group
//         128 B twos, 64 B third bits           w = (u d s) l[q]     (GGUF IQ2 and IQ1)
//   Q3K   the scales of Q6K, then for each group
//         128 B twos, 64 B third bits           w = (d s) (q - 4)    (GGUF Q3_K)
//   Q2K   half d[16], half m[16], 256 B nibbles s[8][2][16] (low) and o[8][2][16] (high), one of
//         each for every 16 inputs, then for each group
//         128 B twos                            w = (d s) q + (m o)  (GGUF Q2_K)
//
// Weights that are floats stay floats, and meet activations that are float32 (matmul_float.inl):
//
//   F32   float[32][16]    of input i and channel c at 16 i + c
//   F16   half[32][16]     the same
//   BF16  bfloat[16][16][2]  of inputs 2 j and 2 j + 1 and channel c at 32 j + 2 c
//
//   nibbles: byte 64 j + 4 c + b  = q of input 8 j + b (low) and 8 j + 4 + b (high), channel c
//   fifth:   byte 4 c + b, bit j  = fifth bit of q of input 4 j + b, channel c; third bits likewise
//   twos:    byte 64 p + 4 c + b, bits 2 k and 2 k + 1 = q of input 16 p + 4 k + b, channel c
//   bytes:   byte 64 j + 4 c + b  = q of input 4 j + b, channel c
//   sixes:   256 numbers of 6 bits in 192 B: the first 192 in the low bits of as many bytes; number
//            192 + i in the high bits of bytes i, 64 + i, 128 + i (lowest first). Of quants, number
//            64 j + 4 c + b is q of input 4 j + b of the 16, channel c
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace forerun {

constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kBlock = 16;  // output channels of a block
constexpr int kLanes = 4;   // rows of activations that are kept together

enum Format : int32_t {
    kQ4 = 0,
    kQ4M = 1,
    kQ8 = 2,
    kQ4K = 3,
    kQ5K = 4,
    kQ6K = 5,
    kF32 = 6,
    kF16 = 7,
    kBF16 = 8,
    kQ4Z = 9,
    kMX4 = 10,
    kQ5 = 11,
    kQ5M = 12,
    kL4 = 13,
    kL4K = 14,
    kQ3K = 15,
    kQ2K = 16,
    kL3K = 17,
};

// This header is compiled for several instruction sets. Nothing in it may be shared between
// them by the linker: hence `static`, and always-inline members.
#define FORERUN_MEMBER inline __attribute__((always_inline))

static constexpr bool is_k_quant(int format) {
    return (format >= kQ4K && format <= kQ6K) || (format >= kL4K && format <= kL3K);
}
static constexpr bool is_float(int format) { return format >= kF32 && format <= kBF16; }
// Whether a quant's fifth bit lies behind its group's nibbles.
static constexpr bool has_fifths(int format) {
    return format == kQ5K || format == kQ5 || format == kQ5M;
}
// Whether quants are places in a table, and whether it lies in the tile.
static constexpr bool has_own_table(int format) { return format == kL4K || format == kL3K; }
static constexpr bool has_table(int format) {
    return format == kMX4 || format == kL4 || has_own_table(format);
}
// Whether quants are two bits, and third bits apart.
static constexpr bool has_thirds(int format) { return format == kQ3K || format == kL3K; }
// How many parts of a group have scales of their own.
static constexpr int group_parts(int format) {
    return format == kQ6K || format == kQ2K || has_thirds(format) ? 2 : 1;
}
// Whether a tile begins with its scales.
static constexpr bool scales_first(int format) { return is_k_quant(format) || format == kQ4Z; }
// Whether low, which is the sum of activations times something, is part of a product.
static constexpr bool has_offset(int format) {
    return format == kQ4 || format == kQ4M || format == kQ4K || format == kQ5K || format == kQ4Z ||
           format == kQ5M || format == kQ2K;
}

// Groups of a tile, the bytes of one group's quants, and those of a tile's scales.
static constexpr int tile_groups(int format) {
    return is_k_quant(format) ? 8 : format == kQ4Z ? 4 : 1;
}
static constexpr int group_bytes(int format) {
    return format == kF32     ? 2048
           : is_float(format) ? 1024
           : format == kQ8    ? 512
           : format == kQ6K   ? 384
           : has_thirds(format) ? 192
           : format == kQ2K   ? 128
           : has_fifths(format) ? 320
                              : 256;
}
static constexpr int scale_bytes(int format) {
    return is_float(format)                     ? 0
           : format == kQ6K || format == kQ3K ? 288
           : format == kL4K                   ? 192
           : format == kQ2K || format == kL3K ? 320
           : is_k_quant(format)               ? 256
           : format == kQ4M || format == kQ4Z || format == kQ5M ? 64
                                              : 32;
}
// Where a tile's own table lies, and behind it what all its scales are multiplied by.
static constexpr int table_at(int format) { return 32 + 128 * group_parts(format); }
static constexpr int scales_at(int format) { return scales_first(format) ? 0 : group_bytes(format); }
static constexpr int quants_at(int format) { return scales_first(format) ? scale_bytes(format) : 0; }
static constexpr int tile_bytes(int format) {
    return tile_groups(format) * group_bytes(format) + scale_bytes(format);
}

struct Matrix {
    const uint8_t* tiles = nullptr;  // [blocks][groups] tiles
    const float* bias = nullptr;     // [channels] or none
    int32_t format = kQ8;
    int32_t channels = 0;  // rows of the matrix
    int32_t inputs = 0;    // columns of the matrix
    int32_t adapted = -1;  // its place in Model::low_ranks_, or -1: no adapter adds to it

    FORERUN_MEMBER int blocks() const { return (channels + kBlock - 1) / kBlock; }
    FORERUN_MEMBER int groups() const { return (inputs + kGroup - 1) / kGroup; }
    FORERUN_MEMBER size_t block_bytes() const {
        return (size_t)(groups() / tile_groups(format)) * tile_bytes(format);
    }
};

// One group of four rows of activations: x = scale * q. `sum` is scale * sum of q, which a
// format with an offset needs; `excess` is -128 times the sum of q, which a product with weights
// that are stored 128 larger begins at; `excess32` is -32 times the sum of each half of q.
struct Group {
    int8_t q[kLanes][kGroup];
    float scale[kLanes];
    float sum[kLanes];
    int32_t excess[kLanes];
    int32_t excess32[kLanes][2];
};
static_assert(sizeof(Group) == 208, "Group must be dense");

// Four bytes at a time.
static inline uint32_t load_four(const uint8_t* at) {
    uint32_t four;
    memcpy(&four, at, 4);
    return four;
}
static inline void store_four(uint8_t* at, uint32_t four) { memcpy(at, &four, 4); }

// What a file stores, for `pack`.
enum Source : int32_t {
    kFileQ4_0,
    kFileQ4_1,
    kFileQ8_0,
    kFileF32,
    kFileF16,
    kFileBF16,
    kFileQ4_K,
    kFileQ5_K,
    kFileQ6_K,
    kFileQ4Z,    // of 128 numbers: half d, uint8 z, a byte unused, four times Q4_0's 16 bytes
    kFileMXFP4,  // of 32 numbers: an exponent e, d = 2^(e - 128) in a half's range, 16 bytes likewise
    kFileQ5_0,
    kFileQ5_1,
    kFileIQ4_NL,
    kFileIQ4_XS,
    kFileQ3_K,
    kFileQ2_K,
    kFileLevels16,  // of 256 numbers: half d, float u, int8 l[16], int8 s[16] of 16 each, 256 nibbles, the
    kFileLevels8,   //   even numbers low; places in l, of which these use the first eight
};

// Twice the numbers of E2M1 (OCP Microscaling Formats 1.0, section 5.3.3).
static constexpr int8_t kFp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
// What IQ4_NL and IQ4_XS multiply their scales by (ggml's kvalues_iq4nl).
static constexpr int8_t kLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                       1,    13,   25,  38,  53,  69,  89,  113};
static constexpr const int8_t* table_of(int format) { return format == kMX4 ? kFp4 : kLevels; }

// The format that keeps a file's numbers.
int own_format(Source source);
// Whether `pack` can turn one into the other: into the own format always, floats into Q8 and Q4M, and
// into Q4K where rows are whole blocks of 256.
bool can_pack(Source source, int format, int inputs);
size_t packed_bytes(int format, int channels, int inputs);
size_t source_row_bytes(Source source, int inputs);

// Repack blocks [first, last) of a matrix whose rows lie at `rows`; `inputs` not a multiple of 32
// are padded with zeros, as are missing channels. The own format keeps the file's numbers exactly.
// Floats become 8 bits (Q8: symmetric, scale = largest / 127 as a half) or 4 (Q4M: 16 steps from the
// smallest to the largest, both ends as halves; Q4K: make_q4_k) where that is asked for.
void pack(Source source, int format, const uint8_t* rows, int channels, int inputs, int first,
          int last, uint8_t* tiles);

// float[inputs] of one channel.
void unpack_row(const Matrix& matrix, int channel, float* out);

// A block of Q4_K as a file has it, 144 bytes, of float[256] (make_q4_k.cpp). NaN for its scales where
// one is not finite.
void make_q4_k(const float* values, uint8_t* file);

// The two for K-quants (k_quants.cpp): one block's tiles, in the own format of `source`, from the rows of
// its channels, 16 or, of the last block, fewer; and back.
void pack_k_quants(Source source, const uint8_t* rows, size_t row_bytes, int inputs, int channels,
                   uint8_t* tiles);
void unpack_k_quants(int format, const uint8_t* tiles, int inputs, int lane, float* out);

}  // namespace forerun
