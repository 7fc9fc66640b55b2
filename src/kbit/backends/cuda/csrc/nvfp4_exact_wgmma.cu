// y[r, n] = round((sum_k A[r, k] * W[n, k] * w_scale) * row_scale[r]) under the contract `exact`, W in tiles,
// on Hopper's asynchronous tensor cores: for more tokens than nvfp4_exact.cu is fast for.
//
//   weight_map  tensor map of the tiles (nvfp4_layout.py), as in wgmma.cu
//   codebook    float32 [16], values of codes
//   x_map       tensor map of A decoded to float16 [m, K], which is exact; as in wgmma.cu
//   bounds      uint32 [ceil(m / 32), K / 64] (nvfp4_exact_x.cu)
//   row_scale   float32 [m] or null; w_scale, or w_scales float32 [experts]
//   y           [m, n] of dtype `out_dtype` (0 float32, 1 float16, 2 bfloat16)
//
// Where integers take two multiplications for 16 columns, here float32 takes six additions for 256. Both
// operands are code * scale in float16, and products are chained over 256 columns while every sum is a
// multiple of one power of two and at most 2^24 times it: then float32 holds it, and no addition has rounded.
// Norms tell when that is so, those of W in a tile's mark (nvfp4_marks.py), those of A in `bounds`. Else
// products are chained over 64 columns, where the same is asked again; else blocks of 16 columns are
// multiplied apart: their products have one unit, and sums of at most 19 bits.
//
// A float32 becomes an integer by an adder: d + 1.5 * 2^(23 + u) has d in units of 2^u, rounded, in its low
// bits. What it rounded off is exact, and goes into units 2^23 times smaller likewise; what that leaves is 0
// where no scale of W is more than 2^8 times smaller than the largest of the 64 rows. A tile that has one is
// multiplied apart, and that rest, of units of 2^-20, goes to shared memory. So nothing is ever lost, and the
// order of sums cannot be seen. See Units for the bounds.
//
// Grouped: one W for every expert, and rows of A sorted by expert, `offsets` int32 [experts + 1] of them
// (groups.cuh); those of no expert give +0. A[r] is then row rows[r] of what has factors, or row r.
//
// Rings, clusters and dependent launch are those of wgmma.cu, where windows of 256 columns stand for its
// steps. K has at most 511 tiles.
//
// Shared memory: that of wgmma.cu, where staging holds sums on their way between blocks of a cluster: 64 bits
// each, [warpgroup][sum of a lane][lane]. Rests lie in the table's holes; grouped, where those hold the list
// of experts, and nothing is split, in staging.
#include "nvfp4_exact_wgmma.cuh"
#include "wgmma_instruction.h"

using Leftover = Rests<kMine, kConsumers, !kGrouped>;

// The sums of a lane, of a tile of y.
struct Lane {
    Sums<kMine> sums;
    Units units;
    const Leftover rests;
    bool has_rests;

    // A tile of K with a mark that does not fit.
    DEVICE void add_apart(float (&acc)[kMine], const u32 (&a)[4][4], u64 b) {
        if (!has_rests) {
            rests.clear();
            has_rests = true;
        }
        sums.carry();
#pragma unroll 1
        for (int j = 0; j < 4; ++j) {
            const u32 block[4] = {pick(a, j, 0), pick(a, j, 1), pick(a, j, 2), pick(a, j, 3)};
            wgmma_fence();
            multiply_onto(acc, block, b + j * 2, false);
            wgmma_commit();
            products_done(acc);
            sums.add_apart(acc, units, rests);
        }
        sums.carry();
    }
    static DEVICE u32 pick(const u32 (&a)[4][4], int j, int i) {
        return j < 2 ? (j ? a[1][i] : a[0][i]) : j > 2 ? a[3][i] : a[2][i];
    }
    DEVICE i64 total(int i) const { return sums.total(i, units, has_rests ? rests.at(i) : 0); }
};

// The barriers of a split tile's end, for warps without sums: sums are there, and have been read.
DEVICE void syncs_of_sums(const Work&) {
    cluster_sync();
    cluster_sync();
}

