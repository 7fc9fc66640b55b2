// A token's step of multi-head latent attention, first half: the new token goes into the cache, and blocks
// attend to parts of it. latent_combine.cu adds these up.
//
//   query      16-bit [batch, heads, turned], absorbed [batch, heads, latent], any strides in pieces of 16
//              bytes, columns next to each other
//   fresh      [batch, latent + turned]: the new token's latent and key, rows fresh_batch pieces apart
//   norm       [latent], of the new latent; eps, plus_one, round_first: see rms_norm.cu
//   cos, sin   [batch or 1, turned], angle_batch pieces apart; interleaved: pairs of neighbouring columns
//   turn mask       [batch or 1, room], mask_batch elements apart, or null: is added to scores latents
//   [batch, room, latent], keys [batch, room, turned]; length, int64 [1], how many rows they have.
//              The new token's is written behind them if there is room
//   sums       float32 [batch, splits, heads, latent], weights float2 [batch, splits, heads]
//
// A latent and its turned key, next to each other, are what scores are products with, and the latent alone is
// what is summed: both for all heads, so that one copy of a chunk of 32 tokens in shared memory serves
// everything. Scores: tokens are the rows of A, heads the columns of B; four warps split the columns of each
// 16 tokens. Sums: latent columns are the rows of A, by ldmatrix.trans, heads again the columns of B.
//
// Blocks: x, of `splits`, takes chunks x, x + splits, ..; y takes Config::heads heads, z a sequence. A block
// without tokens ends at once, which latent_combine.cu knows by `length`. So the cache's length is known on
// the device alone, and a graph serves all of them.
//
// Softmax with the largest score so far; sums and weights are those of exp2(score - largest), weights.x, in
// units of log2, and weights.y their sum, of weights rounded to 16 bits as they are multiplied. Order of
// sums: k16 steps of a quarter, quarters, tokens by k16 steps, chunks ascending.
//
// Shared memory: stages of 32 rows, queries, scores of the four quarters, weights, factors; rows of 16-bit
// matrices are 16 bytes longer than their columns, an odd number of pieces, for ldmatrix.
// Method: DeepSeek-AI 2024 (arXiv:2405.04434), Milakov and Gimelshein 2018 (arXiv:1805.02867).
#include "config.h"
#include "heads.cuh"
#include "matrices.cuh"

constexpr int kLatent = Config::latent, kTurned = Config::turned, kColumns = kLatent + kTurned;
constexpr int kHeads = Config::heads, kHeadTiles = kHeads / 8, kStages = Config::stages;
constexpr int kTokens = 32, kWarps = 8, kThreads = 32 * kWarps, kQuarters = 4;
constexpr int kPieces = kColumns / 8, kLatentPieces = kLatent / 8;
constexpr u32 kPitch = kColumns * 2 + 16, kWeightPitch = kTokens * 2 + 16;  // bytes
constexpr u32 kStageBytes = kTokens * kPitch;
constexpr u32 kQueriesAt = kStages * kStageBytes, kScoresAt = kQueriesAt + kHeads * kPitch;
constexpr u32 kQuarterBytes = kTokens * kHeads * 4;
constexpr u32 kWeightsAt = kScoresAt + kQuarters * kQuarterBytes;
constexpr u32 kFactorsAt = kWeightsAt + kHeads * kWeightPitch, kBytes = kFactorsAt + kHeads * 4;
constexpr int kSteps = kColumns / 16, kTiles = kLatent / 16 / kWarps;  // of scores; of a warp's sums
constexpr int kLanes = 8, kOfLane = kTokens / kLanes;  // that have a head's weights; tokens of each
static_assert(kBytes == Config::shared_bytes && kLatent % (16 * kWarps) == 0 && kTurned % 16 == 0);
static_assert(kHeads % 8 == 0 && kHeads * kLanes <= kThreads && kLatentPieces % 32 == 0);
using H = Half<Config::bf16>;
constexpr float kLog2E = 1.4426950408889634f;

