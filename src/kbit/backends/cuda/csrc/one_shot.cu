// Sum over ranks of a few values, see one_shot.cuh; with Config::gathers they come beside each other instead.
//
//   x        float16, or bfloat16 with Config::bf16: lines * 4 elements, 8-byte aligned
//   y        like x, and may be x; gathered, of every row_lines lines of x the ranks' in their order
//
// grid: ceil(lines / threads)
#include "config.h"
#include "one_shot.cuh"

// Where rank r's line `at` comes to be in y.
DEVICE u32 gathered_place(u32 at, u32 r, u32 row_lines) {
    return at + (at / row_lines * (kRanks - 1) + r) * row_lines;
}

extern "C" __global__ void __launch_bounds__(128)
    one_shot(const uint2* x, uint2* y, u64 inbox_0, u64 inbox_1, u64 inbox_2, u64 inbox_3, u64 inbox_4,
             u64 inbox_5, u64 inbox_6, u64 inbox_7, u32* state, int rank, int capacity, int seconds,
             int lines, int row_lines) {
    follow_previous(x, state);
    const u32 number = *state, at = blockIdx.x * blockDim.x + threadIdx.x;
    const Inboxes inboxes = {{inbox_0, inbox_1, inbox_2, inbox_3, inbox_4, inbox_5, inbox_6, inbox_7},
                             number,
                             u32(rank),
                             u32(capacity),
                             u32(seconds)};
    if (at < u32(lines)) {
        uint2 lines[1][kRanks];
        inboxes.send_line(x[at], at);
        inboxes.receive<1>(lines, {at});
        if constexpr (Config::gathers) {
#pragma unroll
            for (int r = 0; r < kRanks; ++r) {
                y[gathered_place(at, u32(r), u32(row_lines))] = lines[0][r];
            }
        } else {
            y[at] = sum_of_lines(lines[0]);
        }
    }
    end_of_block(state, number);
}
