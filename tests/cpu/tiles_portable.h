// csrc/simd_amx.h in plain C++: what tiles hold is where it is told to be.
#pragma once
#include <cstdint>

static int tile_inputs = 0;  // of begin_tiles, 0 outside of a product

static void begin_tiles(int inputs) { tile_inputs = inputs; }
static void end_tiles() { tile_inputs = 0; }

template <bool Signed, int Inputs>
static void tile_sums(const int8_t* rows, const uint8_t* w, int32_t* sums, bool) {
    if (tile_inputs != Inputs) abort();  // Tiles have another shape.
    for (int row = 0; row < 16; row++) {
        for (int channel = 0; channel < 16; channel++) {
            int32_t sum = 0;
            for (int i = 0; i < Inputs; i++) {
                const uint8_t byte = w[i / 4 * 64 + 4 * channel + i % 4];
                sum += rows[row * Inputs + i] * (Signed ? (int8_t)byte : (int)byte);
            }
            sums[16 * row + channel] = sum;
        }
    }
}
