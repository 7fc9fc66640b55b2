// The kernels in plain C++, for any little-endian CPU.
#include "decode_portable.h"
#include "dequantize.h"
#include "linear_f32.h"
#include "quantize.h"

namespace kbit {

const Kernels* portable_kernels() {
    static constexpr Kernels kernels = {"portable", decode_row,  kFloatLinear,
                                        nullptr,    measure_row, quantize_row};
    return &kernels;
}

}  // namespace kbit
