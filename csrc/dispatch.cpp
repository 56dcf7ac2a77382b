// Which kernels this machine can run.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "kernels.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace forerun {
namespace {

#if defined(__x86_64__)

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

// Leaf 7.1, EAX bit 4. That the system keeps 256-bit registers is part of AVX2.
bool has_avx_vnni() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}

bool has_avx512_vnni() {
    return __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

// AVX2's kernels under another name, with products of their own.
Kernels with(const char* name, Product product) {
    Kernels kernels = *kAvx2;
    kernels.name = name;
    kernels.product = product;
    return kernels;
}

// 512-bit vectors, and a system that keeps their registers.
bool has_avx512_wide() {
    return has_avx512_vnni() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw");
}

// A product of some rows that are no zeros, with weights of some format.
struct Trial {
    Matrix w;
    std::vector<uint8_t> tiles;
    std::vector<Group> x;

    Trial(Format format, int rows) {
        w.format = format;
        w.channels = 256;
        w.inputs = 512;
        tiles.resize(w.blocks() * w.block_bytes());
        for (size_t i = 0; i < tiles.size(); i++) tiles[i] = (uint8_t)(i * 37 % 59);  // Finite scales.
        w.tiles = tiles.data();
        x.resize((size_t)(rows + kLanes - 1) / kLanes * w.groups());
        std::vector<float> row(w.inputs);
        for (int r = 0; r < rows; r++) {
            for (int i = 0; i < w.inputs; i++) row[i] = (float)((i + 3 * r) % 17 - 8);
            kPortable->quantise(row.data(), w.inputs, &x[(size_t)(r / kLanes) * w.groups()], r % kLanes);
        }
    }
    // Seconds that it takes.
    double by(Product product, int rows, std::vector<float>& out) const {
        out.resize((size_t)rows * w.channels);
        const auto begin = std::chrono::steady_clock::now();
        product(w, x.data(), rows, 0, w.blocks(), {out.data(), w.channels, false});
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        return took.count();
    }
};

// Whether one product takes less time than another: some processors clock down for 512-bit
// operations or do them in halves. The smallest of eight turns each, half a millisecond in all.
bool sooner(Product one, Product other, int rows) {
    const Trial trial(kQ8, rows);
    std::vector<float> out;
    double least[2] = {1e9, 1e9};
    for (int turn = 0; turn < 16; turn++) {
        double& mine = least[turn % 2];
        mine = std::min(mine, trial.by(turn % 2 ? other : one, rows, out));
    }
    return least[0] < least[1];
}

constexpr int kFewestTiled = 4;   // rows that tiles are tried with at least
constexpr int kMostTiled = 64;    // and at most
int tiled_from = kMostTiled;      // rows from which on they are sooner; set before any product is made
std::string amx_left_out;

void product_by_rows(const Matrix& w, const Group* x, int rows, int first, int last, Target out) {
    (rows >= tiled_from ? kAmxProduct : kAvx512->product)(w, x, rows, first, last, out);
}

// Leaf 7, EDX bits 24 and 25, and the system's permission, which it gives to the whole process.
bool has_amx() {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx >> 24 & 3) != 3) return false;
#if defined(__linux__)
    constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    if (syscall(SYS_arch_prctl, request, tile_data) == 0) return true;
    amx_left_out = std::string("the system does not permit it: ") + strerror(errno);
#else
    amx_left_out = "how to ask this system for it is not known here";
#endif
    return false;
}

// Whether tiles give the bits that other products give, and take less time from some number of rows
// on, which `tiled_from` becomes.
bool tiles_win() {
    for (const Format format : {kQ8, kQ4, kQ4K, kQ6K, kMX4, kQ5, kL4K, kQ3K, kQ2K, kL3K}) {
        for (const int rows : {5, 16, 33}) {
            const Trial trial(format, rows);
            std::vector<float> one, other;
            trial.by(kAmxProduct, rows, one);
            trial.by(kAvx512->product, rows, other);
            if (memcmp(one.data(), other.data(), one.size() * sizeof(float)) != 0) {
                amx_left_out = "its products are not those of other instructions";
                return false;
            }
        }
    }
    int rows = kMostTiled;
    while (rows >= kFewestTiled && sooner(kAmxProduct, kAvx512->product, rows)) rows /= 2;
    tiled_from = std::min(2 * rows, kMostTiled);
    if (rows < kMostTiled) return true;
    amx_left_out = "products take no less time by it";
    return false;
}

#endif

bool has_dot_products() {
#if defined(__aarch64__) && defined(__linux__)
    return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#else
    return true;  // Apple silicon
#endif
}

// All that this machine runs, best first. The same bits by any of them.
std::vector<Kernels> usable() {
    std::vector<Kernels> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (kAvx2 && has_avx2()) {
        if (kAvx512VnniProduct && has_avx512_vnni()) {
            found.push_back(with("avx512-vnni", kAvx512VnniProduct));
            if (kAvx512 && has_avx512_wide()) {
                const bool wins = sooner(kAvx512->product, kAvx512VnniProduct, 16);
                found.insert(wins ? found.begin() : found.end(), *kAvx512);
                if (kAmxProduct && has_amx() && tiles_win()) {
                    found.insert(found.begin(), *kAvx512);
                    found.front().name = "avx512-amx";
                    found.front().product = product_by_rows;
                }
            }
        }
        if (kAvxVnniProduct && has_avx_vnni()) found.push_back(with("avx-vnni", kAvxVnniProduct));
        found.push_back(*kAvx2);
    }
#endif
    if (kNeon && has_dot_products()) found.push_back(*kNeon);
    found.push_back(*kPortable);
    return found;
}

}  // namespace

const Kernels* choose_kernels(const char* name) {
    static const std::vector<Kernels> all = usable();
    for (const Kernels& kernels : all) {
        if (!name || !*name || strcmp(name, kernels.name) == 0) return &kernels;
    }
    return nullptr;
}

const char* amx_fault() {
#if defined(__x86_64__)
    choose_kernels("");
    return amx_left_out.c_str();
#else
    return "";
#endif
}

}  // namespace forerun
