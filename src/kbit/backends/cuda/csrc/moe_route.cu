// The experts of every token, and their weights, from a router's logits, in one launch: scores (softmax, or
// sigmoid), the `choices` largest by score (plus bias), weights that sum to 1 if `normalize`, times `factor`.
//
//   logits   [tokens, experts] of Config::dtype (Dense in rows.cuh)
//   bias     float32 [experts], added to scores for the choice alone; null: none
//   ids      int64 [tokens, choices], by falling score; of equal scores the smaller id comes first, NaN is
//            the largest
//   weights  [tokens, choices] of the logits' dtype, rounded once from float32
//   of_shared  0, or all tokens have one more choice, the last: id `experts`, of weight 1 (kOne), or the
//            sigmoid of a logit in one more column (kSigmoid)
//
// A team of Config::team warps has a token, and a lane every 32 * team-th expert: Config::per_lane of them,
// as keys whose order as integers is that of the scores. A team of one goes by rounds: each finds the largest
// key and the smallest id that has it, by redux.sync, and takes it out. A larger team has so many experts
// that their number counts, and instructions that are fetched once: of the largest keys of 32 groups of lanes
// the one of rank `choices` bounds the choices from below, nearly always at most 32 keys reach it, and each
// of these has a rank among them. Where more do, the team goes by rounds.
//
// grid: x tokens, one for each team of a block, which has one team, or up to Config::warps teams of a warp.
// At most 32 choices: a lane each.
#include "config.h"
#include "rows.cuh"

using D = Dense<Config::dtype>;
constexpr int kPer = Config::per_lane, kTeam = Config::team, kLanes = 32 * kTeam;
enum { kNone, kSigmoid, kOne };
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

DEVICE float add(float a, float b) {
    return __fadd_rn(a, b);
}

// A logit's score, of softmax to be divided by the sum of all.
DEVICE float score(float logit, float largest, bool sigmoid) {
    return sigmoid ? __fdividef(1.0f, 1.0f + expf(-logit)) : expf(logit - largest);
}

DEVICE u32 larger_key(u32 a, u32 b) {
    return max(a, b);
}
DEVICE u32 smaller_id(u32 a, u32 b) {
    return min(a, b);
}

// A warp's value, of all its lanes the same, combined with those of the team's other warps, in their order.
template <class T, class F>
DEVICE T of_team(T value, T (&shared)[kTeam], F f) {
    if constexpr (kTeam > 1) {
        if ((threadIdx.x & 31) == 0) {
            shared[threadIdx.x >> 5] = value;
        }
        __syncthreads();
        value = shared[0];
#pragma unroll
        for (int warp = 1; warp < kTeam; ++warp) {
            value = f(value, shared[warp]);
        }
    }
    return value;
}

struct Shared {
    float largest[kTeam], sums[kTeam];
    u32 most[kTeam], first[kTeam];
    u32 groups[32], bound, count;
    u32 keys[32], ids[32], by_rank[32];
};

// The id of a lane's choice, alike in all warps of a team.
DEVICE u32 choose_in_rounds(u32 (&keys)[kPer], int choices, Shared& shared, int member) {
    u32 chosen = 0;
    for (int choice = 0; choice < choices; ++choice) {
        const u32 most = of_team(__reduce_max_sync(kAll, fold(keys, larger_key)), shared.most, larger_key);
        u32 found[kPer];
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
            found[i] = keys[i] == most ? u32(i * kLanes + member) : ~0u;
        }
        const u32 id = of_team(__reduce_min_sync(kAll, fold(found, smaller_id)), shared.first, smaller_id);
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
            keys[i] = u32(i * kLanes + member) == id ? 0 : keys[i];
        }
        chosen = (member & 31) == choice ? id : chosen;
    }
    return chosen;
}

