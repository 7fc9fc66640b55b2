// What the two kernels of latent attention share: how tokens are dealt, and the softmax's weights.
#pragma once

#include "config.h"
#include "heads.cuh"

constexpr int kTokens = Config::tokens;  // of a chunk
using H = Half<Config::bf16>;

// Chunks of a cache of `count` tokens.
DEVICE int chunks_of(int count) {
    return (count + kTokens - 1) / kTokens;
}
DEVICE float minus_infinity() {
    return __uint_as_float(0xff800000u);
}
// 2^(score - largest), 0 if there is no score yet.
DEVICE float weight_of(float score, float largest) {
    return largest == minus_infinity() ? 0.0f : exp2f(score - largest);
}
