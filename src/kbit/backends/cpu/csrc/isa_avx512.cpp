// The kernels for AVX-512 F, BW, VL, DQ, VBMI and GFNI (Ice Lake, Zen 4 and later).
#include "decode_avx512.h"
#include "dequantize.h"
#include "linear_f32.h"
#include "quantize.h"

namespace kbit {

const Kernels* avx512_kernels() {
    static constexpr Kernels kernels = {"avx512_nobf16", decode_row,  kFloatLinear,
                                        nullptr,         measure_row, quantize_row};
    return &kernels;
}

}  // namespace kbit
