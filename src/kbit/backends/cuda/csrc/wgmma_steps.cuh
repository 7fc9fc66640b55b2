// The way of a step's weights and activations in wgmma.cu and nvfp4_exact_wgmma.cu: copied by the producer
// warps, decoded by the consumer warps.
#pragma once

#include "wgmma.cuh"

// A block begins, all threads: its ring, and, on its way meanwhile, what a lane contributes to the table.
DEVICE float begin(const Ring& ring, const float* codebook, const TensorMap* weight_map,
                   const TensorMap* x_map, int thread, int lane) {
    if (thread == 0) {
        ring.init();
        prefetch_map(weight_map);
        prefetch_map(x_map);
    }
    const float level = D::level(codebook, lane);
    if (cluster_size() > 1) {
        cluster_sync();  // no block sends or reads sums or activations of one that has not begun
    } else {
        __syncthreads();
    }
    return level;
}

// Warp 0 of the producers copies weights, warp 1 activations; one lane of each. A step beyond K is all zeros.
// (Eight copies of a tile instead of a box took 800 clocks a step.) `early`: the weights of the first steps
// complete their own barriers. Grouped: the consumers read there what tile it is, since looking for its
// expert takes 500 clocks.
template <class WORK>
DEVICE void produce_tile(const Problem& p, const WORK& work, const Tile& at, Ring& ring, const TensorMap* map,
                         bool weights, bool early) {
    constexpr int kWords = D::kTileBytes / 4;
    const int row_tile = at.expert * p.row_tiles + at.block * (p.gated ? kRowTiles / 2 : kRowTiles);
    const int first = work.first(), count = work.count();
    for (int i = 0; i < count; ++i) {
        const bool apart = early && weights && i < kEarlySteps;
        const u32 there = apart ? ring.early() : ring.there();
        barrier_wait(ring.empty(), ring.phase ^ 1);
        if (kGrouped && weights && i < kTurns) {
            ring.put_tile(at);
        }
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
        ring.next(kTeams / kTurns);
    }
}

// Producer warp `warp` of those that `work` is for. `syncs` does the cluster's barriers at the end of a tile
// whose steps are split.
template <class WORK, class F>
DEVICE void produce(const Problem& p, WORK work, Ring ring, const TensorMap* weight_map,
                    const TensorMap* x_map, int warp, int lane, F syncs) {
    const bool weights = warp == 0, busy = warp < 2 && lane == 0;
    if (busy && !weights) {
        wait_for_previous();
        launch_late();
    }
    for (bool first = true; work.more(); work.next(), first = false) {
        const Tile at = p.tile(work.tile);
        if (busy) {
            produce_tile(p, work, at, ring, weights ? weight_map : x_map, weights, first);
        }
        __syncwarp();
        if (work.split) {
            syncs(work);
        }
    }
}

// A consumer warp's packed weights of a step.
struct Packed {
    using S = Scales<kUe4m3, Config::bf16>;
    u32 words[kTilesOfStep][Config::bits];
    typename S::Words scales[kTilesOfStep];

    Packed() = default;
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
            static_for<4>([&](auto j) {
                u32(&to)[4] = a[4 * t + j.value];
                decode.template step<j.value>(words[t], to);
                S::template scale<j.value>(to, scales[t]);
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

// All products in flight are done.
DEVICE void products_done(float (&acc)[kSumTokens / 2]) {
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kSumTokens / 2; ++i) {
        asm volatile("" : "+f"(acc[i])::"memory");  // not read before the wait
    }
}
