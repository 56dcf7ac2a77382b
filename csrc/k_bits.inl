// The bits of K-quants' tiles (quant.h) spread into bytes, eight bytes at a time in plain C++ that
// compilers turn into vectors. For matmul.inl and matmul_wide.inl.
#include <cstdint>
#include <cstring>

namespace {

// The same byte eight times.
constexpr uint64_t each_byte(uint8_t byte) { return byte * 0x0101010101010101ull; }

FORERUN_INLINE uint64_t load_word(const uint8_t* at, int word) {
    uint64_t value;
    memcpy(&value, at + 8 * word, 8);
    return value;
}
FORERUN_INLINE void store_word(uint8_t* at, int word, uint64_t value) {
    memcpy(at + 8 * word, &value, 8);
}

// 192 B of sixes as 256 bytes from 0 to 63.
FORERUN_INLINE void spread_sixes(const uint8_t* __restrict sixes, uint8_t* __restrict out) {
    constexpr uint64_t low = each_byte(63), two = each_byte(3);
    for (int i = 0; i < 8; i++) {
        const uint64_t a = load_word(sixes, i), b = load_word(sixes + 64, i);
        const uint64_t c = load_word(sixes + 128, i);
        store_word(out, i, a & low);
        store_word(out + 64, i, b & low);
        store_word(out + 128, i, c & low);
        store_word(out + 192, i, (a >> 6 & two) | (b >> 6 & two) << 2 | (c >> 6 & two) << 4);
    }
}

// One group's twos, with or without third bits, as 512 bytes from 0 to 3 or 7, in the order of bytes.
template <bool Thirds>
FORERUN_INLINE void spread_twos(const uint8_t* __restrict quants, uint8_t* __restrict out) {
    constexpr uint64_t two = each_byte(3), bit = each_byte(1);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        for (int i = 0; i < 8; i++) {
            uint64_t q = load_word(quants + 64 * (j / 4), i) >> 2 * (j % 4) & two;
            if (Thirds) q |= (load_word(quants + 128, i) >> j & bit) << 2;
            store_word(out + 64 * j, i, q);
        }
    }
}

// One group's quants of Q5_K, Q5_0 or Q5_1 as 512 bytes from 0 to 31, in the order of bytes.
FORERUN_INLINE void spread_fives(const uint8_t* __restrict quants, uint8_t* __restrict out) {
    constexpr uint64_t nibble = each_byte(15), bit = each_byte(1);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        for (int i = 0; i < 8; i++) {
            const uint64_t both = load_word(quants + 64 * j, i);
            const uint64_t fifth = load_word(quants + 256, i) >> 2 * j;
            store_word(out + 128 * j, i, (both & nibble) | (fifth & bit) << 4);
            store_word(out + 128 * j + 64, i, (both >> 4 & nibble) | (fifth >> 1 & bit) << 4);
        }
    }
}

// Bytes that `small_scales` may fill.
template <int Format>
constexpr int kRoom = Format == forerun::kQ2K ? 512 : forerun::has_offset(Format) ? 256 : 1;

// What the halves d of a tile are multiplied by as floats.
template <int Format>
FORERUN_INLINE float unit_of(const uint8_t* tile) {
    if (!forerun::has_own_table(Format)) return 1.0f;
    float unit;
    memcpy(&unit, tile + forerun::table_at(Format) + 16, sizeof unit);
    return unit;
}
// The table in which a tile's quants are places.
template <int Format>
FORERUN_INLINE const int8_t* levels_of(const uint8_t* tile) {
    if (forerun::has_own_table(Format)) return (const int8_t*)tile + forerun::table_at(Format);
    return forerun::has_table(Format) ? forerun::table_of(Format) : nullptr;
}

// The small numbers of a tile that d and m are multiplied by, of 16 channels each: of each of 8 groups
// the scales, or of each 16 inputs, then the offsets likewise; scales have a sign where there are no
// offsets. `room` may hold them.
template <int Format>
FORERUN_INLINE const uint8_t* small_scales(const uint8_t* tile, uint8_t* room) {
    if (!forerun::has_offset(Format)) return tile + 32;
    if (Format != forerun::kQ2K) {
        spread_sixes(tile + 64, room);
        return room;
    }
    constexpr uint64_t nibble = each_byte(15);
    for (int i = 0; i < 32; i++) {
        const uint64_t both = load_word(tile + 64, i);
        store_word(room, i, both & nibble);
        store_word(room + 256, i, both >> 4 & nibble);
    }
    return room;
}

// Where the scale of part `p` of a group lies among them.
template <int Format>
constexpr int small_at(int group, int p) {
    return forerun::kBlock * (forerun::group_parts(Format) * group + p);
}
// Where offsets begin among them.
template <int Format>
constexpr int kOffsets = 8 * forerun::kBlock * forerun::group_parts(Format);

// What the offset of part `p` of a group is multiplied by: scale * sum of q of these inputs.
template <int Format>
FORERUN_INLINE float sum_of_part(const Group& x, int r, int p) {
    if (forerun::group_parts(Format) == 1) return x.sum[r];
    return x.scale[r] * (float)(x.excess32[r][p] / -32);
}

// What sums of part `p` begin at, so that quants stored larger than they are come out right. Those of
// formats with tables are stored `plus` larger.
template <int Format>
FORERUN_INLINE int32_t first_sum_of(const Group& x, int r, int p, int plus) {
    if (Format == forerun::kQ6K) return x.excess32[r][p];
    if (Format == forerun::kQ3K) return x.excess32[r][p] / 8;   // -4 times the sum
    if (Format == forerun::kQ5) return x.excess[r] / 8;         // -16 times the sum
    if (Format == forerun::kL3K) return x.excess32[r][p] / 32 * plus;
    return forerun::has_table(Format) ? x.excess[r] / 128 * plus : 0;
}

}  // namespace
