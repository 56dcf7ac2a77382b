// K-quants between a file's layout and tiles (quant.h): the same numbers in another order.
#include <cstring>

#include "half.h"
#include "quant.h"

namespace forerun {
namespace {

constexpr int kInputs = 256;  // of a block of the file, and of a tile

// One channel of one tile, the bits of its numbers as the file has them.
struct KBlock {
    uint16_t d, m;        // halves; m is what offsets are multiplied by, of which Q6_K has none
    uint8_t scales[16];   // Q6_K: int8 for every 16 inputs; else 6 bits: 8 scales, 8 offsets
    uint8_t q[kInputs];
};

uint16_t load_half(const uint8_t* at) { return (uint16_t)(at[0] | at[1] << 8); }

int file_bytes(int format) { return format == kQ4K ? 144 : format == kQ5K ? 176 : 210; }

// Q4_K and Q5_K: a scale and an offset of 6 bits for each of eight groups in 12 bytes.
void read_scales(const uint8_t* packed, KBlock& block) {
    for (int g = 0; g < 4; g++) {
        block.scales[g] = packed[g] & 63;
        block.scales[8 + g] = packed[g + 4] & 63;
        block.scales[4 + g] = (uint8_t)((packed[g + 8] & 15) | packed[g] >> 6 << 4);
        block.scales[12 + g] = (uint8_t)(packed[g + 8] >> 4 | packed[g + 4] >> 6 << 4);
    }
}

void read_q4_or_q5(int format, const uint8_t* file, KBlock& block) {
    block.d = load_half(file);
    block.m = load_half(file + 2) ^ 0x8000;  // the file subtracts offsets
    read_scales(file + 4, block);
    const uint8_t* fifth = file + 16;
    const uint8_t* nibbles = format == kQ5K ? file + 48 : file + 16;
    for (int i = 0; i < kInputs; i++) {
        const int group = i / kGroup;
        int q = nibbles[group / 2 * kGroup + i % kGroup] >> group % 2 * 4 & 15;
        if (format == kQ5K) q |= (fifth[i % kGroup] >> group & 1) << 4;
        block.q[i] = (uint8_t)q;
    }
}

// Q6_K: 128 numbers at a time, their upper two bits apart; a scale of 8 bits for every 16.
void read_q6(const uint8_t* file, KBlock& block) {
    block.d = load_half(file + 208);
    memcpy(block.scales, file + 192, 16);
    for (int i = 0; i < kInputs; i++) {
        const int half = i / 128, quarter = i % 128 / 32, at = i % 32;
        const uint8_t low = file[half * 64 + quarter % 2 * 32 + at];
        const uint8_t high = file[128 + half * 32 + at];
        block.q[i] = (uint8_t)((low >> quarter / 2 * 4 & 15) | (high >> 2 * quarter & 3) << 4);
    }
}

void put_six(uint8_t* sixes, int index, uint8_t number) {
    if (index < 192) {
        sixes[index] |= number;
        return;
    }
    for (int k = 0; k < 3; k++) sixes[index - 192 + 64 * k] |= (number >> 2 * k & 3) << 6;
}

int six_at(const uint8_t* sixes, int index) {
    if (index < 192) return sixes[index] & 63;
    const uint8_t* at = sixes + index - 192;
    return at[0] >> 6 | at[64] >> 6 << 2 | at[128] >> 6 << 4;
}

// Where q of one input lies within its group's quants: the byte, or of sixes the number.
int place_in(int format, int input, int lane) {
    const int step = format == kQ6K ? input % 16 / 4 : input / 8;
    return 64 * step + 4 * lane + input % 4;
}

void write_block(int format, const KBlock& block, int lane, uint8_t* tile) {
    memcpy(tile + 2 * lane, &block.d, 2);
    if (format == kQ6K) {
        for (int i = 0; i < 16; i++) tile[32 + 16 * i + lane] = block.scales[i];
    } else {
        memcpy(tile + 32 + 2 * lane, &block.m, 2);
        for (int i = 0; i < 16; i++) put_six(tile + 64, 16 * i + lane, block.scales[i]);
    }
    for (int i = 0; i < kInputs; i++) {
        uint8_t* quants = tile + quants_at(format) + i / kGroup * group_bytes(format);
        const int input = i % kGroup, place = place_in(format, input, lane);
        if (format == kQ6K) {
            put_six(quants + input / 16 * 192, place, block.q[i]);
            continue;
        }
        quants[place] |= (block.q[i] & 15) << input % 8 / 4 * 4;
        if (format == kQ5K) {
            quants[256 + 4 * lane + input % 4] |= (block.q[i] >> 4) << input / 4;
        }
    }
}

float number_at(int format, const uint8_t* tile, int i, int lane) {
    const uint8_t* quants = tile + quants_at(format) + i / kGroup * group_bytes(format);
    const int input = i % kGroup, place = place_in(format, input, lane);
    const float d = float_from_half(load_half(tile + 2 * lane));
    if (format == kQ6K) {
        const int8_t scale = (int8_t)tile[32 + i / 16 * 16 + lane];
        return d * (float)scale * (float)(six_at(quants + input / 16 * 192, place) - 32);
    }
    const float m = float_from_half(load_half(tile + 32 + 2 * lane));
    const int scale = six_at(tile + 64, i / kGroup * 16 + lane);
    const int offset = six_at(tile + 64, 128 + i / kGroup * 16 + lane);
    int q = quants[place] >> input % 8 / 4 * 4 & 15;
    if (format == kQ5K) q |= (quants[256 + 4 * lane + input % 4] >> input / 4 & 1) << 4;
    return d * (float)scale * (float)q + m * (float)offset;
}

}  // namespace

void pack_k_quants(int format, const uint8_t* blocks, int inputs, int lane, uint8_t* tiles) {
    for (int i = 0; i < inputs; i += kInputs) {
        KBlock block;
        if (format == kQ6K) {
            read_q6(blocks, block);
        } else {
            read_q4_or_q5(format, blocks, block);
        }
        write_block(format, block, lane, tiles);
        blocks += file_bytes(format);
        tiles += tile_bytes(format);
    }
}

void unpack_k_quants(int format, const uint8_t* tiles, int inputs, int lane, float* out) {
    for (int i = 0; i < inputs; i++) {
        const uint8_t* tile = tiles + (size_t)(i / kInputs) * tile_bytes(format);
        out[i] = number_at(format, tile, i % kInputs, lane);
    }
}

}  // namespace forerun
