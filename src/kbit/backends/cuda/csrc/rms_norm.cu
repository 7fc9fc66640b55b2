// RMS norm of rows: y = x / sqrt(mean(x^2) + eps) * weight, in float32, rounded as models round it.
//
//   x, y    float16, or bfloat16 with Config::bf16: [rows, pieces * 8], 16-byte aligned
//   added   like x, or null: x + added, rounded and written to total, takes the place of x
//   weight  [pieces * 8] of the same dtype
//   lanes   of a row: 16, or whole warps. A block has as many rows as its threads allow, one if a row has
//           more than a warp
//   plus_one  the weight is stored minus 1
//   round_first  the quotient is rounded before it is multiplied by the weight, and the product again
//
// A thread keeps up to Config::pieces pieces of 16 bytes. Order of the sum of squares: a thread's by column,
// then lanes by halves, then warps by halves. Of the weight only the fetch to L2 goes ahead of the kernel in
// front: it may be what that kernel writes.
//
// grid: ceil(rows / rows of a block)
#include "config.h"
#include "heads.cuh"

constexpr int kLine = 8;          // pieces of a line of L2
constexpr u32 kFewBlocks = 1024;  // beyond, blocks of the next kernel would take the place of this one's

DEVICE uint4 sum_of(uint4 a, uint4 b) {
    float v[D::kPerPiece], w[D::kPerPiece];
    widen(v, a);
    widen(w, b);
#pragma unroll
    for (int i = 0; i < D::kPerPiece; ++i) {
        v[i] = __fadd_rn(v[i], w[i]);
    }
    return D::piece(v);
}

extern "C" __global__ void __launch_bounds__(1024)
    rms_norm(const uint4* x, const uint4* added, const uint4* weight, uint4* total, uint4* y, u64 rows,
             int pieces, int lanes, float eps, int plus_one, int round_first) {
    __shared__ float sums[32];
    if (gridDim.x <= kFewBlocks) {
        launch_early();
    }
    const int within = int(threadIdx.x) % lanes;
    const u64 row = u64(blockIdx.x) * (blockDim.x / u32(lanes)) + threadIdx.x / u32(lanes);
    if (within * kLine < pieces) {
        prefetch(weight + within * kLine);
    }
    wait_for_previous();
    launch_late();
    forget(x, added, weight);
    uint4 mine[Config::pieces], beside[Config::pieces], own[Config::pieces];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::pieces; ++i) {
        const int piece = within + i * lanes;
        const bool there = piece < pieces && row < rows;
        mine[i] = there ? x[row * u32(pieces) + u32(piece)] : make_uint4(0, 0, 0, 0);
        beside[i] = there && added ? added[row * u32(pieces) + u32(piece)] : make_uint4(0, 0, 0, 0);
        own[i] = there ? weight[piece] : make_uint4(0, 0, 0, 0);
    }
    if (added) {
#pragma unroll
        for (int i = 0; i < Config::pieces; ++i) {
            const int piece = within + i * lanes;
            mine[i] = sum_of(mine[i], beside[i]);
            if (piece < pieces && row < rows) {
                total[row * u32(pieces) + u32(piece)] = mine[i];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < Config::pieces; ++i) {
        sum = add_squares(sum, mine[i]);
    }
    sum = sum_lanes(sum, min(lanes, 32));
    if (lanes > 32) {
        const int lane = threadIdx.x & 31;
        if (lane == 0) {
            sums[threadIdx.x >> 5] = sum;
        }
        __syncthreads();
        sum = warp_sum(lane < lanes / 32 ? sums[lane] : 0.0f);
    }
    const float factor = norm_factor(sum, pieces, eps), more = plus_one ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < Config::pieces; ++i) {
        const int piece = within + i * lanes;
        if (piece < pieces && row < rows) {
            y[row * u32(pieces) + u32(piece)] = normed(mine[i], own[i], factor, more, round_first);
        }
    }
}
