// y[m, n] = sum_k x[m, k] * W[n, k] (+ bias[n]) for more tokens than stream.cu takes, where there is no
// wgmma.
//
// Gated: W holds 2 * I rows, gates first; y[m, i] = silu(gate[m, i]) * up[m, i], shape [M, I], I % 16 == 0.
//
//   tiled     [ceil(N/16), ceil(K/64)] tiles (layout.py), 16-byte aligned
//   codebook  float32 [2^bits]; scale float32 [1]: the matrix's factor
//   x         16-bit [M, x_stride], rows aligned to 16 bytes, zeros in columns K to the next multiple of 8
//   bias      16-bit [N] or null; y 16-bit [M, N], or [M, N/2] if gated
//   partial   null; or float32, the sums of each of gridDim.z parts of K, for mma_sums.cu: quad i of thread j
//             of block b of part p is at ((p * blocks + b) * kQuads + i) * kFinishing + j
//
// Experts (Config::experts): tiled [experts, ...], scale [experts], m rows of x and y sorted by expert, those
// of e from offsets[e] (int32 [experts + 1]) on; rows of no expert become zeros. No bias, partial null.
//
// A block takes 32 rows for each of its row warps and Config::tokens tokens. Config::slices warps have the
// same rows and take K's column tiles in turn. A warp decodes its two tiles' weights, scaled, into A operands
// in registers, so that 64 columns by T tokens are 32 look-ups a lane and T MMAs. Weights and activations
// come by asynchronous copies, Config::stages steps of 64 * slices columns in flight.
//
// Activations lie in shared memory as rows of 128 bytes, of 64 columns, piece p of 16 bytes in place
// p ^ (token % 8): neither the copies nor ldmatrix meet in a bank.
//
// Order of float32 sums: a slice's MMAs by columns; slices in their order; parts of K in theirs.
//
// grid: x blocks of rows, y of tokens, z parts of K. Experts: any number along x, which take tiles in turn,
// row_blocks of them for every Config::tokens rows of an expert.
// Shared memory: table, stages * (slices * (128 * tokens + 2 * row warps * tile bytes)).
#include "decode.cuh"
#include "groups.cuh"
#include "mma.cuh"
#include "stage16.cuh"

using D = Decoder<Config::bits, Config::bf16>;
using S = Scales<kUe4m3, Config::bf16>;
constexpr int kStages = Config::stages;
constexpr u32 kSliceBytes = kTokens * 128;
constexpr u32 kWarpBytes = 2 * D::kTileBytes;
constexpr u32 kWeightsAt = kSlices * kSliceBytes, kStageBytes = kWeightsAt + Config::warps * kWarpBytes;
static_assert((kSlices - 1) * kFinishing * kQuads * 16 <= kStages * kStageBytes || kSlices == 1);

struct Problem {
    const u8* tile[2];  // of this warp: its rows' first tiles
    const u16* x;       // of this block: its first token
    int k, k_tiles, x_stride, tokens;
};

// Whose tile of tokens a block has, and which rows of x and y.
struct Tile {
    int expert, first, end;
};

// Tiles one after the other, by ascending place.
struct Finder {
    const int* offsets;
    int experts, rows;
    int base = 0, passed = 0;  // experts from which to look, and the tiles of those before

    // That of place `slot`; first == end if there are fewer. All lanes of a warp.
    DEVICE Tile find(int slot) {
        const int lane = threadIdx.x & 31;
        for (; base < experts; base += 32) {
            const int e = min(base + lane, experts), next = min(e + 1, experts);
            const int first = row_offset(offsets, e, rows), end = row_offset(offsets, next, rows);
            const int tiles = end > first ? (end - first + kTokens - 1) / kTokens : 0;
            const int before = passed + sum_up_to(tiles, lane);  // and these
            const u32 beyond = __ballot_sync(~0u, before > slot);
            if (beyond != 0) {
                const int owner = __ffs(beyond) - 1;
                const int begin = __shfl_sync(~0u, first + (slot - before + tiles) * kTokens, owner);
                return {base + owner, begin, min(begin + kTokens, __shfl_sync(~0u, end, owner))};
            }
            passed = __shfl_sync(~0u, before, 31);
        }
        return {0, 0, 0};
    }
};

