#include "quant.h"

#include <cmath>
#include <cstring>

#include "half.h"

namespace forerun {
namespace {

// One channel's group, whatever the file: 32 integers, scale and offset.
struct Piece {
    uint8_t q[kGroup];
    float d, m;
};

uint16_t load_half(const uint8_t* at) { return (uint16_t)(at[0] | at[1] << 8); }
float half_at(const uint8_t* at) { return float_from_half(load_half(at)); }

void read_nibbles(const uint8_t* at, Piece& piece) {
    for (int i = 0; i < 16; i++) {
        piece.q[i] = at[i] & 15;
        piece.q[i + 16] = at[i] >> 4;
    }
}

// Symmetric 8 bits. A group that is not finite keeps a NaN scale, so that it is noticed.
void quantise(const float (&values)[kGroup], Piece& piece) {
    float largest = 0;
    bool finite = true;
    for (float value : values) {
        finite = finite && std::isfinite(value);
        largest = std::fmax(largest, std::fabs(value));
    }
    piece.d = finite ? float_from_half(half_from_float(largest / 127.0f)) : NAN;
    for (int i = 0; i < kGroup; i++) {
        const float scaled = piece.d > 0 ? values[i] / piece.d : 0.0f;
        piece.q[i] = (uint8_t)(int8_t)std::nearbyint(std::fmin(std::fmax(scaled, -127), 127));
    }
}

// Numbers [begin, end) of a row of floats.
void read_floats(Source source, const uint8_t* row, int begin, int end, float* values) {
    for (int i = begin; i < end; i++) {
        if (source == kFileF32) {
            memcpy(values + i - begin, row + 4 * (size_t)i, 4);
        } else {
            const uint16_t stored = load_half(row + 2 * (size_t)i);
            values[i - begin] =
                source == kFileF16 ? float_from_half(stored) : float_from_bfloat(stored);
        }
    }
}

// Q4_K and Q5_K: eight groups share two halves; each has a scale and an offset of 6 bits.
void read_scales(const uint8_t* block, int group, float& d, float& m) {
    const uint8_t* packed = block + 4;
    int scale, offset;
    if (group < 4) {
        scale = packed[group] & 63;
        offset = packed[group + 4] & 63;
    } else {
        scale = (packed[group + 4] & 15) | packed[group - 4] >> 6 << 4;
        offset = packed[group + 4] >> 4 | packed[group] >> 6 << 4;
    }
    d = half_at(block) * (float)scale;
    m = -half_at(block + 2) * (float)offset;
}

void read_q4_k(const uint8_t* block, int group, Piece& piece) {
    read_scales(block, group, piece.d, piece.m);
    const uint8_t* nibbles = block + 16 + group / 2 * 32;
    for (int i = 0; i < kGroup; i++) piece.q[i] = nibbles[i] >> group % 2 * 4 & 15;
}

void read_q5_k(const uint8_t* block, int group, float* values) {
    float d, m;
    read_scales(block, group, d, m);
    const uint8_t *fifth = block + 16, *nibbles = block + 48 + group / 2 * 32;
    for (int i = 0; i < kGroup; i++) {
        const int q = (nibbles[i] >> group % 2 * 4 & 15) | (fifth[i] >> group & 1) << 4;
        values[i] = d * (float)q + m;
    }
}

// Q6_K: 128 numbers at a time, their upper two bits apart; a scale of 8 bits for every 16.
void read_q6_k(const uint8_t* block, int group, float* values) {
    const int quarter = group % 4;
    const uint8_t* low = block + group / 4 * 64 + quarter % 2 * 32;
    const uint8_t* high = block + 128 + group / 4 * 32;
    const int8_t* scales = (const int8_t*)block + 192 + group * 2;
    const float d = half_at(block + 208);
    for (int i = 0; i < kGroup; i++) {
        const int q = (low[i] >> quarter / 2 * 4 & 15) | (high[i] >> 2 * quarter & 3) << 4;
        values[i] = d * (float)scales[i / 16] * (float)(q - 32);
    }
}

Piece read_piece(Source source, const uint8_t* row, int group, int inputs) {
    Piece piece = {};
    float values[kGroup] = {0};
    const size_t block = (size_t)group / 8;
    switch (source) {
        case kFileQ4_0:
            piece.d = half_at(row + (size_t)group * 18);
            read_nibbles(row + (size_t)group * 18 + 2, piece);
            return piece;
        case kFileQ4_1:
            piece.d = half_at(row + (size_t)group * 20);
            piece.m = half_at(row + (size_t)group * 20 + 2);
            read_nibbles(row + (size_t)group * 20 + 4, piece);
            return piece;
        case kFileQ8_0:
            piece.d = half_at(row + (size_t)group * 34);
            memcpy(piece.q, row + (size_t)group * 34 + 2, kGroup);
            return piece;
        case kFileQ4_K: read_q4_k(row + block * 144, group % 8, piece); return piece;
        case kFileQ5_K: read_q5_k(row + block * 176, group % 8, values); break;
        case kFileQ6_K: read_q6_k(row + block * 210, group % 8, values); break;
        default: {
            const int begin = group * kGroup, end = begin + kGroup;
            read_floats(source, row, begin, end < inputs ? end : inputs, values);
        }
    }
    quantise(values, piece);
    return piece;
}

void write_scale(int format, uint8_t* at, float scale) {
    if (format == kQ4K) {
        memcpy(at, &scale, 4);
    } else {
        const uint16_t half = half_from_float(scale);  // exact: it was one
        memcpy(at, &half, 2);
    }
}

void write_piece(int format, const Piece& piece, int channel, uint8_t* tile) {
    uint8_t* at = tile + 4 * channel;
    const int width = format == kQ4K ? 4 : 2;
    uint8_t* scales = tile + scales_at(format) + width * channel;
    write_scale(format, scales, piece.d);
    if (format == kQ8) {
        for (int i = 0; i < kGroup; i += 4) memcpy(at + 16 * i, piece.q + i, 4);
        return;
    }
    if (format != kQ4) write_scale(format, scales + width * kBlock, piece.m);
    for (int i = 0; i < kGroup; i += 8) {
        for (int b = 0; b < 4; b++) {
            at[8 * i + b] = (uint8_t)(piece.q[i + b] | piece.q[i + 4 + b] << 4);
        }
    }
}

float read_scale(int format, const uint8_t* at) {
    if (format != kQ4K) return half_at(at);
    float scale;
    memcpy(&scale, at, 4);
    return scale;
}

}  // namespace

int packed_format(Source source) {
    switch (source) {
        case kFileQ4_0: return kQ4;
        case kFileQ4_1: return kQ4M;
        case kFileQ4_K: return kQ4K;
        default: return kQ8;
    }
}

size_t packed_bytes(Source source, int channels, int inputs) {
    Matrix matrix;
    matrix.format = packed_format(source);
    matrix.channels = channels;
    matrix.inputs = inputs;
    return matrix.blocks() * matrix.block_bytes();
}

size_t source_row_bytes(Source source, int inputs) {
    const size_t groups = (size_t)inputs / kGroup, blocks = (size_t)inputs / 256;
    switch (source) {
        case kFileQ4_0: return groups * 18;
        case kFileQ4_1: return groups * 20;
        case kFileQ8_0: return groups * 34;
        case kFileQ4_K: return blocks * 144;
        case kFileQ5_K: return blocks * 176;
        case kFileQ6_K: return blocks * 210;
        case kFileF32: return (size_t)inputs * 4;
        default: return (size_t)inputs * 2;
    }
}

void pack(Source source, const uint8_t* rows, int channels, int inputs, int first, int last,
          uint8_t* tiles) {
    const int format = packed_format(source), groups = (inputs + kGroup - 1) / kGroup;
    const size_t row_bytes = source_row_bytes(source, inputs);
    for (int block = first; block < last; block++) {
        uint8_t* tile = tiles + (size_t)block * groups * tile_bytes(format);
        for (int group = 0; group < groups; group++, tile += tile_bytes(format)) {
            for (int lane = 0; lane < kBlock; lane++) {
                const int channel = block * kBlock + lane;
                Piece piece = {};
                if (channel < channels) {
                    piece = read_piece(source, rows + channel * row_bytes, group, inputs);
                }
                write_piece(format, piece, lane, tile);
            }
        }
    }
}

void unpack_row(const Matrix& matrix, int channel, float* out) {
    const int lane = channel % kBlock, format = matrix.format, width = format == kQ4K ? 4 : 2;
    const uint8_t* tile = matrix.tiles + channel / kBlock * matrix.block_bytes();
    for (int base = 0; base < matrix.inputs; base += kGroup, tile += tile_bytes(format)) {
        const uint8_t* scales = tile + scales_at(format) + width * lane;
        const float d = read_scale(format, scales);
        const bool offset = format == kQ4M || format == kQ4K;
        const float m = offset ? read_scale(format, scales + width * kBlock) : 0.0f;
        const int count = matrix.inputs - base < kGroup ? matrix.inputs - base : kGroup;
        for (int i = 0; i < count; i++) {
            if (format == kQ8) {
                out[base + i] = d * (float)(int8_t)tile[64 * (i / 4) + 4 * lane + i % 4];
                continue;
            }
            const uint8_t both = tile[64 * (i / 8) + 4 * lane + i % 4];
            const int q = i % 8 < 4 ? both & 15 : both >> 4;
            out[base + i] = format == kQ4 ? d * (float)(q - 8) : d * (float)q + m;
        }
    }
}

}  // namespace forerun
