// What the warps of wgmma.cu share: the problem and its tiles, and the ring of packed weights and
// activations.
#pragma once

#include "config.h"
#include "decode.cuh"
#include "groups.cuh"
#include "hopper.cuh"

using D = Decoder<Config::bits, Config::bf16, Config::table_bytes>;
using H = Half<Config::bf16>;

constexpr int kTokens = Config::tokens;
constexpr int kTokensLog = kTokens < 32 ? 4 : kTokens < 64 ? 5 : kTokens < 128 ? 6 : kTokens < 256 ? 7 : 8;
static_assert(Config::experts == 0 || 1 << kTokensLog == kTokens);
constexpr int kStages = Config::stages;
constexpr int kRowTiles = 8;
constexpr int kTileColumns = 64;
constexpr int kTilesOfStep = Config::columns / kTileColumns;
constexpr int kBoxBytes = kTokens * kTileColumns * 2;  // activations
constexpr int kTilesBytes = kRowTiles * D::kTileBytes;
constexpr int kActivationBytes = kTilesOfStep * kBoxBytes;  // of a step
constexpr int kWeightBytes = kTilesOfStep * kTilesBytes;
constexpr int kActivationsAt = D::kTableBytes;
// Staging of y: for each warpgroup two buffers of kRound tokens by 64 rows of W.
constexpr int kRound = Config::round;
constexpr int kStagingBytes = 2 * kRound * 128;  // of a warpgroup
constexpr int kStagingAt = kActivationsAt + kStages * kActivationBytes;
constexpr int kWeightsAt = kStagingAt + 2 * kStagingBytes;
constexpr int kSumsAt = kWeightsAt + kStages * kWeightBytes;
constexpr bool kOwnSums = Config::sums > 0;  // else a cluster's go where activations were, after a barrier
constexpr int kBarriersAt = kSumsAt + Config::sums;
constexpr int kConsumers = 256;                 // threads
constexpr bool kGrouped = Config::experts > 0;  // of which the list has room for so many
constexpr int kScratchAt = kBarriersAt + 16 * kStages;
// The list of experts lies in the table's holes if it has any.
using List = GroupList<D::kHoles ? 128 / sizeof(Group) : 1, D::kHoles ? D::kRowBytes : sizeof(Group)>;
constexpr int kScratchBytes = 256;
constexpr int kListAt = D::kHoles ? D::kRowBytes - 128 : kScratchAt + kScratchBytes;
constexpr int kListBytes = D::kHoles ? 0 : Config::experts * sizeof(Group);
static_assert(kScratchAt + (kGrouped ? kScratchBytes + kListBytes : 0) == Config::shared_bytes);

// Of y: a block of rows of an expert's W, and rows of x from `token` on, of which the expert has those up to
// `end`.
struct Tile {
    int expert, block, token, end;
};

struct Problem {
    int n, m;
    bool gated;
    int steps, row_tiles, row_blocks, token_blocks;
    int alone;  // so many tiles are of one block each; clusters split the steps of the others
    int near;   // token blocks whose activations stay in the L2 cache while all of W passes by

    List list;  // grouped: token_blocks are those of all experts
    int groups;

    // Those of full waves; and all, if the rest would take clusters as many rounds as they have blocks.
    DEVICE void find_alone() {
        const int blocks = cluster_size(), grid = gridDim.x, whole = Divider(grid)(tiles()) * grid;
        const bool few = (tiles() - whole) * blocks <= (blocks - 1) * grid;
        alone = blocks > 1 && few ? whole : tiles();
    }
    DEVICE int tiles() const { return row_blocks * token_blocks; }
    DEVICE Tile tile(int i) const {
        if constexpr (!kGrouped) {
            const int first = near < token_blocks ? Divider(near * row_blocks)(i) * near : 0;
            const int inside = i - first * row_blocks, width = min(near, token_blocks - first);
            const int block = Divider(width)(inside);
            return {0, block, (first + inside - block * width) * kTokens, m};
        }
        const int piece = Divider(row_blocks)(i);
        const Group g = find_group(list, groups, piece);
        return {g.expert, i - piece * row_blocks, g.first + (piece - g.before) * kTokens, g.end};
    }
    DEVICE int width() const { return gated ? n / 2 : n; }
    // Where the row tile of consumer warp `i` is among the eight of a step. Gates come first, and each
    // warpgroup has two of them and their ups.
    DEVICE int slot(int i) const { return gated ? i / 4 * 2 + i % 2 + i / 2 % 2 * 4 : i; }
    // Which row tile of W that is, in a block of rows; it may be beyond the last.
    DEVICE int row_tile(int block, int i) const {
        const int at = slot(i), half = kRowTiles / 2;
        return gated ? block * half + at % half + at / half * (row_tiles / 2) : block * kRowTiles + at;
    }
};

struct Ring {
    u32 base;
    int slot = 0;
    u32 phase = 0;
    DEVICE u32 full() const { return base + kBarriersAt + 16 * slot; }
    DEVICE u32 empty() const { return full() + 8; }
    DEVICE u32 activations() const { return base + kActivationsAt + slot * kActivationBytes; }
    DEVICE u32 weights() const { return base + kWeightsAt + slot * kWeightBytes; }
    DEVICE void next() {
        if (++slot == kStages) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// A block's way through the tiles. Those of full waves are a block's own; where the rest is less than
// a wave, clusters split each tile's steps.
struct Work {
    int tile, stride, tiles, alone, steps;
    bool split = false;

    DEVICE Work(const Problem& p) : tiles(p.tiles()), alone(p.alone), steps(p.steps) {
        tile = blockIdx.x;
        stride = gridDim.x;
        share();
    }
    // From a block's own tiles to those that are split.
    DEVICE void share() {
        if (!split && tile >= alone && alone < tiles) {
            const Divider by_blocks(cluster_size());
            tile = alone + by_blocks(blockIdx.x);
            stride = by_blocks(stride);
            split = true;
        }
    }
    DEVICE bool more() const { return tile < tiles; }
    DEVICE bool last() const { return tile + stride >= tiles; }  // of a cluster's split ones
    DEVICE void next() {
        tile += stride;
        share();
    }
    DEVICE int first() const { return split ? part(cluster_rank()) : 0; }
    DEVICE int end() const { return split ? part(cluster_rank() + 1) : steps; }
    DEVICE int part(int i) const { return Divider(cluster_size())(steps * i); }
    // Of full tiles an even number, since registers of steps alternate, also from a tile to the next; a step
    // too many multiplies zeros.
    DEVICE int count() const { return split ? end() - first() : (steps + 1) / 2 * 2; }
    // Whether the ring goes on to another tile without a barrier of the cluster.
    DEVICE bool flows() const { return !split && tile + stride < alone; }
};
