// Every set of kernels of this build that this machine runs, against plain C++: the same bits.
// Linked with all of csrc/*.cpp. With -DEMULATE_VNNI also the VNNI kernels, their one special
// instruction played by others, on machines that have none. Prints the names; code 1 on a
// difference.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "kernels.h"
#include "half.h"

#ifdef EMULATE_VNNI
#include <immintrin.h>
static inline __m256i emulated(__m256i sum, __m256i u, __m256i s) {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i low = _mm256_madd_epi16(_mm256_unpacklo_epi8(u, zero),
                                          _mm256_srai_epi16(_mm256_unpacklo_epi8(s, s), 8));
    const __m256i high = _mm256_madd_epi16(_mm256_unpackhi_epi8(u, zero),
                                           _mm256_srai_epi16(_mm256_unpackhi_epi8(s, s), 8));
    return _mm256_add_epi32(sum, _mm256_hadd_epi32(low, high));
}
#define FORERUN_VNNI emulated
#include "simd_avx2.h"
#include "matmul.inl"
#include "matmul_float.inl"
#include "rows.inl"
#include "attention.inl"
#include "sample.inl"
#define FORERUN_COLUMNS 8
#include "delta.inl"
static const forerun::Kernels kEmulated = {"emulated vnni", FORERUN_KERNELS};
#endif

using namespace forerun;
using Floats = std::vector<float>;

static std::mt19937 random_bits(7);

static Floats normal(size_t count, float spread) {
    std::normal_distribution<float> draw(0, spread);
    Floats made(count);
    for (float& x : made) x = draw(random_bits);
    return made;
}

static int faults = 0;

template <class T>
static void same(const char* name, const char* what, const std::vector<T>& a,
                 const std::vector<T>& b) {
    if (a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0) return;
    printf("%s: %s differs\n", name, what);
    faults++;
}

// One row of everything that reads rows, as bytes one after the other.
static std::vector<uint8_t> rows_by(const Kernels& k, const Floats& x, const Floats& w) {
    const int count = (int)x.size();
    std::vector<Group> groups((2 + kGates) * ((count + 31) / 32));
    memset(groups.data(), 0, groups.size() * sizeof(Group));
    const size_t row = groups.size() / (2 + kGates);
    k.quantise(x.data(), count, &groups[0], 1);
    k.norm_quantise(x.data(), w.data(), 1e-5f, count, &groups[row], 2);
    Floats floats;
    for (int gate = 0; gate < kGates; gate++) {
        Floats one(x);
        k.gates_quantise[gate](x.data(), w.data(), count, &groups[(2 + gate) * row], 3);
        k.gates[gate](x.data(), w.data(), count, one.data());
        floats.insert(floats.end(), one.begin(), one.end());
    }
    Floats softened(x);
    k.soften(softened.data(), count, 5.0f);
    floats.insert(floats.end(), softened.begin(), softened.end());
    Floats turned(x.begin(), x.begin() + 48), cosine(24), sine(24);
    for (int i = 0; i < 24; i++) cosine[i] = std::cos(i * 0.3f), sine[i] = std::sin(i * 0.3f);
    k.rotate(turned.data(), w.data(), 1e-6f, cosine.data(), sine.data(), 24, 0.125f);
    std::vector<uint16_t> halves(count / 8 * 8);
    k.to_halves(x.data(), (int)halves.size(), halves.data());
    floats.insert(floats.end(), turned.begin(), turned.end());
    const size_t numbers = floats.size() * sizeof(float), grouped = groups.size() * sizeof(Group);
    std::vector<uint8_t> all(grouped + numbers + halves.size() * 2);
    memcpy(all.data(), groups.data(), grouped);
    memcpy(&all[grouped], floats.data(), numbers);
    memcpy(&all[grouped + numbers], halves.data(), halves.size() * 2);
    return all;
}

static Matrix matrix_of(int format, int channels, int inputs, const std::vector<uint8_t>& tiles) {
    Matrix w;
    w.tiles = tiles.data();
    w.format = format;
    w.channels = channels;
    w.inputs = inputs;
    return w;
}

