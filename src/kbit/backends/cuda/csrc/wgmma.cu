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
// They add up their sums in the end, which a block of few steps is better without.
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
// scratch, list of experts; the list and the sums lie in what a table of 3 or 4 bits leaves free, as far as
// that reaches, and sums of 96 tokens and more where activations were.
// Technique: decode into registers as the A operand (operands swapped) from FLUTE and Machete.
#include "wgmma_finish.cuh"
#include "wgmma_instruction.h"

// Warp 0 of the producers copies weights, warp 1 activations; one lane of each. A step beyond K is all zeros.
// (Eight copies of a tile instead of a box took 800 clocks a step.) `early`: the weights of the first steps
// complete their own barriers.
DEVICE void produce_tile(const Problem& p, const Work& work, Ring& ring, const TensorMap* map, bool weights,
                         bool early) {
    constexpr int kWords = D::kTileBytes / 4;
    const Tile at = p.tile(work.tile);
    const int row_tile = at.expert * p.row_tiles + at.block * (p.gated ? kRowTiles / 2 : kRowTiles);
    const int first = work.first(), count = work.count();
    for (int i = 0; i < count; ++i) {
        const bool apart = early && weights && i < kEarlySteps;
        const u32 there = apart ? ring.early() : ring.there();
        barrier_wait(ring.empty(), ring.phase ^ 1);
        barrier_expect(there, weights ? kWeightBytes : kActivationBytes);
        if (apart) {
            barrier_arrive(ring.there());
        }
#pragma unroll
        for (int j = 0; j < kTilesOfStep; ++j) {
            const int tile = (first + i) * kTilesOfStep + j;
            if (!weights) {
                const u32 to = ring.activations() + j * kBoxBytes;
                if constexpr (kMulticast) {
                    const int rank = cluster_rank(), token = at.token + rank * (kTokens / 2);
                    copy_box_to_both(to + rank * (kBoxBytes / 2), map, tile * kTileColumns, token, there);
                } else {
                    copy_box(to, map, tile * kTileColumns, at.token, there);
                }
                continue;
            }
            const u32 to = ring.weights() + j * kTilesBytes;
            copy_box(to, map, tile * kWords, row_tile, there);
            if (p.gated) {
                copy_box(to + kTilesBytes / 2, map, tile * kWords, row_tile + p.row_tiles / 2, there);
            }
        }
        ring.next();
    }
}

DEVICE void produce(const Problem& p, Work work, Ring ring, const TensorMap* weight_map,
                    const TensorMap* x_map, int warp, int lane) {
    const bool weights = warp == 0, busy = warp < 2 && lane == 0;
    if (busy && !weights) {
        wait_for_previous();
        launch_late();
    }
    for (bool first = true; work.more(); work.next(), first = false) {
        if (busy) {
            produce_tile(p, work, ring, weights ? weight_map : x_map, weights, first);
        }
        __syncwarp();
        if (work.split) {
            syncs_of_finish(work);
        }
    }
}

// A consumer warp's packed weights of a step.
struct Packed {
    using S = Scales<kUe4m3, Config::bf16>;
    u32 words[kTilesOfStep][Config::bits];
    typename S::Words scales[kTilesOfStep];

    // Of the step in `ring`, complete with barrier `there`.
    DEVICE Packed(const Ring& ring, int slot, int lane, u32 there) {
        barrier_wait(there, ring.phase);
#pragma unroll
        for (int t = 0; t < kTilesOfStep; ++t) {
            const u32 tile = ring.weights() + t * kTilesBytes + slot * D::kTileBytes;
            D::load(words[t], tile, lane);
            scales[t] = S::load(tile + D::kScalesAt + lane / 4 * S::kBytes);
        }
    }
    // As the A operands of the step's k16 steps.
    DEVICE void decode(u32 (&a)[4 * kTilesOfStep][4], const D& decode) const {
#pragma unroll
        for (int t = 0; t < kTilesOfStep; ++t) {
            u32 factors[4 / S::kSteps][2];
            static_for<4 / S::kSteps>([&](auto block) {
                factors[block.value][0] = S::template factor<block.value * S::kSteps, 0>(scales[t]);
                factors[block.value][1] = S::template factor<block.value * S::kSteps, 1>(scales[t]);
            });
            static_for<4>([&](auto j) {
                u32(&to)[4] = a[4 * t + j.value];
                decode.template step<j.value>(words[t], to);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    to[i] = H::multiply(to[i], factors[j.value / S::kSteps][i % 2]);
                }
            });
        }
    }
};

// A consumer warp has read a step's slot: it is free when all have, of both blocks if they fill each other's.
DEVICE void release(u32 empty, int lane) {
    if constexpr (!kMulticast) {
        warp_arrive(empty, lane);
        return;
    }
    __syncwarp();
    if (lane < kWarpArrivals) {
        barrier_arrive_there(empty, 0);
        barrier_arrive_there(empty, 1);
    }
}

