// The gated delta rule over the tokens of a prompt, by chunks of 64. Method and symbols:
// gated_delta_rule.cuh.
//
//   query, key    16-bit [batch, tokens, k_heads, 128], of length 1; like all, at multiples of 16 bytes
//   value         16-bit [batch, tokens, v_heads, 128]
//   solved, scores, factors  of gated_delta_chunks.cu
//   before        null, which is zeros, or float32 [batch, v_heads, 128, 128], keys' columns first
//   y             like value
//   state         like before: behind the last token
//
// Columns of a state do not meet, so a warp has 16 of a head's, turned over, in registers: what is known of
// keys, the change of each token and the state are products from the left with these, and what one product
// leaves in a lane is what the next one takes from it, rounded to 16 bits. Another warp multiplies queries,
// one chunk later, with the state and the change that the first has left in shared memory. All matrices of
// the next chunk are fetched meanwhile, if there is room for two.
//
// Shared memory: Config::stages of 64 rows of keys and queries, 272 bytes each, of values, 2 * columns + 16,
// of two squares, 144, and 3 * 64 floats; and 768 bytes a column that warps hand over. Sums are float32:
// columns or tokens by steps of 16, chunks ascending. In float16 nothing that is rounded may be larger than
// 65504.
//
// For prompts; one token's step is gated_delta.cu's. Other sizes and dtypes are computed by PyTorch. 2048
// tokens of 16 and 32 heads take 50 us on an H100, all that flash-linear-attention 0.6.0 runs for both
// kernels 140 us. Blocks are 4 to a head: with 20 on the GPU a chunk takes 1.4 us, with 128, which read the
// same from L2, 1.7 us.
//
// grid: (128 / Config::columns, v_heads, batch)
// Method: Yang et al. 2024 (arXiv:2412.06464).
#include "gated_delta_rule.cuh"

constexpr int kColumns = Config::columns, kStages = Config::stages, kWarps = kColumns / 16;
constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;  // chunks that are fetched before they are needed
constexpr int kLoaders = Config::loaders, kThreads = 2 * kWarps * 32 + kLoaders;
constexpr u32 kPitch = kColumns * 2 + 16;
// A stage of keys: keys, what was solved, values, factors; one of queries: those, scores, exp(G).
constexpr u32 kSolvedAt = kRowsBytes, kValuesAt = kSolvedAt + kSquareBytes;
constexpr u32 kFactorsAt = kValuesAt + kChunk * kPitch, kKeysBytes = kFactorsAt + 2 * kChunk * 4;
constexpr u32 kScoresAt = kRowsBytes, kKeptAt = kScoresAt + kSquareBytes,
              kQueriesBytes = kKeptAt + kChunk * 4;
constexpr u32 kQueriesAt = kStages * kKeysBytes;
// What warps hand over, as it is in their lanes: the state of keys by steps of 16, then changes of tokens.
constexpr u32 kHandedAt = kQueriesAt + kStages * kQueriesBytes, kStepBytes = 32 * 16;
constexpr u32 kChangesAt = kDim / 16 * kStepBytes, kHandedBytes = kChangesAt + kTiles * kStepBytes;
static_assert(kHandedAt + 2 * kWarps * kHandedBytes == Config::shared_bytes);

// Of 16 columns: a tile of 8 tokens, or of 8 columns of keys. A lane has two neighbours of column lane / 4,
// and of 8 on.
using Tile = float[4];
constexpr float kFactor = 0.0883883476f;  // 1 / sqrt(kDim)
static_assert(kDim == 128);

DEVICE void pack(u32 (&v)[4], const Tile& left, const Tile& right) {
    v[0] = H::pack(left[0], left[1]);
    v[1] = H::pack(left[2], left[3]);
    v[2] = H::pack(right[0], right[1]);
    v[3] = H::pack(right[2], right[3]);
}
DEVICE void scale(Tile& tile, float even, float odd) {
    tile[0] *= even;
    tile[1] *= odd;
    tile[2] *= even;
    tile[3] *= odd;
}
// Two floats of a tile's tokens.
DEVICE float2 pair_at(u32 factors, int tile, int lane) {
    const uint2 both = load_shared2(factors + (tile * 8 + lane % 4 * 2) * 4);
    return {__uint_as_float(both.x), __uint_as_float(both.y)};
}
DEVICE void hand_over(u32 to, const Tile& left, const Tile& right, int lane) {
    u32 v[4];
    pack(v, left, right);
    store_shared4(to + lane * 16, {v[0], v[1], v[2], v[3]});
}
DEVICE void load_step(u32 (&v)[4], u32 at) {
    const uint4 piece = load_shared4(at);
    v[0] = piece.x;
    v[1] = piece.y;
    v[2] = piece.z;
    v[3] = piece.w;
}