static Floats product_by(const Kernels& k, int format, int channels, int inputs, int rows,
                         const std::vector<uint8_t>& tiles, const Floats& x) {
    const Matrix w = matrix_of(format, channels, inputs, tiles);
    std::vector<Group> groups((size_t)(rows + 3) / 4 * w.groups());
    for (int r = 0; r < rows; r++) {
        k.quantise(&x[(size_t)r * inputs], inputs, &groups[(size_t)(r / 4) * w.groups()], r % 4);
    }
    Floats out((size_t)rows * channels, 0.5f);
    k.product(w, groups.data(), rows, 0, w.blocks(), {out.data(), channels, true});
    return out;
}

static Floats float_product_by(const Kernels& k, int format, int channels, int inputs, int rows,
                               const std::vector<uint8_t>& tiles, const Floats& x) {
    const Matrix w = matrix_of(format, channels, inputs, tiles);
    Floats out((size_t)rows * channels, 0.5f);
    k.float_product(w, x.data(), rows, 0, w.blocks(), {out.data(), channels, true});
    return out;
}

// mixed: less than `size` where values are the first numbers of their keys.
static Floats attend_by(const Kernels& k, int size, int heads, int trunk, int tail,
                        const Floats& queries, const std::vector<uint16_t>& cache,
                        const float* sinks, int mixed) {
    std::vector<int32_t> places(trunk), path(tail);
    for (int i = 0; i < trunk; i++) places[i] = (i * 7) % 300;
    for (int i = 0; i < tail; i++) path[i] = 299 - i;
    Floats out((size_t)heads * size);
    Attend job = {};
    job.stride = padded_positions(trunk + tail);
    Floats scores(heads * job.stride), totals(heads);
    job.room = heads > 3 ? 3 : heads;
    job.keys = (const uint8_t*)cache.data();
    job.values = (const uint8_t*)(cache.data() + (mixed < size ? 0 : 300 * size));
    job.mixed = mixed;
    job.trunk = places.data();
    job.sight = {trunk, tail, path.data()};
    job.heads = heads;
    job.size = size;
    job.cold = true;
    job.queries = queries.data();
    job.out = out.data();
    job.scores = scores.data();
    job.totals = totals.data();
    job.sinks = sinks;
    job.cap = sinks ? 2.0f : 0.0f;  // one case has both
    k.attend(job);
    // In pieces, as by several threads: the same.
    Floats pieces((size_t)heads * size);
    job.out = pieces.data();
    job.room = heads;
    const int length = trunk + tail, middle = length / 16 * 8;
    k.score(job, middle, length);
    k.score(job, 0, middle);
    for (int h = 0; h < heads; h++)
        totals[h] = k.weigh(&scores[h * job.stride], length, sinks ? sinks + h : nullptr, job.cap);
    k.mix(job, 8, mixed);
    k.mix(job, 0, 8);
    same(k.name, "attention in pieces", out, pieces);
    return out;
}

static std::vector<int32_t> choices_by(const Kernels& k, const Floats& logits) {
    std::vector<int32_t> chosen;
    for (float temperature : {0.0f, 0.5f, 1.0f, 2.5f}) {
        for (uint32_t p = 0; p < 8; p++) {
            const uint64_t seed = 0x9E3779B97F4A7C15ull * (p + 1);
            chosen.push_back(k.choose(logits.data(), (int)logits.size(), temperature, seed, p));
        }
    }
    return chosen;
}

