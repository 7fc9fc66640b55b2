// row_scale[r] = amax(|x[r]|) / global_scale / 2688, or 1 where that is not normal; see `row_scale` in
// kbit/nvfp4/kernels.py.
//
//   x          Config::dtype [rows, columns]; 16-byte aligned where `wide`: columns is then a multiple of 16
//   row_scale  float32 [rows]
//
// A block takes a row at a time, a thread 16 elements. A maximum has no order, so neither has the result.
#include "config.h"
#include "nvfp4.cuh"

using D = Dense<Config::dtype>;
constexpr int kWarps = 8;

extern "C" __global__ void __launch_bounds__(kWarps * 32)
    nvfp4_row_scale(const u8* x, float* row_scale, int rows, int columns, float global_scale, int wide) {
    __shared__ float of_warp[2][kWarps];
    follow_previous(x);
    const int lane = int(threadIdx.x & 31), warp = int(threadIdx.x >> 5);
    int odd = 0;  // the next row's maxima are written while this one's are read
    for (int row = int(blockIdx.x); row < rows; row += int(gridDim.x), odd ^= 1) {
        float amax = 0.0f;
        for (int first = int(threadIdx.x) * kSub; first < columns; first += kWarps * 32 * kSub) {
            float v[kSub];
            load_sub_block<D>(v, x + i64(row) * columns * D::kBytes, first, columns, wide != 0);
#pragma unroll
            for (int j = 0; j < kSub; ++j) {
                amax = larger(amax, fabsf(v[j]));
            }
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            amax = larger(amax, __shfl_xor_sync(kAll, amax, step));
        }
        if (lane == 0) {
            of_warp[odd][warp] = amax;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
#pragma unroll
            for (int i = 1; i < kWarps; ++i) {
                amax = larger(amax, of_warp[odd][i]);
            }
            row_scale[row] = row_scale_of(amax, global_scale);
        }
    }
}
