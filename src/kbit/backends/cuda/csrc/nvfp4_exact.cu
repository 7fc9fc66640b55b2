// y[r, n] = round((sum_k A[r, k] * W[n, k] * w_scale) * row_scale[r]) under the contract `exact`, W in tiles.
//
//   a_codes   uint8 [m, columns / 2], a_scales uint8 [m, columns / 16]: 16-byte aligned, columns % 64 == 0
//   tiled     [ceil(n / 16), columns / 64] tiles (kbit/format/nvfp4_layout.py), 16-byte aligned
//   row_scale float32 [m] or null
//   y         [m, n] of dtype `out_dtype` (0 float32, 1 float16, 2 bfloat16)
//   partial   null; or int64 [m, n], zeroed, to which sums are added instead of writing y (nvfp4_finish.cu
//   does)
//
// Config::experts, of one token a block: row r of y is row rows[r] of A, or, rows being null, row r, times
// its expert e's W, offsets[e] <= r < offsets[e + 1], and w_scales[e]; +0 of rows of no expert.
//
//   offsets int32 [experts + 1], rows int32 [m] or null, w_scales float32 [experts]; tiled [experts, ...]
//
// The integers are those of nvfp4_decode.cuh, sums are 64 bits wide, and so no order of them can be seen. Of
// nvfp4_gemm.cu, which takes the layout nv and experts, this differs where its time went: a lane loads its
// codes of 64 columns at once; integers of scales are looked up; nobody waits for a step's slowest warp.
//
// A block has Config::tokens rows of A and `rows` row tiles of W. Its `teams` share K. In a team every row
// tile has a warp, which keeps kStages steps of 256 columns of weights in flight, and one more warp decodes
// the activations for all of them, kSlots steps ahead; the first ones all warps decode together.
//
// Of fewer than 8 tokens several sub-blocks are beside each other in the columns of B. A product meets the
// activations of one, zeros elsewhere, and so adds to its sums alone; those of all are scaled together.
//
// Instructions for 16 x 16 weights (sm_90a, disassembled): 22 + 11 T / 8 for T tokens from 8 on, 22 for one.
// Most take two clocks, and IMAD.WIDE, one of a lane's two multiplications, four: each 8 tokens cost 33.
//
// grid: x blocks of row tiles, y blocks of tokens, z parts of K, only with `partial`.
//
// Dependent launch: the table is built and weights are on their way before the previous kernel is done, so
// whoever writes `tiled` ends with a kernel that is launched without it.
//
// Shared memory: table of scales, barriers, rings [team][row tile][stage], in the end the teams' sums, and
// operands [team][slot].
#include "nvfp4_exact.cuh"

// The expert of a row, or -1; in all threads of a block.
DEVICE int find_expert(const int* offsets, int experts, int row) {
    __shared__ int found;
    if (threadIdx.x == 0) {
        found = -1;
    }
    __syncthreads();
    for (int e = int(threadIdx.x); e < experts; e += int(blockDim.x)) {
        if (offsets[e] <= row && row < offsets[e + 1]) {
            found = e;
        }
    }
    __syncthreads();
    return found;
}

typedef i64 Sums[kTiles][4];  // of a lane: rows g, g, g + 8, g + 8 and columns 2t, 2t + 1 alternately

// The A operand of a sub-block of 16 rows.
struct Weights {
    u32 upper, lower;  // rows g and g + 8

    DEVICE Weights(const CodeBytes& bytes, u32 word) {
        const u32 codes = permute(word, 0, 0x3120);  // row g's, then row g + 8's
        upper = bytes.of(codes);
        lower = bytes.of(codes >> 16);
    }
    DEVICE void multiply(int (&dot)[4], u32 b) const { multiply_bytes(dot, upper, lower, b); }
};

struct Pair {
    int first, second;
};

// sums += dot * (integers of two columns' activations) * (those of rows g and g + 8 in either column)
DEVICE void add_scaled(i64 (&sums)[4], const int (&dot)[4], uint2 columns, Pair upper, Pair lower) {
    sums[0] += i64(dot[0] * int(columns.x)) * upper.first;
    sums[1] += i64(dot[1] * int(columns.y)) * upper.second;
    sums[2] += i64(dot[2] * int(columns.x)) * lower.first;
    sums[3] += i64(dot[3] * int(columns.y)) * lower.second;
}