static void compare(const Kernels& k) {
    const Kernels& plain = *kPortable;
    for (float spread : {1e-20f, 0.01f, 1.0f, 30.0f, 1e5f}) {
        for (int count : {48, 64, 100, 576}) {
            const Floats x = normal(count, spread), w = normal(count, 1);
            same(k.name, "rows", rows_by(k, x, w), rows_by(plain, x, w));
        }
        const Floats logits = normal(1003, spread);
        same(k.name, "choice", choices_by(k, logits), choices_by(plain, logits));
    }
    for (int source : {kFileQ4_0, kFileQ4_1, kFileQ8_0, kFileQ4_K, kFileQ5_K, kFileQ6_K, kFileQ4Z,
                       kFileMXFP4}) {
        for (int rows : {1, 2, 3, 4, 7, 65}) {
            const int format = own_format((Source)source);
            const int channels = 40, inputs = tile_groups(format) > 1 ? 512 : 96;
            std::vector<uint8_t> file(channels * source_row_bytes((Source)source, inputs));
            for (uint8_t& byte : file) byte = (uint8_t)(random_bits() & 0xff);
            // Scales: a byte of which every value makes a modest half.
            const size_t step = source_row_bytes((Source)source, 32 * tile_groups(format));
            const size_t first = source == kFileQ6_K ? 208 : 0;
            const bool two = format == kQ4M || format == kQ4K || format == kQ5K;
            for (size_t at = first; at < file.size(); at += step) {
                if (source == kFileMXFP4) {
                    file[at] = (uint8_t)(118 + file[at] % 20);
                    continue;
                }
                file[at + 1] = 0x20 | (file[at + 1] & 0x93);
                if (two) file[at + 3] = 0x20 | (file[at + 3] & 0x93);
            }
            std::vector<uint8_t> tiles(packed_bytes(format, channels, inputs));
            pack((Source)source, format, file.data(), channels, inputs, 0, (channels + 15) / 16,
                 tiles.data());
            const Floats x = normal((size_t)rows * inputs, 3);
            same(k.name, "product", product_by(k, format, channels, inputs, rows, tiles, x),
                 product_by(plain, format, channels, inputs, rows, tiles, x));
        }
    }
    for (int source : {kFileF32, kFileF16, kFileBF16}) {
        for (int rows : {1, 2, 3, 4, 7, 65}) {
            const int format = own_format((Source)source), channels = 40, inputs = 96;
            const Floats numbers = normal((size_t)channels * inputs, 1);
            std::vector<uint8_t> file(channels * source_row_bytes((Source)source, inputs));
            if (source == kFileF32) memcpy(file.data(), numbers.data(), file.size());
            for (size_t i = 0; source != kFileF32 && i < numbers.size(); i++) {
                uint32_t bits;
                memcpy(&bits, &numbers[i], 4);
                const uint16_t half = source == kFileF16 ? half_from_float(numbers[i])
                                                         : (uint16_t)(bits >> 16);
                memcpy(&file[2 * i], &half, 2);
            }
            std::vector<uint8_t> tiles(packed_bytes(format, channels, inputs));
            pack((Source)source, format, file.data(), channels, inputs, 0, (channels + 15) / 16,
                 tiles.data());
            const Floats x = normal((size_t)rows * inputs, 3);
            same(k.name, "float product", float_product_by(k, format, channels, inputs, rows, tiles, x),
                 float_product_by(plain, format, channels, inputs, rows, tiles, x));
        }
    }
    for (int size : {8, 24, 64, 96, 128}) {
        std::vector<uint16_t> cache(600 * size);
        for (uint16_t& half : cache) half = half_from_float(normal(1, 1)[0]);
        for (int heads : {1, 2, 3, 4, 7}) {
            const Floats queries = normal((size_t)heads * size, 0.3f), sinks = normal(heads, 3);
            for (int trunk : {1, 7, 8, 9, 50, 290}) {
                for (int tail : {0, 1, 5}) {
                    for (const float* given : {(const float*)nullptr, sinks.data()}) {
                        const auto by = [&](const Kernels& which, int mixed) {
                            return attend_by(which, size, heads, trunk, tail, queries, cache, given,
                                             mixed);
                        };
                        same(k.name, given ? "attention with sinks" : "attention", by(k, size),
                             by(plain, size));
                        if (size > 8) {
                            same(k.name, "latent attention", by(k, size - 8), by(plain, size - 8));
                        }
                    }
                }
            }
        }
    }
    printf("%s\n", k.name);
}

int main() {
    for (const char* name : {"avx512-vnni-512", "avx512-vnni", "avx-vnni", "avx2", "neon"}) {
        if (const Kernels* found = choose_kernels(name)) compare(*found);
    }
#ifdef EMULATE_VNNI
    compare(kEmulated);
#endif
    return faults != 0;
}
