// NVFP4 in stream.cu: the products of a group, where every k16 step is a block with a scale of its own.
#pragma once

#include "stream_sums.cuh"
#include "stream_x.cuh"

// sums += the group of 4 tiles at a shared address; as multiply_group in stream.cu.
//
// M = 1: the columns of B are halves of tiles. A step's MMA meets the x of its half alone, zeros elsewhere,
// and so adds to the sum of its block alone: even steps in one set of accumulators, odd ones in the other. (A
// fresh set for each, its useful column taken out, needed more registers: 64 bytes spilled for sm_80.)
//
// Otherwise weights are scaled, which is exact, and products chained: in two sets where there is one column
// of tokens, because 16 MMAs that wait for each other take 530 clocks a group.
template <bool NEW>
DEVICE u32 multiply_nvfp4(Sums& sums, const D& decode, Activations& x, u32 group, int lane) {
    const int g = lane >> 2, t = lane & 3;
    S::Words scales[kStepTiles];
    Sums odd = {}, even = {};  // M = 1: [half] of tile t's in row g, [2 + half] in row g + 8
    const u32 loaded = for_tiles<kColumns == 2 ? 0 : 1>(group, lane, scales, [&](int q, const auto& w) {
        static_for<4>([&](auto step) {
            constexpr int kStep = step.value, kHalf = kStep / 2, kPair = kStep % 2 * 2;
            u32 a[4];
            decode.template step<kStep>(w, a);
            if (kPair == 0 && NEW) {
                x.prepare(2 * q + kHalf, decode, t);
            }
            if constexpr (kOne) {
                const bool mine = g == 2 * q + kHalf;
                const u32(&b)[4] = x.v[0][0];
                H::mma(kPair ? odd[0] : even[0], a, mine ? b[kPair] : 0, mine ? b[kPair + 1] : 0);
            } else {
                S::template scale<kStep>(a, scales[q]);
#pragma unroll
                for (int n = 0; n < kColumns; ++n) {
                    const u32(&b)[4] = x.v[n][2 * q + kHalf];
                    H::mma(kColumns == 1 && kPair ? odd[n] : sums[n], a, b[kPair], b[kPair + 1]);
                }
            }
        });
    });
    if constexpr (kOne) {
        static_for<4>([&](auto step) {
            constexpr int kStep = step.value;
            const float (&d)[4] = kStep % 2 ? odd[0] : even[0];
            sums[0][0] += d[kStep / 2] * S::template value<kStep, 0>(scales[0]);
            sums[0][2] += d[2 + kStep / 2] * S::template value<kStep, 1>(scales[0]);
        });
    } else if constexpr (kColumns == 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums[0][i] += odd[0][i];
        }
    }
    return loaded;
}
