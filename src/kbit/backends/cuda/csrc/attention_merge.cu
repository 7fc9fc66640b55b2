// Attention to parts of a cache and to the tokens' own keys, put together.
//
//   parts   16-bit [splits, tokens, heads, 8 * pieces]: what each part gives alone; zeros if it has no keys
//   sums    float32 [heads, splits, tokens]: the logarithms of its weights' sums; inf where it has no keys,
//           or NaN
//   own     16-bit [tokens, heads, 8 * pieces], own_sums float32 [heads, tokens]: of the tokens' own
//   out     16-bit [tokens, heads, 8 * pieces]
//
// A thread has 16 bytes. grid: ceil(count / threads), count = tokens * heads * pieces
#include "config.h"
#include "rows.cuh"

using D = Dense<Config::bf16 ? 2 : 1>;

DEVICE bool is_infinite(float value) {
    return __float_as_uint(value) << 1 == 0xff000000u;
}

DEVICE void add_piece(float (&to)[8], uint4 piece, float factor) {
    const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        to[i] = __fmaf_rn(D::get(words, i), factor, to[i]);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    attention_merge(const uint4* parts, const float* sums, const uint4* own, const float* own_sums,
                    uint4* out, u32 count, int heads, int pieces, int tokens, int splits) {
    follow_previous(parts, sums, own, own_sums);
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) {
        return;
    }
    const u32 row = at / u32(pieces), token = row / u32(heads), head = row % u32(heads);
    const float its = own_sums[head * u32(tokens) + token];
    const float* const of_parts = sums + u64(head) * u32(splits) * u32(tokens) + token;
    float largest = its;
    for (int split = 0; split < splits; ++split) {
        const float sum = of_parts[u32(split) * u32(tokens)];
        largest = is_infinite(sum) ? largest : fmaxf(largest, sum);
    }
    float total[8] = {}, weight = __expf(its - largest), all = weight;
    add_piece(total, own[at], weight);
    for (int split = 0; split < splits; ++split) {
        const float sum = of_parts[u32(split) * u32(tokens)];
        const bool none = is_infinite(sum);
        weight = none ? 0.0f : __expf(sum - largest);
        all += weight;
        add_piece(total, parts[u64(u32(split)) * count + at], none ? 1.0f : weight);
    }
    const float one = __fdiv_rn(1.0f, all);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        total[i] *= one;
    }
    out[at] = D::piece(total);
}
