// A token's step of attention in which some query heads share a head of keys and values: the new token's
// heads are normed and turned, its key and value go into the cache, and all heads attend to that.
//
//   query      16-bit [batch, heads, pieces * 8], a piece being 16 bytes; any strides in pieces, columns next
//              to each other. key, value: of key_heads heads; gate: like query, or null
//   query_norm, key_norm   [pieces * 8] or both null; eps, plus_one, round_first: see rms_norm.cu
//   cos, sin   [batch or 1, 2 * half * 8], angle_batch pieces apart
//   mask       [batch or 1, room], mask_batch elements apart, or null: is added to scores
//   keys, values   [batch, key_heads, room, pieces * 8]; length, int64 [1], how many rows they have. The new
//              token's are written behind them if there is room
//   out        [batch, heads, pieces * 8]: what attention gives, times the gate's sigmoid
//
// Blocks: y takes up to 8 query heads of a head of keys (one of `groups`), z a sequence. Its tokens are split
// in chunks of 16, of which the blocks x of a cluster have a row each, dealt to their warps in turn, which
// run alone: a chunk's keys and values come into stages of the warp's own. The cache's length is known on the
// device alone, so a graph serves all lengths; what a launch reads follows from it, not from the room there
// is.
//
// Scores: tokens are the rows of A, heads the columns of B. Their weights, turned over in registers, are B
// once more; values, by ldmatrix.trans, are A, whose rows are columns of `out`.
//
// The softmax goes by a warp's largest score so far: weights are 2^(score - largest), rounded to 16 bits as
// they are multiplied. Order of sums: k16 steps of a score, each fourth of them first; a warp's chunks
// ascending, then warps, then blocks. Which chunks these are depends on the cache's length and room.
//
// `length` is read before the previous kernel is done, too, which may have written it: what that says is
// fetched to L2 and asked for at once, and again where it was wrong.
//
// Dependent launch: as in stream.cu.
//
// Shared memory: stages of the warps (afterwards their sums), queries, the new token's key and value, what
// blocks of the cluster send. Rows are 16 bytes longer than their columns, an odd number of pieces, for
// ldmatrix.
//
// grid: (blocks of a cluster, key_heads * groups, batch)
// Methods: Ainslie et al. 2023 (arXiv:2305.13245), Milakov and Gimelshein 2018 (arXiv:1805.02867).
#include "attention_step.cuh"

