// A token's step of multi-head latent attention, second half: the sums of latent_attention.cu's blocks, added
// up and divided by their weights.
//
//   sums     float32 [batch, splits, heads, 4 * Config::lanes], weights float2 [batch, splits, heads]
//   length   int64 [1], tokens in the cache before this one; room: for so many. Chunks of Config::tokens have
//            gone to splits in turn, so that the first ones have all
//   out      16-bit [batch, heads, 4 * Config::lanes]
//
// A warp has 128 columns of every so manieth split, added up ascending; then the warps' sums are, ascending.
// 0 where no token had a score above -inf.
//
// grid: (heads, batch, columns / 128), Config::warps warps at most
#include "latent.cuh"

constexpr int kLanes = Config::lanes, kMostWarps = Config::warps;
constexpr int kMostSplits = Config::splits, kAtOnce = Config::at_once;  // loads of a lane on their way

extern "C" __global__ void __launch_bounds__(32 * kMostWarps)
    latent_combine(const float4* sums, const float2* weights, const i64* length, uint2* out, int heads,
                   int splits, int room) {
    __shared__ float factors[kMostSplits];
    __shared__ float4 parts[kMostWarps * 32];
    __shared__ float all;
    follow_previous(sums, weights, length);
    const int head = blockIdx.x, batch = blockIdx.y, thread = threadIdx.x;
    const int warps = blockDim.x / 32, warp = thread / 32, lane = blockIdx.z * 32 + thread % 32;
    const int active = min(splits, chunks_of(int(min(*length + 1, i64(room)))));
    const i64 first = i64(batch) * splits * heads + head;
    if (thread < 32) {  // what the sums of a split count for, and all weights
        constexpr int kOwn = kMostSplits / 32;
        float2 its[kOwn];
        float largest = minus_infinity(), sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int split = i * 32 + thread;
            its[i] =
                split < active ? weights[first + i64(split) * heads] : make_float2(minus_infinity(), 0.0f);
            largest = fmaxf(largest, its[i].x);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, step));
        }
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const float factor = weight_of(its[i].x, largest);
            factors[i * 32 + thread] = factor;
            sum = __fmaf_rn(its[i].y, factor, sum);
        }
        sum = warp_sum(sum);
        if (thread == 0) {
            all = sum;
        }
    }
    __syncthreads();
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int begin = warp; begin < active; begin += kAtOnce * warps) {
        float4 v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int split = min(begin + i * warps, active - 1);
            v[i] = sums[(first + i64(split) * heads) * kLanes + lane];
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int split = begin + i * warps;
            if (split < active) {
                add_scaled(total, v[i], factors[split]);
            }
        }
    }
    parts[thread] = total;
    __syncthreads();
    if (warp == 0) {
        for (int other = 1; other < warps; ++other) {
            add_scaled(total, parts[other * 32 + thread], 1.0f);
        }
        const float one = one_over(all);
        out[(i64(batch) * heads + head) * kLanes + lane] =
            make_uint2(H::pack(total.x * one, total.y * one), H::pack(total.z * one, total.w * one));
    }
}
