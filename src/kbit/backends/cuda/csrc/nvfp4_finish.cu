// y[r, n] = round((sum * w_scale) * row_scale[r]): what is done with an exact sum, after K was split over
// blocks.
//
//   partial    int64 [m, n], units of 2^-20
//   row_scale  float32 [m] or null; y [m, n] of dtype `out_dtype` (0 float32, 1 float16, 2 bfloat16)
#include "nvfp4_decode.cuh"

extern "C" __global__ void __launch_bounds__(256)
    nvfp4_finish(const i64* partial, const float* row_scale, void* y, i64 total, int n, float w_scale,
                 int out_dtype) {
    follow_previous(partial, row_scale);
    for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += i64(gridDim.x) * blockDim.x) {
        const float factor = row_scale != nullptr ? row_scale[i / n] : 1.0f;
        store_exact(y, i, partial[i], w_scale, factor, out_dtype);
    }
}
