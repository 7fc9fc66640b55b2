// y[m, n] = sum_k x[m, k] * W[n, k] (+ bias[n]) on Hopper's asynchronous tensor cores, for any M.
//
// Gated: W holds 2 * I rows, gates first; y[m, i] = silu(gate[m, i]) * up[m, i], shape [M, I], I % 16 == 0.
//
// stream.cu takes up to 8 tokens, dequantize_tiled.cu + cuBLAS many tokens of small weights (preference.py).
//
// Grouped: one W for every expert, and rows of x sorted by expert, as many as there are (groups.cuh).
//
//   weight_map  tensor map of the tiles (layout.py), 32-bit [experts * ceil(N/16), ceil(K/64) * words]: boxes
//               of one tile by Config::rows / 16 tiles, or by 4 if gated
//   codebook    float32 [2^bits]; scale float32 [experts]: the matrices' factors
//   x_map       tensor map of x 16-bit [M, K]: boxes of 64 columns x Config::tokens rows, half of them if
//               Config::multicast; 128-byte swizzle
//   row_scale   NVFP4's tiles: float32 [M] or null, factors of the rows of y before the bias
//   bias        16-bit [N] or null; y 16-bit [M, N], or [M, N/2] if gated, any alignment of its type
//   offsets     grouped: int32 [experts + 1]
//
// A block computes tiles of Config::rows rows of W, 64, 128 (gated: 64 gates and their 64 ups) or 192, by
// Config::tokens tokens in steps of Config::columns. A producer warpgroup keeps kStages steps of packed
// weights and activations in flight. Of the others each has 64 rows: a warp decodes 16 rows a step into
// registers, scales them (so that the operand is the 16-bit weight that dequantize gives), and the warpgroup
// multiplies: wgmma with A in registers and B, the activations, in shared memory. The next step is decoded
// while the tensor cores work on this one.
//
// Tiles of 64 rows are for weights of few rows: two warpgroups take turns at the steps of one, as teams do,
// and no cluster is needed to fill the machine.
//
// With few tokens the latencies of decoding are more than the products take. Two tiles a step hide a part,
// 290 clocks a tile at 16 tokens, not 460; two teams of eight warps that take turns at the steps hide more.
// They add up their sums in the end, which a block of few steps is better without. Of experts with few
// tokens each team has tiles of its own, and producers of its own.
//
// Tiles of full waves are a block's own, one after the other. Where the rest is few, a cluster of blocks
// splits the columns of each and adds up its sums in the blocks' order. The order of sums depends on shapes
// alone.
//
// Dependent launch: the table is built and weights are on their way before the previous kernel is done. x,
// bias, row_scale and offsets are read, and y written, after. As in stream.cu, whoever writes weights,
// codebook or scale ends with a kernel that is launched without it.
//
// Shared memory: table, ring of activations, staging for y, ring of weights, sums of a cluster, barriers,
// scratch, list of experts; the list and the sums lie in what a table of 3 to 5 bits leaves free, as far as
// that reaches, and sums of 96 tokens and more where activations were.
// Technique: decode into registers as the A operand (operands swapped) from FLUTE and Machete.
#include "wgmma_finish.cuh"
#include "wgmma_instruction.h"
#include "wgmma_steps.cuh"

