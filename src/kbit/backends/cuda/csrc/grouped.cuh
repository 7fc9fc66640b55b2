// What the warps of grouped.cu hold: a block's jobs, the ring of packed weights, activations.
#pragma once

#include "grouped_unit.cuh"
#include "ring.cuh"

constexpr int kStages = Config::stages;
constexpr int kTiles = 2;  // of a row tile, in a stage of the ring
constexpr int kHalfBytes = kTiles * D::kTileBytes;
constexpr int kStageBytes = 2 * kHalfBytes;
using BlockGroups = Groups<kWarps, Config::experts>;

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

    DEVICE void init() const { ring_init<kStages>(barriers, lane); }
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
            const u32 row = at.job->expert * p.row_tiles, row_bytes = p.k_tiles * D::kTileBytes;
            upper = tiled + u64(row + p.upper(unit)) * row_bytes + first_tile * D::kTileBytes;
            lower = tiled + u64(row + p.lower(unit)) * row_bytes + first_tile * D::kTileBytes;
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

// x of jobs: [job][column tile][token]. There are only `tokens` (1, 2, 4, 8 or 16) of each; columns of B
// beyond them repeat these, and their results are dropped.
struct Staged {
    Activations x;
    int tokens_log;

    DEVICE u32 tile_bytes() const { return Activations::kRowBytes << tokens_log; }
    // Of the row that lane 8i + j loads of a column tile, matrix i of 8 tokens.
    DEVICE u32 lane_place(int lane) const {
        const int token = lane & 7 & (1 << tokens_log) - 1;
        return Activations::place(token, lane >> 3, token);
    }
    // Asks for `count` jobs from `jobs` on, one after the other; all warps of the block, a token at a time.
    DEVICE void ask(u32 region, const Problem& p, const Job* jobs, int count, int warp, int lane) const {
        for (int i = warp; i < count << tokens_log; i += kWarps) {
            const int job = i >> tokens_log, token = i & (1 << tokens_log) - 1;
            const bool there = token < jobs[job].tokens;
            const int row = (job * p.k_tiles << tokens_log) + token;
            x.ask(region, p, there ? jobs[job].row + token : -1, row, token, 1 << tokens_log, lane);
        }
        end_stage();
    }
    // A lane's part of a column tile. at: the tile's, of lane_place.
    static DEVICE void load(u32 (&b)[kColumns][8], u32 at) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
            Activations::load(b[n], at, n * 8 * Activations::kRowBytes);
        }
    }
};