// sums += a step of 16 rows times that of all tokens.
DEVICE void multiply_step(Sums& sums, const Table& table, const Packed& w, u32 slot, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const u32 operands = slot + lane * 4, factors = slot + kOperandBytes + t * 8;
    static_for<kSubBlocks / kBeside>([&](auto group) {
        constexpr int kGroup = decltype(group)::value, kFirst = kGroup * kBeside;
        if constexpr (kBeside == 1) {
            const Weights weights(table.bytes, w.word(kFirst));
            const uint2 scales = w.scales_of(kFirst / 4);
            const int upper = table.at(scales.x, kFirst % 4), lower = table.at(scales.y, kFirst % 4);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                int dot[4] = {};
                weights.multiply(dot, load_shared(operands + (kGroup * kTiles + tile) * 128));
                const uint2 columns = load_shared2(factors + (kGroup * kTiles + tile) * 32);
                add_scaled(sums[tile], dot, columns, {upper, upper}, {lower, lower});
            }
        } else {
            const u32 mine = load_shared(operands + kGroup * 128);
            int dot[4] = {};
            static_for<kBeside>([&](auto sub) {
                const bool meets = g / kTokens == sub.value;
                const Weights weights(table.bytes, w.word(kFirst + decltype(sub)::value));
                weights.multiply(dot, meets ? mine : 0);
            });
            // The sub-block of column 2t, and of 2t + 1.
            const int sub = kFirst + 2 * t / kTokens, next = kTokens == 1 ? sub + 1 : sub;
            const uint2 scales = w.scales_of(kFirst / 4, kBeside == 8 && t >= 2);
            const Pair upper = {table.at(scales.x, sub % 4), table.at(scales.x, next % 4)};
            const Pair lower = {table.at(scales.y, sub % 4), table.at(scales.y, next % 4)};
            add_scaled(sums[0], dot, load_shared2(factors + kGroup * 32), upper, lower);
        }
    });
}

// Sub-blocks beside each other: their sums, in all lanes that have some.
DEVICE void add_beside(Sums& sums) {
    if constexpr (kTokens == 1) {
        sums[0][0] += sums[0][1];
        sums[0][2] += sums[0][3];
    }
#pragma unroll
    for (int step = kTokens == 4 ? 2 : 1; kTokens < 8 && step < 4; step *= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums[0][i] += __shfl_xor_sync(kAll, sums[0][i], step);
        }
    }
}

DEVICE void consume(Sums& sums, const Team& team, const Table& table, const Ring& ring, u32 zero, int lane) {
    for (int i = 0; i < team.end - team.begin; ++i) {
        const Packed w(ring.wait(i), lane);
        if (i >= kSlots) {
            barrier_wait(team.full_at(i), Team::phase(i));
        }
        multiply_step(sums, table, w, team.slot(i), lane);
        ring.fetch(team, i + kStages, after_loads(w.loaded(), zero));
        warp_arrive(team.empty_at(i), lane);
    }
}

