// A router's logits for few tokens: logits[t, e] = sum over k of x[t, k] * weight[e, k], in float32, rounded
// once at the end.
//
//   x, weight  float16, or bfloat16 with Config::bf16: [tokens, columns] and [experts, columns], rows of
//              whole 16-byte pieces; the weight float32 with Config::wide_weight
//   last       null, or one more expert's row: the gate of a shared one. It counts in `experts`
//   logits     [tokens, experts], of their dtype, or float32 with Config::wide
//
// A block reads its experts' weights once for Config::tokens tokens. They are fetched to L2 before the kernel
// in front is done, and no further: a router's weight may be what that kernel writes.
//
// grid: x experts / Config::experts, y tokens / Config::tokens. Threads: whole warps for pieces / kPieces, at
// most kLogitsThreads
#include "logits_block.cuh"

constexpr int kTokens = Config::tokens;

extern "C" __global__ void __launch_bounds__(kLogitsThreads, 1)
    moe_logits(const uint4* x, const uint4* weight, const uint4* last, u8* logits, int experts, int pieces,
               int tokens) {
    launch_early();
    const RouterRows rows{weight, last, experts, pieces};
    const int expert = int(blockIdx.x) * kExperts, token = int(blockIdx.y) * kTokens;
    prefetch_rows(rows, expert);
    wait_for_previous();
    launch_late();
    forget(x, weight, last);
    float sums[kTokens * kExperts] = {};
    for (int first = int(threadIdx.x); first < pieces; first += kPieces * int(blockDim.x)) {
        WeightPieces weights;
        weights.load(rows, expert, first);
        uint4 mine[kTokens][kPieces];
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            const uint4* const row = x + u64(min(token + t, tokens - 1)) * pieces;
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                const int piece = first + i * int(blockDim.x);
                mine[t][i] = piece < pieces ? row[piece] : make_uint4(0, 0, 0, 0);
            }
        }
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            weights.add_products(sums + t * kExperts, mine[t]);
        }
    }
    add_up(sums, [&](int i, float sum) {
        const int t = token + i / kExperts, e = expert + i % kExperts;
        if (t < tokens && e < experts) {
            store_logit(logits, u64(t) * experts + e, sum);
        }
    });
}
