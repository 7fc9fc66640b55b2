// Rows of x as NVFP4, each divided by a factor of its own; see `quantize_rows` in kbit/nvfp4/kernels.py.
//
//   x          Config::dtype [rows, columns]; 16-byte aligned where `wide`: columns is then a multiple of 16
//   row_scale  float32 [rows], written
//   codes      uint8 [rows, 8 * groups], 8-byte aligned; scales uint8 [rows, groups]
//   groups     ceil(columns / 16)
//
// A block takes a row, a thread 16 elements at a time: it looks for the row's largest, and reads the row
// again, now from near, to quantize it. Two launches, of which the second read all from memory again,
// took 1.4 times as long for 4096 rows of 5120.
#include "config.h"
#include "nvfp4.cuh"

using D = Dense<Config::dtype>;
constexpr int kThreads = 256;

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    nvfp4_quantize_rows(const u8* x, float* row_scale, u8* codes, u8* scales, int rows, int columns,
                        int groups, float global_scale, int wide) {
    __shared__ float of_warp[2][kThreads / 32];
    follow_previous(x);
    int odd = 0;  // the next row's maxima are written while this one's are read
    for (int row = int(blockIdx.x); row < rows; row += int(gridDim.x), odd ^= 1) {
        const u8* from = x + i64(row) * columns * D::kBytes;
        float v[kSub], amax = 0.0f;
        for (int group = int(threadIdx.x); group < groups; group += int(blockDim.x)) {
            load_sub_block<D>(v, from, group * kSub, columns, wide != 0);
            amax = larger(amax, largest_of(v));
        }
        const float own = row_scale_of(largest_of_block(amax, of_warp[odd]), global_scale);
        if (threadIdx.x == 0) {
            row_scale[row] = own;
        }
        for (int group = int(threadIdx.x); group < groups; group += int(blockDim.x)) {
            load_sub_block<D>(v, from, group * kSub, columns, wide != 0);
            divide_all(v, global_scale);
            const bool is_short = D::kBytes == 2 && global_scale == 1.0f;
            if (!(is_short && divide_short(v, own))) {
                divide_all(v, own);
            }
            store_coded(codes, scales, i64(row) * groups + group,
                        quantize_sub_block<Config::ties_even>(v, Config::search));
        }
    }
}
