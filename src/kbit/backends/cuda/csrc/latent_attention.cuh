// Parts of latent_attention.cu: sizes, the new token, the cache, the softmax.
#pragma once

#include "fragments.cuh"
#include "latent.cuh"
#include "matrices.cuh"

constexpr int kLatent = Config::latent, kTurned = Config::turned, kColumns = kLatent + kTurned;
constexpr int kHeads = Config::heads, kHeadTiles = (kHeads + 7) / 8, kStages = Config::stages;
constexpr int kWarps = 8, kThreads = 32 * kWarps, kQuarters = 4;
constexpr int kPieces = kColumns / 8, kLatentPieces = kLatent / 8, kHalf = kTurned / 2;
constexpr u32 kPitch = kColumns * 2 + 16, kWeightPitch = kTokens * 2 + 16;  // bytes
constexpr u32 kStageBytes = kTokens * kPitch, kScorePitch = kHeadTiles * 8 * 4;
constexpr u32 kQueriesAt = kStages * kStageBytes, kFreshAt = kQueriesAt + kHeads * kPitch;
constexpr u32 kScoresAt = kFreshAt + kPitch, kQuarterBytes = kTokens * kScorePitch;
constexpr u32 kWeightsAt = kScoresAt + kQuarters * kQuarterBytes;
constexpr u32 kFactorsAt = kWeightsAt + kHeadTiles * 8 * kWeightPitch,
              kBytes = kFactorsAt + kHeadTiles * 8 * 4;
constexpr int kSteps = kColumns / 16 / kQuarters;      // of a warp's scores
constexpr int kTiles = kLatent / 16 / kWarps;          // of its sums
constexpr int kLanes = 8, kOfLane = kTokens / kLanes;  // that have a head's weights; tokens of each
constexpr int kTurns = (kHeads * kHalf + kThreads - 1) / kThreads;  // of a thread
static_assert(kBytes == Config::shared_bytes && kLatent % (16 * kWarps) == 0 && kTurned % 16 == 0);
static_assert(kColumns % (16 * kQuarters) == 0 && kPieces % 8 == 0);
static_assert(kHeads * kLanes <= kThreads && kLatentPieces % 32 == 0);

// A pair of columns and their angles: column `at` and the one half a row behind it.
struct Pair {
    float low, high, cos[2], sin[2];

    DEVICE Pair(const u16* x, const u16* cos_, const u16* sin_, int at, int interleaved)
        : low(H::widen(x[interleaved ? 2 * at : at])),
          high(H::widen(x[interleaved ? 2 * at + 1 : at + kHalf])),
          cos{H::widen(cos_[at]), H::widen(cos_[at + kHalf])},
          sin{H::widen(sin_[at]), H::widen(sin_[at + kHalf])} {}
    DEVICE u16 turned(float mine, float other, int i) const {
        const float product = D::round(__fmul_rn(mine, cos[i]));
        return H::narrow(__fadd_rn(product, D::round(__fmul_rn(other, sin[i]))));
    }
    DEVICE void store(u32 to) const {
        put_shared_element<2>(to, turned(low, -high, 0));
        put_shared_element<2>(to + 2 * kHalf, turned(high, low, 1));
    }
};

struct Token {
    const u16 *fresh, *norm, *cos, *sin;
    float eps;
    int plus_one, round_first, interleaved;

    // The new token's row, to shared memory: by the first warp its latent, by the second its key.
    DEVICE void put(u32 row, int warp, int lane) const {
        if (warp == 0) {
            constexpr int kOwn = kLatentPieces / 32;
            const uint4* const from = reinterpret_cast<const uint4*>(fresh);
            const uint4* const weights = reinterpret_cast<const uint4*>(norm);
            uint4 mine[kOwn], weight[kOwn];
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                mine[i] = from[i * 32 + lane];
                weight[i] = weights[i * 32 + lane];
            }
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                sum = add_squares(sum, mine[i]);
            }
            const float factor = norm_factor(sum_lanes(sum, 32), kLatentPieces, eps);
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                store_shared4(row + (i * 32 + lane) * 16,
                              normed(mine[i], weight[i], factor, plus_one ? 1.0f : 0.0f, round_first));
            }
        } else if (warp == 1) {
            for (int at = lane; at < kHalf; at += 32) {
                Pair(fresh + kLatent, cos, sin, at, interleaved).store(row + kLatent * 2 + 2 * at);
            }
        }
    }
};

