// The activations of a worker of stream.cu: the B operands of a group, in registers.
#pragma once

#include "stream.cuh"
#include "ue4m3.cuh"

// x of a launch, or of a slot.
struct Source {
    const u16* x;      // kCoded: uint8 [M, stride / 2], codes
    const u8* scales;  // kCoded: uint8 [M, stride / 16]
    int stride;        // columns from row to row
};

DEVICE void put(u32 (&words)[4], uint4 v) {
    words[0] = v.x;
    words[1] = v.y;
    words[2] = v.z;
    words[3] = v.w;
}

// v: [column tile][set of kBeside k-blocks][4 registers]. They are loaded raw, and prepared before their
// first use. Of many sets each is prepared just before its first MMA, which hides the loads of the next ones.
template <bool CODED>
struct ActivationsOf;

// A lane loads 16 bytes, to be swapped within its four lanes (loading 4 bytes at a time took 8 tokens of
// 2048 x 512 from 1.9 to 3.6 us).
template <>
struct ActivationsOf<false> {
    static constexpr int kSets = 2 * kGroupTiles / kBeside;
    u32 v[kColumns][kSets][4];

    DEVICE void load(const Source& from, int group, const Problem& p, int lane) {
        const int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
                const int token = n * 8 + g % kWide;
                const int column = group * kGroupColumns + (set * kBeside + g / kWide) * 32 + 8 * t;
                const bool there = token < p.m && column < p.k;
                const u16* at = from.x + u64(token) * from.stride + column;
                put(v[n][set], there ? *reinterpret_cast<const uint4*>(at) : uint4{});
            }
        }
    }
    DEVICE void prepare(int block, const D&, int t) {
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
            if (kBeside == 1 ? set == block : block == 0) {
#pragma unroll
                for (int n = 0; n < kColumns; ++n) {
                    transpose_four_lanes(v[n][set], t);
                }
            }
        }
    }
};

// NVFP4, K a multiple of 256: the four lanes of a token load the same 16 bytes, the codes of a k-block, of
// which lane t owns bytes t and t + 4 of either half. A byte is two neighbouring codes, and so a row of the
// weights' table of pairs. Levels times scales are exact: what nvfp4_dequantize.cu would have written.
template <>
struct ActivationsOf<true> {
    static constexpr int kSets = 8 / kBeside;
    static_assert(!kCoded || kSets == 1 || kSets == 8);
    u32 v[kColumns][kSets][4];
    u32 scales[kColumns][4];  // two bytes of a set

    DEVICE void load(const Source& from, int group, const Problem& p, int lane) {
        const int g = lane >> 2;
        const u8* codes = reinterpret_cast<const u8*>(from.x);
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
            const int token = n * 8 + g % kWide;
            const bool there = token < p.m && group * 256 < p.k;
            const u64 first = u64(token) * from.stride + group * 256;
            if constexpr (kSets == 1) {
                const u8* at = from.scales + first / 16 + g / kWide * 2;
                scales[n][0] = there ? *reinterpret_cast<const u16*>(at) : 0;
            } else {
                const u8* at = from.scales + first / 16;
                put(scales[n], there ? *reinterpret_cast<const uint4*>(at) : uint4{});
            }
#pragma unroll
            for (int set = 0; set < kSets; ++set) {
                const u8* at = codes + first / 2 + (set * kBeside + g / kWide) * 16;
                put(v[n][set], there ? *reinterpret_cast<const uint4*>(at) : uint4{});
            }
        }
    }
    DEVICE void prepare(int block, const D& decode, int t) {
        const u32 selector = 0x7704 | t << 4;  // byte t makes the address of a row
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
            if (kSets == 8 ? set == block : block == 0) {
#pragma unroll
                for (int n = 0; n < kColumns; ++n) {
                    u32& word = scales[n][set / 2];
                    word = set % 2 ? word : clean_scales(word);
                    const u32 factors[2] = {factor(word, set % 2 * 2), factor(word, set % 2 * 2 + 1)};
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const u32 pair = decode.look_up(permute(v[n][set][i], decode.lane_byte, selector));
                        v[n][set][i] = H::multiply(pair, factors[i / 2]);
                    }
                }
            }
        }
    }
    // A scale in both halves, in the inverse unit of the table's levels.
    static DEVICE u32 factor(u32 word, u32 byte) {
        const u32 bytes = permute(word, 0, 0x4040 | byte | byte << 8);
        const u32 small = Config::bf16 ? bytes << 4 : bytes << 7;  // 2^-120, 2^-8 times the scale
        return kScaleWeights ? small : H::multiply(small, Config::bf16 ? 0x7b807b80u : 0x5c005c00u);
    }
};

using Activations = ActivationsOf<kCoded>;

// x of one of the two steps of a group, M = 1.
DEVICE Activations of_step(const Activations& x, int step) {
    Activations of;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        of.v[0][0][i] = step ? x.v[0][Activations::kSets - 1][i] : x.v[0][0][i];
    }
    return of;
}
