// The mask of causal attention, as what is added to scores: 0 for the keys that a token sees, else -inf.
//
//   first   the first token's own key, up to which it sees keys
//   there   with `masked`, bytes [batch, known]: whether a key is there; those behind are not
//   out     16-bit [batch, tokens, keys]
//
// A thread has eight keys of a token, and stores them at once where rows are whole pieces of 16 bytes.
//
// grid: ceil(count / threads), count = batch * tokens * ceil(keys / 8)
#include "rows.cuh"

constexpr int kEach = 8;

extern "C" __global__ void __launch_bounds__(128)
    causal_mask(const i64* first, const u8* there, u16* out, u32 count, int tokens, int keys, int known,
                int masked, int minus_infinity) {
    follow_previous(first, there);
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) {
        return;
    }
    const u32 each = u32(keys + kEach - 1) / kEach, row = at / each, from = at % each * kEach;
    const i64 last = *first + row % u32(tokens);
    const u8* const mine = there + u64(row / u32(tokens)) * u32(known);
    u32 values[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const u32 key = from + i;
        const bool is_there = !masked || (key < u32(known) && mine[key] != 0);
        values[i] = is_there && i64(key) <= last ? 0 : u32(minus_infinity);
    }
    u16* const to = out + u64(row) * u32(keys) + from;
    if (keys % kEach == 0) {
        const auto both = [&](int i) { return values[i] | values[i + 1] << 16; };
        *reinterpret_cast<uint4*>(to) = make_uint4(both(0), both(2), both(4), both(6));
        return;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        if (from + i < u32(keys)) {
            to[i] = u16(values[i]);
        }
    }
}
