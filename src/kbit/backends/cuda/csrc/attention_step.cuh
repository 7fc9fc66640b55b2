// Parts of attention_step.cu: sizes, the new token, the cache, the softmax, sums of warps and of blocks.
#pragma once

#include "config.h"
#include "fragments.cuh"
#include "hopper.cuh"
#include "matrices.cuh"
#include "new_heads.cuh"
#include "softmax.cuh"
#include "stage16.cuh"

using H = Half<Config::bf16>;
constexpr int kColumns = Config::columns, kPieces = kColumns / 8, kLanes = kPieces <= 16 ? 16 : 32;
constexpr int kWarps = Config::warps, kThreads = kWarps * 32, kStages = Config::stages;
constexpr int kTokens = 16, kHeads = 8;  // of a chunk; of a block
constexpr int kSteps = kColumns / 16;
constexpr u32 kPitch = kColumns * 2 + 16, kHalfBytes = kTokens * kPitch, kStageBytes = 2 * kHalfBytes;
constexpr u32 kQueriesAt = kWarps * kStages * kStageBytes, kFreshAt = kQueriesAt + kHeads * kPitch;
constexpr u32 kExchangeAt = kFreshAt + 2 * kPitch;
// Four columns of a head: a piece of float32 sums. Of all heads of a block.
constexpr int kQuads = kColumns / 4, kItems = kHeads * kQuads;
// Sums of a warp in place of the stages: a head's are 4 more than its columns, for the banks. Behind those of
// all warps, the largest score and the sum of weights: [warp][head].
constexpr u32 kSumPitch = (kColumns + 4) * 4, kSumBytes = kHeads * kSumPitch;
constexpr u32 kStatesAt = kWarps * kSumBytes;
static_assert(kColumns % 32 == 0 && 32 % kPieces == 0);
static_assert(kStatesAt + kWarps * kHeads * 8 <= kQueriesAt);
static_assert(kExchangeAt + kItems * 24 + 16 == Config::shared_bytes);

// Up to kHeads query heads of the new token.
struct Queries {
    const uint4* first;
    u64 stride;
    int count;
};

struct NewToken {
    Queries queries;
    const uint4 *key, *value, *query_norm, *key_norm, *cos, *sin;
    int half;
    NormRule rule;

    // Queries, the last one for those there are not; then its key and its value.
    DEVICE void put(u32 base, int thread) const {
        constexpr int kRows = kHeads + 2, kAtOnce = kThreads / kLanes;
        const int piece = thread % kLanes;
#pragma unroll
        for (int begin = 0; begin < kRows; begin += kAtOnce) {
            const int row = begin + thread / kLanes;
            const bool of_query = row < kHeads, there = row < kRows && piece < kPieces;
            const uint4* const from = of_query ? queries.first + min(row, queries.count - 1) * queries.stride
                                               : (row == kHeads ? key : value);
            const uint4 mine = there ? from[piece] : make_uint4(0, 0, 0, 0);
            const uint4* const norm = of_query ? query_norm : row == kHeads ? key_norm : nullptr;
            const uint4 made =
                norm_and_turn<kLanes>(mine, norm, cos, sin, there, row <= kHeads, piece, kPieces, half, rule);
            if (there) {
                store_shared4(base + kQueriesAt + row * kPitch + piece * 16, made);
            }
        }
    }
};

// Chunks `first`, `first` + kWarps, .. of a cache, up to `end`, are a warp's. The block has a row of them: it
// took an H100 99 us to read 268 MB where chunks dealt to blocks in turn took 106.
struct Share {
    int first, end;

    // length: of the cache, without the new token.
    DEVICE Share(i64 length, int room, int rank, int blocks, int warp) {
        const int tokens = length < 0 ? 0 : length < room ? int(length) + 1 : room;
        const int chunks = (tokens + kTokens - 1) / kTokens;
        first = int(i64(chunks) * rank / blocks) + warp;
        end = int(i64(chunks) * (rank + 1) / blocks);
    }
};

// Of the sequence and the head.
struct Cache {
    uint4 *keys, *values;
    int room;

