// A token's step of multi-head latent attention, second half: the sums of latent_attention.cu's blocks, added
// up and divided by their weights.
//
//   sums     float32 [batch, splits, heads, 4 * Config::lanes], weights float2 [batch, splits, heads]
//   length   int64 [1], tokens in the cache before this one; room: for so many. Chunks of 32 tokens have gone
//            to splits in turn, so that the first ones have all
//   out      16-bit [batch, heads, 4 * Config::lanes]
//
// Splits are added up ascending, sums and weights alike; 0 where no token had a score above -inf.
//
// grid: (heads, batch), Config::lanes threads, 4 columns each
#include "config.h"
#include "heads.cuh"

constexpr int kTokens = 32;  // of a chunk
using H = Half<Config::bf16>;

extern "C" __global__ void __launch_bounds__(Config::lanes)
    latent_combine(const float4* sums, const float2* weights, const i64* length, uint2* out, int heads,
                   int splits, int room) {
    follow_previous(sums, weights, length);
    const int head = blockIdx.x, batch = blockIdx.y, thread = threadIdx.x;
    const i64 count = min(*length + 1, i64(room)), chunks = (count + kTokens - 1) / kTokens;
    const int active = int(min(i64(splits), chunks));
    const i64 first = i64(batch) * splits * heads + head;
    const float none = __uint_as_float(0xff800000u);
    float largest = none;
    for (int split = 0; split < active; ++split) {
        largest = fmaxf(largest, weights[first + i64(split) * heads].x);
    }
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float all = 0.0f;
#pragma unroll 4
    for (int split = 0; split < active; ++split) {
        const i64 place = first + i64(split) * heads;
        const float2 its = weights[place];
        const float4 v = sums[place * Config::lanes + thread];
        const float factor = its.x == none ? 0.0f : exp2f(its.x - largest);
        total.x = __fmaf_rn(v.x, factor, total.x);
        total.y = __fmaf_rn(v.y, factor, total.y);
        total.z = __fmaf_rn(v.z, factor, total.z);
        total.w = __fmaf_rn(v.w, factor, total.w);
        all = __fmaf_rn(its.y, factor, all);
    }
    const float one = all > 0.0f ? __fdiv_rn(1.0f, all) : 0.0f;
    out[(i64(batch) * heads + head) * Config::lanes + thread] =
        make_uint2(H::pack(total.x * one, total.y * one), H::pack(total.z * one, total.w * one));
}
