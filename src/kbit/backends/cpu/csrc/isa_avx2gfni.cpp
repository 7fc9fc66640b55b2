// The kernels for AVX2, FMA and GFNI (Alder Lake, Zen 4 and later).
#include "decode_avx2gfni.h"
#include "dequantize.h"
#include "linear_f32.h"
#include "quantize.h"

namespace kbit {

const Kernels* avx2gfni_kernels() {
    static constexpr Kernels kernels = {"avx2", decode_row, kFloatLinear, nullptr, measure_row, quantize_row};
    return &kernels;
}

}  // namespace kbit
