// y[m, n] = sum_k x[m, k] * W[n, k] (+ bias[n]) for few tokens: 1 <= M <= Config::tokens (1, 2, 4, 8 or 16).
//
// Gated: W holds 2 * I rows, gates first; y[m, i] = silu(gate[m, i]) * up[m, i], shape [M, I], I % 16 == 0.
//
// Memory-bound: every packed byte is read once, into a ring in shared memory, and decoded into an MMA's A;
// tokens are the columns of B. Above 8 wgmma.cu takes over on Hopper, elsewhere mma.cu above 16.
//
//   tiled     [ceil(N/16), ceil(K/64)] tiles (layout.py), 16-byte aligned
//   codebook  float32 [2^bits]; scale float32 [1]: the matrix's factor
//   x         16-bit [M, x_stride], rows aligned to 16 bytes, zeros in columns K to the next multiple of 8
//             Config::coded: NVFP4, uint8 [M, x_stride / 2], and x_scales uint8 [M, x_stride / 16], K a
//             multiple of 256, rows aligned to 16 bytes; NVFP4 weights only
//   bias      16-bit [N] or null; y 16-bit [M, N], or [M, N/2] if gated
//   row_scale float32 [M] or null: NVFP4 only, never gated; y is (sum * scale) * row_scale (+ bias)
//
// Experts of a token (Config::experts): tiled [experts, ...], scale [experts], ids int32 or int64 [slots].
//   rows     x [1, K], y [slots, N] or [slots, N/2]: of each expert, zeros for ids of no expert
//   columns  x [slots, K], y [1, N] = sum over s of weights[s] * (x[s] @ W[ids[s]]^T); weights 16-bit or
//            float32 [slots]; never gated
//
// Work: the row tiles (16 rows) are dealt to the blocks. The workers, all warps of a block but the last,
// split K in groups of Config::group_tiles (4 or 8); each keeps x of its group in registers and passes over
// the block's row tiles. If K has more groups than there are workers there are several passes. The last warp,
// the server, adds up the workers' sums: done by the workers in turn, that cost them a third of their
// instructions. Config::split: row tiles are dealt to clusters, whose blocks split K first, so that each
// reads a part of x; their servers send each other what they added up.
//
// Order of float32 sums: the MMAs of a 32-block, times its scale, over the blocks of a worker's group, over
// workers in their order, over passes, over blocks of the cluster; where a block has a single row tile that
// is not gated, over a worker's passes before its place among workers. Results depend on N, K, which of
// stream.py's classes M is in and how many multiprocessors there are, never on timing.
//
//   M = 1, 2, 4: the 8 columns of B hold 8, 4, 2 k-blocks beside each other. The MMA of a block is then
//   useful in its own columns only, and 4 registers are the x of all of them: fewer to load and to swap.
//
// Dependent launch: the table is built and the ring filled before the previous kernel is done, so whoever
// writes `tiled` ends with a kernel that is launched without it; x is read, and y written, after. Experts'
// rows wait for ids first, and then let the columns start, which must follow them and find ids written.
//
// Shared memory: table, barriers (kBarrierBytes), ring (workers * stages * groups), parts (2 or 4 * workers
// * 128 bytes a sum; in the table's holes where they fit), totals, the sums of a cluster's blocks.
#include "stream_nvfp4.cuh"
#include "stream_serve.cuh"

// d += one 32-block of a tile (its two k16 steps) times x. If kScaleWeights, the weights are scaled first.
template <int BLOCK, bool NEW>
DEVICE void multiply_block(float (&d)[kColumns][4], const D& decode, const u32 (&w)[Config::bits],
                           S::Words scales, Activations& x, int q, int t) {
    u32 a[2][4];
    decode.template step<2 * BLOCK, Config::bits == 2 && BLOCK == 0>(w, a[0]);
    decode.template step<2 * BLOCK + 1>(w, a[1]);
    if constexpr (kScaleWeights) {
        S::scale<2 * BLOCK>(a[0], scales);
        S::scale<2 * BLOCK + 1>(a[1], scales);
    }
    const int block = 2 * q + BLOCK, set = block / kBeside;
    if (NEW) {
        x.prepare(block, decode, t);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
            const u32(&b)[4] = x.v[n][set];
            H::mma(d[n], a[j], b[2 * j], b[2 * j + 1]);
        }
    }
}