// Products of 16 columns of the state and 64 rows of keys or queries.
DEVICE void multiply_rows(Tile (&sums)[2 * kTiles], const u32 (&a)[4], u32 rows, int lane) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        u32 b[4];
        load_matrices(b, rows + n * 16 * kRowPitch + by_columns(lane, kRowPitch));
        H::mma(sums[2 * n], a, b[0], b[1]);
        H::mma(sums[2 * n + 1], a, b[2], b[3]);
    }
}
// Of 16 tokens `step` of the columns and these columns of a lower triangle.
DEVICE void multiply_triangle(Tile (&sums)[2 * kTiles], const u32 (&a)[4], u32 square, int step, int lane) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        if (n >= step) {
            u32 b[4];
            load_matrices(b, square + n * 16 * kSquarePitch + by_columns(lane, kSquarePitch) + step * 32);
            H::mma(sums[2 * n], a, b[0], b[1]);
            H::mma(sums[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// A chunk's tokens onto 16 columns of the state; hands over what it was, and the changes.
DEVICE void advance(Tile (&state)[kDim / 8], u32 keys, u32 handed, int warp, int lane) {
    Tile known[2 * kTiles] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
        u32 a[4];
        pack(a, state[2 * step], state[2 * step + 1]);
        multiply_rows(known, a, keys + step * 32, lane);
    }
    Tile change[2 * kTiles] = {};
#pragma unroll
    for (int step = 0; step < kTiles; ++step) {
        u32 values[4], rest[4];
        load_transposed(values, keys + kValuesAt + step * 16 * kPitch + by_columns(lane, kPitch) + warp * 32);
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // of two tiles, columns lane / 4 and + 8
            const float2 kept = pair_at(keys + kFactorsAt, 2 * step + i / 2, lane);
            const Tile& own = known[2 * step + i / 2];
            rest[i] = H::pack(H::widen(u16(values[i])) - kept.x * own[i % 2 * 2],
                              H::widen(u16(values[i] >> 16)) - kept.y * own[i % 2 * 2 + 1]);
        }
        multiply_triangle(change, rest, keys + kSolvedAt, step, lane);
    }
    const float decay = __uint_as_float(load_shared(keys + kFactorsAt + (kChunk - 1) * 4));
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
        hand_over(handed + step * kStepBytes, state[2 * step], state[2 * step + 1], lane);
        scale(state[2 * step], decay, decay);
        scale(state[2 * step + 1], decay, decay);
    }
#pragma unroll
    for (int step = 0; step < kTiles; ++step) {
        hand_over(handed + kChangesAt + step * kStepBytes, change[2 * step], change[2 * step + 1], lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 left = pair_at(keys + kFactorsAt + kChunk * 4, 2 * step + i, lane);
            scale(change[2 * step + i], left.x, left.y);
        }
    }
#pragma unroll
    for (int step = 0; step < kTiles; ++step) {
        u32 a[4];
        pack(a, change[2 * step], change[2 * step + 1]);
#pragma unroll
        for (int n = 0; n < kDim / 16; ++n) {
            u32 b[4];
            load_transposed(b, keys + step * 16 * kRowPitch + by_rows(lane, kRowPitch) + n * 32);
            H::mma(state[2 * n], a, b[0], b[1]);
            H::mma(state[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// What a chunk's queries give, 16 columns of each of the `there` tokens.
DEVICE void answer(u16* y, i64 row, int there, u32 queries, u32 handed, int lane) {
    Tile sums[2 * kTiles] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
        u32 a[4];
        load_step(a, handed + step * kStepBytes + lane * 16);
        multiply_rows(sums, a, queries + step * 32, lane);
    }
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
        const float2 kept = pair_at(queries + kKeptAt, n, lane);
        scale(sums[n], kept.x, kept.y);
    }
#pragma unroll
    for (int step = 0; step < kTiles; ++step) {
        u32 a[4];
        load_step(a, handed + kChangesAt + step * kStepBytes + lane * 16);
        multiply_triangle(sums, a, queries + kScoresAt, step, lane);
    }
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
        scale(sums[n], kFactor, kFactor);
        const int token = n * 8 + lane / 4;
        const u32 low = transposed(H::pack(sums[n][0], sums[n][1]));
        const u32 high = transposed(H::pack(sums[n][2], sums[n][3]));
        if (token < there) {
            u32* const to = reinterpret_cast<u32*>(y + token * row) + lane % 4;
            to[0] = low;
            to[4] = high;
        }
    }
}

// A head, from its first token and column on.
struct Head {
    const u16 *query, *key, *value, *solved, *scores;
    const float* factors;
    i64 k_row, v_row;  // elements from a token to the next
    int heads, tokens, thread;

    DEVICE int there(int chunk) const { return min(kChunk, tokens - chunk * kChunk); }
    template <int FLOATS>
    DEVICE void stage_chunk(u32 square_at, u32 factors_at, const u16* square, int chunk) const {
        const i64 block = i64(chunk) * heads;
        stage_rows<kChunk / 8, kLoaders>(square_at, kSquarePitch, square + block * kChunk * kChunk, kChunk,
                                         kChunk, thread);
        if (thread < FLOATS / 4) {
            stage16(factors_at + thread * 16, factors + block * 2 * kChunk + thread * 4);
        }
    }
    DEVICE void stage_keys(u32 to, int chunk) const {
        const i64 first = i64(chunk) * kChunk;
        stage_rows<kDim / 8, kLoaders>(to, kRowPitch, key + first * k_row, k_row, there(chunk), thread);
        stage_rows<kColumns / 8, kLoaders>(to + kValuesAt, kPitch, value + first * v_row, v_row, there(chunk),
                                           thread);
        stage_chunk<2 * kChunk>(to + kSolvedAt, to + kFactorsAt, solved, chunk);
    }
    DEVICE void stage_queries(u32 to, int chunk) const {
        const i64 first = i64(chunk) * kChunk;
        stage_rows<kDim / 8, kLoaders>(to, kRowPitch, query + first * k_row, k_row, there(chunk), thread);
        stage_chunk<kChunk>(to + kScoresAt, to + kKeptAt, scores, chunk);
    }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    gated_delta_rule(const u16* query, const u16* key, const u16* value, const u16* solved, const u16* scores,
                     const float* factors, const float* before, u16* y, float* state, int tokens, int k_heads,
                     int heads) {
    extern __shared__ __align__(1024) u8 memory[];
    follow_previous(query, key, value, solved, scores, factors, before);
    const u32 base = shared_address(memory);
    const int thread = int(threadIdx.x), warp = uniform(thread / 32), lane = thread % 32;
    const int chunks = (tokens + kChunk - 1) / kChunk, part = warp % kWarps;
    const bool of_key = warp < kWarps, of_query = !of_key && warp < 2 * kWarps;
    const i64 batch = blockIdx.z, v_head = blockIdx.y, v_heads = gridDim.y, k_head = v_head / heads;
    const i64 of_keys = (batch * tokens * k_heads + k_head) * kDim, block = batch * chunks * v_heads + v_head;
    const i64 of_values = (batch * tokens * v_heads + v_head) * kDim + blockIdx.x * kColumns;
    const Head head{query + of_keys,
                    key + of_keys,
                    value + of_values,
                    solved + block * kChunk * kChunk,
                    scores + block * kChunk * kChunk,
                    factors + block * 2 * kChunk,
                    i64(k_heads) * kDim,
                    v_heads * kDim,
                    int(v_heads),
                    tokens,
                    thread - 2 * kWarps * 32};
    const auto stage = [&](int chunk) {  // of keys; of queries, the one before
        if (head.thread < 0) {
            return;
        }
        if (chunk < chunks) {
            head.stage_keys(base + chunk % kStages * kKeysBytes, chunk);
        }
        if (0 < chunk && chunk <= chunks) {
            head.stage_queries(base + kQueriesAt + (chunk - 1) % kStages * kQueriesBytes, chunk - 1);
        }
        end_stage();
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
        stage(i);
    }

    Tile own[kDim / 8] = {};
    const i64 place = ((batch * v_heads + v_head) * kDim + lane % 4 * 2) * kDim + blockIdx.x * kColumns +
                      part * 16 + lane / 4;
#pragma unroll
    for (int i = 0; before && of_key && i < kDim / 2; ++i) {
        own[i / 4][i % 4] = before[place + (i / 4 * 8 + i % 2) * kDim + i % 4 / 2 * 8];
    }
#pragma unroll 1
    for (int chunk = 0; chunk <= chunks; ++chunk) {
        wait_for_stage<kAhead - 1>();
        __syncthreads();
        if (kStages > 1) {
            stage(chunk + kAhead);
        }
        const u32 handed = base + kHandedAt + part * kHandedBytes;
        if (of_key && chunk < chunks) {
            advance(own, base + chunk % kStages * kKeysBytes, handed + chunk % 2 * kWarps * kHandedBytes,
                    part, lane);
        } else if (of_query && chunk > 0) {
            const int last = chunk - 1;
            answer(y + of_values + last * kChunk * head.v_row + part * 16, head.v_row, head.there(last),
                   base + kQueriesAt + last % kStages * kQueriesBytes,
                   handed + last % 2 * kWarps * kHandedBytes, lane);
        }
        if (kStages == 1) {
            __syncthreads();
            stage(chunk + 1);
        }
    }
#pragma unroll
    for (int i = 0; of_key && i < kDim / 2; ++i) {
        state[place + (i / 4 * 8 + i % 2) * kDim + i % 4 / 2 * 8] = own[i / 4][i % 4];
    }
}
