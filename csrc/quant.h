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
//   Q4K   256 B nibbles, float d[16], m[16]     w = d * q + m        (GGUF Q4_K, whose scales are
//                                                                     products: more than a half)
//   Q8    512 B bytes,   half d[16]             w = d * q            (GGUF Q8_0, and the rest)
//
//   nibbles: byte 64 j + 4 c + b  = q of input 8 j + b (low) and 8 j + 4 + b (high), channel c
//   bytes:   byte 64 j + 4 c + b  = q of input 4 j + b, channel c
#pragma once
#include <cstddef>
#include <cstdint>

namespace forerun {

constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kBlock = 16;  // output channels of a block
constexpr int kLanes = 4;   // rows of activations that are kept together

enum Format : int32_t { kQ4 = 0, kQ4M = 1, kQ8 = 2, kQ4K = 3 };

// This header is compiled for several instruction sets. Nothing in it may be shared between
// them by the linker: hence `static`, and always-inline members.
#define FORERUN_MEMBER inline __attribute__((always_inline))

// Where a tile's scales begin, and where the next tile does.
static constexpr int scales_at(int format) { return format == kQ8 ? 512 : 256; }
static constexpr int tile_bytes(int format) {
    return scales_at(format) + kBlock * (format == kQ4K ? 8 : format == kQ4M ? 4 : 2);
}

struct Matrix {
    const uint8_t* tiles = nullptr;  // [blocks][groups] tiles
    const float* bias = nullptr;     // [channels] or none
    int32_t format = kQ8;
    int32_t channels = 0;  // rows of the matrix
    int32_t inputs = 0;    // columns of the matrix

    FORERUN_MEMBER int blocks() const { return (channels + kBlock - 1) / kBlock; }
    FORERUN_MEMBER int groups() const { return (inputs + kGroup - 1) / kGroup; }
    FORERUN_MEMBER size_t block_bytes() const {
        return (size_t)groups() * tile_bytes(format);
    }
};

// One group of four rows of activations: x = scale * q. `sum` is scale * sum of q, which a
// format with an offset needs; `excess` is -128 times the sum of q, which a product with weights
// that are stored 128 larger begins at.
struct Group {
    int8_t q[kLanes][kGroup];
    float scale[kLanes];
    float sum[kLanes];
    int32_t excess[kLanes];
};
static_assert(sizeof(Group) == 176, "Group must be dense");

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
};

int packed_format(Source source);
size_t packed_bytes(Source source, int channels, int inputs);
size_t source_row_bytes(Source source, int inputs);

// Repack blocks [first, last) of a matrix whose rows lie at `rows`; `inputs` not a multiple of 32
// are padded with zeros, as are missing channels. Q4_0, Q4_1, Q4_K and Q8_0 keep their numbers
// exactly; all else becomes 8 bits, symmetric: scale = largest / 127 as a half.
void pack(Source source, const uint8_t* rows, int channels, int inputs, int first, int last,
          uint8_t* tiles);

// float[inputs] of one channel.
void unpack_row(const Matrix& matrix, int channel, float* out);

}  // namespace forerun
