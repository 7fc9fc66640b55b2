// A sum of rows, its RMS norm, and a router's logits of that, for few tokens: what rms_norm.cu and
// moe_logits.cu compute one after the other, bit for bit. Each block makes its token's norm for itself, which
// takes less than a launch, and the first of a token stores it.
//
//   x, added         [tokens, pieces * 8], float16, or bfloat16 with Config::bf16, of 16-byte pieces
//   weight           of the norm, [pieces * 8]; eps, plus_one and round_first as in rms_norm.cu
//   total, y         like x: the sum, rounded, and its norm
//   router, last, logits, experts  weight, last, logits and experts of moe_logits.cu, float32 as there
//
// A warp has an expert, a thread kPieces pieces of the sum. The router's first pieces are on their way while
// the norm is made. Shared memory: those of kAtOnce pieces of every thread, then the normed row.
//
// grid: x experts / warps of a block, y tokens. Threads: whole warps for pieces / kPieces
#include "config.h"
#include "heads.cuh"
#include "moe_logits.cuh"

constexpr int kPieces = 2;              // as rms_norm.cu has for rows of so many columns
constexpr int kAtOnce = 8 / kOfWeight;  // pieces of x whose weights a lane has in flight

extern "C" __global__ void __launch_bounds__(1024)
    norm_logits(const uint4* x, const uint4* added, const uint4* weight, uint4* total, uint4* y,
                const uint4* router, const uint4* last, u8* logits, int experts, int pieces, float eps,
                int plus_one, int round_first) {
    extern __shared__ uint4 staged[];
    __shared__ float sums[32];
    launch_early();
    const int threads = int(blockDim.x), lane = threadIdx.x & 31, warp = int(threadIdx.x >> 5);
    const int expert = int(blockIdx.x) * (threads / 32) + warp;
    const int stride = threads * 16;
    const u32 base = shared_address(staged), mine = base + threadIdx.x * 16,
              row = base + kAtOnce * kOfWeight * stride;
    const uint4* from = RouterRows{router, last, experts, pieces}.of(expert);
    for (int line = lane; line < (pieces * kOfWeight + kLine - 1) / kLine; line += 32) {
        prefetch(from + line * kLine);
    }
    if (int(threadIdx.x) * kLine < pieces) {
        prefetch(weight + threadIdx.x * kLine);
    }
    wait_for_previous();
    launch_late();
    forget(x, added, weight, from);
    const auto stage = [&](int first) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int piece = first + i * 32;
            stage_weight(mine + i * kOfWeight * stride, stride, from, piece, piece < pieces);
        }
    };
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
    stage(lane);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        summed[i] = sum_of(summed[i], beside[i]);
        squares = add_squares(squares, summed[i]);
    }
    squares = warp_sum(squares);
    if (lane == 0) {
        sums[warp] = squares;
    }
    __syncthreads();
    squares = warp_sum(lane < threads / 32 ? sums[lane] : 0.0f);
    const float factor = norm_factor(squares, pieces, eps), more = plus_one ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        const int piece = int(threadIdx.x) + i * threads;
        if (piece < pieces) {
            const uint4 result = normed(summed[i], own[i], factor, more, round_first);
            store_shared4(row + piece * 16, result);
            if (blockIdx.x == 0) {
                total[token + piece] = summed[i];
                y[token + piece] = result;
            }
        }
    }
    __syncthreads();
    float sum = 0.0f;
    for (int first = lane; first < pieces; first += kAtOnce * 32) {
        if (first > lane) {
            stage(first);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int piece = first + i * 32;
            if (piece < pieces) {
                sum =
                    add_products(sum, load_shared4(row + piece * 16), mine + i * kOfWeight * stride, stride);
            } else {
                sum = __fadd_rn(sum, 0.0f);  // as products of zeros do to -0
            }
        }
    }
    sum = warp_sum(sum);
    if (lane == 0 && expert < experts) {
        store_logit(logits, u64(blockIdx.y) * experts + expert, sum);
    }
}