DEVICE float minus_infinity() {
    return __uint_as_float(0xff800000u);
}
// 2^(score - largest), 0 if there is no score yet.
DEVICE float weight_of(float score, float largest) {
    return largest == minus_infinity() ? 0.0f : exp2f(score - largest);
}

// A pair of columns, turned: by angles of column `at` and of the one half a row behind it.
DEVICE void turn(const u16* x, const u16* cos, const u16* sin, int at, int interleaved, u32 to) {
    constexpr int kHalf = kTurned / 2;
    const float low = H::widen(x[interleaved ? 2 * at : at]);
    const float high = H::widen(x[interleaved ? 2 * at + 1 : at + kHalf]);
    const auto turned = [&](float mine, float other, int column) {
        const float product = D::round(__fmul_rn(mine, H::widen(cos[column])));
        return H::narrow(__fadd_rn(product, D::round(__fmul_rn(other, H::widen(sin[column])))));
    };
    put_shared16(to + 2 * at, turned(low, -high, at));
    put_shared16(to + 2 * (at + kHalf), turned(high, low, at + kHalf));
}

struct Token {
    const u16 *fresh, *norm, *cos, *sin;
    float eps;
    int plus_one, round_first, interleaved;

    // The new token's row, to shared memory. All threads; what they wrote is to be waited for.
    DEVICE void put(u32 row, int thread) const {
        if (thread < 32) {
            constexpr int kOwn = kLatentPieces / 32;
            const uint4* const from = reinterpret_cast<const uint4*>(fresh);
            uint4 mine[kOwn];
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                mine[i] = from[i * 32 + thread];
                sum = add_squares(sum, mine[i]);
            }
            const float factor = norm_factor(sum_lanes(sum, 32), kLatentPieces, eps);
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                const uint4 weight = reinterpret_cast<const uint4*>(norm)[i * 32 + thread];
                store_shared4(row + (i * 32 + thread) * 16,
                              normed(mine[i], weight, factor, plus_one ? 1.0f : 0.0f, round_first));
            }
        }
        for (int at = thread - 32; at >= 0 && at < kTurned / 2; at += kThreads - 32) {
            turn(fresh + kLatent, cos, sin, at, interleaved, row + kLatent * 2);
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
    DEVICE void ask(u32 stage, int first, int count, int fresh, int thread) const {
        for (int i = thread; i < kTokens * kPieces; i += kThreads) {
            const int token = i / kPieces, piece = i - token * kPieces;
            if (first + token == fresh) {
                continue;
            }
            const bool there = token < count;
            copy_or_clear(stage + token * kPitch + piece * 16, row(there ? first + token : first, piece),
                          there);
        }
        copies_end();
    }
    // The row of a new token, from shared memory.
    DEVICE void store(u32 from, int token, int thread) const {
        if (thread < kPieces) {
            *reinterpret_cast<uint4*>(row(token, thread)) = load_shared4(from + thread * 16);
        }
    }
};

// Scores of a chunk, a quarter of the columns for each warp: to scores [quarter][token][head].
DEVICE void multiply_queries(u32 base, u32 stage, int warp, int lane) {
    float acc[kHeadTiles][4] = {};
    const int tile = warp % 2, quarter = warp / 2;
    const u32 rows = stage + (tile * 16 + lane % 16) * kPitch + lane / 16 * 16;
    const u32 queries = base + kQueriesAt + lane % 8 * kPitch + lane / 8 % 2 * 16;
    for (int step = quarter; step < kSteps; step += kQuarters) {
        u32 a[4];
        load_matrices(a, rows + step * 32);
#pragma unroll
        for (int n = 0; n < kHeadTiles; ++n) {
            u32 b[2];
            load_matrices(b, queries + n * 8 * kPitch + step * 32);
            H::mma(acc[n], a, b[0], b[1]);
        }
    }
    const u32 to =
        base + kScoresAt + quarter * kQuarterBytes + ((tile * 16 + lane / 4) * kHeads + lane % 4 * 2) * 4;
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
        store_shared2(to + n * 32, make_uint2(__float_as_uint(acc[n][0]), __float_as_uint(acc[n][1])));
        store_shared2(to + n * 32 + 8 * kHeads * 4,
                      make_uint2(__float_as_uint(acc[n][2]), __float_as_uint(acc[n][3])));
    }
}

