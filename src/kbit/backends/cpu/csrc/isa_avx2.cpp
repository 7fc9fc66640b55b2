// The kernels for AVX2 and FMA (Haswell, Zen 1 and later), for CPUs without GFNI.
#include "decode_avx2.h"
#include "dequantize.h"
#include "linear_f32.h"
#include "quantize.h"

namespace kbit {

const Kernels* avx2_kernels() {
    static constexpr Kernels kernels = {"avx2_nogfni", decode_row,  kFloatLinear,
                                        nullptr,       measure_row, quantize_row};
    return &kernels;
}

}  // namespace kbit
