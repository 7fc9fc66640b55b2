// Rotary position embedding of queries and keys: y = x * cos + rotated * sin over a head's first columns, as
// models of 16 bits compute it, each product and the sum rounded. `rotated` is the negated second half of
// these columns, then the first. What comes behind them is copied. Interleaved: of these columns all even
// ones are taken first and then the odd ones, and the first half of the angles are those of both.
//
//   query   float16, or bfloat16 with Config::bf16: [batch, heads, tokens, pieces * 8], a piece being 16
//           bytes; any strides in pieces, columns next to each other. key likewise, of key_heads heads
//   cos, sin  [batch or 1, tokens, 2 * half * 8] of the same dtype, alike in strides
//   out_query, out_key  [batch, tokens, heads, pieces * 8], contiguous
//
// A thread has two pieces of 16 bytes that belong together, or one that is copied: `each` threads a head.
//
// grid: ceil(count / threads), count = batch * tokens * (heads + key_heads) * each
// Method: Su et al. 2021 (arXiv:2104.09864), columns paired as GPT-NeoX pairs them, or neighbours.
#include "config.h"
#include "heads.cuh"

extern "C" __global__ void __launch_bounds__(256)
    rotary(const uint4* query, const uint4* key, const uint4* cos, const uint4* sin, uint4* out_query,
           uint4* out_key, u64 query_batch, u64 query_head, u64 query_token, u64 key_batch, u64 key_head,
           u64 key_token, u64 cos_batch, u64 cos_token, u32 count, int tokens, int heads, int key_heads,
           int pieces, int half, int interleaved) {
    follow_previous(query, key, cos, sin);
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) {
        return;
    }
    const u32 each = u32(pieces - half), all = u32(heads + key_heads);
    const u32 row = at / each, piece = at % each, place = row / all, batch = place / u32(tokens);
    const u32 token = place % u32(tokens), head = row % all;
    const bool of_query = head < u32(heads);
    const u32 own = of_query ? head : head - u32(heads);
    const Strides by =
        of_query ? Strides{query_batch, query_head, query_token} : Strides{key_batch, key_head, key_token};
    const uint4* const x = (of_query ? query : key) + batch * by.batch + own * by.head + token * by.token;
    uint4* const y = (of_query ? out_query : out_key) +
                     (u64(place) * u32(of_query ? heads : key_heads) + own) * u32(pieces);
    if (piece >= u32(half)) {
        y[half + piece] = x[half + piece];
        return;
    }
    const u64 angle = batch * cos_batch + token * cos_token + piece;
    const u32 second = interleaved ? 0 : u32(half);  // of the angles
    uint4 low = x[interleaved ? 2 * piece : piece], high = x[interleaved ? 2 * piece + 1 : half + piece];
    if (interleaved) {
        const uint4 even = every_other(low, high, false);
        high = every_other(low, high, true);
        low = even;
    }
    const uint4 cos_low = cos[angle], cos_high = cos[angle + second];
    const uint4 sin_low = sin[angle], sin_high = sin[angle + second];
    y[piece] = rotated(low, cos_low, high, sin_low, -1.0f);
    y[half + piece] = rotated(high, cos_high, low, sin_high, 1.0f);
}
