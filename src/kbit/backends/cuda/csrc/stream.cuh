// What the workers of stream.cu hold: the problem, and the ring of packed weights.
#pragma once

#include "config.h"
#include "decode.cuh"
#include "ring.cuh"

using D = Decoder<Config::bits, Config::bf16>;
using H = Half<Config::bf16>;
using S = Scales<kUe4m3, Config::bf16>;

constexpr int kGroupTiles = Config::group_tiles, kGroupColumns = 64 * kGroupTiles;
constexpr int kGroupBytes = kGroupTiles * D::kTileBytes;
constexpr int kStages = Config::stages;
constexpr int kColumns = Config::tokens == 16 ? 2 : 1;  // MMA columns / 8
constexpr bool kOne = Config::tokens == 1;
// Tiles of a group are taken so many at a time; M = 1 keeps products of 4 and would spill with more.
constexpr int kStepTiles = kOne ? 4 : kGroupTiles;
// Columns of B: up to 8 tokens; of fewer, several k-blocks beside each other.
constexpr int kWide = Config::tokens < 8 ? Config::tokens : 8, kBeside = 8 / kWide;
constexpr int kSums = kOne ? 2 : 4 * kColumns;  // of a lane and row tile
// Scales multiply the weights, or the products of a block. The first rounds once more (E4M4, not ue4m3), to
// the 16-bit weight that dequantize gives, and needs no second set of accumulators.
constexpr bool kScaleWeights = Config::tokens == 16 || (kUe4m3 && !kOne);
constexpr int kBuffers = Config::buffers;  // of parts
constexpr bool kInHoles = Config::in_holes;
static_assert(!kInHoles || (D::kHoles && kBuffers * Config::workers * kSums <= D::kRows));
// Barriers of parts (full, empty) and then of the workers' rings; the ring's place is stream.py's.
constexpr int kRingBarriersAt = 128, kBarrierBytes = 1024;
static_assert(kRingBarriersAt + Config::workers * kStages * 8 <= kBarrierBytes);
// One token and the weights of its experts: their rows above each other (gates and ups), or their columns
// beside each other (down projections, whose sum is weighted). A slot is a choice of the token.
enum : int { kDense, kExpertRows, kExpertColumns };
constexpr int kExperts = Config::experts;
static_assert(kExperts == kDense || (kOne && !kUe4m3));
static_assert(!kUe4m3 || kOne || kBeside == 1);
static_assert(kGroupTiles == 4 || (kGroupTiles == 8 && !kUe4m3));
// x comes as NVFP4, too.
constexpr bool kCoded = Config::coded;
static_assert(!kCoded || (kUe4m3 && !kExperts));
constexpr int kPartStep = kInHoles ? D::kRowBytes : 128;
// The blocks of a cluster share row tiles and split K: each reads a part of x instead of all.
constexpr bool kSplit = Config::split;
static_assert(!kSplit || kExperts == kDense);
constexpr int kExchangeBarrierAt = kRingBarriersAt - 8;
static_assert(2 * kBuffers * 8 <= kExchangeBarrierAt);

// What a block computes. It goes through its row tiles once per segment: a pass over K, or, if gated, a pass
// over K of the gates and then of the ups.
struct Problem {
    int n, k, m;
    bool gated;
    int k_tiles, segments, row_tiles, first, rows, workers;
    int first_group, end_group;  // of a row tile: the block's
    int per_slot;                // row tiles, or groups, of an expert
    u64 expert_bytes;

    DEVICE int pass(int segment) const { return gated ? segment / 2 : segment; }
    DEVICE bool ups(int segment) const { return gated && segment % 2 == 1; }
    DEVICE bool last(int segment) const { return segment + (gated ? 2 : 1) >= segments; }
    DEVICE int group(int segment, int worker) const {
        return (kSplit ? first_group : 0) + pass(segment) * workers + worker;
    }
    DEVICE bool has(int group) const { return group < end_group; }
    // A single row tile keeps its sums in registers from one pass to the next.
    DEVICE bool hands_over(int segment) const { return rows > 1 || gated || last(segment); }
};

// Which experts the token goes to.
struct Routing {
    const void *ids, *weights;  // int32 or int64 [slots]; 16-bit or float32 [slots], or null: 1
    const float* scale;         // [experts]
    int slots, experts;
    bool wide_ids, wide_weights;
};

// Lane l's: the expert of slot l and the factor of its results. An expert of another device is the first,
// times zero. What is loaded is not touched before it must be, or the warp would wait for it.
struct Choice {
    u32 low = ~0u, high = 0;  // of the id
    bool mine = false;
    int expert = 0;
    float factor = 0.0f;

