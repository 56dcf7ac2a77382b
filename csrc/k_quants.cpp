// K-quants between a file's layout and tiles (quant.h): the same numbers in another order.
#include <cstring>

#include "half.h"
#include "quant.h"

namespace forerun {
namespace {

constexpr int kInputs = 256;  // of a block of the file, and of a tile

uint16_t load_half(const uint8_t* at) { return (uint16_t)(at[0] | at[1] << 8); }

// Four numbers at a time.
constexpr uint32_t kNibble = 0x0f0f0f0f, kTwoBits = 0x03030303, kBit = 0x01010101;

// Q4_K and Q5_K: eight scales of 6 bits, then eight offsets, in 12 bytes of the file; `lane` of 16
// channels of a tile's sixes.
void write_scales(const uint8_t* packed, int lane, uint8_t* sixes) {
    uint8_t scales[16];
    for (int g = 0; g < 4; g++) {
        scales[g] = packed[g] & 63;
        scales[8 + g] = packed[g + 4] & 63;
        scales[4 + g] = (uint8_t)((packed[g + 8] & 15) | packed[g] >> 6 << 4);
        scales[12 + g] = (uint8_t)(packed[g + 8] >> 4 | packed[g + 4] >> 6 << 4);
    }
    for (int i = 0; i < 12; i++) {
        sixes[16 * i + lane] = (uint8_t)(scales[i] | (scales[12 + i % 4] >> i / 4 * 2 & 3) << 6);
    }
}

// Q4_K and Q5_K: the file has two groups in the halves of 32 bytes, fifth bits apart.
void write_q4_or_q5(int format, const uint8_t* file, int lane, uint8_t* tile) {
    memcpy(tile + 2 * lane, file, 2);
    const uint16_t m = load_half(file + 2) ^ 0x8000;  // the file subtracts offsets
    memcpy(tile + 32 + 2 * lane, &m, 2);
    write_scales(file + 4, lane, tile + 64);
    const uint8_t* nibbles = format == kQ5K ? file + 48 : file + 16;
    uint8_t* quants = tile + quants_at(format) + 4 * lane;
    for (int group = 0; group < 8; group++, quants += group_bytes(format)) {
        const uint8_t* from = nibbles + group / 2 * kGroup;
        uint32_t fifth = 0;
        for (int j = 0; j < 4; j++) {
            const uint32_t low = load_four(from + 8 * j) >> group % 2 * 4 & kNibble;
            const uint32_t high = load_four(from + 8 * j + 4) >> group % 2 * 4 & kNibble;
            store_four(quants + 64 * j, low | high << 4);
            if (format != kQ5K) continue;
            fifth |= (load_four(file + 16 + 8 * j) >> group & kBit) << 2 * j;
            fifth |= (load_four(file + 20 + 8 * j) >> group & kBit) << (2 * j + 1);
        }
        if (format == kQ5K) store_four(quants + 256, fifth);
    }
}

// Q6_K: the file has 128 numbers at a time, their upper two bits apart; a scale of 8 bits for every
// 16 numbers.
void write_q6(const uint8_t* file, int lane, uint8_t* tile) {
    memcpy(tile + 2 * lane, file + 208, 2);
    for (int i = 0; i < 16; i++) tile[32 + 16 * i + lane] = file[192 + i];
    uint8_t* quants = tile + quants_at(kQ6K) + 4 * lane;
    for (int group = 0; group < 8; group++) {
        const int half = group / 4, quarter = group % 4;
        const uint8_t* low = file + 64 * half + quarter % 2 * 32;
        const uint8_t* high = file + 128 + 32 * half;
        for (int p = 0; p < 2; p++, quants += 192) {
            uint32_t q[4];
            for (int j = 0; j < 4; j++) {
                const int at = 16 * p + 4 * j;
                q[j] = (load_four(low + at) >> quarter / 2 * 4 & kNibble) |
                       (load_four(high + at) >> quarter * 2 & kTwoBits) << 4;
            }
            for (int j = 0; j < 3; j++) {
                store_four(quants + 64 * j, q[j] | (q[3] >> 2 * j & kTwoBits) << 6);
            }
        }
    }
}

// A tile's own table, and what its scales are multiplied by.
void write_table(int format, const void* table, float unit, uint8_t* tile) {
    memcpy(tile + table_at(format), table, 16);
    memcpy(tile + table_at(format) + 16, &unit, sizeof unit);
}

// A block's places in a table, 128 bytes: of each group low nibbles for the first 16 numbers, then high ones.
void write_places(int format, const uint8_t* places, int lane, uint8_t* tile) {
    uint8_t* quants = tile + quants_at(format) + 4 * lane;
    for (int group = 0; group < 8; group++, quants += group_bytes(format)) {
        const uint8_t* from = places + 16 * group;
        if (format == kL3K) {
            uint32_t third = 0;
            for (int p = 0; p < 2; p++) {
                uint32_t plane = 0;
                for (int k = 0; k < 4; k++) {
                    const uint32_t four = load_four(from + 4 * k) >> 4 * p & kNibble;
                    plane |= (four & kTwoBits) << 2 * k;
                    third |= (four >> 2 & kBit) << (4 * p + k);
                }
                store_four(quants + 64 * p, plane);
            }
            store_four(quants + 128, third);
            continue;
        }
        for (int j = 0; j < 4; j++) {  // inputs 8 j on
            const uint32_t low = load_four(from + 8 * (j % 2)) >> j / 2 * 4 & kNibble;
            const uint32_t next = load_four(from + 8 * (j % 2) + 4) >> j / 2 * 4 & kNibble;
            store_four(quants + 64 * j, low | next << 4);
        }
    }
}

// IQ4_XS: scales of 6 bits, four in one place and two in another, 32 larger than they are.
void write_iq4_xs(const uint8_t* file, int lane, uint8_t* tile) {
    memcpy(tile + 2 * lane, file, 2);
    write_table(kL4K, kLevels, 1.0f, tile);
    const int high = load_half(file + 2);
    for (int group = 0; group < 8; group++) {
        const int scale = (file[4 + group / 2] >> group % 2 * 4 & 15) | (high >> 2 * group & 3) << 4;
        tile[32 + 16 * group + lane] = (uint8_t)(scale - 32);
    }
    write_places(kL4K, file + 8, lane, tile);
}

// Blocks that bring their table.
void write_levels(int format, const uint8_t* file, int lane, uint8_t* tile) {
    memcpy(tile + 2 * lane, file, 2);
    float unit;
    memcpy(&unit, file + 2, sizeof unit);
    write_table(format, file + 6, unit, tile);
    const int parts = 8 * group_parts(format);
    for (int part = 0; part < parts; part++) tile[32 + 16 * part + lane] = file[22 + 16 / parts * part];
    write_places(format, file + 38, lane, tile);
}

// Q3_K's scale of 16 inputs, 6 bits, 32 larger than it is.
int third_scale(const uint8_t* scales, int part) {
    const int low = part < 8 ? scales[part] & 15 : scales[part - 8] >> 4;
    return low | (scales[8 + part % 4] >> part / 4 * 2 & 3) << 4;
}

// Q2_K and Q3_K: the file has two bits of 128 numbers at a time in 32 bytes, third bits apart.
void write_twos(int format, const uint8_t* file, int lane, uint8_t* tile) {
    const bool thirds = format == kQ3K;
    memcpy(tile + 2 * lane, file + (thirds ? 108 : 80), 2);
    if (!thirds) {
        const uint16_t m = load_half(file + 82) ^ 0x8000;  // the file subtracts offsets
        memcpy(tile + 32 + 2 * lane, &m, 2);
    }
    for (int part = 0; part < 16; part++) {
        uint8_t& scale = tile[(thirds ? 32 : 64) + 16 * part + lane];
        scale = thirds ? (uint8_t)(third_scale(file + 96, part) - 32) : file[part];
    }
    const uint8_t* twos = file + (thirds ? 32 : 16);
    uint8_t* quants = tile + quants_at(format) + 4 * lane;
    for (int group = 0; group < 8; group++, quants += group_bytes(format)) {
        const uint8_t* from = twos + group / 4 * 32;
        uint32_t third = 0;
        for (int p = 0; p < 2; p++) {
            uint32_t plane = 0;
            for (int k = 0; k < 4; k++) {
                const int at = 16 * p + 4 * k;
                plane |= (load_four(from + at) >> group % 4 * 2 & kTwoBits) << 2 * k;
                if (thirds) third |= (load_four(file + at) >> group & kBit) << (4 * p + k);
            }
            store_four(quants + 64 * p, plane);
        }
        if (thirds) store_four(quants + 128, third);
    }
}

// Where q of one input lies within its group's quants: the byte, or of sixes the number.
int place_in(int format, int input, int lane) {
    const int step = format == kQ6K ? input % 16 / 4 : input / 8;
    return 64 * step + 4 * lane + input % 4;
}

int six_at(const uint8_t* sixes, int index) {
    if (index < 192) return sixes[index] & 63;
    const uint8_t* at = sixes + index - 192;
    return at[0] >> 6 | at[64] >> 6 << 2 | at[128] >> 6 << 4;
}

// What stands in a tile's own table, times what all its scales are multiplied by.
float level_of(int format, const uint8_t* tile, int place) {
    float unit;
    memcpy(&unit, tile + table_at(format) + 16, sizeof unit);
    return unit * (float)(int8_t)tile[table_at(format) + place];
}

float two_or_three_bits(int format, const uint8_t* tile, int i, int lane) {
    const uint8_t* quants = tile + quants_at(format) + i / kGroup * group_bytes(format);
    const int input = i % kGroup, place = 4 * lane + input % 4;
    const int q = quants[64 * (input / 16) + place] >> input % 16 / 4 * 2 & 3;
    const uint8_t* scale = tile + (format == kQ2K ? 64 : 32) + i / 16 * 16 + lane;
    const float d = float_from_half(load_half(tile + 2 * lane));
    if (format == kQ2K) {
        const float m = float_from_half(load_half(tile + 32 + 2 * lane));
        return d * (float)(*scale & 15) * (float)q + m * (float)(*scale >> 4);
    }
    const int all = q | (quants[128 + place] >> input / 4 & 1) << 2;
    const float number = format == kQ3K ? (float)(all - 4) : level_of(format, tile, all);
    return d * (float)(int8_t)*scale * number;
}

float number_at(int format, const uint8_t* tile, int i, int lane) {
    if (format == kQ2K || has_thirds(format)) return two_or_three_bits(format, tile, i, lane);
    const uint8_t* quants = tile + quants_at(format) + i / kGroup * group_bytes(format);
    const int input = i % kGroup, place = place_in(format, input, lane);
    const float d = float_from_half(load_half(tile + 2 * lane));
    if (format == kQ6K) {
        const int8_t scale = (int8_t)tile[32 + i / 16 * 16 + lane];
        return d * (float)scale * (float)(six_at(quants + input / 16 * 192, place) - 32);
    }
    if (format == kL4K) {
        const float scale = d * (float)(int8_t)tile[32 + i / kGroup * 16 + lane];
        return scale * level_of(format, tile, quants[place] >> input % 8 / 4 * 4 & 15);
    }
    const float m = float_from_half(load_half(tile + 32 + 2 * lane));
    const int scale = six_at(tile + 64, i / kGroup * 16 + lane);
    const int offset = six_at(tile + 64, 128 + i / kGroup * 16 + lane);
    int q = quants[place] >> input % 8 / 4 * 4 & 15;
    if (format == kQ5K) q |= (quants[256 + 4 * lane + input % 4] >> input / 4 & 1) << 4;
    return d * (float)scale * (float)q + m * (float)offset;
}

}  // namespace

void pack_k_quants(Source source, const uint8_t* rows, size_t row_bytes, int inputs, int channels,
                   uint8_t* tiles) {
    const int format = own_format(source);
    const size_t file_bytes = source_row_bytes(source, kInputs);
    if (channels < kBlock) memset(tiles, 0, (size_t)(inputs / kInputs) * tile_bytes(format));
    for (int i = 0; i < inputs; i += kInputs, tiles += tile_bytes(format)) {
        const uint8_t* file = rows + (size_t)(i / kInputs) * file_bytes;
        for (int lane = 0; lane < channels; lane++, file += row_bytes) {
            if (format == kQ6K) write_q6(file, lane, tiles);
            if (source == kFileIQ4_XS) write_iq4_xs(file, lane, tiles);
            if (source == kFileLevels16 || source == kFileLevels8) write_levels(format, file, lane, tiles);
            if (format == kQ4K || format == kQ5K) write_q4_or_q5(format, file, lane, tiles);
            if (format == kQ2K || format == kQ3K) write_twos(format, file, lane, tiles);
        }
    }
}

void unpack_k_quants(int format, const uint8_t* tiles, int inputs, int lane, float* out) {
    for (int i = 0; i < inputs; i++) {
        const uint8_t* tile = tiles + (size_t)(i / kInputs) * tile_bytes(format);
        out[i] = number_at(format, tile, i % kInputs, lane);
    }
}

}  // namespace forerun