    // A chunk, if it is before `end`; rows behind the last token are anything.
    DEVICE void fetch(int chunk, int end, int lane) const {
        constexpr int kLines = kTokens * kColumns * 2 / 128;
        const int first = chunk * kTokens;
        if (chunk < end) {
            for (int i = lane; i < kLines; i += 32) {
                if (first + i * 8 / kPieces < room) {
                    prefetch(keys + u64(first) * kPieces + i * 8);
                    prefetch(values + u64(first) * kPieces + i * 8);
                }
            }
        }
    }
    // Half a stage: its keys or values, as far as there is room.
    DEVICE void ask(const uint4* from, u32 half, int chunk, int end, int lane) const {
        if (chunk < end) {
            constexpr int kAtOnce = 32 / kPieces;  // rows
            const int left = (room - chunk * kTokens) * kPieces - lane;
            const uint4* const mine = from + u64(chunk) * (kTokens * kPieces) + lane;
            const u32 to = half + lane / kPieces * kPitch + lane % kPieces * 16;
#pragma unroll
            for (int i = 0; i < kTokens / kAtOnce; ++i) {
                if (i * 32 < left) {
                    stage16(to + i * kAtOnce * kPitch, mine + i * 32);
                }
            }
        }
        end_stage();
    }
    // Puts the new token's row into half a chunk, and into the cache if `writes`; zeros behind it.
    DEVICE void complete(uint4* to, u32 new_row, u32 half, int first, int fresh, bool writes,
                         int lane) const {
        for (int at = max(fresh - first, 0) * kPieces + lane; at < kTokens * kPieces; at += 32) {
            const int token = at / kPieces, piece = at % kPieces;
            uint4 mine = make_uint4(0, 0, 0, 0);
            if (first + token == fresh && fresh < room) {
                mine = load_shared4(new_row + piece * 16);
                if (writes) {
                    to[u64(fresh) * kPieces + piece] = mine;
                }
            }
            store_shared4(half + token * kPitch + piece * 16, mine);
        }
    }
};

// Of a lane's two heads, in its chunks so far. Sums are of its own tokens until `finish`.
struct Softmax {
    float largest[2] = {minus_infinity(), minus_infinity()}, sum[2] = {}, factor[2] = {};
    u32 weights[2] = {};  // of the chunk: of a token, both heads
    u16 mask[2] = {};     // of the next chunk's tokens, asked for long before

    DEVICE void load(const u16* from, int first, int room, int lane) {
        if (from) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                mask[i] = from[min(first + i * 8 + lane / 4, room - 1)];
            }
        }
    }
    DEVICE void weigh(const float (&scores)[4], int first, int tokens, float scaling, int lane) {
        float score[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float total = scores[i] * scaling + masking(H::widen(mask[i / 2]));
            score[i] = first + i / 2 * 8 + lane / 4 < tokens ? total : minus_infinity();
        }
#pragma unroll
        for (int head = 0; head < 2; ++head) {
            float chunk = fmaxf(score[head], score[2 + head]);
#pragma unroll
            for (int step = 4; step <= 16; step *= 2) {
                chunk = fmaxf(chunk, __shfl_xor_sync(kAll, chunk, step));
            }
            const float before = largest[head];
            largest[head] = fmaxf(before, chunk);
            factor[head] = weight_of(before, largest[head]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            weights[i] =
                H::pack(weight_of(score[2 * i], largest[0]), weight_of(score[2 * i + 1], largest[1]));
        }
        sum[0] = sum[0] * factor[0] + (H::widen(u16(weights[0])) + H::widen(u16(weights[1])));
        sum[1] = sum[1] * factor[1] + (H::widen(u16(weights[0] >> 16)) + H::widen(u16(weights[1] >> 16)));
    }
    DEVICE void finish() {
#pragma unroll
        for (int head = 0; head < 2; ++head) {
#pragma unroll
            for (int step = 4; step <= 16; step *= 2) {
                sum[head] += __shfl_xor_sync(kAll, sum[head], step);
            }
        }
    }
};

// A warp's sums, and what its weights are relative to, to shared memory.
DEVICE void put_sums(u32 base, const float (&sums)[kSteps][4], const Softmax& softmax, int warp, int lane) {
    const int head = lane % 4 * 2;
    const u32 to = base + warp * kSumBytes + head * kSumPitch + lane / 4 * 4;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            put_shared(to + j % 2 * kSumPitch + (i * 16 + j / 2 * 8) * 4, __float_as_uint(sums[i][j]));
        }
    }
    if (lane < 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            store_shared2(base + kStatesAt + (warp * kHeads + head + j) * 8,
                          make_uint2(__float_as_uint(softmax.largest[j]), __float_as_uint(softmax.sum[j])));
        }
    }
}

