// y[m, n] = sum_k x[m, k] * W[n, k] (+ bias[n]) on Hopper's asynchronous tensor cores, for any M.
//
// Gated: W holds 2 * I rows, gates first; y[m, i] = silu(gate[m, i]) * up[m, i], shape [M, I], I % 16 == 0.
//
// Taken from 17 tokens on; stream.cu takes fewer, dequantize + cuBLAS takes all on other GPUs.
//
// Grouped: one W for every expert, and rows of x sorted by expert, as many as there are (groups.cuh).
//
//   weight_map  tensor map of the tiles (layout.py), 32-bit [experts * ceil(N/16), ceil(K/64) * words]: boxes
//               of one tile by 8 tiles, or by 4 if gated
//   codebook    float32 [2^bits]; scale float32 [experts]: the matrices' factors
//   x_map       tensor map of x 16-bit [M, K]: boxes of 64 columns x Config::tokens rows, 128-byte swizzle
//   bias        16-bit [N] or null; y 16-bit [M, N], or [M, N/2] if gated, any alignment of its type
//   offsets     grouped: int32 [experts + 1]
//
// A block computes tiles of 128 rows of W (gated: 64 gates and their 64 ups) by Config::tokens tokens in
// steps of 64 columns. A producer warpgroup keeps kStages steps of packed weights and activations in flight;
// each of eight consumer warps decodes one 16 x 64 weight tile a step into registers, scales it (so that the
// operand is the 16-bit weight that dequantize gives), and two warpgroups multiply: wgmma with A in registers
// and B, the activations, in shared memory. The next step is decoded while the tensor cores work on this one.
//
// Few tiles: a cluster of blocks splits K, leaves float32 sums in shared memory, and every block adds up its
// share of the tokens over the blocks in their order. Otherwise blocks stay and take tile after tile. Either
// way the order of sums depends on shapes alone.
//
// Shared memory: table, ring of kStages * (tokens * 128 bytes + 8 tiles), staging for y (64 tokens),
// barriers. Technique: decode into registers as the A operand (operands swapped) from FLUTE and Machete.
#include "wgmma.cuh"
#include "wgmma_instruction.h"

// Warp 0 of the producers copies weights, warp 1 activations; one lane of each. A step beyond K is all zeros.
// (Eight copies of a tile instead of a box took 800 clocks a step.)
DEVICE void produce(const Problem& p, Ring ring, const TensorMap* map, int tile, int stride, bool weights) {
    constexpr int kWords = D::kTileBytes / 4;
    if (!weights) {
        wait_for_previous();
    }
    for (; tile < p.tiles(); tile += stride) {
        const Tile at = p.tile(tile);
        const int row_tile = at.expert * p.row_tiles + at.block * (p.gated ? kRowTiles / 2 : kRowTiles);
        for (int i = 0; i < p.steps(); ++i) {
            const int step = p.first_step + i < p.end_step ? p.first_step + i : p.k_tiles;
            barrier_wait(ring.empty(), ring.phase ^ 1);
            barrier_expect(ring.full(), weights ? kWeightBytes : kActivationBytes);
            if (!weights) {
                copy_box(ring.activations(), map, step * kStepColumns, at.token, ring.full());
            } else if (!p.gated) {
                copy_box(ring.weights(), map, step * kWords, row_tile, ring.full());
            } else {
                copy_box(ring.weights(), map, step * kWords, row_tile, ring.full());
                copy_box(ring.weights() + kWeightBytes / 2, map, step * kWords, row_tile + p.row_tiles / 2,
                         ring.full());
            }
            ring.next();
        }
    }
}

