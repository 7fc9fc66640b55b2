// For attention to parts of a cache: a query for each of them, and where they begin.
//
//   query   [tokens, heads, pieces * 16 bytes], any strides in pieces, columns next to each other
//   length  int64 [1]: keys in front of these tokens' own
//   parts   [splits, tokens, heads, pieces * 16 bytes], contiguous: the query, as often
//   starts  int32: splits + 1 first rows of parts' queries; splits + 1 first keys of theirs, which are equal
//           shares of those in front; first key of the tokens' own, and the one behind the last. One part is
//           all keys, and has no copy of the query.
//
// A thread has 16 bytes. grid: ceil(max(count, splits + 1) / threads), count = tokens * heads * pieces, 0
// where there is one part
#include "config.h"
#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(256)
    attention_parts(const uint4* query, const i64* length, uint4* parts, int* starts, u64 by_token,
                    u64 by_head, u32 count, int heads, int pieces, int tokens, int room, int splits) {
    follow_previous(query, length);
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at <= u32(splits)) {
        const i64 most = room - tokens, given = *length;
        const i64 held = given < 0 ? 0 : given < most ? given : most;
        starts[at] = int(at) * tokens;
        starts[splits + 1 + at] = int(held * at / splits);
        if (at == 0) {
            starts[2 * splits + 2] = splits == 1 ? 0 : int(held);
            starts[2 * splits + 3] = int(held) + tokens;
        }
    }
    if (at >= count) {
        return;
    }
    const u32 row = at / u32(pieces), piece = at % u32(pieces);
    const uint4 its = query[row / u32(heads) * by_token + row % u32(heads) * by_head + piece];
    for (int split = 0; split < splits; ++split) {
        parts[u64(u32(split)) * count + at] = its;
    }
}
