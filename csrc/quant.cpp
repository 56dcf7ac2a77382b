#include "quant.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "half.h"

namespace forerun {
namespace {

// One channel's group, whatever the file: 32 integers, scale and offset as halves.
struct Piece {
    uint8_t q[kGroup];
    uint16_t d, m;
};

uint16_t load_half(const uint8_t* at) { return (uint16_t)(at[0] | at[1] << 8); }
float half_at(const uint8_t* at) { return float_from_half(load_half(at)); }

void read_nibbles(const uint8_t* at, Piece& piece) {
    for (int i = 0; i < 16; i += 4) {
        store_four(piece.q + i, load_four(at + i) & 0x0f0f0f0f);
        store_four(piece.q + i + 16, load_four(at + i) >> 4 & 0x0f0f0f0f);
    }
}

void read_fifths(const uint8_t* at, Piece& piece) {
    for (int i = 0; i < kGroup; i++) piece.q[i] |= (uint8_t)((at[i / 8] >> i % 8 & 1) << 4);
}

// Where a group's numbers lie, NaN where one is not finite, so that it is noticed.
struct Span {
    float least, most;
};

Span span_of(const float (&values)[kGroup]) {
    Span span = {values[0], values[0]};
    for (float value : values) {
        if (!std::isfinite(value)) return {NAN, NAN};
        span.least = value < span.least ? value : span.least;
        span.most = value > span.most ? value : span.most;
    }
    return span;
}

// The whole number nearest to x / d, ties to even, within [least, most], which are below 2^21; 0
// where d is not a positive number. Adding 1.5 * 2^23 leaves no bit for a fraction.
int nearest(float x, float d, float least, float most) {
    const float scaled = d > 0 ? x / d : 0.0f;
    const float within = scaled < least ? least : scaled > most ? most : scaled;
    return (int)((within + 12582912.0f) - 12582912.0f);
}

// Four bits between the smallest number and the largest.
void quantise_nibbles(const float (&values)[kGroup], Piece& piece) {
    const Span span = span_of(values);
    piece.m = half_from_float(span.least);
    const float m = float_from_half(piece.m);
    piece.d = half_from_float((span.most - m) / 15.0f);
    const float d = float_from_half(piece.d);
    for (int i = 0; i < kGroup; i++) piece.q[i] = (uint8_t)nearest(values[i] - m, d, 0, 15);
}

// Symmetric 8 bits.
void quantise_bytes(const float (&values)[kGroup], Piece& piece) {
    const Span span = span_of(values);
    piece.d = half_from_float((span.most > -span.least ? span.most : -span.least) / 127.0f);
    const float d = float_from_half(piece.d);
    for (int i = 0; i < kGroup; i++) piece.q[i] = (uint8_t)nearest(values[i], d, -127, 127);
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

// Rows of floats as rows of Q4_K.
std::vector<uint8_t> rows_of_q4_k(Source source, const uint8_t* rows, int count, int inputs) {
    const size_t row_bytes = source_row_bytes(source, inputs);
    std::vector<uint8_t> made((size_t)count * source_row_bytes(kFileQ4_K, inputs));
    float values[256];
    uint8_t* block = made.data();
    for (int row = 0; row < count; row++) {
        for (int begin = 0; begin < inputs; begin += 256, block += 144) {
            read_floats(source, rows + row * row_bytes, begin, begin + 256, values);
            make_q4_k(values, block);
        }
    }
    return made;
}

Piece read_piece(Source source, int format, const uint8_t* row, int group, int inputs) {
    Piece piece = {};
    float values[kGroup] = {0};
    switch (source) {
        case kFileQ4_0:
            piece.d = load_half(row + (size_t)group * 18);
            read_nibbles(row + (size_t)group * 18 + 2, piece);
            return piece;
        case kFileQ4_1:
            piece.d = load_half(row + (size_t)group * 20);
            piece.m = load_half(row + (size_t)group * 20 + 2);
            read_nibbles(row + (size_t)group * 20 + 4, piece);
            return piece;
        case kFileQ4Z:
            row += (size_t)(group / 4) * 68;
            piece.d = load_half(row);
            piece.m = row[2];
            read_nibbles(row + 4 + 16 * (group % 4), piece);
            return piece;
        case kFileMXFP4:
            row += (size_t)group * 17;
            piece.d = half_from_float(std::ldexp(1.0f, (int)row[0] - 128));
            read_nibbles(row + 1, piece);
            return piece;
        case kFileQ5_0:
            row += (size_t)group * 22;
            piece.d = load_half(row);
            read_nibbles(row + 6, piece);
            read_fifths(row + 2, piece);
            return piece;
        case kFileQ5_1:
            row += (size_t)group * 24;
            piece.d = load_half(row);
            piece.m = load_half(row + 2);
            read_nibbles(row + 8, piece);
            read_fifths(row + 4, piece);
            return piece;
        case kFileIQ4_NL:
            piece.d = load_half(row + (size_t)group * 18);
            read_nibbles(row + (size_t)group * 18 + 2, piece);
            return piece;
        case kFileQ8_0:
            piece.d = load_half(row + (size_t)group * 34);
            memcpy(piece.q, row + (size_t)group * 34 + 2, kGroup);
            return piece;
        default: {
            const int begin = group * kGroup, end = begin + kGroup;
            read_floats(source, row, begin, end < inputs ? end : inputs, values);
        }
    }
    format == kQ4M ? quantise_nibbles(values, piece) : quantise_bytes(values, piece);
    return piece;
}

// `group`: of the tile.
void write_piece(int format, const Piece& piece, int group, int channel, uint8_t* tile) {
    uint8_t* at = tile + quants_at(format) + group * group_bytes(format) + 4 * channel;
    uint8_t* scales = tile + scales_at(format) + 2 * channel;
    memcpy(scales, &piece.d, 2);
    if (format == kQ4M || format == kQ5M) memcpy(scales + 2 * kBlock, &piece.m, 2);
    if (format == kQ4Z) tile[2 * kBlock + channel] = (uint8_t)-piece.m;
    if (format == kQ8) {
        for (int i = 0; i < kGroup; i += 4) memcpy(at + 16 * i, piece.q + i, 4);
        return;
    }
    uint32_t fifth = 0;
    for (int i = 0; i < kGroup; i += 8) {
        const uint32_t low = load_four(piece.q + i), high = load_four(piece.q + i + 4);
        store_four(at + 8 * i, (low & 0x0f0f0f0f) | (high & 0x0f0f0f0f) << 4);
        fifth |= (low >> 4 & 0x01010101) << i / 4 | (high >> 4 & 0x01010101) << (i / 4 + 1);
    }
    if (has_fifths(format)) store_four(at + 256, fifth);
}

// Where input `i` of the group and channel `lane` lie in a tile of floats: bytes.
size_t float_at(int format, int i, int lane) {
    if (format == kF32) return 4 * (size_t)(kBlock * i + lane);
    return 2 * (size_t)(format == kF16 ? kBlock * i + lane : i / 2 * 2 * kBlock + 2 * lane + i % 2);
}

// The first `count` items of one channel's group, `kBytes` each, as they are.
template <int kBytes>
void write_items(const uint8_t* row, int count, int lane, uint8_t* tile) {
    for (int i = 0; i < count; i++) {
        memcpy(tile + kBytes * (kBlock * i + lane), row + kBytes * i, kBytes);
    }
}

// Group `group` of one channel of floats as they are.
void write_floats(int format, const uint8_t* row, int group, int inputs, int lane, uint8_t* tile) {
    const int begin = group * kGroup, count = inputs - begin < kGroup ? inputs - begin : kGroup;
    if (format == kF32) return write_items<4>(row + 4 * (size_t)begin, count, lane, tile);
    row += 2 * (size_t)begin;
    if (format == kF16) return write_items<2>(row, count, lane, tile);
    write_items<4>(row, count / 2, lane, tile);
    if (count % 2) memcpy(tile + float_at(format, count - 1, lane), row + 2 * (count - 1), 2);
}

float read_float(int format, const uint8_t* at) {
    if (format == kF16) return half_at(at);
    if (format == kBF16) return float_from_bfloat(load_half(at));
    float value;
    memcpy(&value, at, 4);
    return value;
}

}  // namespace

int own_format(Source source) {
    switch (source) {
        case kFileQ4_0: return kQ4;
        case kFileQ4_1: return kQ4M;
        case kFileQ4_K: return kQ4K;
        case kFileQ5_K: return kQ5K;
        case kFileQ6_K: return kQ6K;
        case kFileF32: return kF32;
        case kFileF16: return kF16;
        case kFileBF16: return kBF16;
        case kFileQ4Z: return kQ4Z;
        case kFileMXFP4: return kMX4;
        case kFileQ5_0: return kQ5;
        case kFileQ5_1: return kQ5M;
        case kFileIQ4_NL: return kL4;
        case kFileIQ4_XS: return kL4K;
        case kFileLevels16: return kL4K;
        case kFileLevels8: return kL3K;
        case kFileQ3_K: return kQ3K;
        case kFileQ2_K: return kQ2K;
        default: return kQ8;
    }
}

bool can_pack(Source source, int format, int inputs) {
    const int own = own_format(source);
    if (format == own) return true;
    return is_float(own) && (format == kQ8 || format == kQ4M || (format == kQ4K && inputs % 256 == 0));
}

size_t packed_bytes(int format, int channels, int inputs) {
    Matrix matrix;
    matrix.format = format;
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
        case kFileQ4Z: return groups / 4 * 68;
        case kFileMXFP4: return groups * 17;
        case kFileQ5_0: return groups * 22;
        case kFileQ5_1: return groups * 24;
        case kFileIQ4_NL: return groups * 18;
        case kFileIQ4_XS: return blocks * 136;
        case kFileLevels16: return blocks * 166;
        case kFileLevels8: return blocks * 166;
        case kFileQ3_K: return blocks * 110;
        case kFileQ2_K: return blocks * 84;
        case kFileF32: return (size_t)inputs * 4;
        default: return (size_t)inputs * 2;
    }
}

void pack(Source source, int format, const uint8_t* rows, int channels, int inputs, int first,
          int last, uint8_t* tiles) {
    const int groups = (inputs + kGroup - 1) / kGroup;
    const size_t row_bytes = source_row_bytes(source, inputs);
    const size_t block_bytes = (size_t)(groups / tile_groups(format)) * tile_bytes(format);
    for (int block = first; block < last; block++) {
        uint8_t* tile = tiles + block * block_bytes;
        const uint8_t* from = rows + (size_t)block * kBlock * row_bytes;
        const int left = channels - block * kBlock, lanes = left < kBlock ? left : kBlock;
        if (is_k_quant(format) && is_float(own_format(source))) {
            const auto made = rows_of_q4_k(source, from, lanes, inputs);
            pack_k_quants(kFileQ4_K, made.data(), made.size() / lanes, inputs, lanes, tile);
            continue;
        }
        if (is_k_quant(format)) {
            pack_k_quants(source, from, row_bytes, inputs, lanes, tile);
            continue;
        }
        if (lanes < kBlock || inputs % kGroup || format == kQ4Z) memset(tile, 0, block_bytes);
        for (int group = 0; group < groups; group++) {
            const int within = group % tile_groups(format);
            for (int lane = 0; lane < lanes; lane++) {
                const uint8_t* row = from + lane * row_bytes;
                if (is_float(format)) {
                    write_floats(format, row, group, inputs, lane, tile);
                } else {
                    const Piece piece = read_piece(source, format, row, group, inputs);
                    write_piece(format, piece, within, lane, tile);
                }
            }
            if (within + 1 == tile_groups(format)) tile += tile_bytes(format);
        }
    }
}

void unpack_row(const Matrix& matrix, int channel, float* out) {
    const int lane = channel % kBlock, format = matrix.format;
    const uint8_t* tile = matrix.tiles + channel / kBlock * matrix.block_bytes();
    if (is_k_quant(format)) return unpack_k_quants(format, tile, matrix.inputs, lane, out);
    for (int i = 0; is_float(format) && i < matrix.inputs; i++) {
        const uint8_t* at = tile + (size_t)(i / kGroup) * tile_bytes(format);
        out[i] = read_float(format, at + float_at(format, i % kGroup, lane));
    }
    if (is_float(format)) return;
    for (int base = 0; base < matrix.inputs; base += kGroup) {
        const int group = base / kGroup % tile_groups(format);
        const uint8_t* scales = tile + scales_at(format) + 2 * lane;
        const uint8_t* quants = tile + quants_at(format) + group * group_bytes(format);
        const bool has_m = format == kQ4M || format == kQ5M;
        const float d = half_at(scales), m = has_m ? half_at(scales + 2 * kBlock) : 0.0f;
        const int zero = format == kQ4Z ? -(int8_t)tile[2 * kBlock + lane] : format == kQ5 ? 16 : 8;
        const int count = matrix.inputs - base < kGroup ? matrix.inputs - base : kGroup;
        for (int i = 0; i < count; i++) {
            if (format == kQ8) {
                out[base + i] = d * (float)(int8_t)quants[64 * (i / 4) + 4 * lane + i % 4];
                continue;
            }
            const uint8_t both = quants[64 * (i / 8) + 4 * lane + i % 4];
            int q = i % 8 < 4 ? both & 15 : both >> 4;
            if (has_fifths(format)) q |= (quants[256 + 4 * lane + i % 4] >> i / 4 & 1) << 4;
            out[base + i] = has_m               ? d * (float)q + m
                            : has_table(format) ? d * (float)table_of(format)[q]
                                                : d * (float)(q - zero);
        }
        if (group + 1 == tile_groups(format)) tile += tile_bytes(format);
    }
}

}  // namespace forerun
