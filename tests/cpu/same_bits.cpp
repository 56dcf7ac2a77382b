// Every set of kernels of this build that this machine runs, against plain C++: the same bits.
// Linked with all of csrc/*.cpp. With -DEMULATE_VNNI also the VNNI kernels, their one special
// instruction played by others, and with -DEMULATE_WIDE those of 512 bits in plain C++, on machines
// that have none. Prints the names; code 1 on a difference.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "kernels.h"
#include "half.h"

#ifdef EMULATE_VNNI
#include "vnni_portable.h"
#define FORERUN_VNNI emulated_vnni
#include "simd_avx2.h"
#include "widths.h"
#include "matmul.inl"
#include "matmul_float.inl"
#include "rows.inl"
#include "attention.inl"
#include "sample.inl"
#define FORERUN_COLUMNS 8
#include "delta.inl"
static const forerun::Kernels kEmulated = {"emulated vnni", FORERUN_KERNELS};
#endif

#ifdef EMULATE_WIDE
#define FORERUN_WIDE
#include "simd_portable.h"
#include "wide_portable.h"
#include "widths.h"
#include "matmul_float.inl"
#include "matmul_wide.inl"
#include "rows.inl"
#include "attention.inl"
#include "sample.inl"
#define FORERUN_COLUMNS 16
#include "delta.inl"
static const forerun::Kernels kEmulated = {"emulated 512 bits", FORERUN_KERNELS};
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
    const float factor = k.inverse_rms(x.data(), count, 1e-5f);
    k.norm_quantise(x.data(), w.data(), factor, count, &groups[row], 2);
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
    std::vector<uint8_t> blocks(row_bytes(kBlocks, (int)halves.size()));
    k.to_blocks(x.data(), (int)halves.size(), blocks.data());
    floats.insert(floats.end(), turned.begin(), turned.end());
    const size_t numbers = floats.size() * sizeof(float), grouped = groups.size() * sizeof(Group);
    std::vector<uint8_t> all(grouped + numbers + halves.size() * 2 + blocks.size());
    memcpy(all.data(), groups.data(), grouped);
    memcpy(&all[grouped], floats.data(), numbers);
    memcpy(&all[grouped + numbers], halves.data(), halves.size() * 2);
    memcpy(&all[grouped + numbers + halves.size() * 2], blocks.data(), blocks.size());
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

// What nodes see: a known chain of places, then a path of places each.
struct Sights {
    std::vector<int32_t> trunk;
    std::vector<int32_t> trunks;  // how much of it a node sees
    std::vector<std::vector<int32_t>> paths;

    std::vector<int32_t> places(int node) const {
        std::vector<int32_t> all(trunk.begin(), trunk.begin() + trunks[node]);
        all.insert(all.end(), paths[node].begin(), paths[node].end());
        return all;
    }
    Alike alike() const {
        Alike found = {1 << 30, 0, true};
        for (int n = 0; n < (int)paths.size(); n++) {
            if (places(n).size() > places(found.longest).size()) found.longest = n;
        }
        const std::vector<int32_t> longest = places(found.longest);
        for (int n = 0; n < (int)paths.size(); n++) {
            const std::vector<int32_t> own = places(n);
            int same = 0;
            while (same < (int)own.size() && own[same] == longest[same]) same++;
            found.positions = same < found.positions ? same : found.positions;
            found.nested = found.nested && same == (int)own.size();
        }
        return found;
    }
};

// `known` of the nodes are known, the others a chain behind them, or children of the last known one.
static Sights sights_of(int trunk, int nodes, int known, bool chain) {
    Sights made;
    for (int i = 0; i < trunk + nodes; i++) made.trunk.push_back((i * 7) % 300);
    for (int n = 0; n < nodes; n++) {
        made.trunks.push_back(trunk + (n < known ? n + 1 : known));
        std::vector<int32_t> path;
        for (int i = known; i <= n; i++) {
            if (chain || i == n) path.push_back(299 - i);
        }
        made.paths.push_back(path);
    }
    return made;
}

// 600 rows of `size` numbers, stored as `item` says.
static std::vector<uint8_t> cache_of(int size, int item) {
    std::vector<uint8_t> cache(600 * row_bytes(item, size));
    for (int row = 0; row < 600; row++) {
        const Floats numbers = normal(size, 1);
        uint8_t* at = &cache[row * row_bytes(item, size)];
        if (item == kBlocks) kPortable->to_blocks(numbers.data(), size, at);
        if (item == kHalves) kPortable->to_halves(numbers.data(), size, (uint16_t*)at);
        if (item == kFloats) memcpy(at, numbers.data(), size * sizeof(float));
    }
    return cache;
}