// A consumer warp's tile of the step in `ring`, as the A operands of its four k16 steps.
DEVICE void decode_step(u32 (&a)[4][4], const D& decode, const Ring& ring, int slot, int lane) {
    barrier_wait(ring.full(), ring.phase);
    const u32 tile = ring.weights() + slot * D::kTileBytes;
    u32 w[Config::bits];
    D::load(w, tile, lane);
    using S = Scales<kUe4m3, Config::bf16>;
    const S::Words scales = S::load(tile + D::kScalesAt + lane / 4 * S::kBytes);
    u32 factors[4 / S::kSteps][2];
    static_for<4 / S::kSteps>([&](auto block) {
        factors[block.value][0] = S::factor<block.value * S::kSteps, 0>(scales);
        factors[block.value][1] = S::factor<block.value * S::kSteps, 1>(scales);
    });
    static_for<4>([&](auto j) {
        decode.template step<j.value>(w, a[j.value]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[j.value][i] = H::multiply(a[j.value][i], factors[j.value / S::kSteps][i % 2]);
        }
    });
}

// acc: [token / 2 ...] of this thread. Blocks of a cluster each finish their share of the tokens.
DEVICE void finish(const Problem& p, float (&acc)[kTokens / 2], const Output& out, const Tile& tile, u32 base,
                   int thread) {
    const int warp = thread / 32, lane = thread % 32, g = lane / 4, group = thread / 128;
    const u32 blocks = cluster_size(), rank = cluster_rank();
    const int row_tile = p.row_tile(tile.block, warp);
    const float unit = __ldg(out.scale + tile.expert);
    float bias[2] = {};
    if (out.bias) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = row_tile * 16 + g + 8 * i;
            bias[i] = row < p.n ? H::widen(out.bias[row]) : 0.0f;
        }
    }
    const u32 sums = base + kActivationsAt + thread * 16;  // of a cluster's block: [tokens / 8][256] float4
    if (blocks > 1) {
        consumers_sync();  // the other warpgroup has read its last activations
#pragma unroll
        for (int i = 0; i < kTokens / 8; ++i) {
            store_shared4(sums + i * kConsumers * 16,
                          {__float_as_uint(acc[4 * i]), __float_as_uint(acc[4 * i + 1]),
                           __float_as_uint(acc[4 * i + 2]), __float_as_uint(acc[4 * i + 3])});
        }
        cluster_sync();
    }
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) {
        constexpr int kGroups = kStagingTokens / 16;
        if (i % kGroups == 0) {
            warpgroup_sync(group);  // the staging buffer is free
        }
        const bool mine = (i & (blocks - 1)) == rank;
        if (mine) {
            if (blocks > 1) {
                add_over_cluster(&acc[8 * i], sums + 2 * i * kConsumers * 16, blocks);
                add_over_cluster(&acc[8 * i + 4], sums + (2 * i + 1) * kConsumers * 16, blocks);
            }
            u32 v[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                v[e] = H::pack(acc[8 * i + 2 * e] * unit + bias[e % 2],
                               acc[8 * i + 2 * e + 1] * unit + bias[e % 2]);
            }
            const int token = i % kGroups * 16 + lane % 8 + lane / 16 * 8;
            const int chunk = warp % 4 * 2 + lane / 8 % 2;
            store_matrices_transposed(shared_address(out.staging) + out.staged(token, chunk), v);
        }
        if (i % kGroups == kGroups - 1 || i == kTokens / 16 - 1) {
            warpgroup_sync(group);
            const int first = i / kGroups * kStagingTokens, tokens = (i + 1) * 16 - first;
            out.store(p, tile, first, tokens, blocks, rank, group, thread % 128);
        }
    }
}