// This warp's tiles of column tile `column` to `stage`.
DEVICE void fetch_weights(const Problem& p, u32 stage, int warp, int column, int lane) {
    if (column < p.k_tiles) {
        const u32 to = stage + kWeightsAt + warp * kWarpBytes;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u8* const from = p.tile[i] + u64(column) * D::kTileBytes;
#pragma unroll
            for (u32 at = 0; at < D::kTileBytes; at += 512) {
                if (at + 512 <= D::kTileBytes || at + lane * 16 < D::kTileBytes) {
                    stage16(to + i * D::kTileBytes + at + lane * 16, from + at + lane * 16);
                }
            }
        }
    }
}

// The block's activations of a step to `stage`; zeros beyond tokens and columns.
DEVICE void fetch_x(const Problem& p, u32 stage, int step) {
    constexpr int kPieces = kTokens * 8 * kSlices;
#pragma unroll
    for (int i = 0; i < (kPieces + kThreads - 1) / kThreads; ++i) {
        const int at = i * kThreads + threadIdx.x;
        if (kPieces % kThreads == 0 || at < kPieces) {
            const int piece = at % 8, token = at / 8 % kTokens, slice = at / (8 * kTokens);
            const int column = ((step * kSlices + slice) * 8 + piece) * 8;
            const bool valid = token < p.tokens && column < p.k;
            const u16* const from = p.x + (valid ? u64(token) * p.x_stride + column : 0);
            stage16_if(stage + slice * kSliceBytes + token * 128 + (piece ^ token % 8) * 16, from, valid);
        }
    }
}

// sums += the warp's tiles of one column tile, at `weights`, times the activations at `x`.
DEVICE void multiply(Sums& sums, const D& decode, u32 weights, u32 x, int lane) {
    u32 w[2][Config::bits];
    typename S::Words scales[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 tile = weights + i * D::kTileBytes;
        D::load(w[i], tile, lane);
        scales[i] = S::load(tile + D::kScalesAt + (lane >> 2) * S::kBytes);
    }
    const u32 row = x + (lane / 16 * 8 + lane % 8) * 128, piece = (lane / 8 % 2 ^ lane % 8) * 16;
    static_for<4>([&](auto j) {
        constexpr int kStep = j.value;
        u32 a[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            decode.template step<kStep>(w[i], a[i]);
            S::template scale<kStep>(a[i], scales[i]);
        }
        const u32 from = row + (piece ^ kStep * 32);
#pragma unroll
        for (int eight = 0; eight < kEights; eight += 2) {
            u32 b[4];
            load_matrices(b, from + eight * 8 * 128);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                H::mma(sums[i % 2][eight + i / 2], a[i % 2], b[i / 2 * 2], b[i / 2 * 2 + 1]);
            }
        }
    });
}

// The sums of the slices, in their order, in the warps of the first.
DEVICE void add_slices(Sums& sums, u32 memory, int slice, int thread) {
    if constexpr (kSlices > 1) {
        __syncthreads();  // everyone is done with that memory
        const u32 mine = memory + thread * 16;
        if (slice > 0) {
#pragma unroll
            for (int i = 0; i < kQuads; ++i) {
                const float4 v = quad_of(sums, i);
                store_shared4(mine + ((slice - 1) * kQuads + i) * (kFinishing * 16),
                              make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z),
                                         __float_as_uint(v.w)));
            }
        }
        __syncthreads();
        if (slice == 0) {
#pragma unroll 1
            for (int other = 0; other < kSlices - 1; ++other) {
#pragma unroll
                for (int i = 0; i < kQuads; ++i) {
                    const uint4 v = load_shared4(mine + (other * kQuads + i) * (kFinishing * 16));
                    add_quad(sums, i,
                             {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                              __uint_as_float(v.w)});
                }
            }
        }
    }
}

