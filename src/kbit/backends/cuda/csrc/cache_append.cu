// Rows of new keys and values into a cache of a fixed size, behind those that it has: cache[b, h, length + t]
// = new[b, h, t]. What the cache has no room for is dropped.
//
//   new      [batch, heads, tokens, pieces * 16 bytes], any strides in pieces, columns next to each other
//   cache    [batch, heads, room, pieces * 16 bytes], contiguous; values have other pieces than keys, maybe
//   length   int64 [1]: rows that the cache has
//
// A thread copies 16 bytes. grid: ceil(count / threads), count = batch * heads * tokens * (keys' and values'
// pieces)
#include "config.h"
#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(256)
    cache_append(const uint4* key, const uint4* value, uint4* keys, uint4* values, const i64* length,
                 u64 key_batch, u64 key_head, u64 key_token, u64 value_batch, u64 value_head, u64 value_token,
                 u32 count, int heads, int tokens, int room, int key_pieces, int value_pieces) {
    follow_previous(key, value, length);
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) {
        return;
    }
    const u32 all = u32(key_pieces + value_pieces), row = at / all, place = at % all;
    const u32 token = row % u32(tokens), matrix = row / u32(tokens);
    const u32 batch = matrix / u32(heads), head = matrix % u32(heads);
    const u64 to = u64(*length) + token;
    if (to >= u64(u32(room))) {
        return;
    }
    const u64 cached = matrix * u64(u32(room)) + to;
    if (place < u32(key_pieces)) {
        keys[cached * u32(key_pieces) + place] =
            key[batch * key_batch + head * key_head + token * key_token + place];
    } else {
        const u32 piece = place - u32(key_pieces);
        values[cached * u32(value_pieces) + piece] =
            value[batch * value_batch + head * value_head + token * value_token + piece];
    }
}
