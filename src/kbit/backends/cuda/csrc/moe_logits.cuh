// What kernels of a router's logits share: the rows of its weight, where results go.
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

DEVICE void store_logit(u8* logits, u64 at, float sum) {
    if constexpr (Config::wide) {
        store_global<4>(logits + at * 4, __float_as_uint(sum));
    } else {
        store_global<2>(logits + at * 2, Half<Config::bf16>::narrow(sum));
    }
}
