// Keys of all heads of multi-head latent attention for a prompt's tokens, and queries turned in place: of a
// head's key the first columns come from what latents were expanded to, the others, turned by their
// position's angles, are the same for all heads. Turned as in rotary.cu.
//
//   query     float16, or bfloat16 with Config::bf16: [batch, tokens, heads, own + 2 * kHalf pieces], a
//             piece being 16 bytes; any strides in pieces. The last 2 * kHalf pieces are written
//   expanded  [batch, tokens, heads, own or more pieces], any strides in pieces
//   key       [batch, tokens, 2 * kHalf pieces], likewise
//   cos, sin  [batch or 1, tokens, 2 * kHalf pieces], alike in strides
//   keys      [batch, tokens, heads, own + 2 * kHalf pieces], contiguous
//   turned    [batch, tokens, 2 * kHalf pieces], contiguous: of key
//
// A thread turns two pieces of a head's query or key that belong together, or copies one. Interleaved,
// threads write query's pieces where others read: kHalf of them in a row, which are of one warp, since own
// is a multiple of kHalf.
//
// grid: ceil(count / threads), count = batch * tokens * heads * (own + 2 * kHalf)
// Methods: DeepSeek-AI 2024 (arXiv:2405.04434), Su et al. 2021 (arXiv:2104.09864).
#include "config.h"
#include "heads.cuh"

constexpr int kHalf = Config::turned / 16;
static_assert(32 % kHalf == 0);

extern "C" __global__ void __launch_bounds__(256)
    latent_heads(uint4* query, const uint4* expanded, const uint4* key, const uint4* cos, const uint4* sin,
                 uint4* keys, uint4* turned, u64 query_batch, u64 query_token, u64 query_head,
                 u64 expanded_batch, u64 expanded_token, u64 expanded_head, u64 key_batch, u64 key_token,
                 u64 cos_batch, u64 cos_token, u32 count, int tokens, int heads, int own, int interleaved) {
    follow_previous(query, expanded, key, cos, sin);
    const u32 at = min(blockIdx.x * blockDim.x + threadIdx.x, count - 1), each = u32(own) + 2 * kHalf;
    const bool is_there = blockIdx.x * blockDim.x + threadIdx.x < count;
    const u32 row = at / each, role = at % each, place = row / u32(heads), head = row % u32(heads);
    const u32 batch = place / u32(tokens), token = place % u32(tokens), pair = role % kHalf;
    const bool of_query = role < kHalf, is_turned = role < 2 * kHalf;
    uint4* const own_query = query + batch * query_batch + token * query_token + head * query_head + own;
    const uint4* const x = of_query ? own_query : key + batch * key_batch + token * key_token;
    uint4* const own_keys = keys + u64(row) * each;
    uint4 low, high;
    if (is_turned) {
        low = x[interleaved ? 2 * pair : pair];
        high = x[interleaved ? 2 * pair + 1 : kHalf + pair];
    } else {
        low = expanded[batch * expanded_batch + token * expanded_token + head * expanded_head + role -
                       2 * kHalf];
    }
    __syncwarp();
    if (!is_there) {
        return;
    }
    if (!is_turned) {
        own_keys[role - 2 * kHalf] = low;
        return;
    }
    if (interleaved) {
        const uint4 even = every_other(low, high, false);
        high = every_other(low, high, true);
        low = even;
    }
    const u64 angle = batch * cos_batch + token * cos_token + pair;
    const u32 second = interleaved ? 0 : kHalf;  // of the angles
    const uint4 y_low = rotated(low, cos[angle], high, sin[angle], -1.0f);
    const uint4 y_high = rotated(high, cos[angle + second], low, sin[angle + second], 1.0f);
    uint4* const y = of_query ? own_query : own_keys + own;
    y[pair] = y_low;
    y[kHalf + pair] = y_high;
    if (!of_query && head == 0) {
        turned[u64(place) * 2 * kHalf + pair] = y_low;
        turned[u64(place) * 2 * kHalf + kHalf + pair] = y_high;
    }
}
