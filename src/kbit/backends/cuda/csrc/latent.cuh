// What the two kernels of latent attention share: how tokens are dealt.
#pragma once

#include "config.h"
#include "heads.cuh"
#include "softmax.cuh"

constexpr int kTokens = Config::tokens;  // of a chunk
using H = Half<Config::bf16>;

// Chunks of a cache of `count` tokens.
DEVICE int chunks_of(int count) {
    return (count + kTokens - 1) / kTokens;
}
