// Rows summed over ranks (one_shot.cuh), added to others, and the RMS norm of that: what follows a part of a
// decoder layer that is split over ranks, in one kernel, with the bits of one_shot.cu and then rms_norm.cu.
//
//   x         [rows, pieces * 8] of float16, or bfloat16 with Config::bf16, 16-byte aligned: this rank's part
//   residual  like x: what the sum is added to
//   weight    [pieces * 8], eps, plus_one, round_first: as in rms_norm.cu
//   sum       like x: of the ranks, rounded
//   total     like x: residual + sum, rounded
//   y         like x: its norm
//
// A thread has two pieces of a row. grid: rows; threads: as rms_norm.cu has for a row of more than 64 pieces
#include "config.h"
#include "heads.cuh"
#include "one_shot.cuh"

constexpr int kPieces = 2, kLine = 8;                         // pieces of a thread, and of a line of L2
constexpr int kAtOnce = kRanks > 4 ? 1 : kRanks > 2 ? 2 : 4;  // lines that a thread waits for together

extern "C" __global__ void __launch_bounds__(512)
    one_shot_norm(const uint4* x, const uint4* residual, const uint4* weight, uint4* sum, uint4* total,
                  uint4* y, u64 inbox_0, u64 inbox_1, u64 inbox_2, u64 inbox_3, u64 inbox_4, u64 inbox_5,
                  u64 inbox_6, u64 inbox_7, u32* state, int rank, int capacity, int seconds, int pieces,
                  float eps, int plus_one, int round_first) {
    __shared__ float sums[32];
    launch_early();
    const int lanes = int(blockDim.x);
    if (int(threadIdx.x) * kLine < pieces) {
        prefetch(weight + threadIdx.x * kLine);
    }
    wait_for_previous();
    launch_late();
    forget(x, residual, weight, state);
    const u32 number = *state, first = blockIdx.x * u32(pieces);
    const Inboxes inboxes = {{inbox_0, inbox_1, inbox_2, inbox_3, inbox_4, inbox_5, inbox_6, inbox_7},
                             number,
                             u32(rank),
                             u32(capacity),
                             u32(seconds)};
    const auto piece_of = [&](int i) { return int(threadIdx.x) + i * lanes; };
    uint4 all[kPieces], beside[kPieces], factors[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        all[i] = beside[i] = factors[i] = make_uint4(0, 0, 0, 0);
        if (const u32 at = first + u32(piece_of(i)); piece_of(i) < pieces) {
            all[i] = x[at];
            inboxes.send_line(uint2{all[i].x, all[i].y}, 2 * at);
            inboxes.send_line(uint2{all[i].z, all[i].w}, 2 * at + 1);
        }
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        if (piece_of(i) < pieces) {
            beside[i] = residual[first + u32(piece_of(i))];
            factors[i] = weight[piece_of(i)];
        }
    }
    uint2 summed[2 * kPieces];
    if (int(threadIdx.x) < pieces) {
#pragma unroll
        for (int i = 0; i < 2 * kPieces; i += kAtOnce) {
            u32 places[kAtOnce];
            uint2 lines[kAtOnce][kRanks];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                // Past the end of the row, what the thread has had before.
                const int piece = piece_of((i + j) / 2);
                places[j] = 2 * (first + u32(piece < pieces ? piece : int(threadIdx.x))) + (i + j) % 2;
            }
            inboxes.receive<kAtOnce>(lines, places);
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                summed[i + j] = sum_of_lines(lines[j]);
            }
        }
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        if (const u32 at = first + u32(piece_of(i)); piece_of(i) < pieces) {
            const uint2 low = summed[2 * i], high = summed[2 * i + 1];
            sum[at] = make_uint4(low.x, low.y, high.x, high.y);
            total[at] = all[i] = sum_of(beside[i], make_uint4(low.x, low.y, high.x, high.y));
        }
        squares = add_squares(squares, all[i]);
    }
    squares = sum_lanes(squares, 32);
    const int lane = threadIdx.x & 31;
    if (lane == 0) {
        sums[threadIdx.x >> 5] = squares;
    }
    __syncthreads();
    squares = warp_sum(lane < lanes / 32 ? sums[lane] : 0.0f);
    const float factor = norm_factor(squares, pieces, eps), more = plus_one ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        if (piece_of(i) < pieces) {
            y[first + u32(piece_of(i))] = normed(all[i], factors[i], factor, more, round_first);
        }
    }
    end_of_block(state, number);
}
