// out = round(((magnitude * scale) * global_scale) * row_scale), the first product being exact.
//
//   codes      uint8 [rows, 8 * groups], 8-byte aligned; scales uint8 [rows, groups]
//   row_scale  float32 [rows] or null
//   out        Config::dtype [rows, 16 * groups], 16-byte aligned
//
// A thread decodes 16 elements. Memory-bound: 9 bytes in, 32 or 64 out. The next kernel may start at once:
// the products that read this fill their tables meanwhile.
#include "config.h"
#include "nvfp4.cuh"

using D = Dense<Config::dtype>;
constexpr int kPieces = kSub * D::kBytes / 16;

extern "C" __global__ void __launch_bounds__(256)
    nvfp4_dequantize(const uint2* codes, const u8* scales, const float* row_scale, u8* out, u32 total,
                     int groups, float global_scale) {
    follow_previous(codes, scales, row_scale);
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
        const uint2 code = __ldg(codes + i);
        const float scale = decode_ue4m3(scales[i]);
        const float own = row_scale != nullptr ? row_scale[i / u32(groups)] : 1.0f;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            float v[D::kPerPiece];
#pragma unroll
            for (int j = 0; j < D::kPerPiece; ++j) {
                const int element = piece * D::kPerPiece + j;
                v[j] = __fmul_rn(__fmul_rn(code_value(code, element), scale), global_scale);
                if (row_scale != nullptr) {
                    v[j] = __fmul_rn(v[j], own);
                }
            }
            store16(out + i64(i) * (kSub * D::kBytes) + piece * 16, D::piece(v));
        }
    }
}