DEVICE void consume(const Problem& p, Ring ring, const D& decode, const Output& out, int tile, int stride,
                    int thread) {
    const int slot = p.slot(uniform(thread / 32)), lane = thread % 32;
    const u32 base = ring.base;
    bool waited = false;
    for (; tile < p.tiles(); tile += stride) {
        float acc[kTokens / 2];
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) {
            acc[i] = 0.0f;
        }
        u32 a[2][4][4];
        Ring ahead = ring;
        const int steps = p.steps();
        u32 used = 0;  // empty barrier of the step before
        decode_step(a[0], decode, ahead, slot, lane);
        ahead.next();
        const auto step = [&](u32(&now)[4][4], u32(&then)[4][4], int i) {
            wgmma_fence();
            const u64 b = descriptor(ring.activations());
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                multiply_add(acc, now[j], b + 2 * j);
            }
            wgmma_commit();
            wgmma_wait<1>();  // the step before is done: its registers and its slot are free
            if (i != 0) {
                warp_arrive(used, lane);
            }
            used = ring.empty();
            ring.next();
            if (i + 1 < steps) {
                decode_step(then, decode, ahead, slot, lane);
                ahead.next();
            }
        };
        for (int i = 0; i < steps; i += 2) {
            step(a[0], a[1], i);
            step(a[1], a[0], i + 1);
        }
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) {
            asm volatile("" : "+f"(acc[i])::"memory");  // not read before the wait
        }
        warp_arrive(used, lane);
        if (!waited) {
            wait_for_previous();
            waited = true;
        }
        finish(p, acc, out, p.tile(tile), base, thread);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    wgmma(const float* __restrict__ codebook, const float* __restrict__ scale, const u16* bias, u16* y,
          const int* offsets, const __grid_constant__ TensorMap weight_map,
          const __grid_constant__ TensorMap x_map, int n, int k, int m, int experts, int gated) {
    extern __shared__ __align__(1024) u8 memory[];
    launch_dependents();
    const int thread = threadIdx.x, warp = uniform(thread / 32), lane = thread % 32;
    const u32 blocks = cluster_size(), rank = cluster_rank();
    Problem p;
    p.n = n;
    p.k = k;
    p.m = m;
    p.gated = gated != 0;
    p.k_tiles = (k + kStepColumns - 1) / kStepColumns;
    p.row_tiles = (n + 15) / 16;
    const int rows = gated ? p.row_tiles / 2 : p.row_tiles;
    const int per_block = gated ? kRowTiles / 2 : kRowTiles;
    p.row_blocks = (rows + per_block - 1) / per_block;
    p.token_blocks = (m + kTokens - 1) / kTokens;
    p.first_step = p.k_tiles * rank / blocks;
    p.end_step = p.k_tiles * (rank + 1) / blocks;
    const int tile = blockIdx.x / blocks, stride = gridDim.x / blocks;
    Ring ring{shared_address(memory)};
    if (thread == 0) {
        Ring each = ring;
        for (int s = 0; s < kStages; ++s, each.next()) {
            barrier_init(each.full(), 2);
            barrier_init(each.empty(), kConsumers / 32 * kWarpArrivals);
        }
        barriers_visible();
    }
    const float level = D::level(codebook, lane);
    __syncthreads();
    if constexpr (kGrouped) {
        wait_for_previous();
        Group* const list = reinterpret_cast<Group*>(memory + kListAt);
        int* const scratch = reinterpret_cast<int*>(memory + kScratchAt);
        Groups<(128 + kConsumers) / 32, Config::experts> groups;
        groups.find(scratch, offsets, experts, m, kTokensLog);
        write_list(list, groups, kTokensLog);
        p.list = list;
        p.groups = groups.all_active;
        p.token_blocks = groups.all_pieces;
    }
    if (warp < 4) {
        fewer_registers<40>();
        if (warp < 2 && lane == 0) {
            produce(p, ring, warp == 0 ? &weight_map : &x_map, tile, stride, warp == 0);
        }
        __syncwarp();
        if (blocks > 1) {
            cluster_sync();
        }
    } else {
        more_registers<232>();
        D::fill(memory, level, thread - 128, kConsumers);
        consumers_sync();
        const D decode(memory, lane);
        u8* staging = memory + kStagingAt + (warp / 4 - 1) * kStagingBytes;
        consume(p, ring, decode, {scale, bias, y, staging}, tile, stride, thread - 128);
        if constexpr (kGrouped) {
            clear_other_rows(y, offsets, experts, m, p.width(), thread - 128, kConsumers);
        }
    }
    if (blocks > 1) {
        cluster_sync();  // no block leaves while others read its sums
    }
}
