// What the warps of wgmma.cu share: the problem and its tiles, and the ring of packed weights and
// activations.
#pragma once

#include "config.h"
#include "decode.cuh"
#include "groups.cuh"
#include "hopper.cuh"

using D = Decoder<Config::bits, Config::bf16>;
using H = Half<Config::bf16>;

// Of y: a block of rows of an expert's W, and rows of x from `token` on, of which those up to `end` are
// stored.
struct alignas(16) Tile {
    int expert, block, token, end;
};

constexpr int kTokens = Config::tokens;
constexpr int kStages = Config::stages;
// Two blocks of a cluster have the same tokens, and blocks of rows that follow each other; each copies half
// of the activations for both. That is less work for the L2 cache, and where power bounds the clock, more
// clocks: 2048 x 5120 by 4096 tokens take 115.7 us on an H200, not 118.8. Few tokens lose 0.6 us by it.
constexpr bool kMulticast = Config::multicast;
constexpr int kSharers = kMulticast ? 2 : 1;
constexpr int kGroups = Config::rows / 64;  // warpgroups of a team, each with 64 rows of W
constexpr int kRowTiles = 4 * kGroups;
constexpr bool kMayBeGated = kGroups == 2;  // others never are, see `blocks` in wgmma_config.py
constexpr int kTileColumns = 64;
constexpr int kTilesOfStep = Config::columns / kTileColumns;
constexpr int kBoxBytes = kTokens * kTileColumns * 2;  // activations
constexpr int kTilesBytes = kRowTiles * D::kTileBytes;
constexpr int kActivationBytes = kTilesOfStep * kBoxBytes;  // of a step
constexpr int kWeightBytes = kTilesOfStep * kTilesBytes;
constexpr int kActivationsAt = D::kTableBytes;
// Teams of one or two consumer warpgroups: so many take turns at the steps of a tile, and in the end each has
// the sums of kKept tokens, or team 0 of all; or each has tiles of its own.
constexpr bool kApart = Config::apart;
constexpr int kTeams = Config::teams, kTurns = kApart ? 1 : kTeams;
constexpr int kTeamThreads = 128 * kGroups;
constexpr int kConsumers = kTeams * kTeamThreads;
// Sums go by units of 16 tokens; those beyond kTokens are none of the tile's.
constexpr int kSumTokens =
    kTokens > 16 ? (kTokens + 16 * kTurns - 1) / (16 * kTurns) * (16 * kTurns) : kTokens;
