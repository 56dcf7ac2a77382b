// What matmul_amx.inl needs, on AMX's tiles. tests/cpu/tiles_portable.h has the same in plain C++.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

// Tiles 0 and 1 hold sums, 16 rows of 16 channels; 2 and 4 hold 16 rows of activations, 3 and 5 the
// weights of as many inputs, four to a channel.
FORERUN_INLINE void begin_tiles(int inputs) {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, unused[14] = {0};
        uint16_t bytes[16] = {0};
        uint8_t rows[16] = {0};
    } shapes;
    for (int tile = 0; tile < 6; tile++) {
        const bool activations = tile == 2 || tile == 4, weights = tile == 3 || tile == 5;
        shapes.bytes[tile] = (uint16_t)(activations ? inputs : 64);
        shapes.rows[tile] = (uint8_t)(weights ? inputs / 4 : 16);
    }
    _tile_loadconfig(&shapes);
}

FORERUN_INLINE void end_tiles() { _tile_release(); }

// The same in tiles of its own for every other group, so that none waits for the one before it.
#define FORERUN_TILE_SUMS(sum, activations, weights)                                   \
    _tile_zero(sum);                                                                   \
    _tile_loadd(activations, rows, Inputs);                                            \
    _tile_loadd(weights, w, 64);                                                       \
    if (Signed) {                                                                      \
        _tile_dpbssd(sum, activations, weights);                                       \
    } else {                                                                           \
        _tile_dpbsud(sum, activations, weights);                                       \
    }                                                                                  \
    _tile_stored(sum, sums, 64)

// sums[row][channel], int32[16][16] = rows[16][Inputs] times w[Inputs / 4][channel][4], which are signed
// bytes or unsigned ones. `odd`: whether the group's number is.
template <bool Signed, int Inputs>
FORERUN_INLINE void tile_sums(const int8_t* rows, const uint8_t* w, int32_t* sums, bool odd) {
    __asm__ volatile("" : : : "memory");  // The compiler does not know that tiles read memory.
    if (odd) {
        FORERUN_TILE_SUMS(1, 4, 5);
    } else {
        FORERUN_TILE_SUMS(0, 2, 3);
    }
    __asm__ volatile("" : : : "memory");
}

#undef FORERUN_TILE_SUMS

}  // namespace
