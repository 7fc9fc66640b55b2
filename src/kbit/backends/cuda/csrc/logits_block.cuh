// What moe_logits.cu and norm_logits.cu share: a block has Config::experts experts, each thread of it every
// blockDim.x-th piece of their rows. Order of sums: a thread's by k, then lanes by halves, then warps by
// halves, so that they do not depend on how many experts and tokens a block has.
#pragma once

#include "moe_logits.cuh"

constexpr int kExperts = Config::experts;
constexpr int kPieces = Config::pieces;  // of x, and of each expert's weight, that a thread has in flight
constexpr int kLogitsThreads = Config::threads;  // at most

// The weights that kPieces pieces of x meet, every blockDim.x-th from `first` on.
struct WeightPieces {
    uint4 w[kExperts][kPieces][kOfWeight];

    DEVICE void load(const RouterRows& rows, int expert, int first) {
#pragma unroll
        for (int e = 0; e < kExperts; ++e) {
            const uint4* const row = rows.of(expert + e);
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                const int piece = first + i * int(blockDim.x);
#pragma unroll
                for (int j = 0; j < kOfWeight; ++j) {
                    w[e][i][j] = piece < rows.pieces ? row[piece * kOfWeight + j] : make_uint4(0, 0, 0, 0);
                }
            }
        }
    }
    // Adds each expert's products with these pieces of x.
    DEVICE void add_products(float* sums, const uint4 (&x)[kPieces]) const {
        using X = Dense<Config::bf16 ? 2 : 1>;
        using W = Dense<Config::wide_weight ? 0 : Config::bf16 ? 2 : 1>;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const u32 u[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
            for (int e = 0; e < kExperts; ++e) {
#pragma unroll
                for (int j = 0; j < kOfWeight; ++j) {
                    const uint4 own = w[e][i][j];
                    const u32 v[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
                    for (int n = 0; n < W::kPerPiece; ++n) {
                        sums[e] = __fmaf_rn(X::get(u, j * W::kPerPiece + n), W::get(v, n), sums[e]);
                    }
                }
            }
        }
    }
};

// The fetch to L2 of a block's weights.
DEVICE void prefetch_rows(const RouterRows& rows, int expert) {
    const int lines = (rows.pieces * kOfWeight + kLine - 1) / kLine;
#pragma unroll
    for (int e = 0; e < kExperts; ++e) {
        const uint4* const row = rows.of(expert + e);
        for (int line = int(threadIdx.x); line < lines; line += int(blockDim.x)) {
            prefetch(row + line * kLine);
        }
    }
}

// Adds up each of the threads' sums; some thread of the block has store(i, sum i).
template <int COUNT, class STORE>
DEVICE void add_up(float (&sums)[COUNT], STORE store) {
    __shared__ float parts[COUNT * 32];
    const int lane = int(threadIdx.x) & 31, warp = int(threadIdx.x) >> 5, warps = int(blockDim.x) >> 5;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        sums[i] = warp_sum(sums[i]);
        if (lane == 0) {
            parts[i * 32 + warp] = sums[i];
        }
    }
    __syncthreads();
    for (int i = warp; i < COUNT; i += warps) {
        const float sum = warp_sum(lane < warps ? parts[i * 32 + lane] : 0.0f);
        if (lane == 0) {
            store(i, sum);
        }
    }
}