constexpr int kKept = kTokens > 16 ? kSumTokens / kTurns : kTokens;
static_assert(kStages % kTeams == 0);
constexpr bool kSplits = !kMulticast && !kApart;  // a cluster may split a tile's steps
// Together those that all threads start with: 168 each, 128 with three consumer warpgroups, 96 with four.
constexpr bool kThree = kConsumers == 384, kFour = kConsumers == 512;
constexpr int kProducerRegisters = kThree || kFour ? 32 : 40;
constexpr int kConsumerRegisters = kThree ? 160 : kFour ? 112 : 232;
// Packed words of the next step are loaded in front of a step's products, and the compiler spreads these over
// the look-ups: a product waits for the one before, and look-ups behind all of them come late. 4096 x 14336
// by 128 tokens take 25.5 us on an H200, with words loaded after the products 28.5. Of two teams decoding
// takes longer than the products, and the last of these come late instead: 96 tokens at 5 bits take 31.2 us,
// and 26.1; 64 at 2 bits lose 4%, 3 bits nothing, and 4 gain 1%. With 64 rows 64 tokens lose 8%.
constexpr bool kSpread = kTeams == 1 || (kFour && Config::bits == 4);
static_assert(!kSpread || kStages > 2 * kTeams);  // so early they wait while two turns are not read yet
// Staging of y: for each warpgroup two buffers of kRound tokens by 64 rows of W.
constexpr int kRound = Config::round;
constexpr int kStagingBytes = 2 * kRound * 128;  // of a warpgroup
constexpr int kStagingAt = kActivationsAt + kStages * kActivationBytes;
constexpr int kWeightsAt = kStagingAt + kTeams * kGroups * kStagingBytes;
constexpr int kSumsAt = kWeightsAt + kStages * kWeightBytes;
constexpr bool kGrouped = Config::experts > 0;  // of which the list has room for so many
// What Groups wants, and the tile that each step in flight begins, if it does.
using BlockGroups = Groups<(128 + kConsumers) / 32, Config::experts>;
constexpr int kFoundBytes = BlockGroups::kScratchBytes, kScratchBytes = Config::scratch_bytes;
static_assert(kFoundBytes % 16 == 0 && kFoundBytes + kStages * int(sizeof(Tile)) <= kScratchBytes);
constexpr bool kOwnSums = Config::sums > 0;  // else a cluster's go where activations were, after a barrier
// Sums and the list of experts lie in the table's holes as far as these reach.
constexpr int kListBytes = Config::list_bytes;
static_assert(!kGrouped || (Config::experts + 1) * 4 <= kListBytes);
constexpr int kHoleBytes = D::kHoles ? D::kTableBytes / 2 - kListBytes : 0;
constexpr int kBarriersAt = kSumsAt + (Config::sums > kHoleBytes ? Config::sums - kHoleBytes : 0);
// Of each step: all of it is there, it has been read, and its weights are there. The last is for the first
// two steps of each team, which are decoded while the kernel before still writes activations. Where there
// would be a fourth, beside the first step's: the sums of a cluster are there.
constexpr int kBarrierBytes = 32, kSumsBarrierAt = kBarriersAt + 24;
constexpr int kEarlySteps = 2 * kTurns;  // of a tile
static_assert(kStages >= 2 * kTeams);    // each has a slot of the ring, in its first phase
constexpr int kScratchAt = kBarriersAt + kBarrierBytes * kStages;
using List = GroupList<D::kHoles ? D::kHole / 4 : 1, D::kHoles ? D::kRowBytes : 4>;
constexpr int kListAt = D::kHoles ? D::kHole : kScratchAt + kScratchBytes;
constexpr int kEnd = kScratchAt + (kGrouped ? kScratchBytes + (D::kHoles ? 0 : kListBytes) : 0);
static_assert(kEnd == Config::shared_bytes);

struct Problem {
    int n, m;
    bool gated;
    int steps, row_tiles;
    int row_blocks, token_blocks;  // kMulticast: pairs of row blocks
    int alone;  // so many tiles are of one block each; clusters split the steps of the others
    int near;   // token blocks whose activations stay in the L2 cache while all of W passes by

    List list;  // grouped: token_blocks are those of all experts
    int experts;

    // Those of full waves; and all, if the rest would take clusters as many rounds as they have blocks.
    DEVICE void find_alone() {
        const int blocks = cluster_size(), grid = gridDim.x, whole = Divider(grid)(tiles()) * grid;
        const bool few = (tiles() - whole) * blocks <= (blocks - 1) * grid;
        alone = blocks > 1 && few ? whole : tiles();
    }
    DEVICE int tiles() const { return row_blocks * token_blocks; }
    // All lanes of a warp.
    DEVICE Tile tile(int i) const {
        if constexpr (!kGrouped) {
            const int first = near < token_blocks ? Divider(near * row_blocks)(i) * near : 0;
            const int inside = i - first * row_blocks, width = min(near, token_blocks - first);
            const int block = Divider(width)(inside);
            const int token = (first + inside - block * width) * kTokens;
            const int end = kSumTokens > kTokens ? min(m, token + kTokens) : m;
            return {0, kMulticast ? 2 * block + int(cluster_rank()) : block, token, end};
        }
        const int piece = Divider(row_blocks)(i);
        const Group g = find_group(list, experts, piece, Pieces<kTokens>());
        return {g.expert, i - piece * row_blocks, g.first + (piece - g.before) * kTokens, g.end};
    }
    DEVICE int width() const { return gated ? n / 2 : n; }
    // Where the row tile of a team's warp `i` is among those of a step. Gates come first, and each warpgroup
    // has two of them and their ups.
    DEVICE int slot(int i) const { return gated ? i / 4 * 2 + i % 2 + i / 2 % 2 * 4 : i; }
    // Which row tile of W that is, in a block of rows; it may be beyond the last.
    DEVICE int row_tile(int block, int i) const {
        const int at = slot(i), half = kRowTiles / 2;
        return gated ? block * half + at % half + at / half * (row_tiles / 2) : block * kRowTiles + at;
    }
};

