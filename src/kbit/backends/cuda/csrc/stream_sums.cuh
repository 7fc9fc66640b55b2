// The sums of a warp of stream.cu, in registers and on their way to the server.
#pragma once

#include "quads.cuh"
#include "stream.cuh"

// Sums of a lane for a row tile. M = 1: [0][0] is row g, [0][2] is row g + 8, summed over blocks 2t and 2t
// + 1. Otherwise those of the MMA: [n] is rows g, g, g + 8, g + 8 and tokens 8n + 2t, 8n + 2t + 1
// alternately.
typedef float Sums[kColumns][4];
DEVICE float& sum_at(Sums& sums, int i) {
    return kOne ? sums[0][2 * i] : sums[i / 4][i % 4];
}

// Sums of a warp in shared memory: [sum / kAtOnce][lane][kAtOnce], of which there are 128 bytes every STEP.
constexpr int kAtOnce = kSums < 4 ? 2 : 4;

template <int STEP>
DEVICE u32 place_of_sums(int lane) {
    constexpr int kLanes = 32 / kAtOnce;
    return lane / kLanes * STEP + lane % kLanes * kAtOnce * 4;
}

template <int STEP>
DEVICE void load_sums(float (&sums)[kSums], u32 from) {
#pragma unroll
    for (int i = 0; i < kSums; i += kAtOnce) {
        if constexpr (kAtOnce == 2) {
            const uint2 v = load_shared2(from + i * STEP);
            sums[i] = __uint_as_float(v.x);
            sums[i + 1] = __uint_as_float(v.y);
        } else {
            const uint4 v = load_shared4(from + i * STEP);
            sums[i] = __uint_as_float(v.x);
            sums[i + 1] = __uint_as_float(v.y);
            sums[i + 2] = __uint_as_float(v.z);
            sums[i + 3] = __uint_as_float(v.w);
        }
    }
}

template <int STEP>
DEVICE void store_sums(u32 to, const float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; i += kAtOnce) {
        if constexpr (kAtOnce == 2) {
            store_shared2(to + i * STEP, uint2{__float_as_uint(sums[i]), __float_as_uint(sums[i + 1])});
        } else {
            store_shared4(to + i * STEP, words_of(&sums[i]));
        }
    }
}

template <int STEP>
DEVICE void add_stored(float (&sums)[kSums], u32 from) {
    float stored[kSums];
    load_sums<STEP>(stored, from);
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
        sums[i] += stored[i];
    }
}

// The workers' sums: [buffer][worker].
struct Parts {
    u32 base;  // for this lane
    int workers;

    DEVICE u32 at(int buffer, int worker) const {
        return base + (buffer * workers + worker) * kSums * kPartStep;
    }
    // Leaves zeros.
    DEVICE void hand_over(int buffer, int worker, Sums& sums) const {
        float taken[kSums];
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            taken[i] = sum_at(sums, i);
            sum_at(sums, i) = 0.0f;
        }
        store_sums<kPartStep>(at(buffer, worker), taken);
    }
};

// sums += the workers', in their order. (More loads at once made clusters 5% slower, and nothing faster.)
DEVICE void add_workers(float (&sums)[kSums], const Parts& parts, int buffer) {
#pragma unroll 4
    for (int w = 0; w < parts.workers; ++w) {
        add_stored<kPartStep>(sums, parts.at(buffer, w));
    }
}