// The other teams' sums, where their weights were.
DEVICE void add_teams(Sums& sums, u32 base, int warp, int rows, int team, int teams, int lane) {
    __syncthreads();  // everyone is done with that memory
    const u32 mine = base + (team * rows + warp) * (kSums * 256) + lane * 8;
    if (team > 0 && warp < rows) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            const u64 sum = u64(sums[i / 4][i % 4]);
            store_shared2(mine + i * 256, make_uint2(u32(sum), u32(sum >> 32)));
        }
    }
    __syncthreads();
    if (team == 0 && warp < rows) {
        for (int other = 1; other < teams; ++other) {
#pragma unroll
            for (int i = 0; i < kSums; ++i) {
                const uint2 part = load_shared2(mine + other * rows * (kSums * 256) + i * 256);
                sums[i / 4][i % 4] += i64(u64(part.y) << 32 | part.x);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kMostWarps * 32, 1)
    nvfp4_exact(const u8* a_codes, const u8* a_scales, const u8* tiled, const float* row_scale, void* y,
                u64* partial, const int* sources, const int* offsets, const float* w_scales, int experts,
                int m, int n, int columns, int rows, int teams, float w_scale, int out_dtype) {
    extern __shared__ __align__(1024) u8 memory[];
    const int out_row = int(blockIdx.y) * kTokens;
    int expert = 0, first = out_row;
    const u32 base = shared_address(memory);
    if constexpr (kExperts) {
        Table::fill(base, int(threadIdx.x), int(blockDim.x));
        wait_for_previous();
        expert = find_expert(offsets, experts, out_row);
        first = sources != nullptr ? sources[out_row] : out_row;
        w_scale = expert < 0 ? 1.0f : w_scales[expert];
    }
    const int lane = int(threadIdx.x & 31), number = uniform(int(threadIdx.x >> 5));
    const int team_number = number / (rows + 1), warp = number - team_number * (rows + 1);
    const int k_tiles = columns / 64, steps = expert < 0 ? 0 : (k_tiles + kStepTiles - 1) / kStepTiles;
    const int part = int(blockIdx.z) * teams + team_number, parts = int(gridDim.z) * teams;
    const u32 barriers = base + kTableBytes, rings = barriers + kBarrierBytes;
    const u32 team_barriers = barriers + (teams * rows * kStages + team_number * 2 * kSlots) * 8;
    const Team team{rings + teams * rows * (kStages * kStageBytes) + team_number * (kSlots * kSlotBytes),
                    team_barriers, team_barriers + kSlots * 8, steps * part / parts,
                    steps * (part + 1) / parts};
    const int row_tile = int(blockIdx.x) * rows + warp, row_tiles = (n + 15) / 16;
    const i64 tile_row = i64(max(expert, 0)) * row_tiles + min(row_tile, row_tiles - 1);
    const int ring_number = team_number * rows + warp;
    // Warps beyond the last row tile repeat it; their sums are not stored.
    const Ring ring{tiled + tile_row * k_tiles * kTileBytes, rings + ring_number * (kStages * kStageBytes),
                    barriers + ring_number * (kStages * 8), k_tiles, lane};
    if (warp < rows) {
        ring.init();
        for (int i = 0; i < kStages; ++i) {
            ring.fetch(team, i, 0);
        }
    } else if (lane == 0) {
        for (int i = 0; i < kSlots; ++i) {
            barrier_init(team.full_at(i), kWarpArrivals);
            barrier_init(team.empty_at(i), rows * kWarpArrivals);
        }
    }
    if constexpr (!kExperts) {
        Table::fill(base, int(threadIdx.x), int(blockDim.x));
    }
    __syncthreads();
    wait_for_previous();
    forget(a_codes, a_scales, row_scale);
    const Table table(memory, lane);
    const Problem p{a_codes, a_scales, columns, first, kExperts ? first + 1 : min(m, first + kTokens)};
    team.begin_with(p, table, warp * 32 + lane, (rows + 1) * 32);
    launch_dependents();  // whose weights would come before these activations
    __syncthreads();
    Sums sums = {};
    if (warp < rows) {
        consume(sums, team, table, ring, opaque(u32(m) >> 31), lane);
    } else {
        team.produce(p, table, lane);
    }
    if (teams > 1) {
        add_teams(sums, rings, warp, rows, team_number, teams, lane);
    }
    if (team_number > 0 || warp == rows || row_tile >= row_tiles) {
        return;
    }
    add_beside(sums);
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = tile * 8 + 2 * t + i % 2, r = p.first + token;
            const int column = row_tile * 16 + g + i / 2 * 8;
            if (token >= kTokens || r >= p.end || column >= n) {
                continue;
            }
            const i64 at = i64(kExperts ? out_row : r) * n + column;
            if (partial != nullptr) {
                atomicAdd(partial + at, u64(sums[tile][i]));
                continue;
            }
            const float factor = row_scale != nullptr ? row_scale[r] : 1.0f;
            store_exact(y, at, sums[tile][i], w_scale, factor, out_dtype);
        }
    }
}
