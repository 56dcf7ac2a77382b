#include "quant.h"

#include <cmath>
#include <cstring>

#include "half.h"

namespace forerun {
namespace {

// One channel's group, whatever the file: 32 integers, the scale and the offset as halves.
struct Piece {
    uint8_t q[kGroup];
    uint16_t d, m;
};

uint16_t load_half(const uint8_t* at) { return (uint16_t)(at[0] | at[1] << 8); }

void read_nibbles(const uint8_t* at, Piece& piece) {
    for (int i = 0; i < 16; i++) {
        piece.q[i] = at[i] & 15;
        piece.q[i + 16] = at[i] >> 4;
    }
}

float read_float(Source source, const uint8_t* row, int index) {
    if (source == kFileF32) {
        float value;
        memcpy(&value, row + 4 * (size_t)index, 4);
        return value;
    }
    const uint16_t stored = load_half(row + 2 * (size_t)index);
    return source == kFileF16 ? float_from_half(stored) : float_from_bfloat(stored);
}

// Symmetric 8 bits: d = max|w| / 127 rounded to a half, q = w / d to nearest. A group that is not
// finite keeps a NaN scale, so that it is noticed and not hidden.
void quantise(Source source, const uint8_t* row, int begin, int end, Piece& piece) {
    float values[kGroup] = {0}, largest = 0;
    bool finite = true;
    for (int i = begin; i < end; i++) {
        values[i - begin] = read_float(source, row, i);
        finite = finite && std::isfinite(values[i - begin]);
        largest = std::fmax(largest, std::fabs(values[i - begin]));
    }
    piece.d = finite ? half_from_float(largest / 127.0f) : 0x7e00;
    const float d = float_from_half(piece.d);
    for (int i = 0; i < kGroup; i++) {
        const float scaled = finite && d > 0 ? values[i] / d : 0.0f;
        piece.q[i] = (uint8_t)(int8_t)std::nearbyint(std::fmin(std::fmax(scaled, -127), 127));
    }
}

Piece read_piece(Source source, const uint8_t* row, int group, int inputs) {
    Piece piece = {};
    const uint8_t* at;
    switch (source) {
        case kFileQ4_0:
            at = row + (size_t)group * 18;
            piece.d = load_half(at);
            read_nibbles(at + 2, piece);
            break;
        case kFileQ4_1:
            at = row + (size_t)group * 20;
            piece.d = load_half(at);
            piece.m = load_half(at + 2);
            read_nibbles(at + 4, piece);
            break;
        case kFileQ8_0:
            at = row + (size_t)group * 34;
            piece.d = load_half(at);
            memcpy(piece.q, at + 2, kGroup);
            break;
        default: {
            const int begin = group * kGroup, end = begin + kGroup;
            quantise(source, row, begin, end < inputs ? end : inputs, piece);
        }
    }
    return piece;
}

void write_piece(int format, const Piece& piece, int channel, uint8_t* tile) {
    uint8_t* at = tile + 4 * channel;
    if (format == kQ8) {
        for (int i = 0; i < kGroup; i += 4) memcpy(at + 16 * i, piece.q + i, 4);
        memcpy(tile + scales_at(format) + 2 * channel, &piece.d, 2);
        return;
    }
    for (int i = 0; i < kGroup; i += 8) {
        for (int b = 0; b < 4; b++) {
            at[8 * i + b] = (uint8_t)(piece.q[i + b] | piece.q[i + 4 + b] << 4);
        }
    }
    uint8_t* scales = tile + scales_at(format) + 2 * channel;
    memcpy(scales, &piece.d, 2);
    if (format == kQ4M) memcpy(scales + 2 * kBlock, &piece.m, 2);
}

}  // namespace

int packed_format(Source source) {
    return source == kFileQ4_0 ? kQ4 : source == kFileQ4_1 ? kQ4M : kQ8;
}

size_t packed_bytes(Source source, int channels, int inputs) {
    Matrix matrix;
    matrix.format = packed_format(source);
    matrix.channels = channels;
    matrix.inputs = inputs;
    return matrix.blocks() * matrix.block_bytes();
}

size_t source_row_bytes(Source source, int inputs) {
    const size_t groups = (size_t)inputs / kGroup;
    switch (source) {
        case kFileQ4_0: return groups * 18;
        case kFileQ4_1: return groups * 20;
        case kFileQ8_0: return groups * 34;
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
    const int lane = channel % kBlock, format = matrix.format;
    const uint8_t* tile = matrix.tiles + channel / kBlock * matrix.block_bytes();
    for (int base = 0; base < matrix.inputs; base += kGroup, tile += tile_bytes(format)) {
        const uint8_t* scales = tile + scales_at(format) + 2 * lane;
        const float d = float_from_half(load_half(scales));
        const float m = format == kQ4M ? float_from_half(load_half(scales + 2 * kBlock)) : 0.0f;
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