// sums += (one 32-block's products) * (its scales in rows g and g + 8)
DEVICE void add_scaled(float (&sums)[kColumns][4], const float (&d)[kColumns][4], u32 scales) {
    const float upper = low_half(scales), lower = high_half(scales);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
        sums[n][0] += d[n][0] * upper;
        sums[n][1] += d[n][1] * upper;
        sums[n][2] += d[n][2] * lower;
        sums[n][3] += d[n][3] * lower;
    }
}

// Products of k-blocks beside each other, of which every block's are useful in columns of its own. A lane has
// those of two columns: of one block and two tokens, or, M = 1, of two blocks.
template <class S>
struct Beside {
    float d[4];
    int mine;  // the lane's block of a set; M = 1: the first of two

    DEVICE Beside(int t) : d{}, mine(2 * t / kWide) {}

    // The products of blocks 2q and 2q + 1 in all columns.
    DEVICE void keep(const float (&even)[4], const float (&odd)[4], int q) {
        const int block = 2 * q % kBeside;
        if constexpr (kOne) {
            if (mine == block) {
                d[0] = even[0];
                d[1] = odd[1];
                d[2] = even[2];
                d[3] = odd[3];
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            d[i] = mine == block ? even[i] : mine == block + 1 ? odd[i] : d[i];
        }
    }
    // sums += the products times their scales; `words`: of the tiles of a set, or, M = 1, of tile t in [0].
    DEVICE void add_to(float (&sums)[4], const typename S::Words* words) const {
        if constexpr (kOne) {
            const u32 even = S::template halves<0>(words[0]), odd = S::template halves<1>(words[0]);
            sums[0] += d[0] * low_half(even);
            sums[0] += d[1] * low_half(odd);
            sums[2] += d[2] * high_half(even);
            sums[2] += d[3] * high_half(odd);
            return;
        }
        const u32 tile = kBeside == 4 && mine >= 2 ? words[1] : words[0];
        const u32 both = S::template halves<0>(tile >> mine % 2 * 8);
        const float upper = low_half(both), lower = high_half(both);
        sums[0] += d[0] * upper;
        sums[1] += d[1] * upper;
        sums[2] += d[2] * lower;
        sums[3] += d[3] * lower;
    }
};

// sums += kStepTiles tiles at a shared address. Tiles that K does not reach hold old codes and scales,
// all of them finite, and meet activations of zero. NEW: x was just loaded. Returns what after_loads takes.
template <bool NEW, class S>
DEVICE u32 multiply_tiles(Sums& sums, const D& decode, Activations& x, u32 group, int lane) {
    const int t = lane & 3;
    typename S::Words scales[kStepTiles];
    Beside<S> beside(t);
    constexpr int kAhead = kScaleWeights || kStepTiles > 4 ? 0 : 1;
    return for_tiles<kAhead>(group, lane, scales, [&](int q, const auto& w) {
        if constexpr (kScaleWeights) {
            multiply_block<0, NEW>(sums, decode, w, scales[q], x, q, t);
            multiply_block<1, NEW>(sums, decode, w, scales[q], x, q, t);
            return;
        }
        Sums even = {}, odd = {};
        multiply_block<0, NEW>(even, decode, w, scales[q], x, q, t);
        multiply_block<1, NEW>(odd, decode, w, scales[q], x, q, t);
        if constexpr (kBeside == 1) {
            add_scaled(sums, even, S::template halves<0>(scales[q]));
            add_scaled(sums, odd, S::template halves<1>(scales[q]));
        } else {
            beside.keep(even[0], odd[0], q);
            if ((2 * q + 2) % kBeside == 0) {
                beside.add_to(sums[0], &scales[kOne ? 0 : q + 1 - kBeside / 2]);
            }
        }
    });
}

// sums += the group at a shared address, likewise.
template <bool NEW, class S>
DEVICE u32 multiply_group(Sums& sums, const D& decode, Activations& x, u32 group, int lane) {
    if constexpr (kStepTiles == kGroupTiles) {
        return multiply_tiles<NEW, S>(sums, decode, x, group, lane);
    } else {
        if (NEW) {
            x.prepare(0, decode, lane & 3);
        }
        u32 loaded = 0;
#pragma unroll 1
        for (int step = 0; step < kGroupTiles / kStepTiles; ++step) {
            Activations of = of_step(x, step);
            const u32 at = group + step * kStepTiles * D::kTileBytes;
            loaded |= multiply_tiles<false, S>(sums, decode, of, at, lane);
        }
        return loaded;
    }
}

template <bool NEW>
DEVICE u32 multiply(Sums& sums, const D& decode, Activations& x, u32 group, int lane) {
    if constexpr (kUe4m3) {
        return multiply_nvfp4<NEW>(sums, decode, x, group, lane);
    } else {
        return multiply_group<NEW, S>(sums, decode, x, group, lane);
    }
}

DEVICE void work(const Problem& p, Ring& ring, const Parts& parts, u32 parts_full, u8* table, Source x,
                 const Routing& routing, int worker, int lane) {
    const D decode = D::filled(table, lane);
    const u32 zero = opaque(u32(p.m) >> 31), parts_empty = parts_full + 8 * kBuffers;
    Sums sums = {};
    Activations act;
    Cursor<kBuffers> out;
    for (int segment = 0; segment < p.segments; ++segment) {
        const int group = p.group(segment, worker);
        const bool mine = p.has(group), hands_over = p.hands_over(segment);
        const int slot = kExperts == kExpertColumns && mine ? group / p.per_slot : 0;
        if constexpr (kExperts == kExpertColumns) {  // columns that x lacks are zeros
            const Source of_slot{x.x + u64(slot) * x.stride, nullptr, x.stride};
            act.load(of_slot, mine ? group % p.per_slot : p.per_slot, p, lane);
        } else if (!p.ups(segment)) {
            act.load(x, kSplit && !mine ? p.k_tiles : group, p, lane);
        }
        if (!kOne && segment == 0) {
            launch_dependents();  // whose weights would come before these activations
        }
        if (kExperts && segment == 0) {
            if constexpr (kExperts == kExpertRows) {  // after the activations, which are fewer
                ring.choice.find(routing);
                ring.start(p);
            }
            ring.choice.weigh(routing, lane);
        }
        const float factor = kExperts == kExpertColumns ? ring.choice.factor_of(slot) : 1.0f;
        const auto add_group = [&](Sums& sums, auto new_x) {
            const u32 group_at = ring.wait();
            Sums fresh = {};
            Sums& into = kExperts == kExpertColumns ? fresh : sums;
            const u32 loaded = multiply<new_x.value>(into, decode, act, group_at, lane);
            if constexpr (kExperts == kExpertColumns) {
#pragma unroll
                for (int i = 0; i < kSums; ++i) {
                    sum_at(sums, i) += sum_at(fresh, i) * factor;
                }
            }
            // Sums of 16 tokens need all scales; those, kept for this, spilled in NVFP4 and at 5 bits.
            constexpr bool kBySums = kColumns == 2 && (kUe4m3 || Config::bits == 5);
            ring.refill(p, kBySums ? __float_as_uint(into[kColumns - 1][3]) : loaded, zero);
        };
        const auto hand_over = [&](Sums& sums) {
            const u32 slot = out.slot();
            barrier_wait(parts_empty + 8 * slot, out.phase() ^ 1);
            parts.hand_over(slot, worker, sums);
            warp_arrive(parts_full + 8 * slot, lane);
            out.next();
        };
        int row = 0;
        if (mine) {
            if (!p.ups(segment)) {
                add_group(sums, Index<1>());
                if (hands_over) {
                    hand_over(sums);
                }
                row = 1;
            }
            for (; row < p.rows; ++row) {
                add_group(sums, Index<0>());
                hand_over(sums);
            }
        } else if (hands_over) {
            for (; row < p.rows; ++row) {
                hand_over(sums);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__((Config::workers + 1) * 32, 1)
    stream(const u8* __restrict__ tiled, const float* __restrict__ codebook, const float* __restrict__ scale,
           const u16* x, const u16* bias, u16* y, int n, int k, int m, int x_stride, int gated, int ring_at,
           int parts_at, int totals_at, const float* row_scale, const void* ids, const void* weights,
           int slots, int experts, int wide_ids, int wide_weights, int exchange_at, const u8* x_scales) {
    extern __shared__ __align__(1024) u8 memory[];
    if constexpr (kOne && kExperts != kExpertRows) {
        launch_early();
    }
    const int lane = threadIdx.x & 31, warp = uniform(threadIdx.x >> 5), workers = (blockDim.x >> 5) - 1;
    const float level = D::level<kScaleWeights>(codebook, lane);
    constexpr float kUnit = kScaleWeights ? 1.0f : S::kUnit;
    const float unit = kExperts ? kUnit : __ldg(scale) * kUnit;

    Problem p;
    p.n = n;
    p.k = k;
    p.m = m;
    p.gated = gated != 0;
    p.k_tiles = (k + 63) / 64;
    p.row_tiles = (n + 15) / 16;
    p.workers = workers;
    const int groups = (p.k_tiles + kGroupTiles - 1) / kGroupTiles;
    u32 units = gated ? p.row_tiles / 2 : p.row_tiles;
    p.per_slot = kExperts == kExpertRows ? units : groups;
    p.expert_bytes = u64(p.row_tiles) * p.k_tiles * D::kTileBytes;
    units *= kExperts == kExpertRows ? slots : 1;
    const int size = kSplit ? cluster_size() : 1, rank = kSplit ? cluster_rank() : 0;
    p.first_group = groups * rank / size;
    p.end_group = (kExperts == kExpertColumns ? groups * slots : groups) * (rank + 1) / size;
    p.segments = (p.end_group - p.first_group + workers - 1) / workers * (gated ? 2 : 1);
    const u32 clusters = gridDim.x / size, cluster = blockIdx.x / size;
    const u32 share = units / clusters, rest = units % clusters;
    p.first = share * cluster + (cluster < rest ? cluster : rest);
    p.rows = share + (cluster < rest);

    const u32 base = shared_address(memory), parts_full = base + D::kTableBytes;
    const Exchange exchange{base + exchange_at, parts_full + kExchangeBarrierAt, rank, size, p.gated};
    Ring ring{tiled, base + ring_at + warp * kStages * kGroupBytes,
              parts_full + kRingBarriersAt + warp * kStages * 8, warp, lane};
    if (warp < workers) {
        ring.init();
        if constexpr (!kExperts) {
            ring.start(p);
        }
    } else if (lane < kBuffers) {
        barrier_init(parts_full + 8 * lane, workers * kWarpArrivals);
        barrier_init(parts_full + 8 * (kBuffers + lane), kWarpArrivals);
        if (kSplit && lane == 0) {
            exchange.init(p.rows);
        }
    }
    const Routing routing{ids, weights, scale, slots, experts, wide_ids != 0, wide_weights != 0};
    if constexpr (kExperts == kExpertColumns) {
        ring.choice.load(routing, lane);
    }
    D::fill(memory, level, threadIdx.x, blockDim.x);
    if constexpr (kExperts == kExpertColumns) {
        ring.choice.find(routing);
        if (warp < workers) {
            ring.start(p);
        }
    }
    if constexpr (kSplit) {
        cluster_sync();  // nobody sends to a block that has not begun
    } else {
        __syncthreads();
    }
    wait_for_previous();
    if constexpr (kExperts == kExpertRows) {
        launch_dependents();  // of the columns, which so may read ids and the weights that they name at once
        ring.choice.load(routing, lane);
    } else if constexpr (kOne) {
        launch_late();
    }
    const Parts parts{base + (kInHoles ? D::hole(0) : parts_at) + place_of_sums<kPartStep>(lane), workers};
    if (warp < workers) {
        work(p, ring, parts, parts_full, memory, {x, x_scales, x_stride}, routing, warp, lane);
    } else {
        if constexpr (kExperts == kExpertRows) {
            ring.choice.find(routing);
            ring.choice.weigh(routing, lane);
        }
        serve(p, parts, parts_full, {bias, y, unit, {row_scale}}, ring.choice, base + totals_at, exchange,
              lane);
    }
}
