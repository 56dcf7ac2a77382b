// matmul_wide.inl and matmul_amx.inl in plain C++ against the kernels that this machine has: the same
// bits, also on machines without 512-bit vectors or tiles. Linked with all of csrc/*.cpp. Code 1 on a
// difference.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "kernels.h"
#include "wide_portable.h"
#include "tiles_portable.h"
#include "matmul_wide.inl"
#include "matmul_amx.inl"

using namespace forerun;

int main() {
    std::mt19937 random_bits(7);
    std::normal_distribution<float> draw(0, 3);
    const Kernels& plain = *choose_kernels("portable");
    int compared = 0;
    for (int format : {kQ4, kQ4M, kQ8, kQ4K, kQ5K, kQ6K, kQ4Z, kMX4, kQ5}) {
        for (int channels : {16, 40, 100}) {
            Matrix w;
            w.format = format;
            w.channels = channels;
            w.inputs = tile_groups(format) > 1 ? 512 : 96;
            std::vector<uint8_t> tiles(w.blocks() * w.block_bytes());
            for (uint8_t& byte : tiles) byte = (uint8_t)random_bits();
            const int halves = format == kQ4M || format == kQ4K || format == kQ5K ? 32 : 16;
            for (size_t at = 0; at < tiles.size(); at += tile_bytes(format)) {
                uint8_t* scales = &tiles[at + scales_at(format)];  // modest ones
                for (int i = 1; i < 2 * halves; i += 2) scales[i] = 0x20 | (scales[i] & 0x93);
            }
            w.tiles = tiles.data();
            for (int rows = 1; rows <= 130; rows++) {
                std::vector<float> x((size_t)rows * w.inputs), bias(channels);
                for (float& one : x) one = draw(random_bits);
                for (float& one : bias) one = draw(random_bits);
                w.bias = rows % 2 ? bias.data() : nullptr;
                std::vector<Group> groups((size_t)(rows + 3) / 4 * w.groups());
                memset((void*)groups.data(), 0, groups.size() * sizeof(Group));
                for (int r = 0; r < rows; r++) {
                    plain.quantise(&x[(size_t)r * w.inputs], w.inputs,
                                   &groups[(size_t)(r / 4) * w.groups()], r % 4);
                }
                const bool add = rows % 3 == 0;
                const auto by = [&](Product made) {
                    std::vector<float> out((size_t)rows * channels, 0.5f);
                    made(w, groups.data(), rows, 0, w.blocks(), {out.data(), channels, add});
                    return out;
                };
                const std::vector<float> told = by(plain.product);
                for (const Product made : {product, product_by_tiles}) {
                    compared++;
                    if (memcmp(by(made).data(), told.data(), told.size() * sizeof(float)) != 0) {
                        printf("%s, format %d, %d channels, %d rows differ\n",
                               made == product ? "wide" : "tiles", format, channels, rows);
                        return 1;
                    }
                }
            }
        }
    }
    printf("%d products compared\n", compared);
}