// mixed: less than `size` where values are the first numbers of their keys.
static Floats attend_by(const Kernels& k, int size, int heads, const Sights& seen,
                        const Floats& queries, const std::vector<uint8_t>& cache, int item,
                        const float* sinks, int mixed) {
    const int count = (int)seen.paths.size();
    const Alike alike = seen.alike();
    const int64_t stride = padded_positions((int64_t)seen.places(alike.longest).size());
    Floats out((size_t)count * heads * size), scores(count * heads * stride), totals(count * heads);
    Floats near(near_numbers(size));
    std::vector<Attend> jobs(count);
    for (int n = 0; n < count; n++) {
        Attend& job = jobs[n];
        job = {};
        job.keys = cache.data();
        job.values = cache.data() + (mixed < size ? 0 : 300 * row_bytes(item, size));
        job.item = item;
        job.mixed = mixed;
        job.trunk = seen.trunk.data();
        job.sight = {seen.trunks[n], (int32_t)seen.paths[n].size(), seen.paths[n].data()};
        job.heads = heads;
        job.size = size;
        job.queries = &queries[(size_t)n * heads * size];
        job.out = &out[(size_t)n * heads * size];
        job.scores = &scores[n * heads * stride];
        job.totals = &totals[n * heads];
        job.stride = stride;
        job.room = heads > 3 ? 3 : heads;
        job.near = near.data();
        job.sinks = sinks;
        job.cap = sinks ? 2.0f : 0.0f;  // one case has both
    }
    k.attend(jobs.data(), count, alike);
    // Alone, and in pieces as by several threads: the same.
    Floats alone(out.size()), pieces(out.size());
    for (int n = 0; n < count; n++) {
        Attend job = jobs[n];
        const size_t at = (size_t)n * heads * size;
        job.out = &alone[at];
        k.attend(&job, 1, {0, 0, false});
        job.out = &pieces[at];
        job.room = heads;
        const int length = job.sight.length(), middle = length / 2;
        k.score(job, middle, length);
        k.score(job, 0, middle);
        for (int h = 0; h < heads; h++) {
            const float* sink = sinks ? sinks + h : nullptr;
            job.totals[h] = k.weigh(&job.scores[h * stride], length, sink, job.cap);
        }
        k.mix(job, 8, mixed);
        k.mix(job, 0, 8);
    }
    same(k.name, "attention alone", out, alone);
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
    // What cut-offs are found by.
    const int count = (int)logits.size();
    Floats heated(count), noise(count);
    const float most = k.heat(logits.data(), count, 0.7f, heated.data());
    std::vector<int32_t> near(count);
    for (float depth : {0.0f, 1.0f, 3.0f, 100.0f}) {
        const int found = k.at_least(heated.data(), count, most - depth, near.data());
        chosen.insert(chosen.end(), near.begin(), near.begin() + found);
        k.noise(near.data(), found, 7, 11, noise.data());
        const int32_t* bits = (const int32_t*)noise.data();
        chosen.insert(chosen.end(), bits, bits + found);
    }
    const double mass = k.mass(heated.data(), count, most);
    int32_t bits[2];
    memcpy(bits, &mass, sizeof mass);
    chosen.insert(chosen.end(), bits, bits + 2);
    return chosen;
}

static void compare_attention(const Kernels& k, int size, int item) {
    const Kernels& plain = *kPortable;
    const std::vector<uint8_t> cache = cache_of(size, item);
    for (int heads : {1, 2, 3, 4, 7}) {
        const Floats queries = normal((size_t)kNodesTogether * heads * size, 0.3f);
        const Floats sinks = normal(heads, 3);
        const auto compare_at = [&](const Sights& seen) {
            for (const float* given : {(const float*)nullptr, sinks.data()}) {
                const auto by = [&](const Kernels& which, int mixed) {
                    return attend_by(which, size, heads, seen, queries, cache, item, given, mixed);
                };
                same(k.name, given ? "attention with sinks" : "attention", by(k, size),
                     by(plain, size));
                if (size > 8) {
                    same(k.name, "latent attention", by(k, size - 8), by(plain, size - 8));
                }
            }
        };
        for (int trunk : {0, 7, 8, 15, 16, 49, 280}) {
            compare_at(sights_of(trunk, 1, 1, true));
            compare_at(sights_of(trunk, 5, 0, true));
            compare_at(sights_of(trunk, kNodesTogether, 1, true));
            compare_at(sights_of(trunk, 6, 1, false));
            compare_at(sights_of(trunk, 4, 4, true));
        }
    }
}

static void compare(const Kernels& k) {
    const Kernels& plain = *kPortable;
    for (float spread : {1e-20f, 0.01f, 1.0f, 30.0f, 1e5f}) {
        for (int count : {48, 64, 100, 576}) {
            const Floats x = normal(count, spread), w = normal(count, 1);
            same(k.name, "rows", rows_by(k, x, w), rows_by(plain, x, w));
            Floats odd(x);
            odd[5] = NAN, odd[count - 3] = INFINITY, odd[33] = -0.0f;
            same(k.name, "rows that are not finite", rows_by(k, odd, w), rows_by(plain, odd, w));
        }
        const Floats logits = normal(1003, spread);
        same(k.name, "choice", choices_by(k, logits), choices_by(plain, logits));
    }
    for (int source : {kFileQ4_0, kFileQ4_1, kFileQ8_0, kFileQ4_K, kFileQ5_K, kFileQ6_K, kFileQ4Z,
                       kFileMXFP4, kFileQ5_0}) {
        for (int rows = 1; rows <= 130; rows += rows < 17 ? 1 : 7) {
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
        for (int item : {kBlocks, kHalves, kFloats}) compare_attention(k, size, item);
    }
    printf("%s\n", k.name);
}

int main() {
#if defined(EMULATE_VNNI) || defined(EMULATE_WIDE)
    compare(kEmulated);
#else
    for (const char* name : {"avx512-amx", "avx512-vnni-512", "avx512-vnni", "avx-vnni", "avx2", "neon"}) {
        if (const Kernels* found = choose_kernels(name)) compare(*found);
    }
#endif
    return faults != 0;
}
