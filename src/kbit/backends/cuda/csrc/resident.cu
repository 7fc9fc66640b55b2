// y[r, n] = sum_k x[r, k] * W[e, n, k] for rows r of few experts: so few that all their weights fit in the
// shared memories of the machine.
//
// Gated: W holds 2 * I rows, gates first; y[r, i] = silu(gate[r, i]) * up[r, i], shape [R, I], I % 16 == 0.
//
//   tiled     [experts, ceil(N/16), ceil(K/64)] tiles (layout.py), 16-byte aligned
//   codebook  float32 [2^bits]; scale float32 [experts]: the matrices' factors
//   x         16-bit [x_rows, x_stride], rows aligned to 16 bytes, zeros behind K up to a multiple of 8
//   offsets   int32 [experts + 1], see groups.cuh
//   source    int32 [R], the row of x that a sorted row is; or null: the same
//   y         16-bit [R, N], or [R, N/2] if gated
//
// On Hopper; grouped.cu takes experts whose weights do not fit, wgmma.cu more rows. Clocks are in
// grouped_preference.py.
//
// Such a product takes less time than grouped.cu needs before its first weights are there: offsets, a list of
// jobs, activations, weights, one after the other. Here the units (grouped_unit.cuh) of all experts are dealt
// to blocks beforehand, whether they have rows or not, so that a block has its table and its weights, and a
// part of them decoded, before the previous kernel is done. Then it looks which rows its experts have, and
// keeps the weights for as many pieces of kTokens as there are. Where two blocks fit on a multiprocessor, one
// of them is the next kernel's.
//
// A unit belongs to a team of `span` warps that split K: a warp has up to kTiles column tiles of it.
//
// Order of float32 sums: k16 steps, a 32-block's times its scale, blocks ascending, then warps of a team.
//
// Dependent launch: as stream.cu's, whoever writes `tiled` ends with a kernel that is launched without it.
//
// Shared memory: table, barriers of the warps, weights of the block's units, x of a piece (kInHoles: in what
// the table leaves free), sums of teams (kSumsInHoles: behind x).
#include "grouped_unit.cuh"

constexpr int kTiles = Config::tiles;  // column tiles of a warp, at most
constexpr bool kSumsInHoles = kInHoles && kTokens == 16;

constexpr u32 kXTileBytes = kTokens * Activations::kRowBytes;  // of a column tile: [token]

// The first tile of a warp's first unit, decoded before there is x.
struct Ready {
    u32 a[2][2][2][4];  // [half][block][step]

    DEVICE void decode_tile(const D& decode, u32 weights, u32 half_bytes, int lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 w[Config::bits];
            D::load(w, weights + half * half_bytes, lane);
            static_for<2>([&](auto block) {
                decode.template step<2 * block.value>(w, a[half][block.value][0]);
                decode.template step<2 * block.value + 1>(w, a[half][block.value][1]);
            });
        }
    }
};

// A warp's columns of a unit. `weights`: the shared address of its first tile in the upper half; `x`: that of
// each column's token in its first chunk. No branch is in the way of loads for the next tile: those that a
// warp lacks are its first, times zeros. AHEAD: it is the warp's first unit, with `ready`.
template <bool AHEAD>
DEVICE void multiply_unit(float (&sums)[2][kColumns][4], const D& decode, const Ready& ready, u32 weights,
                          u32 half_bytes, const u32 (&x)[kColumns], int tiles, int lane) {
    const u32 scales_at = weights + D::kScalesAt + lane / 4 * S::kBytes;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        const bool decoded = AHEAD && i == 0;
        const u32 tile = i < tiles ? i : 0;
        u32 w[2][Config::bits], b[kColumns][8];
        S::Words scales[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 at = half * half_bytes + tile * D::kTileBytes;
            scales[half] = S::load(scales_at + at);
            if (!decoded) {
                D::load(w[half], weights + at, lane);
            }
        }
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
            Activations::load(b[n], x[n], tile * kXTileBytes);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                b[n][j] = i < tiles ? b[n][j] : 0;
            }
        }
        if (decoded) {
            static_for<2>([&](auto block) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    u32 a[2][4];
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        a[j / 4][j % 4] = ready.a[half][block.value][j / 4][j % 4];
                    }
                    multiply_block<block.value>(sums[half], a, scales[half], b);
                }
            });
        } else {
            multiply_tile(sums, decode, w, scales, b);
        }
    }
}