// A warp's scores of 16 tokens: [token g or g + 8][head 2 t or 2 t + 1].
DEVICE void multiply_queries(float (&scores)[4], const u32 (&queries)[kSteps][2], u32 keys, int lane) {
    constexpr int kChains = kSteps < 4 ? kSteps : 4;  // one alone would wait for itself
    float acc[kChains][4] = {};
    const u32 row = keys + by_rows(lane, kPitch);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        u32 a[4];
        load_matrices(a, row + step * 32);
        H::mma(acc[step % kChains], a, queries[step][0], queries[step][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        scores[i] = acc[0][i];
#pragma unroll
        for (int chain = 1; chain < kChains; ++chain) {
            scores[i] += acc[chain][i];
        }
    }
}

// sums = sums * the factor of their head + values * weights
DEVICE void add_values(float (&sums)[kSteps][4], const Softmax& softmax, u32 values, int lane) {
    const u32 upper = transposed(softmax.weights[0]), lower = transposed(softmax.weights[1]);
    const u32 row = values + by_columns(lane, kPitch);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        u32 a[4];
        load_transposed(a, row + i * 32);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            sums[i][j] *= softmax.factor[j % 2];
        }
        H::mma(sums[i], a, upper, lower);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, Config::blocks)
    attention_step(const uint4* query, const uint4* key, const uint4* value, const u16* gate,
                   const uint4* query_norm, const uint4* key_norm, const uint4* cos, const uint4* sin,
                   const u16* mask, uint4* keys, uint4* values, const i64* length, u16* out, u64 query_batch,
                   u64 query_head, u64 key_batch, u64 key_head, u64 value_batch, u64 value_head,
                   u64 gate_batch, u64 gate_head, u64 angle_batch, u64 mask_batch, int heads, int key_heads,
                   int groups, int room, int half, float scaling, float eps, int plus_one, int round_first) {
    extern __shared__ __align__(1024) u8 memory[];
    launch_early();
    const int thread = threadIdx.x, warp = uniform(thread / 32), lane = thread % 32;
    const int rank = blockIdx.x, blocks = gridDim.x, batch = blockIdx.z;
    const int of_key = blockIdx.y / groups, group = blockIdx.y % groups, shared = heads / key_heads;
    const int first_head = of_key * shared + group * kHeads, count = min(kHeads, shared - group * kHeads);
    const u32 base = shared_address(memory), ring = base + warp * kStages * kStageBytes;
    const u64 rows = (u64(batch) * key_heads + of_key) * room;
    const Cache cache{keys + rows * kPieces, values + rows * kPieces, room};
    const int items = count * kQuads;
    const Exchange exchange{base + kExchangeAt, rank, blocks, items / blocks};
    if (blocks > 1) {
        if (thread == 0) {
            exchange.init();
        }
        cluster_arrive();
    }
    const auto length_now = [&] { return *const_cast<const volatile i64*>(length); };
    const i64 expected = length_now();
    Share share(expected, room, rank, blocks, warp);
    for (int stage = 0; stage < kStages; ++stage) {
        cache.fetch(share.first + stage * kWarps, share.end, lane);
    }
    wait_for_previous();
    launch_late();
    forget(query, key, value, gate, query_norm, key_norm, cos, sin, mask, length);

    const auto begin = [&] {
        for (int stage = 0; stage < kStages; ++stage) {
            const u32 to = ring + stage * kStageBytes;
            const int chunk = share.first + stage * kWarps;
            cache.ask(cache.keys, to, chunk, share.end, lane);
            cache.ask(cache.values, to + kHalfBytes, chunk, share.end, lane);
        }
    };
    begin();
    const i64 there = length_now();
    const int fresh = there < room ? int(there) : room;  // room: there is none for the new token
    if (there != expected) {
        share = Share(there, room, rank, blocks, warp);
        wait_for_stage<0>();  // or both copies would be under way
        __syncwarp();
        begin();
    }
    const u16* const its_mask = mask ? mask + batch * mask_batch : nullptr;
    Softmax softmax;
    softmax.load(its_mask, share.first * kTokens, room, lane);
    NewToken token{{query + batch * query_batch + first_head * query_head, query_head, count},
                   key + batch * key_batch + of_key * key_head,
                   value + batch * value_batch + of_key * value_head,
                   query_norm,
                   key_norm,
                   cos + batch * angle_batch,
                   sin + batch * angle_batch,
                   half,
                   {eps, plus_one, round_first}};
    token.put(base, thread);
    __syncthreads();
    if (blocks > 1 && thread == 0) {
        exchange.expect();
    }
    u32 queries[kSteps][2];
#pragma unroll
    for (int i = 0; i < kSteps; i += 2) {
        u32 both[4];
        load_matrices(both, base + kQueriesAt + lane % 8 * kPitch + lane / 8 * 16 + i * 32);
        queries[i][0] = both[0];
        queries[i][1] = both[1];
        queries[i + 1][0] = both[2];
        queries[i + 1][1] = both[3];
    }

    float sums[kSteps][4] = {};
    int stage = 0;
    for (int chunk = share.first; chunk < share.end; chunk += kWarps) {
        const u32 at = ring + stage * kStageBytes;
        const int first = chunk * kTokens, next = chunk + kStages * kWarps;
        const bool completes = first + kTokens > fresh;
        wait_for_stage<2 * kStages - 1>();
        __syncwarp();
        if (completes) {
            cache.complete(cache.keys, base + kFreshAt, at, first, fresh, group == 0, lane);
            __syncwarp();
        }
        float scores[4];
        multiply_queries(scores, queries, at, lane);
        __syncwarp();  // all have read what comes next into this half
        cache.ask(cache.keys, at, next, share.end, lane);
        softmax.weigh(scores, first, min(fresh + 1, room), scaling * kLog2E, lane);
        softmax.load(its_mask, first + kWarps * kTokens, room, lane);
        wait_for_stage<2 * kStages - 1>();
        __syncwarp();
        if (completes) {
            cache.complete(cache.values, base + kFreshAt + kPitch, at + kHalfBytes, first, fresh, group == 0,
                           lane);
            __syncwarp();
        }
        add_values(sums, softmax, at + kHalfBytes, lane);
        __syncwarp();
        cache.ask(cache.values, at + kHalfBytes, next, share.end, lane);
        stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    softmax.finish();
    wait_for_stage<0>();
    __syncthreads();
    put_sums(base, sums, softmax, warp, lane);
    __syncthreads();
    const Output output{gate, out, u64(batch) * heads, batch * gate_batch, gate_head};
    if (blocks == 1) {
        for (int item = thread; item < items; item += kThreads) {
            const int head = first_head + item / kQuads, column = item % kQuads * 4;
            const uint2 its_gate = output.gate_of(head, column);
            output.write(head, column, add_warps(base, item), its_gate);
        }
        return;
    }
    cluster_wait();
    for (int item = thread; item < items; item += kThreads) {
        exchange.send(add_warps(base, item), item);
    }
    for (int item = thread; item < exchange.each; item += kThreads) {
        const int own = rank * exchange.each + item, head = first_head + own / kQuads,
                  column = own % kQuads * 4;
        const uint2 its_gate = output.gate_of(head, column);
        output.write(head, column, exchange.receive(item), its_gate);
    }
}