// Adds up the sums of a cluster's blocks, and stores them.
DEVICE void finish_in_cluster(const Lane& mine, const Place& to, u32 staging, int thread) {
    const u32 place = staging + thread / 128 * kPartBytes + thread % 128 * 8;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
        const u64 total = u64(mine.total(i));
        store_shared2(place + i * 1024, make_uint2(u32(total), u32(total >> 32)));
    }
    cluster_sync();
    const int blocks = cluster_size();
    for (int i = cluster_rank(); i < kMine; i += blocks) {
        i64 total = 0;
        for (int block = 0; block < blocks; ++block) {
            const uint2 part = load_cluster2(cluster_address(place + i * 1024, block));
            total += i64(u64(part.y) << 32 | part.x);
        }
        to.store(i, [&] { return total; }, to.row_scale(i));
    }
    cluster_sync();
}

// A consumer warp's way through the steps.
struct Consumer {
    const D& decode;
    int slot, lane;
    Ring ring, ahead;     // of the products, and of the weights, a step in front
    u32 a[2][kSteps][4];  // operands of even and of odd steps
    u32 mark = 0;         // of the next window
    float acc[kMine];
    bool pending = false;  // products are in flight, and their slot of the ring is not free yet
    u32 used = 0;          // its empty barrier

    DEVICE Consumer(const D& decode_, const Ring& ring_, int slot_, int lane_)
        : decode(decode_), slot(slot_), lane(lane_), ring(ring_), ahead(ring_) {}

    // A block's first two steps have weights `early`, and activations later. WINDOW: it begins one.
    template <bool WINDOW>
    DEVICE Packed load_next(bool early) {
        const Packed packed(ahead, slot, lane, early ? ahead.early() : ahead.there());
        if (WINDOW) {
            mark = load_mark(ahead, slot, 0);
        }
        ahead.next();
        return packed;
    }
    DEVICE void begin(bool early) { load_next<true>(early).decode(a[0], decode); }
    // The products of the window before are done.
    DEVICE void window_done(Lane& mine) {
        products_done(acc);
        if (pending) {
            release(used, lane);
            mine.sums.add(acc, mine.units);
        }
        pending = false;
    }
    // A window whose products are chained. begins: the block does; ends: no more weights are to be loaded.
    DEVICE void multiply_window(Lane& mine, bool begins, bool ends) {
        static_for<kWindow>([&](auto j) {
            constexpr int kStep = j.value;
            const bool next = kStep + 1 < kWindow || !ends;
            Packed packed;
            if (next) {
                packed = load_next<kStep + 1 == kWindow>(begins && kStep == 0);
            }
            if (kStep < 2 && begins) {
                barrier_wait(ring.there(), 0);
            }
            if (kStep == 0) {
                window_done(mine);
            } else {
                products_done(acc);
                release(used, lane);
            }
            const u64 b = descriptor(ring.activations());
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                const u64 at = b + i / 4 * (kBoxBytes / 16) + i % 4 * 2;
                multiply_onto(acc, a[kStep % 2][i], at, kStep + i > 0);
            }
            wgmma_commit();
            used = ring.empty();
            ring.next();
            if (next) {
                packed.decode(a[(kStep + 1) % 2], decode);
            }
        });
        pending = true;
    }
    // A window by tiles, of which `first` is the first of K.
    DEVICE void multiply_tiles(Lane& mine, const Bounds& bounds, int first, bool begins, bool ends) {
        window_done(mine);
#pragma unroll 1
        for (int j = 0; j < kWindow; ++j) {
            barrier_wait(ring.there(), ring.phase);
            const u64 b = descriptor(ring.activations());
            static_for<kTilesOfStep>([&](auto t) {
                const u64 box = b + t.value * (kBoxBytes / 16);
                const u32(&of_tile)[4][4] = *reinterpret_cast<const u32(*)[4][4]>(&a[0][4 * t.value]);
                const u32 its_mark = load_mark(ring, slot, t.value);
                if (bounds.tile_fits(its_mark, first + j * kTilesOfStep + t.value)) {
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        multiply_onto(acc, of_tile[i], box + i * 2, i > 0);
                    }
                    wgmma_commit();
                    products_done(acc);
                    mine.sums.add(acc, mine.units);
                } else {
                    mine.add_apart(acc, of_tile, box);
                }
            });
            release(ring.empty(), lane);
            ring.next();
            if (j + 1 < kWindow || !ends) {
                begin(begins && j == 0);
            }
        }
    }
};