// Four columns' sums of a head, and what its weights are relative to.
struct Part {
    float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float largest = minus_infinity(), weights = 0.0f;

    DEVICE void see(float its_largest) { largest = fmaxf(largest, its_largest); }
    // After all were seen.
    DEVICE void add(uint4 its_sums, float its_largest, float its_weights) {
        const float factor = weight_of(its_largest, largest);
        weights = __fmaf_rn(its_weights, factor, weights);
        add_scaled(sums,
                   make_float4(__uint_as_float(its_sums.x), __uint_as_float(its_sums.y),
                               __uint_as_float(its_sums.z), __uint_as_float(its_sums.w)),
                   factor);
    }
};

DEVICE Part add_warps(u32 base, int item) {
    const int head = item / kQuads;
    const u32 states = base + kStatesAt + head * 8, from = base + head * kSumPitch + item % kQuads * 16;
    Part part;
    uint2 state[kWarps];
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
        state[warp] = load_shared2(states + warp * kHeads * 8);
        part.see(__uint_as_float(state[warp].x));
    }
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
        part.add(load_shared4(from + warp * kSumBytes), __uint_as_float(state[warp].x),
                 __uint_as_float(state[warp].y));
    }
    return part;
}

// Each block of a cluster adds up `each` items of all blocks. Received: sums [block][item], behind them the
// largest score and the sum of weights, and a barrier.
struct Exchange {
    static constexpr u32 kStates = kItems * 16, kBarrier = kItems * 24;
    u32 base;
    int rank, blocks, each;

    // By one thread, before the cluster's barrier.
    DEVICE void init() const {
        barrier_init(base + kBarrier, 1);
        barriers_visible();
    }
    // By the same one, after a barrier of the block: others may have sent something already.
    DEVICE void expect() const { barrier_expect(base + kBarrier, blocks * each * 24); }
    DEVICE void send(const Part& part, int item) const {
        const u32 owner = item / each, at = rank * each + item % each;
        const u32 to = cluster_address(base, owner);
        store_cluster(to + at * 16,
                      make_uint4(__float_as_uint(part.sums.x), __float_as_uint(part.sums.y),
                                 __float_as_uint(part.sums.z), __float_as_uint(part.sums.w)),
                      to + kBarrier);
        store_cluster(to + kStates + at * 8,
                      make_uint2(__float_as_uint(part.largest), __float_as_uint(part.weights)),
                      to + kBarrier);
    }
    DEVICE Part receive(int item) const {
        barrier_wait(base + kBarrier, 0);
        Part all;
        for (int block = 0; block < blocks; ++block) {
            all.see(__uint_as_float(load_shared(base + kStates + (block * each + item) * 8)));
        }
        for (int block = 0; block < blocks; ++block) {
            const int at = block * each + item;
            const uint2 state = load_shared2(base + kStates + at * 8);
            all.add(load_shared4(base + at * 16), __uint_as_float(state.x), __uint_as_float(state.y));
        }
        return all;
    }
};

// Four columns of a head, from all its sums.
struct Output {
    const u16* gate;  // or null
    u16* out;
    u64 first_head, gate_batch, gate_head;

    DEVICE uint2 gate_of(int head, int column) const {
        const u16* const from = gate + (gate_batch + head * gate_head) * 8 + column;
        return gate ? *reinterpret_cast<const uint2*>(from) : make_uint2(0, 0);
    }
    DEVICE void write(int head, int column, const Part& all, uint2 its_gate) const {
        const float one = one_over(all.weights);
        float y[4] = {all.sums.x * one, all.sums.y * one, all.sums.z * one, all.sums.w * one};
        if (gate) {
            const u16 gates[4] = {u16(its_gate.x), u16(its_gate.x >> 16), u16(its_gate.y),
                                  u16(its_gate.y >> 16)};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float open = __fdiv_rn(1.0f, 1.0f + expf(-H::widen(gates[i])));
                y[i] = D::round(y[i]) * D::round(open);
            }
        }
        *reinterpret_cast<uint2*>(out + (first_head + head) * kColumns + column) =
            make_uint2(H::pack(y[0], y[1]), H::pack(y[2], y[3]));
    }
};
