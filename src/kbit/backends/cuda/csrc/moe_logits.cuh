// What kernels of a router's logits share: the rows of its weight, products of pieces, where results go.
#pragma once

#include "config.h"
#include "rows.cuh"

constexpr int kLine = 8;  // pieces of a line of L2

// Of `experts` rows the last may be elsewhere: the gate of a shared expert. Of experts that there are not, it
// is the last one's.
struct RouterRows {
    const uint4 *weight, *last;
    int experts, pieces;

    DEVICE const uint4* of(int expert) const {
        const bool is_last = last != nullptr && expert >= experts - 1;
        return is_last ? last : weight + u64(min(expert, experts - 1)) * pieces;
    }
};

// sum + the products of eight pairs
DEVICE float add_products(float sum, uint4 a, uint4 b) {
    using H = Half<Config::bf16>;
    const u32 u[4] = {a.x, a.y, a.z, a.w}, v[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum = __fmaf_rn(H::widen(u16(u[i])), H::widen(u16(v[i])), sum);
        sum = __fmaf_rn(H::widen(u16(u[i] >> 16)), H::widen(u16(v[i] >> 16)), sum);
    }
    return sum;
}

DEVICE void store_logit(u8* logits, u64 at, float sum) {
    if constexpr (Config::wide) {
        store_global<4>(logits + at * 4, __float_as_uint(sum));
    } else {
        store_global<2>(logits + at * 2, Half<Config::bf16>::narrow(sum));
    }
}