// Grouped: all threads find the experts' rows, and with them the tiles; ends with a block barrier.
DEVICE void find_experts(Problem& p, u8* memory, u32 scratch, const int* offsets, int experts) {
    const List list{memory + kListAt, scratch + BlockGroups::kBeforeAt};
    BlockGroups groups;
    groups.find(scratch, offsets, experts, p.m, Pieces<kTokens>());
    write_list(list, groups, experts);
    p.list = list;
    p.experts = experts;
    p.token_blocks = groups.all_pieces;
    p.find_alone();
}

struct Ring {
    u32 base;
    int slot = 0;
    u32 phase = 0;
    DEVICE u32 there() const { return base + kBarriersAt + kBarrierBytes * slot; }
    DEVICE u32 empty() const { return there() + 8; }
    DEVICE u32 early() const { return there() + 16; }
    DEVICE u32 activations() const { return base + kActivationsAt + slot * kActivationBytes; }
    DEVICE u32 weights() const { return base + kWeightsAt + slot * kWeightBytes; }
    // Where the tile is that a step begins for its team, found by its barrier.
    DEVICE u32 tile_at(u32 there) const {
        const u32 step = (there - base - kBarriersAt) / kBarrierBytes;
        return base + kScratchAt + kFoundBytes + step * sizeof(Tile);
    }
    DEVICE void put_tile(const Tile& of) const {
        store_shared4(tile_at(there()), uint4{u32(of.expert), u32(of.block), u32(of.token), u32(of.end)});
    }
    // After the wait for that barrier.
    DEVICE Tile tile(u32 there) const {
        const uint4 v = load_shared4(tile_at(there));
        return {int(v.x), int(v.y), int(v.z), int(v.w)};
    }
    // The descriptor of a step's activations, found by its barrier.
    DEVICE u64 operand(u32 there) const {
        const u64 high = descriptor(0) >> 32 << 32;
        static_assert(kActivationBytes % (16 * kBarrierBytes) == 0);
        constexpr int kRatio = kActivationBytes / 16 / kBarrierBytes;
        return high | (u32(descriptor(base + kActivationsAt)) + (there - base - kBarriersAt) * kRatio);
    }
    // By one thread.
    DEVICE void init() const {
        Ring each = *this;
        for (int s = 0; s < kStages; ++s, each.next()) {
            barrier_init(each.there(), 2);
            barrier_init(each.early(), 1);
            barrier_init(each.empty(), kSharers * kTeamThreads / 32 * kWarpArrivals);
        }
        barrier_init(base + kSumsBarrierAt, 1);
        barriers_visible();
    }
    DEVICE void next(int by = 1) {
        slot += by;
        if (slot >= kStages) {
            slot -= kStages;
            phase ^= 1;
        }
    }
};

// A block's way through the tiles. Those of full waves are a block's own; where the rest is less than
// a wave, clusters split each tile's steps.
struct Work {
    int tile, stride, tiles, alone, steps;
    bool split = false;

    DEVICE Work(const Problem& p, int team) : tiles(p.tiles()), alone(p.alone), steps(p.steps) {
        tile = blockIdx.x / kSharers;
        stride = gridDim.x / kSharers;
        if constexpr (kApart) {
            tile += team * stride;
            stride *= kTeams;
        }
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
    // In steps of all teams, each of which has slots of the ring of its own.
    DEVICE int part(int i) const {
        return Divider(cluster_size())((steps + kTurns - 1) / kTurns * i) * kTurns;
    }
    // Of full tiles an even number for each team, since registers of steps alternate, also from a tile to the
    // next; a step too many multiplies zeros.
    DEVICE int count() const {
        constexpr int kEven = 2 * kTurns;
        return split ? part(cluster_rank() + 1) - first() : (steps + kEven - 1) / kEven * kEven;
    }
    // Whether the ring goes on to another tile without a barrier of the cluster.
    DEVICE bool flows() const { return !split && tile + stride < alone; }
};
