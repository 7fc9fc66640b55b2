// RMS norm of rows: y = x / sqrt(mean(x^2) + eps) * weight, in float32, rounded as models round it.
//
//   x       float16, or bfloat16 with Config::bf16: rows of pieces * 8, 16-byte aligned. Row r is `outer`
//           pieces times r / inner and `step` pieces times r % inner behind x
//   y       like x, contiguous
//   added   like y, or null: x + added, rounded and written to total, takes the place of x; Config::rows is 1
//   weight  [pieces * 8] of the same dtype
//   lanes   of a row: 16, or whole warps. A block has as many rows at a time as its threads allow, one if a
//           row has more than a warp
//   plus_one  the weight is stored minus 1
//   round_first  the quotient is rounded before it is multiplied by the weight, and the product again
//
// A thread keeps up to Config::pieces pieces of 16 bytes of Config::rows rows: more than one of many short
// rows, or too little would be on its way to keep memory busy. Order of the sum of squares: a thread's by
// column, then lanes by halves, then warps by halves. Of the weight only the fetch to L2 goes ahead of the
// kernel in front: it may be what that kernel writes.
//
// grid: ceil(rows / rows of a block)
#include "config.h"
#include "heads.cuh"

constexpr int kLine = 8;          // pieces of a line of L2
constexpr u32 kFewBlocks = 1024;  // beyond, blocks of the next kernel would take the place of this one's

extern "C" __global__ void __launch_bounds__(Config::rows > 1 ? 128 : 1024)
    rms_norm(const uint4* x, const uint4* added, const uint4* weight, uint4* total, uint4* y, u64 outer,
             u64 step, u64 rows, int inner, int pieces, int lanes, float eps, int plus_one, int round_first) {
    constexpr int kPieces = Config::pieces, kRows = Config::rows;
    static_assert(kPieces == 1 || kRows == 1);
    __shared__ float sums[32];
    if (gridDim.x <= kFewBlocks) {
        launch_early();
    }
    const int within = int(threadIdx.x) % lanes;
    const u32 groups = blockDim.x / u32(lanes);
    const u64 first = u64(blockIdx.x) * (groups * kRows) + threadIdx.x / u32(lanes);
    if (within * kLine < pieces) {
        prefetch(weight + within * kLine);
    }
    wait_for_previous();
    launch_late();
    forget(x, added, weight);
    // Item i: piece within + i % kPieces * lanes of row first + i / kPieces * groups.
    constexpr int kItems = kPieces * kRows;
    const auto piece_of = [&](int i) { return within + i % kPieces * lanes; };
    const auto row_of = [&](int i) { return first + u32(i / kPieces) * groups; };
    const auto is_there = [&](int i) { return piece_of(i) < pieces && row_of(i) < rows; };
    const auto place_of = [&](int i) { return row_of(i) * u32(pieces) + u32(piece_of(i)); };
    uint4 mine[kItems], own[kPieces];
    float sum[kRows] = {};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        own[i] = piece_of(i) < pieces ? weight[piece_of(i)] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
        u64 at = row_of(i) * outer;
        if (inner > 1) {
            const u32 row = u32(row_of(i)), place = row / u32(inner);
            at = place * outer + (row - place * u32(inner)) * step;
        }
        mine[i] = is_there(i) ? x[at + u32(piece_of(i))] : make_uint4(0, 0, 0, 0);
    }
    if (kRows == 1 && added) {
        uint4 beside[kPieces];
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            beside[i] = is_there(i) ? added[place_of(i)] : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            mine[i] = sum_of(mine[i], beside[i]);
            if (is_there(i)) {
                total[place_of(i)] = mine[i];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
        sum[i / kPieces] = add_squares(sum[i / kPieces], mine[i]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        sum[r] = sum_lanes(sum[r], min(lanes, 32));
    }
    if (kRows == 1 && lanes > 32) {
        const int lane = threadIdx.x & 31;
        if (lane == 0) {
            sums[threadIdx.x >> 5] = sum[0];
        }
        __syncthreads();
        sum[0] = warp_sum(lane < lanes / 32 ? sums[lane] : 0.0f);
    }
    const float more = plus_one ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
        const float factor = norm_factor(sum[i / kPieces], pieces, eps);
        if (is_there(i)) {
            y[place_of(i)] = normed(mine[i], own[i % kPieces], factor, more, round_first);
        }
    }
}
