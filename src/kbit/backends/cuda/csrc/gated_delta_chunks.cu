// What the gated delta rule needs of each chunk of 64 tokens that does not depend on the state before it.
// Method and symbols: gated_delta_rule.cuh.
//
//   query, key  16-bit [batch, tokens, k_heads, 128], of length 1, at multiples of 16 bytes
//   beta        16-bit [batch, tokens, v_heads]; decay float32, likewise: its logarithm
//   solved      16-bit [batch, chunks, v_heads, 64, 64]: T = (1 + A)^-1 diag(beta)
//   scores      16-bit, likewise: tril(exp(G_i - G_j) q_i k_j)
//   factors     float32 [batch, chunks, v_heads, 2, 64]: exp(G), and exp(G_last - G)
//
// v_heads = k_heads * Config::heads * Config::groups. Tokens that are not there have keys, queries, beta and
// decay of 0.
//
// A block takes a chunk of a head of keys and Config::heads of its heads of values, which products of its
// keys, and of queries and keys, serve. A thread computes a column of an inverse, 16 rows at a time: row r is
// less by A[r, i] times row i for i ascending. A lies in shared memory where keys and queries did, turned
// over, above the diagonal; the inverse grows below.
//
// Shared memory: 2 * 64 rows of 272 bytes, 2 * heads * 64 floats. Products are summed in float32 by steps of
// 16 columns, ascending; the inverse is float32, too. 2048 tokens of 16 and 32 heads: 24 us on an H100.
//
// grid: (chunks, k_heads * groups, batch)
// Method: Yang et al. 2024 (arXiv:2412.06464), Bischof and Van Loan 1987 (the WY form).
#include "gated_delta_rule.cuh"
#include "warp_scan.cuh"

constexpr int kHeads = Config::heads, kGroups = Config::groups, kThreads = kTiles * 32;
constexpr int kPitch = kRowPitch / 4;  // of a row of A, float32
constexpr u32 kSumsAt = 2 * kRowsBytes, kBetasAt = kSumsAt + kHeads * kChunk * 4;
static_assert(kHeads <= 2 && kHeads * kChunk <= kThreads);
static_assert(kBetasAt + kHeads * kChunk * 4 == Config::shared_bytes);

// Sums over the tokens so far; a lane has two.
DEVICE void add_up(float* to, const float* decay, i64 step, int there, int lane) {
    const float even = 2 * lane < there ? decay[2 * lane * step] : 0.0f;
    const float odd = 2 * lane + 1 < there ? decay[(2 * lane + 1) * step] : 0.0f;
    const float both = sum_up_to(even + odd, lane);
    to[2 * lane] = both - odd;
    to[2 * lane + 1] = both;
}

// A warp's 16 rows of k k^T and q k^T, up to the diagonal.
DEVICE void multiply_keys(float (&of_keys)[2 * kTiles][4], float (&of_queries)[2 * kTiles][4], u32 base,
                          int warp, int lane) {
    const u32 rows = base + warp * 16 * kRowPitch + by_rows(lane, kRowPitch);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
        u32 keys[4], queries[4];
        load_matrices(keys, rows + step * 32);
        load_matrices(queries, rows + kRowsBytes + step * 32);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            if (n <= warp) {
                u32 b[4];
                load_matrices(b, base + n * 16 * kRowPitch + by_columns(lane, kRowPitch) + step * 32);
                H::mma(of_keys[2 * n], keys, b[0], b[1]);
                H::mma(of_keys[2 * n + 1], keys, b[2], b[3]);
                H::mma(of_queries[2 * n], queries, b[0], b[1]);
                H::mma(of_queries[2 * n + 1], queries, b[2], b[3]);
            }
        }
    }
}

// Four rows of a column less a column of A times `known`.
DEVICE void subtract_four(float (&x)[16], const float* a, float known, int row) {
    const float4 four = *reinterpret_cast<const float4*>(a + row);
    x[row] = __fmaf_rn(-four.x, known, x[row]);
    x[row + 1] = __fmaf_rn(-four.y, known, x[row + 1]);
    x[row + 2] = __fmaf_rn(-four.z, known, x[row + 2]);
    x[row + 3] = __fmaf_rn(-four.w, known, x[row + 3]);
}

// 16 rows of a column of (1 + A)^-1, behind `first` of them, of which those before `start` are 0. at: of A,
// in front of its diagonal the column's rows are.
DEVICE void solve(float (&x)[16], float* at, int column, int start, int first) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        x[i] = first + i == column ? 1.0f : 0.0f;
    }
