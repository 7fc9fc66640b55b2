// A token's step of multi-head latent attention, first half: the new token goes into the cache, and blocks
// attend to parts of it. latent_combine.cu adds these up.
//
//   query      16-bit [batch, heads, turned], absorbed [batch, heads, latent], any strides in pieces of 16
//              bytes, columns next to each other
//   fresh      [batch, latent + turned]: the new token's latent and key, rows fresh_batch pieces apart
//   norm       [latent], of the new latent; eps, plus_one, round_first: see rms_norm.cu
//   cos, sin   [batch or 1, turned], angle_batch pieces apart. interleaved: neighbouring columns are a pair
//   mask       [batch or 1, room], mask_batch elements apart, or null: is added to scores
//   latents    [batch, room, latent], keys [batch, room, turned]; length, int64 [1], how many rows they have.
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
// The softmax goes by the largest score so far: weights are 2^(score - largest), rounded to 16 bits as they
// are multiplied. A block leaves the largest in weights.x and the sum of its weights in weights.y. Order of
// sums: k16 steps of a quarter, quarters, tokens by k16 steps, chunks ascending.
//
// Shared memory: stages of 32 rows, queries, the new token's row, scores of the four quarters, weights,
// factors; rows of 16-bit matrices are 16 bytes longer than their columns, an odd number of pieces, for
// ldmatrix.
//
// grid: (splits, ceil(heads / Config::heads), batch)
// Methods: DeepSeek-AI 2024 (arXiv:2405.04434), Milakov and Gimelshein 2018 (arXiv:1805.02867).
#include "latent_attention.cuh"

// Scores of a chunk, a quarter of the columns for each warp: to scores [quarter][token][head].
DEVICE void multiply_queries(u32 base, u32 stage, int warp, int lane) {
    float acc[kHeadTiles][4] = {};
    const int tile = warp % 2, quarter = warp / 2;
    const u32 rows = stage + tile * 16 * kPitch + by_rows(lane, kPitch) + quarter * 32;
    u32 queries[kHeadTiles];
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {  // heads that there are not: as the last one
        queries[n] =
            base + kQueriesAt + min(n * 8 + lane % 8, kHeads - 1) * kPitch + lane / 8 % 2 * 16 + quarter * 32;
    }
#pragma unroll 3
    for (int step = 0; step < kSteps; ++step) {
        u32 a[4];
        load_matrices(a, rows + step * kQuarters * 32);
#pragma unroll
        for (int n = 0; n < kHeadTiles; ++n) {
            u32 b[2];
            load_matrices(b, queries[n] + step * kQuarters * 32);
            H::mma(acc[n], a, b[0], b[1]);
        }
    }
    const u32 to =
        base + kScoresAt + quarter * kQuarterBytes + (tile * 16 + lane / 4) * kScorePitch + lane % 4 * 8;
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
        store_shared2(to + n * 32, make_uint2(__float_as_uint(acc[n][0]), __float_as_uint(acc[n][1])));
        store_shared2(to + n * 32 + 8 * kScorePitch,
                      make_uint2(__float_as_uint(acc[n][2]), __float_as_uint(acc[n][3])));
    }
}

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
    const u32 rows = stage + by_columns(lane, kPitch) + warp * kTiles * 32;
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

extern "C" __global__ void __launch_bounds__(kThreads, Config::blocks)
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
    for (int i = thread; i < kTokens * kPieces / 8; i += kThreads) {  // 128 bytes each
        const int token = split * kTokens + i % kTokens, piece = i / kTokens * 8;
        if (token < room) {
            prefetch(cache.row(token, piece));
        }
    }
    wait_for_previous();
    launch_late();
    forget(query, absorbed, fresh, norm, cos, sin, mask, length);

    const i64 there = *length;
    const int fresh_token = there < room ? int(there) : -1;  // -1: there is no room
    const int count = there < room ? int(there) + 1 : room, chunks = chunks_of(count);
    if (split >= chunks) {
        return;
    }
    const auto ask = [&](int chunk, int stage) {
        cache.ask(base + stage * kStageBytes, chunk * kTokens, count - chunk * kTokens, fresh_token, warp,
                  lane);
    };
    for (int i = thread; i < kHeads * kLatentPieces; i += kThreads) {
        const int own = i / kLatentPieces, piece = i - own * kLatentPieces,
                  head = min(first_head + own, heads - 1);
        const u16* const from = absorbed + (batch * absorbed_batch + head * absorbed_head + piece) * 8;
        stage16(base + kQueriesAt + own * kPitch + piece * 16, from);
    }
    ask(split, 0);
    const Token token{fresh + batch * fresh_batch * 8,
                      norm,
                      cos + batch * angle_batch * 8,
                      sin + batch * angle_batch * 8,
                      eps,
                      plus_one,
                      round_first,
                      interleaved};
    if (fresh_token >= 0 && fresh_token / kTokens % splits == split) {
        token.put(base + kFreshAt, warp, lane);
    }
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
        const int at = i * kThreads + thread, own = at / kHalf, column = at - own * kHalf;
        if (kHeads * kHalf % kThreads && own >= kHeads) {
            break;
        }
        const u16* const from =
            query + (batch * query_batch + min(first_head + own, heads - 1) * query_head) * 8;
        const Pair pair(from, token.cos, token.sin, column, interleaved);
        pair.store(base + kQueriesAt + own * kPitch + kLatent * 2 + 2 * column);
    }
    __syncthreads();

    float mine[kTiles][kHeadTiles][4] = {};
    Softmax softmax;
    const u16* const its_mask = mask ? mask + batch * mask_batch : nullptr;
    softmax.load(its_mask, split * kTokens, count - 1, thread % kLanes);
    int stage = 0;
    for (int chunk = split; chunk < chunks; chunk += splits, stage = (stage + 1) % kStages) {
        const u32 rows = base + stage * kStageBytes;
        wait_for_stage<0>();
        const int first = chunk * kTokens;
        if (fresh_token >= first && fresh_token < first + kTokens) {
            const u32 to = rows + (fresh_token - first) * kPitch;
            cache.place(base + kFreshAt, to, fresh_token, first_head == 0, thread);
        }
        __syncthreads();
        const bool more = chunk + splits < chunks;
        if (kStages > 1 && more) {  // of the other stage all are done
            ask(chunk + splits, (stage + 1) % kStages);
        }
        multiply_queries(base, rows, warp, lane);
        __syncthreads();
        if (thread < kHeads * kLanes) {
            softmax.weigh(base, thread / kLanes, thread % kLanes, first, count - 1, scaling * kLog2E);
            softmax.load(its_mask, first + splits * kTokens, count - 1, thread % kLanes);
        }
        __syncthreads();
        add_latents(mine, base, rows, warp, lane);
        if (kStages == 1 && more) {
            __syncthreads();
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
            const int own = n * 8 + lane % 4 * 2 + j % 2, head = first_head + own;
            if (own < kHeads && head < heads) {
                float* const to = sums + (place + head) * kLatent + warp * kTiles * 16 + lane / 4 + j / 2 * 8;
#pragma unroll
                for (int i = 0; i < kTiles; ++i) {
                    to[i * 16] = mine[i][n][j];
                }
            }
        }
    }
}
