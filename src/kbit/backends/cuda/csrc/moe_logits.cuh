// What kernels of a router's logits share: the rows of its weight, products of pieces, where results go.
#pragma once

#include "config.h"
#include "rows.cuh"

constexpr int kLine = 8;  // pieces of a line of L2
// Pieces of the weight that a piece of x meets: weights are of x's dtype, or float32.
constexpr int kOfWeight = Config::wide_weight ? 2 : 1;

// Of `experts` rows the last may be elsewhere: the gate of a shared expert. Of experts that there are not, it
// is the last one's.
struct RouterRows {
    const uint4 *weight, *last;
    int experts, pieces;

    DEVICE const uint4* of(int expert) const {
        const bool is_last = last != nullptr && expert >= experts - 1;
        return is_last ? last : weight + u64(min(expert, experts - 1)) * (pieces * kOfWeight);
    }
};

// sum + the products of eight pairs, of a piece of x and those of the weight from a shared address on, so
// many bytes from each other
DEVICE float add_products(float sum, uint4 x, u32 weight, int stride) {
    using X = Dense<Config::bf16 ? 2 : 1>;
    using W = Dense<Config::wide_weight ? 0 : Config::bf16 ? 2 : 1>;
    const u32 u[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < kOfWeight; ++j) {
        const uint4 w = load_shared4(weight + j * stride);
        const u32 v[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int i = 0; i < W::kPerPiece; ++i) {
            sum = __fmaf_rn(X::get(u, j * W::kPerPiece + i), W::get(v, i), sum);
        }
    }
    return sum;
}

// Copies the pieces of a weight's row that piece `piece` of x meets to a shared address, or zeros where that
// is not `there`; so many bytes from each other.
DEVICE void stage_weight(u32 to, int stride, const uint4* row, int piece, bool there) {
#pragma unroll
    for (int j = 0; j < kOfWeight; ++j) {
        stage16_if(to + j * stride, row + (there ? piece * kOfWeight + j : 0), there);
    }
}

DEVICE void store_logit(u8* logits, u64 at, float sum) {
    if constexpr (Config::wide) {
        store_global<4>(logits + at * 4, __float_as_uint(sum));
    } else {
        store_global<2>(logits + at * 2, Half<Config::bf16>::narrow(sum));
    }
}