DEVICE void consume(const Problem& p, Work work, Ring ring, const D& decode, const Output& out, u32 staging,
                    int team, int thread) {
    const int slot = p.slot(uniform(thread / 32)), lane = thread % 32;
    Ring ahead = ring;
    constexpr int kSteps = 4 * kTilesOfStep;
    u32 a[2][kSteps][4];
    bool first = true, decoded = false;
    u32 sums_phase = 0;
    for (; work.more(); work.next()) {
        float acc[kTokens / 2];
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) {
            acc[i] = 0.0f;
        }
        const int steps = work.count() / kTeams;
        const bool more = work.flows();
        u32 used = 0;  // empty barrier of the step before
        const auto multiply = [&](const u32(&now)[kSteps][4]) {
            wgmma_fence();
            const u64 b = descriptor(ring.activations());
#pragma unroll
            for (int j = 0; j < kSteps; ++j) {
                multiply_add(acc, now[j], b + j / 4 * (kBoxBytes / 16) + j % 4 * 2);
            }
            wgmma_commit();
            used = ring.empty();
            ring.next(kTeams);
        };
        const auto load_next = [&](u32 there) {
            const Packed packed(ahead, slot, lane, there);
            ahead.next(kTeams);
            return packed;
        };
        const auto step = [&](const u32(&now)[kSteps][4], u32(&then)[kSteps][4], int i) {
            const auto multiply_now = [&] {
                wgmma_wait<0>();  // the step before is done: its registers and its slot are free
                release(used, lane);
                multiply(now);
            };
            if (i + 1 == steps && !more) {
                multiply_now();
                return;
            }
            // The next tile's first step, too.
            if constexpr (kSpread) {
                const Packed packed = load_next(ahead.there());
                multiply_now();
                packed.decode(then, decode);
            } else {
                multiply_now();
                load_next(ahead.there()).decode(then, decode);
            }
        };
        if (!decoded) {
            load_next(first ? ahead.early() : ahead.there()).decode(a[0], decode);
        }
        const bool two = first && steps > 1;
        if (two) {
            load_next(ahead.early()).decode(a[1], decode);
        }
        // The first activations come after it anyhow. Before it, biases could be those of another call: the
        // kernel in front may be what writes them.
        wait_for_previous();
        const Addends with(p, out, work.tile, thread / 32, lane / 4);
        if (first) {
            barrier_wait(ring.there(), 0);
        }
        multiply(a[0]);
        if (two) {
            barrier_wait(ring.there(), 0);
        } else if (steps > 1) {
            load_next(ahead.there()).decode(a[1], decode);
        }
        first = false;
        for (int i = 1; i < steps; i += 2) {
            step(a[1], a[0], i);
            if (i + 1 == steps) {
                break;
            }
            step(a[0], a[1], i + 1);
        }
        decoded = more;
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) {
            asm volatile("" : "+f"(acc[i])::"memory");  // not read before the wait
        }
        release(used, lane);
        float kept[kKept / 2];
        // Opaque, or what follows from them would be computed before the steps and kept on the stack.
        asm volatile("" : "+r"(thread), "+r"(staging), "+r"(team));
        add_up_teams(kept, acc, staging, team, thread);
        if (kKept == kTokens && team) {  // team 0 has all
            if (work.split) {
                syncs_of_finish(work);
            }
        } else if (!kMulticast && work.split) {
            finish_in_cluster(p, kept, out, with, work, ring.base, staging, sums_phase, team, thread);
            sums_phase ^= 1;
        } else {
            finish(p, kept, out, with, staging, team, thread);
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
    Problem p{n, m, gated != 0, steps, row_tiles, row_blocks, token_blocks, alone, near, {}, 0};
    Ring ring{shared_address(memory)};
    if (thread == 0) {
        Ring each = ring;
        for (int s = 0; s < kStages; ++s, each.next()) {
            barrier_init(each.there(), 2);
            barrier_init(each.early(), 1);
            barrier_init(each.empty(), kSharers * kTeamThreads / 32 * kWarpArrivals);
        }
        barrier_init(ring.base + kSumsBarrierAt, 1);
        barriers_visible();
        prefetch_map(&weight_map);
        prefetch_map(&x_map);
    }
    const float level = D::level(codebook, lane);
    if (cluster_size() > 1) {
        cluster_sync();  // no block sends sums or activations to one that has not begun
    } else {
        __syncthreads();
    }
    const u32 scratch = ring.base + kScratchAt;
    if constexpr (kGrouped) {
        wait_for_previous();
        const List list{memory + kListAt};
        BlockGroups groups;
        groups.find(scratch, offsets, experts, m, kTokensLog);
        write_list(list, groups, experts);
        p.list = list;
        p.experts = experts;
        p.token_blocks = groups.all_pieces;
        p.find_alone();
    }
    if (warp < 4) {
        fewer_registers<kProducerRegisters>();
        produce(p, Work(p), ring, &weight_map, &x_map, warp, lane);
    } else {
        more_registers<kConsumerRegisters>();
        D::fill(memory, level, thread - 128, kConsumers);
        consumers_sync<kConsumers>();
        const D decode(memory, lane);
        const int width = p.width();
        const bool wide = width % 8 == 0 && reinterpret_cast<u64>(y) % 16 == 0;
        const Output out{scale, bias, row_scale, y, width, wide};
        const int group = uniform(warp / 4) - 1, team = group / kGroups;
        ring.slot = team;
        consume(p, Work(p), ring, decode, out, ring.base + kStagingAt + group * kStagingBytes, team,
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
