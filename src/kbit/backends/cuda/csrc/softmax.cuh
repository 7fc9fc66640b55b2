// Weights of attention by powers of two: scores are multiplied by log2(e) first.
#pragma once

#include "common.cuh"

constexpr float kLog2E = 1.4426950408889634f;

DEVICE float minus_infinity() {
    return __uint_as_float(0xff800000u);
}
// A mask's number, likewise. The least of bfloat16, which many masks have, stays: its product would be -inf,
// and where all tokens are masked by it, all count alike.
DEVICE float masking(float mask) {
    return mask < -2e38f ? mask : mask * kLog2E;
}
// 2^(score - largest), 0 if there is no score yet. `largest` is of numbers: a score that is none gives none.
DEVICE float weight_of(float score, float largest) {
    return score == minus_infinity() ? 0.0f : exp2f(score - largest);
}
// What sums are multiplied by: 0 where no score was above -inf.
DEVICE float one_over(float weights) {
    return weights == 0.0f ? 0.0f : __fdiv_rn(1.0f, weights);
}