// The same by ranks. Every group has an expert, whose key is not 0.
DEVICE u32 choose_by_rank(u32 (&keys)[kPer], int choices, Shared& shared, int member) {
    const int lane = member & 31, warp = member >> 5;
    u32 most = fold(keys, larger_key);
#pragma unroll
    for (int step = 1; step < kTeam; step *= 2) {
        most = max(most, __shfl_xor_sync(kAll, most, step));
    }
    if (member % kTeam == 0) {
        shared.groups[member / kTeam] = most;
    }
    if (member == 0) {
        shared.count = 0;
    }
    __syncthreads();
    const u32 group = shared.groups[lane];
    for (int i = warp; i < 32; i += kTeam) {
        const u32 one = __shfl_sync(kAll, group, i);
        const u32 before = __ballot_sync(kAll, group > one || (group == one && lane < i));
        if (lane == 0 && __popc(before) == choices - 1) {
            shared.bound = one;
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
        if (keys[i] >= shared.bound) {
            const u32 at = atomicAdd(&shared.count, 1u);
            if (at < 32) {
                shared.keys[at] = keys[i];
                shared.ids[at] = i * kLanes + member;
            }
        }
    }
    __syncthreads();
    const int count = shared.count;
    if (count > 32) {
        return choose_in_rounds(keys, choices, shared, member);
    }
    const u32 key = lane < count ? shared.keys[lane] : 0, id = lane < count ? shared.ids[lane] : ~0u;
    for (int i = warp; i < count; i += kTeam) {
        const u32 its_key = __shfl_sync(kAll, key, i), its_id = __shfl_sync(kAll, id, i);
        const u32 before = __ballot_sync(kAll, key > its_key || (key == its_key && id < its_id));
        if (lane == 0 && __popc(before) < choices) {
            shared.by_rank[__popc(before)] = its_id;
        }
    }
    __syncthreads();
    return shared.by_rank[min(lane, choices - 1)];
}

extern "C" __global__ void __launch_bounds__(Config::warps * 32, 4)
    moe_route(const u8* logits, const float* bias, i64* ids, u8* weights, int tokens, int experts,
              int choices, int sigmoid, int normalize, int of_shared, float factor) {
    __shared__ Shared shared;
    follow_previous(logits, bias);
    const int lane = threadIdx.x & 31, member = kTeam > 1 ? threadIdx.x : lane;
    const int token = kTeam > 1 ? blockIdx.x : blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    if (token >= tokens) {
        return;
    }
    const u8* mine = logits + u64(token) * (experts + (of_shared == kSigmoid)) * D::kBytes;
    float values[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
        const int expert = i * kLanes + member;
        values[i] =
            expert < experts ? load_logit(mine + expert * D::kBytes) : __uint_as_float(kMinusInfinity);
    }
    const float gate = of_shared == kSigmoid ? load_logit(mine + experts * D::kBytes) : 0.0f;
    const float largest = of_team(warp_max(fold(values, larger)), shared.largest, larger);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
        values[i] = score(values[i], largest, sigmoid);
    }
    const float sum = sigmoid ? 1.0f : of_team(warp_sum(fold(values, add)), shared.sums, add);

    u32 keys[kPer];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
        const int expert = i * kLanes + member;
        float by = values[i];  // without a bias the sum of all changes no order
        if (bias != nullptr && expert < experts) {
            by = __fadd_rn(__fdividef(by, sum), __ldg(bias + expert));
        }
        keys[i] = expert < experts ? key_of(by) : 0;
    }
    u32 chosen;
    if constexpr (kTeam > 1) {
        chosen = choose_by_rank(keys, choices, shared, member);
        if (member >= 32) {
            return;
        }
    } else {
        chosen = choose_in_rounds(keys, choices, shared, member);
    }

    float weight = 0.0f;
    if (lane < choices) {
        weight = __fdividef(score(load_logit(mine + chosen * D::kBytes), largest, sigmoid), sum);
    }
    if (normalize) {
        const float total = warp_sum(weight);
        weight = __fdividef(weight, sigmoid ? total + 1e-20f : total);
    }
    weight *= factor;
    const int slots = choices + (of_shared != kNone);
    if (lane == choices) {
        chosen = experts;
        weight = of_shared == kSigmoid ? score(gate, 0.0f, true) : 1.0f;
    }
    if (lane < slots) {
        const u64 at = u64(token) * slots + lane;
        ids[at] = chosen;
        store_global<D::kBytes>(weights + at * D::kBytes,
                                D::kBytes == 4 ? __float_as_uint(weight) : D::Bits::narrow(weight));
    }
}
