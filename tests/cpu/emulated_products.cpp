// Products of instruction sets that this machine may lack, for test_emulated.py: those of 512-bit vectors
// and of tiles in plain C++, or with -DEMULATE_VNNI those of VNNI. Linked with what packs matrices.
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"
#ifdef EMULATE_VNNI
#include "vnni_portable.h"
#define FORERUN_VNNI emulated_vnni
#include "simd_avx2.h"
#include "matmul.inl"
#else
#include "wide_portable.h"
#include "tiles_portable.h"
#include "matmul_wide.inl"
#include "matmul_amx.inl"
#endif

using namespace forerun;

// One row into lane `lane` of its column, as every `quantise` does with finite numbers; count a multiple
// of kGroup.
static void quantised(const float* x, int count, Group* out, int lane) {
    for (int first = 0; first < count; first += kGroup, out++) {
        float largest = 0.0f;
        for (int i = 0; i < kGroup; i++) largest = std::fmax(largest, std::fabs(x[first + i]));
        int sums[2] = {};
        for (int i = 0; i < kGroup; i++) {
            const int q = (int)std::nearbyint(x[first + i] * (127.0f / largest));
            out->q[lane][i] = (int8_t)q;
            sums[i / 16] += q;
        }
        out->scale[lane] = largest / 127.0f;
        out->sum[lane] = out->scale[lane] * (float)(sums[0] + sums[1]);
        out->excess[lane] = -128 * (sums[0] + sums[1]);
        for (int h = 0; h < 2; h++) out->excess32[lane][h] = -32 * sums[h];
    }
}

static void multiply(Product product, int source, const uint8_t* file, int channels, int inputs,
                     const float* x, int rows, const float* bias, float* out) {
    Matrix w;
    w.format = own_format((Source)source);
    w.channels = channels;
    w.inputs = inputs;
    w.bias = bias;
    std::vector<uint8_t> tiles(packed_bytes(w.format, channels, inputs));
    pack((Source)source, w.format, file, channels, inputs, 0, w.blocks(), tiles.data());
    w.tiles = tiles.data();
    std::vector<Group> groups((size_t)((rows + kLanes - 1) / kLanes) * w.groups());
    for (int r = 0; r < rows; r++) {
        quantised(x + (size_t)r * inputs, inputs, &groups[(size_t)(r / kLanes) * w.groups()], r % kLanes);
    }
    product(w, groups.data(), rows, 0, w.blocks(), {out, channels, bias != nullptr});
}

// out = W x of `rows` rows, or with a bias (not null) out += W x + bias.
#define EMULATED(name, product)                                                                      \
    extern "C" void name(int source, const uint8_t* file, int channels, int inputs, const float* x,  \
                         int rows, const float* bias, float* out) {                                  \
        multiply(product, source, file, channels, inputs, x, rows, bias, out);                       \
    }

#ifdef EMULATE_VNNI
EMULATED(vnni_product, product)
#else
EMULATED(wide_product, product)
EMULATED(tiles_product, product_by_tiles)
#endif