    DEVICE void load(const Routing& r, int lane) {
        if (lane < r.slots) {
            low = static_cast<const u32*>(r.ids)[r.wide_ids ? 2 * lane : lane];
            if (r.wide_ids) {
                high = static_cast<const u32*>(r.ids)[2 * lane + 1];
            }
        }
    }
    DEVICE void find(const Routing& r) {
        mine = low < u32(r.experts) && high == 0;
        expert = mine ? int(low) : 0;
    }
    DEVICE void weigh(const Routing& r, int lane) {
        if (mine) {
            const float weight = !r.weights       ? 1.0f
                                 : r.wide_weights ? static_cast<const float*>(r.weights)[lane]
                                                  : H::widen(static_cast<const u16*>(r.weights)[lane]);
            factor = weight * r.scale[expert] * (kExperts == kExpertRows ? S::kUnit : 1.0f);
        }
    }
    DEVICE int expert_of(int slot) const { return kExperts ? __shfl_sync(~0u, expert, slot) : 0; }
    DEVICE float factor_of(int slot) const { return __shfl_sync(~0u, factor, slot); }
};

// Goes around SIZE slots, a power of two.
template <int SIZE>
struct Cursor {
    static_assert((SIZE & (SIZE - 1)) == 0);
    u32 taken = 0;

    DEVICE u32 slot() const { return taken % SIZE; }
    DEVICE u32 phase() const { return taken / SIZE % 2; }
    DEVICE void next() { ++taken; }
};

// A worker's groups, in the order it needs them, kStages ahead.
struct Ring {
    const u8* tiled;
    u32 base, barriers;  // kStages slots of kGroupBytes, and as many mbarriers
    int worker, lane;
    const u8* from = nullptr;
    long long stride = 0;
    int left = 0, segment = -1;
    u32 bytes = 0;
    Cursor<kStages> at;
    Choice choice = {};

    DEVICE void init() const { ring_init<kStages>(barriers, lane); }
    DEVICE void start(const Problem& p) {
        stride = (long long)(p.k_tiles) * D::kTileBytes;
        next_segment(p);
        for (int s = 0; s < kStages; ++s) {
            fetch(p, s, 0);
        }
    }
    DEVICE void next_segment(const Problem& p) {
        ++segment;
        const int group = p.group(segment, worker);
        const int tile = (kExperts == kExpertColumns ? group % p.per_slot : group) * kGroupTiles;
        const int tiles = p.k_tiles - tile, row = p.first + (p.ups(segment) ? p.row_tiles / 2 : 0);
        left = segment < p.segments && p.has(group) ? p.rows : 0;
        bytes = (tiles < kGroupTiles ? tiles : kGroupTiles) * D::kTileBytes;
        from = tiled + (u64(row) * p.k_tiles + tile) * D::kTileBytes;
        if constexpr (kExperts == kExpertRows) {
            from = tiled + u64(tile) * D::kTileBytes;
        } else if constexpr (kExperts == kExpertColumns) {
            from += choice.expert_of(min(group / p.per_slot, 31)) * p.expert_bytes;
        }
    }
    // Of a row tile among all experts', from the first one on.
    DEVICE u64 row_offset(const Problem& p, int unit) const {
        const int row = unit % p.per_slot + (p.ups(segment) ? p.row_tiles / 2 : 0);
        return choice.expert_of(unit / p.per_slot) * p.expert_bytes + u64(row) * p.k_tiles * D::kTileBytes;
    }
    DEVICE void fetch(const Problem& p, int slot, u32 shift) {
        if (left > 0) {
            const u64 offset = kExperts == kExpertRows ? row_offset(p, p.first + p.rows - left) : 0;
            copy<1>({base + slot * kGroupBytes + shift}, {from + offset}, bytes, barriers + 8 * slot, lane);
            from += kExperts == kExpertRows ? 0 : stride;
            if (--left == 0) {
                next_segment(p);
            }
        }
    }
    // Address of the next group, when it is there.
    DEVICE u32 wait() const {
        barrier_wait(barriers + 8 * at.slot(), at.phase());
        return base + at.slot() * kGroupBytes;
    }
    // The next group into the slot that all lanes have read; see after_loads.
    DEVICE void refill(const Problem& p, u32 loaded, u32 zero) {
        fetch(p, at.slot(), after_loads(loaded, zero));
        at.next();
    }
};

// f(q, w) for tile q of the group at a shared address and its words, which are loaded AHEAD tiles before they
// are looked up. `scales` are those of tile q, or, M = 1, scales[0] those of tile t. Returns what after_loads
// takes: scales.
template <int AHEAD, class F>
DEVICE u32 for_tiles(u32 group, int lane, S::Words (&scales)[kStepTiles], F f) {
    const u32 scales_at = group + D::kScalesAt + S::kBytes * (lane >> 2);
    u32 w[kStepTiles][Config::bits], loaded = 0;
    if constexpr (kOne) {
        scales[0] = S::load(scales_at + (lane & 3) * D::kTileBytes);
        loaded = S::loaded(scales[0]);
    }
#pragma unroll
    for (int i = 0; i < kStepTiles + AHEAD; ++i) {
        if (i < kStepTiles) {
            if constexpr (!kOne) {
                scales[i] = S::load(scales_at + i * D::kTileBytes);
                loaded |= S::loaded(scales[i]);
            }
            D::load(w[i], group + i * D::kTileBytes, lane);
        }
        if (i >= AHEAD) {
            f(i - AHEAD, w[i - AHEAD]);
        }
    }
    return loaded;
}
