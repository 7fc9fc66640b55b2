// codes, scales = NVFP4 of the rows of x; see `quantize` and `quantize_scatter` in kbit/nvfp4/kernels.py.
//
//   x          Config::dtype [rows, columns]; 16-byte aligned where `wide`: columns is then a multiple of 16
//   slots      int32 [rows, copies] or null: row r is stored at each of slots[r, 0 .. copies - 1]
//   codes      uint8 [rows out, 8 * groups], 8-byte aligned; scales uint8 [rows out, groups]
//   groups     ceil(columns / 16); rows * groups < 2^31
//
// A thread quantizes 16 elements: 32 or 64 bytes in, 8 + 1 bytes out, both contiguous over a warp. Nothing
// is reduced across threads, so a row's bytes do not depend on its neighbours.
#include "config.h"
#include "nvfp4.cuh"

using D = Dense<Config::dtype>;

extern "C" __global__ void __launch_bounds__(256, 4)
    nvfp4_quantize(const u8* x, const int* slots, u8* codes, u8* scales, int rows, int columns, int groups,
                   int copies, float global_scale, int wide) {
    follow_previous(x, slots);
    const bool flat = wide != 0 && slots == nullptr;  // sub-block i is at 16 * i: no division
    const u32 total = u32(rows) * u32(groups);
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
        u32 row = 0, group = 0;
        float v[kSub];
        if (flat) {
            load_sub_block<D>(v, x + i64(i) * (kSub * D::kBytes), 0, columns, true);
        } else {
            row = i / u32(groups);
            group = i - row * u32(groups);
            load_sub_block<D>(v, x + i64(row) * columns * D::kBytes, int(group) * kSub, columns, wide != 0);
        }
        divide_all(v, global_scale);
        const Coded coded = quantize_sub_block<Config::ties_even>(v, Config::search);
        if (slots == nullptr) {
            store_coded(codes, scales, i, coded);
            continue;
        }
        for (int copy = 0; copy < copies; ++copy) {
            store_coded(codes, scales, i64(slots[i64(row) * copies + copy]) * groups + group, coded);
        }
    }
}
