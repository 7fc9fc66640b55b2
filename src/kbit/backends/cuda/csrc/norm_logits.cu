// A sum of rows, its RMS norm, and a router's logits of that, for few tokens: what rms_norm.cu and
// moe_logits.cu compute one after the other, bit for bit. Each block makes its token's norm for itself, which
// takes less than a launch, and the first of a token stores it.
//
//   x, added         [tokens, pieces * 8], float16, or bfloat16 with Config::bf16, of 16-byte pieces
//   weight           of the norm, [pieces * 8]; eps, plus_one and round_first as in rms_norm.cu
//   total, y         like x: the sum, rounded, and its norm
//   router, last, logits, experts  weight, last, logits and experts of moe_logits.cu, float32 as there
//
// A thread keeps its pieces of the norm and multiplies them by the weight's, which are on their way while the
// norm is made.
//
// grid: x experts / Config::experts, y tokens. Threads: whole warps for pieces / kPieces, as rms_norm.cu has
// for rows of so many columns
#include "config.h"
#include "heads.cuh"
#include "logits_block.cuh"

extern "C" __global__ void __launch_bounds__(kLogitsThreads, 1)
    norm_logits(const uint4* x, const uint4* added, const uint4* weight, uint4* total, uint4* y,
                const uint4* router, const uint4* last, u8* logits, int experts, int pieces, float eps,
                int plus_one, int round_first) {
    __shared__ float squared[32];
    launch_early();
    const int threads = int(blockDim.x), lane = threadIdx.x & 31, warp = int(threadIdx.x >> 5);
    const int expert = int(blockIdx.x) * kExperts;
    const RouterRows rows{router, last, experts, pieces};
    prefetch_rows(rows, expert);
    if (int(threadIdx.x) * kLine < pieces) {
        prefetch(weight + threadIdx.x * kLine);
    }
    wait_for_previous();
    launch_late();
    forget(x, added, weight, router, last);
    const u64 token = u64(blockIdx.y) * pieces;
    uint4 summed[kPieces], beside[kPieces], own[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        const int piece = int(threadIdx.x) + i * threads;
        const bool there = piece < pieces;
        summed[i] = there ? x[token + piece] : make_uint4(0, 0, 0, 0);
        beside[i] = there ? added[token + piece] : make_uint4(0, 0, 0, 0);
        own[i] = there ? weight[piece] : make_uint4(0, 0, 0, 0);
    }
    WeightPieces weights;
    weights.load(rows, expert, int(threadIdx.x));
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        summed[i] = sum_of(summed[i], beside[i]);
        squares = add_squares(squares, summed[i]);
    }
    squares = warp_sum(squares);
    if (lane == 0) {
        squared[warp] = squares;
    }
    __syncthreads();
    squares = warp_sum(lane < threads / 32 ? squared[lane] : 0.0f);
    const float factor = norm_factor(squares, pieces, eps), more = plus_one ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        const int piece = int(threadIdx.x) + i * threads;
        if (piece < pieces) {
            own[i] = normed(summed[i], own[i], factor, more, round_first);
            if (blockIdx.x == 0) {
                total[token + piece] = summed[i];
                y[token + piece] = own[i];
            }
        }
    }
    float sums[kExperts] = {};
    weights.add_products(sums, own);
    add_up(sums, [&](int e, float sum) {
        if (expert + e < experts) {
            store_logit(logits, u64(blockIdx.y) * experts + expert + e, sum);
        }
    });
}