// The sums of a team's warps, in their order, to y. A pair is of one row of each half and one token; a warp
// adds up and writes every `span`-th of a lane's. `parts`: of the team, for this lane, [warp][pair][half],
// pairs every `step` bytes.
struct Output {
    static constexpr int kPairs = 4 * kColumns;
    static constexpr int kPairBytes = 256;
    u16* y;
    u32 step;

    // Pairs of even tokens come first: of a single one there are no others.
    static DEVICE int sum_of(int pair) { return (pair & 1) * 2 + (pair >> 1 & 1); }
    static DEVICE int token_of(int pair) { return pair / 4 * 8 + (pair >> 1 & 1); }

    DEVICE void finish(const Problem& p, const Piece& piece, int unit, float factor,
                       const float (&sums)[2][kColumns][4], u32 parts, int team, int place, int lane) const {
        const u32 to = parts + place * kPairs * step;
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
            const int n = pair / 4, i = sum_of(pair);
            store_shared2(to + pair * step,
                          uint2{__float_as_uint(sums[0][n][i]), __float_as_uint(sums[1][n][i])});
        }
        team_sync(team, p.span * 32);
        if (p.span < kPairs) {
            write_all<2>(p, piece, unit, factor, parts, place, lane);
        } else {
            write_all<1>(p, piece, unit, factor, parts, place, lane);
        }
        team_sync(team, p.span * 32);
    }
    // AT_ONCE pairs of the warp: one alone waits for itself, instruction by instruction.
    template <int AT_ONCE>
    DEVICE void write_all(const Problem& p, const Piece& piece, int unit, float factor, u32 parts, int place,
                          int lane) const {
#pragma unroll 1
        for (int first = place; first < kPairs; first += AT_ONCE * p.span) {
            if (token_of(first) >= piece.tokens) {
                continue;  // of no lane
            }
            float v[AT_ONCE][2] = {};
#pragma unroll
            for (int warp = 0; warp < kWarps; ++warp) {
                if ((AT_ONCE == 1 || AT_ONCE * warp < kPairs) && warp < p.span) {
#pragma unroll
                    for (int i = 0; i < AT_ONCE; ++i) {
                        const uint2 part = load_shared2(parts + (warp * kPairs + first + i * p.span) * step);
                        v[i][0] += __uint_as_float(part.x);
                        v[i][1] += __uint_as_float(part.y);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int pair = first + i * p.span;
                write(p, piece, unit, v[i][0] * factor, v[i][1] * factor, token_of(pair) + 2 * (lane & 3),
                      (lane >> 2) + (sum_of(pair) & 2) * 4);
            }
        }
    }
    DEVICE void write(const Problem& p, const Piece& piece, int unit, float upper, float lower, int token,
                      int row) const {
        if (token >= piece.tokens) {
            return;
        }
        const int width = p.width(), column = p.upper(unit) * 16 + row;
        u16* const to = y + u64(piece.row + token) * width + column;
        if (p.gated) {
            to[0] = H::narrow(silu_and_mul<Config::bf16>(upper, lower));
            return;
        }
        if (column < width) {
            to[0] = H::narrow(upper);
        }
        if (column + 16 < width) {
            to[16] = H::narrow(lower);
        }
    }
};

extern "C" __global__ void __launch_bounds__(Config::warps * 32, Config::blocks)
    resident(const u8* __restrict__ tiled, const float* __restrict__ codebook,
             const float* __restrict__ scale, const u16* x, u16* y, const int* offsets, const int* source,
             int n, int k, int rows, int x_stride, int x_rows, int experts, int gated, int each, int rest,
             int span_log, int x_at, int weights_at, int parts_at) {
    extern __shared__ __align__(1024) u8 memory[];
    launch_early();
    const int lane = threadIdx.x & 31, warp = uniform(threadIdx.x >> 5), block = blockIdx.x;
    const float level = D::level<kScaleWeights>(codebook, lane);
    const Problem p(n, k, gated != 0, 1 << span_log, kWarps >> span_log);
    const int team = warp >> span_log, place = warp & (p.span - 1);
    const int first_tile = p.k_tiles * place >> span_log,
              tiles = (p.k_tiles * (place + 1) >> span_log) - first_tile;
    // The block's units: `count` from `skipped` on, counted from those of its first expert.
    const int first = each * block + min(block, rest), count = each + (block < rest);
    const int first_expert = Divider(p.units)(first), skipped = first - first_expert * p.units;

    const u32 base = shared_address(memory), barrier = base + D::kTableBytes + warp * 8;
    const u32 half_bytes = p.k_tiles * D::kTileBytes, tile_at = first_tile * D::kTileBytes;
    const u32 weights = base + weights_at + tile_at;
    const int mine = max(0, count - team + p.teams - 1) / p.teams;
    if (lane == 0) {
        barrier_init(barrier, max(1, mine) * kCopyArrivals);
        barriers_visible();
    }
    __syncwarp();
    const u8* matrix = tiled + u64(first_expert) * p.row_tiles * half_bytes + tile_at;
    for (int unit = team, of = skipped + team; unit < count; unit += p.teams, of += p.teams) {
        for (; of >= p.units; of -= p.units) {
            matrix += u64(p.row_tiles) * half_bytes;
        }
        const u32 to = weights + 2 * unit * half_bytes;
        copy<2>({to, to + half_bytes}, {matrix + p.upper(of) * half_bytes, matrix + p.lower(of) * half_bytes},
                tiles * D::kTileBytes, barrier, lane);
    }
    D::fill(memory, level, threadIdx.x, blockDim.x);
    __syncthreads();
    const D decode = D::filled(memory, lane);
    const Output out{y, kSumsInHoles ? 2 * Output::kPairBytes : Output::kPairBytes};
    const Activations activations{x, source, x_stride, x_rows};
    const u32 region = opaque(base + x_at), x_tile = opaque(region + first_tile * kXTileBytes);
    const u32 parts = opaque(base + parts_at + (team << span_log) * Output::kPairs * out.step +
                             (kSumsInHoles ? D::hole(lane * 8) - D::hole(0) : lane * 8));
    Ready ready = {};
    if (mine > 0) {
        barrier_wait(barrier, 0);
        ready.decode_tile(decode, weights + 2 * team * half_bytes, half_bytes, lane);
    }
    wait_for_previous();
    launch_late();

    const Offsets at(offsets, first_expert, experts, rows, lane);
    const Owned owned(at.first(), at.last());
    bool staged = false;
    int unit = 0, end = p.units - skipped;
    for (int expert = first_expert; unit < count; ++expert, unit = end, end += p.units) {
        const int last = min(end, count), end_row = at.of(expert + 1);
        Piece piece{expert, at.of(expert), 0};
        for (; piece.row < end_row; piece.row += kTokens) {
            piece.tokens = min(kTokens, end_row - piece.row);
            if (staged) {
                __syncthreads();  // all have read what will be overwritten
            }
            for (int token = warp; token < piece.tokens; token += kWarps) {
                activations.ask(region, p, piece.row + token, token, token, kTokens, lane);
            }
            end_stage();
            staged = true;
            const float factor = factor_of(scale, expert);
            u32 columns[kColumns];
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {  // beyond a piece's tokens, its last one
                const int token = min(n * 8 + (lane & 7), piece.tokens - 1);
                columns[n] = x_tile + Activations::place(token, lane >> 3, token);
            }
            wait_for_stage<0>();
            __syncthreads();
            for (int u = unit + ((team - unit) & (p.teams - 1)); u < last; u += p.teams) {
                float sums[2][kColumns][4] = {};
                const u32 from = weights + 2 * u * half_bytes;
                if (u == team) {
                    multiply_unit<true>(sums, decode, ready, from, half_bytes, columns, tiles, lane);
                } else {
                    multiply_unit<false>(sums, decode, ready, from, half_bytes, columns, tiles, lane);
                }
                out.finish(p, piece, skipped + u - (expert - first_expert) * p.units, factor, sums, parts,
                           team, place, lane);
            }
        }
    }
    owned.clear_others(y, rows, p.width(), threadIdx.x, blockDim.x);
}