#pragma unroll 2
    for (int i = start; i < first; ++i) {
        const float known = i >= column ? at[i * kPitch + column] : 0.0f;
#pragma unroll
        for (int row = 0; row < 16; row += 4) {
            subtract_four(x, at + i * kPitch + first, known, row);
        }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float* const a = at + (first + i) * kPitch + first;
        const int fours = (i / 4 + 1) * 4;
#pragma unroll
        for (int row = i + 1; row < fours; ++row) {
            // Volatile: as a part of four, it would be read with what other threads write beside it.
            const float one = __uint_as_float(load_shared(shared_address(a + row)));
            x[row] = __fmaf_rn(-one, x[i], x[row]);
        }
#pragma unroll
        for (int row = fours; row < 16; row += 4) {
            subtract_four(x, a, x[i], row);
        }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        if (first + i >= column) {
            at[(first + i) * kPitch + column] = x[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    gated_delta_chunks(const u16* query, const u16* key, const u16* beta, const float* decay, u16* solved,
                       u16* scores, float* factors, int tokens, int k_heads) {
    extern __shared__ __align__(1024) u8 memory[];  // keys and queries, then A of each head; sums; betas
    float* const sum_of = reinterpret_cast<float*>(memory + kSumsAt);
    float* const beta_of = reinterpret_cast<float*>(memory + kBetasAt);
    follow_previous(query, key, beta, decay);
    const u32 base = shared_address(memory);
    const int thread = int(threadIdx.x), warp = uniform(thread / 32), lane = thread % 32;
    const int chunk = int(blockIdx.x), group = int(blockIdx.y), k_head = group / kGroups;
    const int v_heads = k_heads * kHeads * kGroups;
    const int first = chunk * kChunk, there = min(kChunk, tokens - first);
    const i64 token = i64(blockIdx.z) * tokens + first;
    const i64 of_keys = (token * k_heads + k_head) * kDim, row = i64(k_heads) * kDim;
    stage_rows<kDim / 8, kThreads>(base, kRowPitch, key + of_keys, row, there, thread);
    stage_rows<kDim / 8, kThreads>(base + kRowsBytes, kRowPitch, query + of_keys, row, there, thread);
    end_stage();
    const i64 of_values = token * v_heads + group * kHeads;
    if (warp < kHeads) {
        add_up(sum_of + warp * kChunk, decay + of_values + warp, v_heads, there, lane);
    }
    for (int i = thread; i < kHeads * kChunk; i += kThreads) {
        const int at = i % kChunk;
        beta_of[i] = at < there ? H::widen(beta[of_values + i64(at) * v_heads + i / kChunk]) : 0.0f;
    }
    wait_for_stage<0>();
    __syncthreads();

    float products[2 * kTiles][4] = {}, of_queries[2 * kTiles][4] = {};
    multiply_keys(products, of_queries, base, warp, lane);
    __syncthreads();
    float* const a = reinterpret_cast<float*>(memory);
    const i64 block = (i64(blockIdx.z) * gridDim.x + chunk) * v_heads + group * kHeads;
#pragma unroll
    for (int i = 0; i < 2 * kHeads; ++i) {  // rows lane / 4 and + 8, of each head
        const int head = i / 2, half = i % 2, at = warp * 16 + half * 8 + lane / 4;
        const float* const g = sum_of + head * kChunk;
        const float own = g[at], own_beta = beta_of[head * kChunk + at];
        u16* const to = scores + ((block + head) * kChunk + at) * kChunk + lane % 4 * 2;
        float* const turned = a + (head * kChunk + lane % 4 * 2) * kPitch + at;
#pragma unroll
        for (int n = 0; n < 2 * kTiles; ++n) {
            float of_query[2] = {};
#pragma unroll
            for (int j = 0; n / 2 <= warp && j < 2; ++j) {
                const int column = n * 8 + lane % 4 * 2 + j;
                const float factor = at >= column ? expf(own - g[column]) : 0.0f;
                of_query[j] = of_queries[n][2 * half + j] * factor;
                if (at > column) {
                    turned[(n * 8 + j) * kPitch] = products[n][2 * half + j] * factor * own_beta;
                }
            }
            *reinterpret_cast<u32*>(to + n * 8) = H::pack(of_query[0], of_query[1]);
        }
    }
    __syncthreads();
    if (thread >= kHeads * kChunk) {
        return;
    }
    // Columns of the first half take longer: odd blocks have them in other warps.
    const int head = thread / kChunk, column = thread % kChunk ^ chunk % 2 * (kChunk / 2);
    const int at = head * kChunk + column, start = column / (kChunk / 2) * (kChunk / 2);
    float* const of_head = factors + (block + head) * 2 * kChunk;
    of_head[column] = expf(sum_of[at]);
    of_head[kChunk + column] = expf(sum_of[head * kChunk + kChunk - 1] - sum_of[at]);
    u16* const to = solved + (block + head) * kChunk * kChunk + column;
#pragma unroll 1
    for (int above = 0; above < kChunk; above += 16) {
        float x[16] = {};
        if (above >= start) {
            solve(x, a + head * kChunk * kPitch, column, start, above);
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            to[(above + i) * kChunk] = H::narrow(x[i] * beta_of[at]);
        }
    }
}
