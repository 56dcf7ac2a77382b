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

// One group's quants of Q5_K or Q5_0 as 512 bytes from 0 to 31, in the order of bytes.
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

// The 256 small numbers of a tile that d and m are multiplied by: of each of 8 groups 16 scales, then
// of each 16 offsets, or of Q6K of each 16 inputs 16 scales with a sign. `room` may hold them.
template <int Format>
FORERUN_INLINE const uint8_t* small_scales(const uint8_t* tile, uint8_t* room) {
    if (Format == forerun::kQ6K) return tile + 32;
    spread_sixes(tile + 64, room);
    return room;
}

}  // namespace
