// The way of nvfp4_exact_wgmma.cu through K and to y: windows, what may be chained in them, where sums go.
#pragma once

#include "nvfp4_sums.cuh"
#include "wgmma_steps.cuh"

static_assert(kTeams == 1 && !kMulticast && !Config::bf16);
constexpr int kMine = kTokens / 2;  // sums of a lane
constexpr int kPartBytes = kMine * 128 * 8;
static_assert(kPartBytes <= kStagingBytes);
static_assert(kConsumers * kMine * 4 <= (kGrouped ? kGroups * kStagingBytes : kHoleBytes));
constexpr int kWindowTiles = 4;                       // 256 columns, WIDE_COLUMNS of nvfp4_marks.py
constexpr int kWindow = kWindowTiles / kTilesOfStep;  // in steps
static_assert(kWindow % 2 == 0);                      // registers of steps alternate
constexpr int kSteps = 4 * kTilesOfStep;              // k16 steps of a step
constexpr u32 kMostNorms = 48;                        // of both bounds: 2^24 for sums, squared

// A block's way through the tiles; Problem::steps are windows.
struct Windows : Work {
    DEVICE Windows(const Problem& p) : Work(p, 0) {}
    DEVICE int first_window() const { return Work::first(); }
    DEVICE int windows() const { return split ? part(cluster_rank() + 1) - Work::first() : steps; }
    DEVICE int first() const { return kWindow * first_window(); }
    DEVICE int count() const { return kWindow * windows(); }
};

// The mark of the `tile`-th tile of a ring's step, of the 64 rows among which row tile `slot` is.
DEVICE u32 load_mark(const Ring& ring, int slot, int tile) {
    const u32 at = ring.weights() + tile * kTilesBytes + slot / 4 * 4 * D::kTileBytes;
    const uint4 words = load_shared4(at + D::kScalesAt);
    const auto bits = [](u32 word) { return (word >> 7 & 0x01010101u) * 0x01020408u >> 24 & 15u; };
    return bits(words.x) | bits(words.y) << 4 | bits(words.z) << 8 | bits(words.w) << 12;
}

// Bounds of a tile's tokens: those of windows, 32 in a warp's registers and the next 32 on their way.
struct Bounds {
    // 32 tokens that a tile may have some of; experts' tiles begin anywhere.
    static constexpr int kMost = kGrouped ? (kTokens + 30) / 32 + 1 : (kTokens + 31) / 32;
    const u32* first;   // of the tile's first 32
    int others, tiles;  // 32 each, after these; of K
    int window;         // this lane's next
    u32 now, then;

    DEVICE void find(const u32* bounds, const Tile& at, int tiles_, const Windows& work, int lane) {
        first = bounds + i64(at.token / 32) * tiles_;
        others = (min(at.token + kTokens, at.end) - 1) / 32 - at.token / 32;
        tiles = tiles_;
        window = work.first_window() + lane;
        now = load();
        then = work.windows() > 32 ? load() : 0;
    }
    // The largest of all, byte BYTE.
    template <int BYTE>
    DEVICE u32 of(int tile) const {
        u32 largest = 0;
        if (tile < tiles) {
#pragma unroll
            for (int i = 0; i < kMost; ++i) {
                largest = max(largest, first[i64(min(i, others)) * tiles + tile] >> (8 * BYTE) & 255u);
            }
        }
        return largest;
    }
    DEVICE u32 load() {
        const u32 wide = of<1>(kWindowTiles * window);
        window += 32;
        return wide;
    }
    // Whether all products of the i-th window may be chained, by the mark of its first tile; asked for in
    // turn.
    DEVICE bool fits(u32 mark, int i) {
        if (i > 0 && i % 32 == 0) {
            now = then;
            then = load();
        }
        return uniform(int((mark >> 6 & 63u) + __shfl_sync(kAll, now, i % 32))) <= int(kMostNorms);
    }
    // Whether those of the `tile`-th tile may.
    DEVICE bool tile_fits(u32 mark, int tile) const {
        return uniform(int((mark & 63u) + of<0>(tile))) <= int(kMostNorms);
    }
};

struct Output {
    const float* row_scale;
    const int* rows;        // of A, whose factors these are, by row of y; or null
    const float* w_scales;  // of experts; or null
    void* y;
    float w_scale;
    int dtype;
};

// Where a thread's sums of a tile go.
struct Place {
    const Output& out;
    int n, end;
    int row, column;  // of sum 0
    float w_scale;

    DEVICE Place(const Problem& p, const Output& out_, const Tile& at, int thread)
        : out(out_),
          n(p.n),
          end(at.end),
          row(at.token + thread % 4 * 2),
          column(p.row_tile(at.block, thread / 32) * 16 + thread % 32 / 4),
          w_scale(kGrouped ? out_.w_scales[at.expert] : out_.w_scale) {}

    DEVICE int row_of(int i) const { return row + i / 4 * 8 + i % 2; }
    DEVICE float row_scale(int i) const {
        const int mine = min(row_of(i), end - 1), of_a = out.rows != nullptr ? out.rows[mine] : mine;
        return out.row_scale != nullptr ? out.row_scale[of_a] : 1.0f;
    }
    // The factors of all sums, every other one of which has that of the one before.
    DEVICE void load(float (&row_scales)[kMine / 2]) const {
#pragma unroll
        for (int i = 0; i < kMine / 2; ++i) {
            row_scales[i] = row_scale(i / 2 * 4 + i % 2);
        }
    }
    // total: of what is stored.
    template <class F>
    DEVICE void store(int i, F total, float row_scale) const {
        const int to_row = row_of(i), to_column = column + i / 2 % 2 * 8;
        if (to_row < end && to_column < n) {
            store_exact(out.y, i64(to_row) * n + to_column, total(), w_scale, row_scale, out.dtype);
        }
    }
};
