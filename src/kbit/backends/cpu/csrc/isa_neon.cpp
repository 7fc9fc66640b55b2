// The kernels for 64-bit ARM, all of which have NEON.
#include "decode_neon.h"
#include "dequantize.h"
#include "linear_f32.h"
#include "quantize.h"

namespace kbit {

const Kernels* neon_kernels() {
    static constexpr Kernels kernels = {"neon", decode_row, kFloatLinear, nullptr, measure_row, quantize_row};
    return &kernels;
}

}  // namespace kbit
