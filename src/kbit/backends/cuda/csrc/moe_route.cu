// The experts of every token, and their weights, from a router's logits, in one launch: scores (softmax, or
// sigmoid), the `choices` largest by score (plus bias), weights that sum to 1 if `normalize`, times `factor`.
//
//   logits   [tokens, experts] of Config::dtype (Dense in rows.cuh)
//   bias     float32 [experts], added to scores for the choice alone; null: none
//   ids      int64 [tokens, choices], by falling score; of equal scores the smaller id comes first, NaN is
//            the largest
//   weights  [tokens, choices] of the logits' dtype, rounded once from float32
//   shared   0, or all tokens have one more choice, the last: id `experts`, of weight 1 (kOne), or the
//   sigmoid
//            of a logit in one more column (kSigmoid)
//
// A warp has a token, and a lane the experts lane, lane + 32, ...: Config::per_lane of them, as keys whose
// order as integers is that of the scores. A round finds the largest key and the smallest id that has it, by
// redux.sync, and takes it out.
//
// grid: x tokens, one for each warp of a block, at most Config::warps. At most 32 choices: a lane each.
#include "config.h"
#include "rows.cuh"

using D = Dense<Config::dtype>;
constexpr int kPer = Config::per_lane;
enum Shared { kNone, kSigmoid, kOne };
constexpr u32 kMinusInfinity = 0xff800000u;

DEVICE float load_logit(const u8* from) {
    const u32 bits = load_global<D::kBytes>(from);
    return D::get(&bits, 0);
}

// Larger for larger values, largest for NaN, and never 0.
DEVICE u32 key_of(float value) {
    const u32 bits = __float_as_uint(value);
    return value != value ? ~0u : bits ^ (bits >> 31 ? ~0u : 1u << 31);
}

DEVICE float larger(float a, float b) {
    return b > a || b != b ? b : a;
}
DEVICE float warp_max(float value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        value = larger(value, __shfl_xor_sync(kAll, value, step));
    }
    return value;
}

// A lane's values from FROM on, by pairs: few of them wait for each other.
template <int FROM = 0, int COUNT = kPer, class T, class F>
DEVICE T fold(const T (&values)[kPer], F f) {
    if constexpr (COUNT == 1) {
        return values[FROM];
    } else {
        return f(fold<FROM, COUNT / 2>(values, f), fold<FROM + COUNT / 2, COUNT / 2>(values, f));
    }
}

// A logit's score, of softmax to be divided by the sum of all.
DEVICE float score(float logit, float largest, bool sigmoid) {
    return sigmoid ? __fdividef(1.0f, 1.0f + expf(-logit)) : expf(logit - largest);
}

extern "C" __global__ void __launch_bounds__(Config::warps * 32, 4)
    moe_route(const u8* logits, const float* bias, i64* ids, u8* weights, int tokens, int experts,
              int choices, int sigmoid, int normalize, int shared, float factor) {
    follow_previous(logits, bias);
    const int lane = threadIdx.x & 31, token = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (token >= tokens) {
        return;
    }
    const u8* mine = logits + u64(token) * (experts + (shared == kSigmoid)) * D::kBytes;
    float values[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
        const int expert = i * 32 + lane;
        values[i] =
            expert < experts ? load_logit(mine + expert * D::kBytes) : __uint_as_float(kMinusInfinity);
    }
    const float gate = shared == kSigmoid ? load_logit(mine + experts * D::kBytes) : 0.0f;
    const float largest = warp_max(fold(values, larger));
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
        values[i] = score(values[i], largest, sigmoid);
    }
    const float sum =
        sigmoid ? 1.0f : warp_sum(fold(values, [](float a, float b) { return __fadd_rn(a, b); }));

    u32 keys[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
        const int expert = i * 32 + lane;
        float by = values[i];  // without a bias the sum of all changes no order
        if (bias != nullptr && expert < experts) {
            by = __fadd_rn(__fdividef(by, sum), __ldg(bias + expert));
        }
        keys[i] = expert < experts ? key_of(by) : 0;
    }
    u32 chosen = 0;
    for (int choice = 0; choice < choices; ++choice) {
        const u32 most = __reduce_max_sync(kAll, fold(keys, [](u32 a, u32 b) { return max(a, b); }));
        u32 found[kPer];
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
            found[i] = keys[i] == most ? u32(i * 32 + lane) : ~0u;
        }
        const u32 id = __reduce_min_sync(kAll, fold(found, [](u32 a, u32 b) { return min(a, b); }));
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
            keys[i] = u32(i * 32 + lane) == id ? 0 : keys[i];
        }
        chosen = lane == choice ? id : chosen;
    }

    const bool has = lane < choices;
    float weight = 0.0f;
    if (has) {
        weight = __fdividef(score(load_logit(mine + chosen * D::kBytes), largest, sigmoid), sum);
    }
    if (normalize) {
        const float total = warp_sum(weight);
        weight = __fdividef(weight, sigmoid ? total + 1e-20f : total);
    }
    weight *= factor;
    const int slots = choices + (shared != kNone);
    if (lane == choices) {
        chosen = experts;
        weight = shared == kSigmoid ? score(gate, 0.0f, true) : 1.0f;
    }
    if (lane < slots) {
        const u64 at = u64(token) * slots + lane;
        ids[at] = chosen;
        store_global<D::kBytes>(weights + at * D::kBytes,
                                D::kBytes == 4 ? __float_as_uint(weight) : D::Bits::narrow(weight));
    }
}
