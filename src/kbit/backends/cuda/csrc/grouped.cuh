// What the warps of grouped.cu hold: a block's jobs, the ring of packed weights, activations.
#pragma once

#include "grouped_unit.cuh"

constexpr int kStages = Config::stages;
constexpr int kTiles = 2;  // of a row tile, in a stage of the ring
constexpr int kHalfBytes = kTiles * D::kTileBytes;
constexpr int kStageBytes = 2 * kHalfBytes;
constexpr bool kInHoles = Config::in_holes;  // x, in what the table leaves free
static_assert(!kInHoles || D::kHoles);

// A piece, and units of its expert's weight. A block has a list of them, and an end.
struct Job : Piece {
    int first, begin;  // its first unit: of the weight, and of the block
};

// Where a warp is among the block's units: every `teams`-th is its team's.
struct Place {
    const Job* job;
    int unit;

    DEVICE void settle() {
        while (unit >= job[1].begin) {
            ++job;
        }
    }
    DEVICE int weight_unit() const { return job->first + unit - job->begin; }
};

// A warp's share of the weights of its units, in the order it needs them, kStages ahead.
struct Ring {
    const u8* tiled;
    u32 base, barriers;  // kStages slots of kStageBytes, and as many mbarriers
    int lane, first_tile, end_tile;
    Place at;
    int count;  // units of the block
    int tile = 0;
    const u8 *upper = nullptr, *lower = nullptr;
    u32 taken = 0;  // stages

    DEVICE void init() const {
        if (lane == 0) {
            for (int s = 0; s < kStages; ++s) {
                barrier_init(barriers + 8 * s, kCopyArrivals);
            }
            barriers_visible();
        }
        __syncwarp();
    }
    DEVICE void start(const Problem& p) {
        find(p);
        for (int s = 0; s < kStages; ++s) {
            fetch(p, s, 0);
        }
    }
    DEVICE void find(const Problem& p) {
        if (at.unit < count) {
            at.settle();
            const int unit = at.weight_unit();
            const u64 row = u64(at.job->expert) * p.row_tiles;
            upper = tiled + ((row + p.upper(unit)) * p.k_tiles + first_tile) * D::kTileBytes;
            lower = tiled + ((row + p.lower(unit)) * p.k_tiles + first_tile) * D::kTileBytes;
            tile = first_tile;
        }
    }
    DEVICE void fetch(const Problem& p, int slot, u32 shift) {
        if (at.unit < count) {
            const u32 bytes = (end_tile - tile < kTiles ? end_tile - tile : kTiles) * D::kTileBytes;
            const u32 to = base + slot * kStageBytes + shift;
            copy<2>({to, to + kHalfBytes}, {upper, lower}, bytes, barriers + 8 * slot, lane);
            upper += kHalfBytes;
            lower += kHalfBytes;
            tile += kTiles;
            if (tile >= end_tile) {
                at.unit += p.teams;
                find(p);
            }
        }
    }
    // Address of the next stage, when it is there.
    DEVICE u32 wait() const {
        barrier_wait(barriers + 8 * (taken % kStages), taken / kStages & 1);
        return base + taken % kStages * kStageBytes;
    }
    // The next tiles into the stage that all lanes have read; see after_loads.
    DEVICE void refill(const Problem& p, u32 loaded, u32 zero) {
        fetch(p, taken % kStages, after_loads(loaded, zero));
        ++taken;
    }
};

// x of jobs in shared memory, as B operands: [job][column tile][8-token set][token][4 lanes][8 words]. Of a
// set there are only `tokens` (1, 2, 4 or 8); columns of B beyond them repeat these, and their results are
// dropped.
struct Activations {
    const u16* x;
    const int* source;  // which row of x a sorted row is, or null if x is sorted
    int stride, rows, tokens;

    // Where byte `at` is, from the region's start.
    static DEVICE u32 place(u32 at) { return kInHoles ? D::hole(at) : at; }
    DEVICE u32 tile_bytes() const { return tokens * 128 * kColumns; }
    // Of a lane, in every column tile.
    DEVICE u32 lane_place(int lane) const { return place((lane & (4 * tokens - 1)) * 32); }

    // All threads of the block: `count` jobs from `jobs` on, one after the other. A warp takes a token at a
    // time, eight chunks of 8 columns a lane at once. `then` runs in every warp when its first loads are on
    // their way: behind the weights of the whole machine they took 1.5 us longer.
    template <class THEN>
    DEVICE void stage(u8* region, const Problem& p, const Job* jobs, int count, THEN then) const {
        constexpr int kAtOnce = 8;
        const int lane = threadIdx.x & 31, chunks = p.k_tiles * 8, all = tokens * kColumns;
        int job = 0, token = threadIdx.x >> 5;
        bool first_loads = true;
        while (true) {
            for (; token >= all; token -= all) {
                ++job;
            }
            if (job >= count) {
                break;
            }
            const u16* from = nullptr;
            if (token < jobs[job].tokens) {
                const int row = row_of_x(source, jobs[job].row + token, rows);
                from = x + u64(u32(row)) * u32(stride);
            }
            const u32 to = job * p.k_tiles * tile_bytes() + token * 128;
            for (int first = lane; first < chunks; first += kAtOnce * 32) {
                uint4 v[kAtOnce];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const int chunk = first + i * 32;
                    const bool there = from && chunk * 8 < p.k;
                    v[i] = there ? *reinterpret_cast<const uint4*>(from + chunk * 8) : uint4{};
                }
                if (first == lane && first_loads) {
                    then();
                    first_loads = false;
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    const int chunk = first + i * 32;
                    if (chunk < chunks) {
                        u8* const word = region + place(to + chunk / 8 * tile_bytes() + chunk % 8 * 4);
                        *reinterpret_cast<u32*>(word) = v[i].x;
                        *reinterpret_cast<u32*>(word + 32) = v[i].y;
                        *reinterpret_cast<u32*>(word + 64) = v[i].z;
                        *reinterpret_cast<u32*>(word + 96) = v[i].w;
                    }
                }
            }
            token += kWarps;
        }
        if (first_loads) {
            then();
        }
    }
    // A lane's part of a column tile, its four steps. lane_at: the region's address + lane_place(lane); tile:
    // a multiple of 128 from the region's start.
    static DEVICE void load(u32 (&b)[kColumns][8], u32 lane_at, u32 tile) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
            const u32 at = lane_at + (tile + n * 1024) * (kInHoles ? 2 : 1);
            const uint4 v = load_shared4(at), w = load_shared4(at + 16);
            b[n][0] = v.x;
            b[n][1] = v.y;
            b[n][2] = v.z;
            b[n][3] = v.w;
            b[n][4] = w.x;
            b[n][5] = w.y;
            b[n][6] = w.z;
            b[n][7] = w.w;
        }
    }
};
