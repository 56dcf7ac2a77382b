// Which kernels this machine can run.
#include <cstring>

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
// Leaf 7.1, EAX bit 4. AVX2 being usable means that the system keeps 256-bit registers.
bool has_avx_vnni() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}
#endif

bool runs(const Kernels* kernels) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    if (kernels == &kAvx2) return avx2;
    if (kernels == &kAvx512Vnni) {
        return avx2 && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    }
    if (kernels == &kAvxVnni) return avx2 && has_avx_vnni();
#endif
    return kernels == &kPortable;
}

}  // namespace

const Kernels* choose_kernels(const char* name) {
    const Kernels* const best_first[] = {
#if defined(__x86_64__)
        &kAvx512Vnni,
        &kAvxVnni,
        &kAvx2,
#endif
        &kPortable,
    };
    for (const Kernels* kernels : best_first) {
        const bool named = !name || !*name || strcmp(name, kernels->name) == 0;
        if (named && runs(kernels)) return kernels;
    }
    return nullptr;
}

}  // namespace forerun
