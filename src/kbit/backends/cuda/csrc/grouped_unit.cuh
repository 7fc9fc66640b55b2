// What grouped.cu and resident.cu do alike: a unit of an expert's weight times a piece of the expert's rows.
#pragma once

#include "config.h"
#include "decode.cuh"
#include "groups.cuh"
#include "quads.cuh"
#include "stage16.cuh"

using D = Decoder<Config::bits, Config::bf16>;
using H = Half<Config::bf16>;
using S = Scales<kUe4m3, Config::bf16>;

constexpr int kTokens = Config::tokens;
constexpr int kWarps = Config::warps;
constexpr int kColumns = kTokens == 16 ? 2 : 1;  // MMA columns / 8
constexpr int kSums = 8 * kColumns;              // of a lane and unit
// As in stream.cu: scaled weights, or scaled products of a block.
constexpr bool kScaleWeights = Config::tokens == 16;
constexpr bool kInHoles = Config::in_holes;  // x, in what the table leaves free
static_assert(!kInHoles || D::kHoles);

// A unit is two row tiles: neighbours, or if gated a gate's and its up's. Warps of a team share its columns.
struct Problem {
    int n, k, k_tiles, row_tiles, units;
    bool gated;
    int span, teams;

    // teams_: as many of `span_` warps as a block has, so that a kernel may have a shift instead of a
    // division.
    DEVICE Problem(int n_, int k_, bool gated_, int span_, int teams_)
        : n(n_),
          k(k_),
          k_tiles((k_ + 63) / 64),
          row_tiles((n_ + 15) / 16),
          units(gated_ ? row_tiles / 2 : (row_tiles + 1) / 2),
          gated(gated_),
          span(span_),
          teams(teams_) {}

    DEVICE int width() const { return gated ? n / 2 : n; }
    // The row tile of each half. The last of an odd number stands in for the one that is missing.
    DEVICE int upper(int unit) const { return gated ? unit : 2 * unit; }
    DEVICE int lower(int unit) const {
        return gated ? unit + row_tiles / 2 : min(2 * unit + 1, row_tiles - 1);
    }
};

// Up to kTokens rows of an expert.
struct Piece {
    int expert, row, tokens;  // rows row .. row + tokens - 1, as sorted
};

// What the sums of an expert are multiplied by at the end.
DEVICE float factor_of(const float* scale, int expert) {
    return __ldg(scale + expert) * (kScaleWeights ? 1.0f : S::kUnit);
}

// sums += the two k16 steps `a` of block BLOCK of a column tile times x. `a` may be scaled.
template <int BLOCK>
DEVICE void multiply_block(float (&sums)[kColumns][4], u32 (&a)[2][4], S::Words scales,
                           const u32 (&b)[kColumns][8]) {
    float fresh[kColumns][4] = {};
    if constexpr (kScaleWeights) {
        S::scale<2 * BLOCK>(a[0], scales);
        S::scale<2 * BLOCK + 1>(a[1], scales);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
            float (&d)[4] = kScaleWeights ? sums[n] : fresh[n];
            H::mma(d, a[j], b[n][4 * BLOCK + 2 * j], b[n][4 * BLOCK + 2 * j + 1]);
        }
    }
    if constexpr (!kScaleWeights) {
        const u32 both = S::halves<BLOCK>(scales);
        const float upper = low_half(both), lower = high_half(both);
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
            sums[n][0] += fresh[n][0] * upper;
            sums[n][1] += fresh[n][1] * upper;
            sums[n][2] += fresh[n][2] * lower;
            sums[n][3] += fresh[n][3] * lower;
        }
    }
}

// sums[half] += one column tile of each half times x. A quarter of 2-bit codes do without shared memory,
// which gives out look-ups and activations in three of four clocks.
DEVICE void multiply_tile(float (&sums)[2][kColumns][4], const D& decode, const u32 (&w)[2][Config::bits],
                          const S::Words (&scales)[2], const u32 (&b)[kColumns][8]) {
    static_for<2>([&](auto block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 a[2][4];
            decode.template step<2 * block.value, Config::bits == 2 && block.value == 0>(w[half], a[0]);
            decode.template step<2 * block.value + 1>(w[half], a[1]);
            multiply_block<block.value>(sums[half], a, scales[half], b);
        }
    });
}

// Four 8 x 8 matrices of 16-bit numbers: lane 8i + j says where row j of matrix i is.
DEVICE void load_matrices(u32 (&v)[8], int at, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[at]), "=r"(v[at + 1]), "=r"(v[at + 2]), "=r"(v[at + 3])
                 : "r"(address));
}

// x in shared memory: rows of 64 columns of a token, 16 bits each, as matrices of 8 tokens by 8 columns.
// Chunks of 8 columns are swapped by their token, so that a matrix meets no bank twice.
struct Activations {
    static constexpr int kRowBytes = kInHoles ? D::kRowBytes : 128;  // from a row to the next
    const u16* x;
    const int* source;  // which row of x a sorted row is, or null if x is sorted
    int stride, rows;

    // Of chunk 0 .. 7 of a row.
    static DEVICE u32 place(int row, int chunk, int token) {
        return row * kRowBytes + (kInHoles ? D::kHole : 0) + (chunk ^ (token & 7)) * 16;
    }
    // A warp asks for a sorted row, or zeros if it is negative: into row `first` from `region` on for its
    // first column tile, and every `step`-th for the others. (Lanes that take chunks of 8 rows were slower by
    // half.)
    DEVICE void ask(u32 region, const Problem& p, int sorted, int first, int token, int step,
                    int lane) const {
        const int row = sorted < 0 ? 0 : row_of_x(source, sorted, rows);
        const u16* const from = x + u64(u32(row)) * u32(stride);
        u32 to = region + place(first + lane / 8 * step, lane & 7, token);
#pragma unroll 4
        for (int chunk = lane; chunk < p.k_tiles * 8; chunk += 32) {
            stage16_if(to, from + chunk * 8, sorted >= 0 && chunk * 8 < p.k);
            to += 4 * step * kRowBytes;
        }
    }
    // A lane's part of a column tile and 8 tokens, its four steps. at: `place` of the row that lane 8i + j
    // loads of matrix i; offset: a multiple of 128.
    static DEVICE void load(u32 (&b)[8], u32 at, u32 offset) {
        load_matrices(b, 0, at + offset);
        load_matrices(b, 4, (at ^ 64) + offset);
    }
};

// `threads`: of the team.
DEVICE void team_sync(int team, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(threads) : "memory");
}