struct Cache {
    u16 *latents, *keys;  // of the sequence
    int room;

    DEVICE u16* row(int token, int piece) const {
        return piece < kLatentPieces ? latents + i64(token) * kLatent + piece * 8
                                     : keys + i64(token) * kTurned + (piece - kLatentPieces) * 8;
    }
    // Asks for a chunk of `count` tokens that are there already; others are 0, but `fresh` is left alone.
    DEVICE void ask(u32 stage, int first, int count, int fresh, int warp, int lane) const {
#pragma unroll
        for (int i = 0; i < kTokens / kWarps; ++i) {
            const int token = warp * (kTokens / kWarps) + i;
            const bool there = token < count;
            if (first + token == fresh) {
                continue;
            }
#pragma unroll
            for (int piece = 0; piece < kPieces; piece += 32) {
                if (piece + 32 <= kPieces || piece + lane < kPieces) {
                    const u16* const from = row(there ? first + token : first, piece + lane);
                    stage16_if(stage + token * kPitch + (piece + lane) * 16, from, there);
                }
            }
        }
        end_stage();
    }
    // The row of a new token, from shared memory to a stage, and into the cache if that is this block's part.
    DEVICE void place(u32 from, u32 to, int token, bool mine, int thread) const {
        if (thread < kPieces) {
            const uint4 piece = load_shared4(from + thread * 16);
            store_shared4(to + thread * 16, piece);
            if (mine) {
                *reinterpret_cast<uint4*>(row(token, thread)) = piece;
            }
        }
    }
};

// The softmax of a head, by eight lanes.
struct Softmax {
    float largest = minus_infinity(), sum = 0.0f;
    u16 mask[kOfLane] = {};  // of the next chunk, asked for long before

    DEVICE void load(const u16* from, int first, int last, int lane) {
        if (from) {
#pragma unroll
            for (int i = 0; i < kOfLane; ++i) {
                mask[i] = from[min(first + i * kLanes + lane, last)];
            }
        }
    }
    // A chunk's weights to shared memory, and the factor of what was summed before.
    DEVICE void weigh(u32 base, int head, int lane, int first, int last, float scaling) {
        float score[kOfLane] = {}, chunk = minus_infinity();
#pragma unroll
        for (int quarter = 0; quarter < kQuarters; ++quarter) {
#pragma unroll
            for (int i = 0; i < kOfLane; ++i) {
                const u32 token =
                    base + kScoresAt + quarter * kQuarterBytes + (i * kLanes + lane) * kScorePitch;
                score[i] += __uint_as_float(load_shared(token + head * 4));
            }
        }
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            const float total = score[i] * scaling + masking(H::widen(mask[i]));
            score[i] = first + i * kLanes + lane <= last ? total : minus_infinity();
            chunk = fmaxf(chunk, score[i]);
        }
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) {
            chunk = fmaxf(chunk, __shfl_xor_sync(kAll, chunk, step));
        }
        const float before = largest;
        largest = fmaxf(before, chunk);
        const float factor = weight_of(before, largest);
        float added = 0.0f;
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            const u16 weight = H::narrow(weight_of(score[i], largest));
            put_shared_element<2>(base + kWeightsAt + head * kWeightPitch + (i * kLanes + lane) * 2, weight);
            added += H::widen(weight);
        }
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) {
            added += __shfl_xor_sync(kAll, added, step);
        }
        sum = sum * factor + added;
        if (lane == 0) {
            put_shared(base + kFactorsAt + head * 4, __float_as_uint(factor));
        }
    }
};
