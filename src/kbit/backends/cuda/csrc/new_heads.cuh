// A new token's queries and keys, as append_heads.cu and attention_step.cu have them: normed and turned.
// "config.h" must be included before.
#pragma once

#include "heads.cuh"

// How queries and keys are normed: see rms_norm.cu.
struct NormRule {
    float eps;
    int plus_one, round_first;
};

// Piece `piece` of a head, of which LANES neighbouring lanes, 16 or 32, have a piece each, zeros behind the
// last: normed if it has a norm, then turned by its position's angles, where the first 2 * half pieces are.
template <int LANES>
DEVICE uint4 norm_and_turn(uint4 mine, const uint4* norm, const uint4* cos, const uint4* sin, bool there,
                           bool is_turned, int piece, int pieces, int half, NormRule rule) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const bool has_norm = there && norm, turns = there && is_turned && piece < 2 * half;
    const uint4 weight = has_norm ? norm[piece] : zero;
    const uint4 its_cos = turns ? cos[piece] : zero, its_sin = turns ? sin[piece] : zero;
    const float sum = sum_lanes(add_squares(0.0f, mine), LANES);
    if (has_norm) {
        mine = normed(mine, weight, norm_factor(sum, pieces, rule.eps), rule.plus_one ? 1.0f : 0.0f,
                      rule.round_first);
    }
    const bool low = piece < half;
    const int other = (int(threadIdx.x) - piece) % 32 + ((low ? piece + half : piece - half) & (LANES - 1));
    const uint4 its_other = make_uint4(__shfl_sync(kAll, mine.x, other), __shfl_sync(kAll, mine.y, other),
                                       __shfl_sync(kAll, mine.z, other), __shfl_sync(kAll, mine.w, other));
    return turns ? rotated(mine, its_cos, its_other, its_sin, low ? -1.0f : 1.0f) : mine;
}
