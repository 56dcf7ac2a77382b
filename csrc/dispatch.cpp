// Which kernels this machine can run.
#include <cstring>

#include "kernels.h"
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace forerun {
namespace {

bool runs(const Kernels* kernels) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    if (kernels == &kAvx2) return avx2;
#endif
    return kernels == &kPortable;
}

}  // namespace

const Kernels* choose_kernels(const char* name) {
    const Kernels* const best_first[] = {
#if defined(__x86_64__)
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
