// Which kernels this machine can run.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "kernels.h"
#if defined(__x86_64__)
#include <cpuid.h>
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

// Whether one product takes less time than another: some processors clock down for 512-bit
// operations or do them in halves. The smallest of eight turns each, half a millisecond in all.
bool sooner(Product one, Product other) {
    constexpr int rows = 16;
    Matrix w;
    w.channels = 256;
    w.inputs = 576;
    const std::vector<uint8_t> tiles(w.blocks() * w.block_bytes());
    w.tiles = tiles.data();
    const std::vector<Group> x((size_t)rows / kLanes * w.groups());
    std::vector<float> out((size_t)rows * w.channels);
    double least[2] = {1e9, 1e9};
    for (int turn = 0; turn < 16; turn++) {
        const auto begin = std::chrono::steady_clock::now();
        (turn % 2 ? other : one)(w, x.data(), rows, 0, w.blocks(), {out.data(), w.channels, false});
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        least[turn % 2] = std::min(least[turn % 2], took.count());
    }
    return least[0] < least[1];
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
                const bool wins = sooner(kAvx512->product, kAvx512VnniProduct);
                found.insert(wins ? found.begin() : found.end(), *kAvx512);
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

}  // namespace forerun