DEVICE void consume(const Problem& p, int tiles, Windows work, const Ring& ring, const D& decode,
                    const u32* bounds, const Output& out, const Leftover& rests, u32 staging, int thread) {
    const int lane = thread % 32;
    Consumer consumer(decode, ring, p.slot(uniform(thread / 32)), lane);
    if (!work.more()) {
        return;
    }
    consumer.begin(true);
    wait_for_previous();
    Tile at = p.tile(work.tile);
    Bounds of_windows;
    of_windows.find(bounds, at, tiles, work, lane);
    for (bool first = true, decoded = true; work.more(); work.next(), first = false) {
        if (!decoded) {
            consumer.begin(false);
        }
        const int windows = work.windows();
        const bool more = work.flows();
        Lane mine{{}, Units(consumer.mark >> 12), rests, false};
        for (int w = 0; w < windows; ++w) {
            const bool begins = first && w == 0, ends = w + 1 == windows && !more;
            if (of_windows.fits(consumer.mark, w)) {
                consumer.multiply_window(mine, begins, ends);
            } else {
                const int tile = kWindowTiles * (work.first_window() + w);
                consumer.multiply_tiles(mine, of_windows, tile, begins, ends);
            }
        }
        decoded = more;
        // What the end of this tile and the beginning of the next wait for, on its way before.
        const Place to(p, out, at, thread);
        constexpr bool kEarly = kTokens < 64;  // more lack registers
        float row_scales[kMine / 2];
        if (kEarly && !work.split) {
            to.load(row_scales);
        }
        Windows next = work;
        next.next();
        if (next.more()) {
            at = p.tile(next.tile);
            of_windows.find(bounds, at, tiles, next, lane);
        }
        consumer.window_done(mine);
        if (work.split) {
            finish_in_cluster(mine, to, staging, thread);
            continue;
        }
        if (!kEarly) {
            to.load(row_scales);
        }
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            to.store(i, [&] { return mine.total(i); }, row_scales[i / 4 * 2 + i % 2]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(128 + kConsumers, 1)
    nvfp4_exact_wgmma(const float* __restrict__ codebook, const u32* bounds, const float* row_scale,
                      const int* rows, const float* w_scales, const int* offsets, void* y,
                      const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap x_map,
                      int n, int m, int experts, int tiles, int row_tiles, int row_blocks, int token_blocks,
                      int alone, int near, float w_scale, int out_dtype) {
    extern __shared__ __align__(1024) u8 memory[];
    launch_early();
    const int thread = threadIdx.x, warp = uniform(thread / 32), lane = thread % 32;
    const int windows = (tiles + kWindowTiles - 1) / kWindowTiles;
    Problem p{n, m, false, windows, row_tiles, row_blocks, token_blocks, alone, near, {}, 0};
    Ring ring{shared_address(memory)};
    const float level = begin(ring, codebook, &weight_map, &x_map, thread, lane);
    const u32 scratch = ring.base + kScratchAt;
    if constexpr (kGrouped) {
        wait_for_previous();
        find_experts(p, memory, scratch, offsets, experts);
    }
    if (warp < 4) {
        fewer_registers<kProducerRegisters>();
        produce(p, Windows(p), ring, &weight_map, &x_map, warp, lane, syncs_of_sums);
    } else {
        more_registers<kConsumerRegisters>();
        const int mine = thread - 128;
        D::fill(memory, level, mine, kConsumers);
        consumers_sync<kConsumers>();
        const D decode(memory, lane);
        const Output out{row_scale, rows, w_scales, y, w_scale, out_dtype};
        const Leftover rests{kGrouped ? memory + kStagingAt : memory, mine};
        consume(p, tiles, Windows(p), ring, decode, bounds, out, rests, ring.base + kStagingAt, mine);
        if constexpr (kGrouped) {
            const int width = out_dtype == 0 ? 2 * n : n;  // in 16 bits
            BlockGroups::owned(scratch).clear_others(static_cast<u16*>(y), m, width, mine, kConsumers);
        }
    }
}
