// Which kernels this machine can run.
#include <cstring>
#include <initializer_list>

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

// Leaf 7.1, EAX bit 4. That the system keeps 256-bit registers is part of having AVX2.
bool has_avx_vnni() {
    unsigned eax, ebx, ecx, edx;
    return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}

bool has_avx512_vnni() {
    return has_avx2() && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

#endif

bool has_dot_products() {
#if defined(__aarch64__) && defined(__linux__)
    return getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
#else
    return true;  // Apple silicon
#endif
}

bool runs(const Kernels* kernels) {
    if (!kernels) return false;
#if defined(__x86_64__)
    if (kernels == kAvx512Vnni) return has_avx512_vnni();
    if (kernels == kAvxVnni) return has_avx_vnni();
    if (kernels == kAvx2) return has_avx2();
#endif
    return kernels != kNeon || has_dot_products();
}

}  // namespace

const Kernels* choose_kernels(const char* name) {
    for (const Kernels* kernels : {kAvx512Vnni, kAvxVnni, kAvx2, kNeon, kPortable}) {
        if (!runs(kernels)) continue;
        if (!name || !*name || strcmp(name, kernels->name) == 0) return kernels;
    }
    return nullptr;
}

}  // namespace forerun
