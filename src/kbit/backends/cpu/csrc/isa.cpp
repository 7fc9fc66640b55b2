#include "isa.h"

namespace kbit {
namespace {

#if defined(__x86_64__) && (defined(KBIT_HAVE_AVX2) || defined(KBIT_HAVE_AVX2GFNI) || \
                            defined(KBIT_HAVE_AVX512) || defined(KBIT_HAVE_AVX512BF16))
#define HAS(feature) (__builtin_cpu_supports(feature) != 0)

// __builtin_cpu_supports also checks (xgetbv) that the operating system saves the registers.
bool has_avx2() {
    return HAS("avx2") && HAS("fma");
}
bool has_avx2gfni() {
    return has_avx2() && HAS("gfni");
}
bool has_avx512() {
    return has_avx2gfni() && HAS("avx512f") && HAS("avx512bw") && HAS("avx512vl") && HAS("avx512dq") &&
           HAS("avx512vbmi");
}
bool has_avx512bf16() {
    return has_avx512() && HAS("avx512bf16");
}
#undef HAS
#endif

std::vector<const Kernels*> find_kernels() {
    std::vector<const Kernels*> found;
#if defined(__x86_64__) && defined(KBIT_HAVE_AVX512BF16)
    if (has_avx512bf16()) {
        found.push_back(avx512bf16_kernels());
    }
#endif
#if defined(__x86_64__) && defined(KBIT_HAVE_AVX512)
    if (has_avx512()) {
        found.push_back(avx512_kernels());
    }
#endif
#if defined(__x86_64__) && defined(KBIT_HAVE_AVX2GFNI)
    if (has_avx2gfni()) {
        found.push_back(avx2gfni_kernels());
    }
#endif
#if defined(__x86_64__) && defined(KBIT_HAVE_AVX2)
    if (has_avx2()) {
        found.push_back(avx2_kernels());
    }
#endif
#if defined(__aarch64__) && defined(KBIT_HAVE_NEON)
    found.push_back(neon_kernels());
#endif
    found.push_back(portable_kernels());
    return found;
}

}  // namespace

const std::vector<const Kernels*>& supported_kernels() {
    static const std::vector<const Kernels*> found = find_kernels();
    return found;
}

}  // namespace kbit