// A block's rows and tokens, over its part of K. `rows`: the row warp, counted over all blocks. READY: when
// all that other kernels write is there.
template <class READY>
DEVICE void multiply_tile(Problem& p, const Result& result, const D& decode, const Tile& tile, const u16* x,
                          float4* partial, u32 stages, int rows, int warp, int lane, READY ready) {
    const int slice = warp / kRowWarps;
    const int steps = (p.k_tiles + kSlices - 1) / kSlices, part = blockIdx.z, parts = gridDim.z;
    const int begin = steps * part / parts, end = steps * (part + 1) / parts;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        if (begin + i < end) {
            fetch_weights(p, stages + i * kStageBytes, warp, (begin + i) * kSlices + slice, lane);
        }
    }
    ready();
    p.x = x + u64(tile.first) * p.x_stride;
    p.tokens = tile.end - tile.first;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        if (begin + i < end) {
            fetch_x(p, stages + i * kStageBytes, begin + i);
        }
        end_stage();
    }
    Sums sums = {};
    int slot = 0;
#pragma unroll 1
    for (int step = begin; step < end; ++step) {
        wait_for_stage<kStages - 2>();
        __syncthreads();  // this step is there, and the one before is done with its slot
        if (step + kStages - 1 < end) {
            const u32 next = stages + (slot == 0 ? kStages - 1 : slot - 1) * kStageBytes;
            fetch_weights(p, next, warp, (step + kStages - 1) * kSlices + slice, lane);
            fetch_x(p, next, step + kStages - 1);
        }
        end_stage();
        if (step * kSlices + slice < p.k_tiles) {
            const u32 stage = stages + slot * kStageBytes;
            multiply(sums, decode, stage + kWeightsAt + warp * kWarpBytes, stage + slice * kSliceBytes, lane);
        }
        slot = slot + 1 == kStages ? 0 : slot + 1;
    }
    const int thread = threadIdx.x % kFinishing;
    add_slices(sums, stages, slice, thread);
    if (slice > 0) {
        return;
    }
    if (Config::experts || partial == nullptr) {
        result.finish(sums, rows, tile.first, lane);
        return;
    }
    const u64 block = (u64(part) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
        partial[(block * kQuads + i) * kFinishing + thread] = quad_of(sums, i);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mma(const u8* __restrict__ tiled, const float* __restrict__ codebook, const float* scale, const u16* x,
        const u16* bias, u16* y, float4* partial, const int* offsets, int m, int n, int k, int x_stride,
        int gated, int vector, int experts, int row_blocks) {
    extern __shared__ __align__(1024) u8 memory[];
    launch_early();
    const int lane = threadIdx.x & 31, warp = uniform(threadIdx.x >> 5), row_warp = warp % kRowWarps;
    const u32 stages = shared_address(memory) + D::kTableBytes;
    Result result{scale, bias, y, m, n, gated, vector};
    Problem p;
    p.k = k;
    p.k_tiles = (k + 63) / 64;
    p.x_stride = x_stride;
    const D decode(memory, lane);
    const auto fill = [&] {
        D::fill(memory, D::level(codebook, lane), threadIdx.x, kThreads);
        wait_for_previous();
        launch_late();
        forget(x, result.bias);
    };
    const auto locate = [&](const u8* first, int rows) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            p.tile[i] = first + u64(result.tile(rows, i)) * p.k_tiles * D::kTileBytes;
        }
    };
    if constexpr (Config::experts) {
        fill();
        Owned(row_offset(offsets, 0, m), row_offset(offsets, experts, m))
            .clear_others(y, m, result.width(), threadIdx.x, kThreads);
        const u64 expert_bytes = u64((n + 15) / 16) * p.k_tiles * D::kTileBytes;
        Finder finder{offsets, experts, m};
#pragma unroll 1
        for (int place = blockIdx.x;; place += gridDim.x) {
            const Tile tile = finder.find(place / row_blocks);
            if (tile.first == tile.end) {
                break;
            }
            const int rows = place % row_blocks * kRowWarps + row_warp;
            locate(tiled + tile.expert * expert_bytes, rows);
            result.scale = scale + tile.expert;
            result.end = tile.end;
            __syncthreads();  // everyone is done with the stages
            multiply_tile(p, result, decode, tile, x, partial, stages, rows, warp, lane, [] {});
        }
    } else {
        const int rows = int(blockIdx.x) * kRowWarps + row_warp, first = int(blockIdx.y) * kTokens;
        locate(tiled, rows);
        multiply_tile(p, result, decode, {0, first, m}, x, partial, stages, rows, warp, lane, fill);
    }
}