// The softmax of a head, by eight lanes.
struct Softmax {
    float largest = minus_infinity(), sum = 0.0f;

    // A chunk's weights to shared memory, and the factor of what was summed before.
    DEVICE void weigh(u32 base, int head, int lane, int first, int last, float scaling, const u16* mask) {
        float score[kOfLane], chunk = minus_infinity();
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
            const int token = i * kLanes + lane;
            float total = 0.0f;
#pragma unroll
            for (int quarter = 0; quarter < kQuarters; ++quarter) {
                const u32 at = base + kScoresAt + quarter * kQuarterBytes + (token * kHeads + head) * 4;
                total += __uint_as_float(load_shared(at));
            }
            total *= scaling;
            if (first + token <= last && mask) {
                total += H::widen(mask[first + token]) * kLog2E;
            }
            score[i] = first + token <= last ? total : minus_infinity();
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
            put_shared16(base + kWeightsAt + head * kWeightPitch + (i * kLanes + lane) * 2, weight);
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

// A warp's columns of latents, weighted, onto its sums.
DEVICE void add_latents(float (&sums)[kTiles][kHeadTiles][4], u32 base, u32 stage, int warp, int lane) {
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
        const uint2 both = load_shared2(base + kFactorsAt + (n * 8 + lane % 4 * 2) * 4);
        const float even = __uint_as_float(both.x), odd = __uint_as_float(both.y);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            sums[i][n][0] *= even;
            sums[i][n][1] *= odd;
            sums[i][n][2] *= even;
            sums[i][n][3] *= odd;
        }
    }
    const u32 weights = base + kWeightsAt + lane % 8 * kWeightPitch + lane / 8 % 2 * 16;
    const u32 rows = stage + (lane / 16 * 8 + lane % 8) * kPitch + warp * kTiles * 32 + lane / 8 % 2 * 16;
#pragma unroll
    for (int step = 0; step < kTokens / 16; ++step) {
        u32 b[kHeadTiles][2];
#pragma unroll
        for (int n = 0; n < kHeadTiles; ++n) {
            load_matrices(b[n], weights + n * 8 * kWeightPitch + step * 32);
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            u32 a[4];
            load_transposed(a, rows + step * 16 * kPitch + i * 32);
#pragma unroll
            for (int n = 0; n < kHeadTiles; ++n) {
                H::mma(sums[i][n], a, b[n][0], b[n][1]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    latent_attention(const u16* query, const u16* absorbed, const u16* fresh, const u16* norm, const u16* cos,
                     const u16* sin, const u16* mask, u16* latents, u16* keys, const i64* length, float* sums,
                     float2* weights, u64 query_batch, u64 query_head, u64 absorbed_batch, u64 absorbed_head,
                     u64 fresh_batch, u64 angle_batch, u64 mask_batch, int heads, int room, float scaling,
                     float eps, int plus_one, int round_first, int interleaved) {
    extern __shared__ __align__(1024) u8 memory[];
    launch_early();
    const int thread = threadIdx.x, warp = uniform(thread / 32), lane = thread % 32;
    const int split = blockIdx.x, splits = gridDim.x, first_head = blockIdx.y * kHeads, batch = blockIdx.z;
    const u32 base = shared_address(memory);
    const Cache cache{latents + i64(batch) * room * kLatent, keys + i64(batch) * room * kTurned, room};
    for (int i = thread; i < kTokens * kPieces; i += 8 * kThreads) {  // 128 bytes each
        const int token = split * kTokens + i % kTokens, piece = i / kTokens * 8;
        if (token < room && piece < kPieces) {
            prefetch(cache.row(token, piece));
        }
    }
    wait_for_previous();
    launch_late();
    forget(query, absorbed, fresh, norm, cos, sin, mask, length);

    const i64 there = *length;
    const int fresh_token = there < room ? int(there) : -1;  // -1: there is no room
    const int count = there < room ? int(there) + 1 : room, chunks = (count + kTokens - 1) / kTokens;
    if (split >= chunks) {
        return;
    }
    const auto ask = [&](int chunk, int stage) {
        cache.ask(base + stage * kStageBytes, chunk * kTokens, count - chunk * kTokens, fresh_token, thread);
    };
    ask(split, 0);
    const Token token{fresh + batch * fresh_batch * 8,
                      norm,
                      cos + batch * angle_batch * 8,
                      sin + batch * angle_batch * 8,
                      eps,
                      plus_one,
                      round_first,
                      interleaved};
    for (int i = thread; i < kHeads * kLatentPieces; i += kThreads) {
        const int own = i / kLatentPieces, piece = i - own * kLatentPieces, head = first_head + own;
        const u16* const from = absorbed + (batch * absorbed_batch + head * absorbed_head + piece) * 8;
        const uint4 zero = make_uint4(0, 0, 0, 0);
        store_shared4(base + kQueriesAt + own * kPitch + piece * 16,
                      head < heads ? *reinterpret_cast<const uint4*>(from) : zero);
    }
    for (int i = thread; i < kHeads * (kTurned / 2); i += kThreads) {
        const int own = i / (kTurned / 2), at = i - own * (kTurned / 2),
                  head = min(first_head + own, heads - 1);
        const u16* const from = query + (batch * query_batch + head * query_head) * 8;
        turn(from, token.cos, token.sin, at, interleaved, base + kQueriesAt + own * kPitch + kLatent * 2);
    }

    float mine[kTiles][kHeadTiles][4] = {};
    Softmax softmax;
    const u16* const its_mask = mask ? mask + batch * mask_batch : nullptr;
    int stage = 0;
    for (int chunk = split; chunk < chunks; chunk += splits, stage = (stage + 1) % kStages) {
        const u32 rows = base + stage * kStageBytes;
        if (kStages > 1 && chunk + splits < chunks) {
            ask(chunk + splits, (stage + 1) % kStages);
            copies_wait<kStages - 1>();
        } else {
            copies_wait<0>();
        }
        const int first = chunk * kTokens;
        if (fresh_token >= first && fresh_token < first + kTokens) {
            token.put(rows + (fresh_token - first) * kPitch, thread);
        }
        __syncthreads();
        if (first_head == 0 && fresh_token >= first && fresh_token < first + kTokens) {
            cache.store(rows + (fresh_token - first) * kPitch, fresh_token, thread);
        }
        multiply_queries(base, rows, warp, lane);
        __syncthreads();
        if (thread < kHeads * kLanes) {
            softmax.weigh(base, thread / kLanes, thread % kLanes, first, count - 1, scaling * kLog2E,
                          its_mask);
        }
        __syncthreads();
        add_latents(mine, base, rows, warp, lane);
        __syncthreads();
        if (kStages == 1 && chunk + splits < chunks) {
            ask(chunk + splits, 0);
        }
    }
    const i64 place = (i64(batch) * splits + split) * heads;
    if (thread < kHeads * kLanes && thread % kLanes == 0 && first_head + thread / kLanes < heads) {
        weights[place + first_head + thread / kLanes] = make_float2(softmax.largest, softmax.sum);
    }
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int head = first_head + n * 8 + lane % 4 * 2 + j % 2;
            if (head < heads) {
                float* const to = sums + (place + head) * kLatent + warp * kTiles * 16 + lane / 4 + j / 2 * 8;
#pragma unroll
                for (int i = 0; i < kTiles; ++i) {
                    to[i * 16] = mine[i][n][j];
                }
            }
        }
    }
}
