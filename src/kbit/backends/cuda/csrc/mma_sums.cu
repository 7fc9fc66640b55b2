// The end of mma.cu where blocks split K: the parts' sums, added up in their order, become y.
//
//   partial   float32, as mma.cu leaves it; parts of K
//   scale, bias, y, m, n, gated, vector: as there
//
// grid: x blocks of rows, y of tokens, as there.
#include "mma.cuh"

extern "C" __global__ void __launch_bounds__(kFinishing, 1)
    mma_sums(const float4* partial, const float* scale, const u16* bias, u16* y, int m, int n, int gated,
             int vector, int parts) {
    follow_previous(partial, scale, bias);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u64 block = u64(blockIdx.y) * gridDim.x + blockIdx.x, blocks = u64(gridDim.y) * gridDim.x;
    Sums sums = {};
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            add_quad(sums, i, partial[((part * blocks + block) * kQuads + i) * kFinishing + threadIdx.x]);
        }
    }
    const Result result{scale, bias, y, m, n, gated, vector};
    result.finish(sums, int(blockIdx.x) * kRowWarps + warp, int(blockIdx.y) * kTokens, lane);
}