DEVICE void consume(const Problem& p, Work work, Ring ring, const D& decode, const Output& out, u32 staging,
                    int team, int thread) {
    const int slot = p.slot(uniform(thread / 32)), lane = thread % 32;
    constexpr int kSteps = 4 * kTilesOfStep;
    u32 a[2][kSteps][4];
    bool first = true, decoded = false;
    u32 next = 0;  // barrier of the last step that is decoded
    u32 sums_phase = 0;
    for (; work.more(); work.next()) {
        float acc[kSumTokens / 2];
#pragma unroll
        for (int i = 0; i < kSumTokens / 2; ++i) {
            acc[i] = 0.0f;
        }
        const int steps = work.count() / kTurns;
        const bool more = work.flows();
        u32 used = 0;  // empty barrier of the step before
        const auto multiply = [&](const u32(&operand)[kSteps][4], u32 there) {
            wgmma_fence();
            const u64 b = ring.operand(there);
#pragma unroll
            for (int j = 0; j < kSteps; ++j) {
                multiply_onto(acc, operand[j], b + j / 4 * (kBoxBytes / 16) + j % 4 * 2, true);
            }
            wgmma_commit();
            used = there + 8;
        };
        const auto load_next = [&](u32 there) {
            const Packed packed(ring, slot, lane, there);
            next = ring.there();
            ring.next(kTeams);
            return packed;
        };
        const auto multiply_next = [&](const u32(&operand)[kSteps][4], u32 there) {
            wgmma_wait<0>();  // the step before is done: its registers and its slot are free
            release(used, lane);
            multiply(operand, there);
        };
        const auto step = [&](const u32(&operand)[kSteps][4], u32(&then)[kSteps][4]) {
            const u32 there = next;
            if constexpr (kSpread) {
                const Packed packed = load_next(ring.there());
                multiply_next(operand, there);
                packed.decode(then, decode);
            } else {
                multiply_next(operand, there);
                load_next(ring.there()).decode(then, decode);
            }
        };
        if (!decoded) {
            load_next(first ? ring.early() : ring.there()).decode(a[0], decode);
        }
        const u32 begin = next;
        const bool two = first && steps > 1;
        if (two) {
            load_next(ring.early()).decode(a[1], decode);
        }
        // The first activations come after it anyhow. Before it, biases could be those of another call: the
        // kernel in front may be what writes them.
        wait_for_previous();
        const auto multiply_first = [&] {
            if (first) {
                barrier_wait(begin, 0);
            }
            multiply(a[0], begin);
        };
        if constexpr (kGrouped) {  // products first: what follows waits for shared memory
            multiply_first();
        }
        const Tile tile = kGrouped ? ring.tile(begin) : p.tile(work.tile);
        const Addends with(p, out, tile, thread / 32, lane / 4);
        if constexpr (!kGrouped) {  // behind loads of factor and biases, as long at times as all products
            multiply_first();
        }
        if (two) {
            barrier_wait(next, 0);
        } else if (steps > 1) {
            load_next(ring.there()).decode(a[1], decode);
        }
        first = false;
        // Steps behind which another is decoded: also the next tile's first.
        int left = steps - (more ? 1 : 2);
        for (; left > 1; left -= 2) {
            step(a[1], a[0]);
            step(a[0], a[1]);
        }
        if (left == 1) {
            step(a[1], a[0]);
        }
        if (!more && steps > 1) {
            left == 1 ? multiply_next(a[0], next) : multiply_next(a[1], next);
        }
        decoded = more;
        products_done(acc);
        release(used, lane);
        float kept[kKept / 2];
        // Opaque, or what follows from them would be computed before the steps and kept on the stack.
        asm volatile("" : "+r"(thread), "+r"(staging), "+r"(team));
        if constexpr (kTurns == 1) {
#pragma unroll
            for (int i = 0; i < kKept / 2; ++i) {
                kept[i] = acc[i];
            }
        } else if (team) {
            add_up_teams<1>(kept, acc, staging, thread / 128, thread % 128);
        } else {
            add_up_teams<0>(kept, acc, staging, thread / 128, thread % 128);
        }
        if (kTurns > 1 && kKept == kSumTokens && team) {  // team 0 has all
            if (work.split) {
                syncs_of_finish(work);
            }
        } else if (kSplits && work.split) {
            finish_in_cluster(p, kept, out, with, work, ring.base, staging, sums_phase, team, thread);
            sums_phase ^= 1;
        } else {
            finish(kept, out, with, p.gated, staging, team, thread);
        }
    }
}

extern "C" __global__ void __launch_bounds__(128 + kConsumers, 1)
    wgmma(const float* __restrict__ codebook, const float* __restrict__ scale, const u16* bias,
          const float* row_scale, u16* y, const int* offsets, const __grid_constant__ TensorMap weight_map,
          const __grid_constant__ TensorMap x_map, int n, int m, int experts, int steps, int row_tiles,
          int row_blocks, int token_blocks, int alone, int near, int gated) {
    extern __shared__ __align__(1024) u8 memory[];
    launch_early();
    const int thread = threadIdx.x, warp = uniform(thread / 32), lane = thread % 32;
    Problem p{n, m, kMayBeGated && gated, steps, row_tiles, row_blocks, token_blocks, alone, near, {}, 0};
    Ring ring{shared_address(memory)};
    const float level = begin(ring, codebook, &weight_map, &x_map, thread, lane);
    const u32 scratch = ring.base + kScratchAt;
    if constexpr (kGrouped) {
        wait_for_previous();
        find_experts(p, memory, scratch, offsets, experts);
    }
    if (warp < 4) {
        fewer_registers<kProducerRegisters>();
        const int team = kApart ? warp / 2 : 0;
        ring.slot = team;
        produce(p, Work(p, team), ring, &weight_map, &x_map, warp - 2 * team, lane, syncs_of_finish);
    } else {
        more_registers<kConsumerRegisters>();
        D::fill(memory, level, thread - 128, kConsumers);
        consumers_sync<kConsumers>();
        const D decode(memory, lane);
        const int width = p.width();
        const bool wide = width % 8 == 0 && reinterpret_cast<u64>(y) % 16 == 0;
        const Output out{scale, bias, row_scale, y, width, wide};
        const int group = uniform(warp / 4) - 1, team = kTeams > 1 ? group / kGroups : 0;
        ring.slot = team;
        consume(p, Work(p, team), ring, decode, out, ring.base + kStagingAt + group * kStagingBytes, team,
                (thread - 128) % kTeamThreads);
        if constexpr (kGrouped) {
            BlockGroups::owned(scratch).clear_others(y, m, p.width(), thread - 128, kConsumers);
        }
    }
    if constexpr (kMulticast) {
        __syncwarp();
        cluster_sync();  // no block ends while the other may copy into it
    }
}
