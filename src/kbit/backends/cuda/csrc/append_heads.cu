// What attention does with new tokens' queries, keys and values before it multiplies them: queries and keys
// are normed head by head, if they have norms, and turned by their positions' angles, keys and values go into
// a cache of a fixed size. As rms_norm.cu, rotary.cu and cache_append.cu compute it, one behind the other.
//
//   query    float16, or bfloat16 with Config::bf16: [batch, tokens, heads, pieces * 8], a piece being 16
//            bytes; any strides in pieces, columns next to each other. key, value: of key_heads heads
//   query_norm, key_norm   [pieces * 8] of the same dtype, or both null; eps, plus_one, round_first: see
//            rms_norm.cu
//   cos, sin   [batch or 1, tokens, 2 * half * 8], alike in strides
//   out      [batch, tokens, heads, pieces * 8], contiguous
//   keys, values   [batch, key_heads, room, pieces * 8], contiguous; length, int64 [1], is how many rows they
//            have. What they have no room for is dropped.
//
// Config::lanes threads, 16 or 32, have a head of a token, a piece each. rows = batch * tokens * (heads + 2 *
// key_heads): queries, keys and values of a token, then of the next one. Norms and angles are fetched to L2
// while the kernel in front still runs, which may write them.
//
// grid: ceil(rows * lanes / threads)
// Methods: Zhang and Sennrich 2019 (arXiv:1910.07467), Su et al. 2021 (arXiv:2104.09864).
#include "config.h"
#include "new_heads.cuh"

constexpr u32 kLanes = Config::lanes;

extern "C" __global__ void __launch_bounds__(128)
    append_heads(const uint4* query, const uint4* key, const uint4* value, const uint4* query_norm,
                 const uint4* key_norm, const uint4* cos, const uint4* sin, uint4* out, uint4* keys,
                 uint4* values, const i64* length, u64 query_batch, u64 query_token, u64 query_head,
                 u64 key_batch, u64 key_token, u64 key_head, u64 value_batch, u64 value_token, u64 value_head,
                 u64 cos_batch, u64 cos_token, u32 rows, int tokens, int heads, int key_heads, int room,
                 int pieces, int half, float eps, int plus_one, int round_first) {
    launch_early();
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x, row = thread / kLanes, piece = thread % kLanes;
    const u32 all = u32(heads + 2 * key_heads), place = row / all, batch = place / u32(tokens);
    const u32 token = place % u32(tokens), head = row % all;
    const bool of_query = head < u32(heads), of_value = head >= u32(heads + key_heads);
    const u32 own = of_query ? head : (head - u32(heads)) % u32(key_heads);
    const Strides by = of_query   ? Strides{query_batch, query_head, query_token}
                       : of_value ? Strides{value_batch, value_head, value_token}
                                  : Strides{key_batch, key_head, key_token};
    const u64 from = batch * by.batch + token * by.token + own * by.head + piece;
    const u64 angle = batch * cos_batch + token * cos_token + piece;
    const bool there = row < rows && piece < u32(pieces), turns = there && !of_value && piece < 2 * u32(half);
    const uint4* norm = of_query ? query_norm : of_value ? nullptr : key_norm;
    if (there && norm) {
        prefetch(norm + piece);
    }
    if (turns) {
        prefetch(cos + angle);
        prefetch(sin + angle);
    }
    wait_for_previous();
    launch_late();
    forget(query, key, value, norm, cos, sin, length);

    const uint4 raw = there ? (of_query ? query : of_value ? value : key)[from] : make_uint4(0, 0, 0, 0);
    const u64 to = u64(*length) + token;
    const uint4 mine =
        norm_and_turn<int(kLanes)>(raw, norm, cos + (angle - piece), sin + (angle - piece), there, !of_value,
                                   int(piece), pieces, half, {eps, plus_one, round_first});
    if (there && of_query) {
        out[(u64(place) * u32(heads) + own) * u32(pieces) + piece] = mine;
    } else if (there && to < u64(u32(room))) {
        const u64 cached = (u64(batch) * u32(key_heads) + own) * u32(room) + to;
        (of_value ? values : keys)[cached * u32(pieces) + piece] = mine;
    }
}
