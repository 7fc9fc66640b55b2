// y[r, n] = round((sum_k A[r, k] * W[n, k] * w_scale) * row_scale[r]) under the contract `exact`, W in tiles.
//
//   a_codes   uint8 [m, columns / 2], a_scales uint8 [m, columns / 16]: 16-byte aligned, columns % 64 == 0
//   tiled     [ceil(n / 16), columns / 64] tiles (kbit/format/nvfp4_layout.py), 16-byte aligned
//   row_scale float32 [m] or null
//   y         [m, n] of dtype `out_dtype` (0 float32, 1 float16, 2 bfloat16)
//
// The integers are those of nvfp4_decode.cuh, sums are 64 bits wide, and so no order of them can be seen. Of
// nvfp4_gemm.cu, which takes the layout nv and experts, this differs where its time went: a lane loads its
// codes of 64 columns at once; integers of scales are looked up; nobody waits for a step's slowest warp.
//
// A block has Config::tokens rows of A and `rows` row tiles of W. Its `teams` share K. In a team every row
// tile has a warp, which keeps kStages steps of 256 columns of weights in flight, and one more warp decodes
// the activations for all of them, kSlots steps ahead; the first ones all warps decode together.
//
// Instructions for 16 x 16 weights and T / 8 tiles of tokens (sm_90a, disassembled): @@ + 11 T / 8.
//
// Dependent launch: the table is built and weights are on their way before the previous kernel is done, so
// whoever writes `tiled` ends with a kernel that is launched without it.
//
// Shared memory: table of scales, barriers, rings [team][row tile][stage], in the end the teams' sums, and
// operands [team][slot].
#include "config.h"
#include "nvfp4_decode.cuh"

constexpr int kTokens = Config::tokens, kTiles = kTokens / 8, kStages = Config::stages;
constexpr int kSlots = Config::slots;
constexpr int kStepTiles = 4, kStepColumns = 64 * kStepTiles, kSubBlocks = 4 * kStepTiles;
constexpr int kScalesAt = 512, kTileBytes = 576, kStageBytes = kStepTiles * kTileBytes;
// A step of activations: operands [sub-block][tile of tokens][lane], integers of scales [sub-block][token].
constexpr int kOperandBytes = kSubBlocks * kTokens * 16, kSlotBytes = kOperandBytes + kSubBlocks * kTokens * 4;
constexpr int kPieces = kTokens * 8;  // of 32 columns of a token, in a step
constexpr int kRowBytes = 256, kTableBytes = 128 * kRowBytes, kBarrierBytes = 1024;
constexpr int kMostWarps = 16;
static_assert(8 * kMostWarps * kStages <= kBarrierBytes && 8 * kMostWarps * 2 * kSlots <= kBarrierBytes);
constexpr int kSums = 4 * kTiles;  // of a lane
static_assert(kSums * 256 <= kStages * kStageBytes);

// 512 times every scale, once for each lane, 256 bytes apart: a byte and a lane make an address in one PRMT.
struct Table {
    const u8* memory;
    u32 lane_byte;

    DEVICE Table(const u8* memory_, int lane) : memory(memory_), lane_byte(opaque(u32(lane * 4))) {}
    static DEVICE void fill(u32 base, int thread, int threads) {
        for (int i = thread; i < 128 * 8; i += threads) {
            const u32 byte = u32(i) / 8, exponent = byte >> 3, mantissa = byte & 7u;
            const u32 value = byte == 0x7fu ? 0 : exponent ? (mantissa | 8u) << (exponent - 1) : mantissa;
            store_shared4(base + byte * kRowBytes + i % 8 * 16, make_uint4(value, value, value, value));
        }
    }
    // Of byte BYTE, whose top bit is 0.
    template <int BYTE>
    DEVICE int of(u32 bytes) const {
        return *reinterpret_cast<const int*>(memory + permute(bytes, lane_byte, 0x7704 | BYTE << 4));
    }
};

struct Problem {
    const u8 *a_codes, *a_scales;
    int columns, first, end;  // rows first .. end - 1 of A
};

// 32 columns of a token of A, raw. Piece `at` of a step is of token at % kTokens.
struct Piece {
    uint4 codes;
    u32 scales;

    DEVICE void load(const Problem& p, int step, int at) {
        const int row = p.first + at % kTokens, column = step * kStepColumns + at / kTokens * 32;
        codes = make_uint4(0, 0, 0, 0);
        scales = 0;
        if (row < p.end && column < p.columns) {
            const i64 from = i64(row) * p.columns + column;
            codes = __ldg(reinterpret_cast<const uint4*>(p.a_codes + from / 2));
            scales = __ldg(reinterpret_cast<const u16*>(p.a_scales + from / 16));
        }
    }
    // The codes of a sub-block, as lanes t = 0 .. 3 of a token need them: two bytes each, 4 apart.
    static DEVICE uint4 operands(u32 low, u32 high) {
        return make_uint4(code_bytes(permute(low, high, 0x40)), code_bytes(permute(low, high, 0x51)),
                          code_bytes(permute(low, high, 0x62)), code_bytes(permute(low, high, 0x73)));
    }
    DEVICE void decode(const Table& table, u32 slot, int at) const {
        const int token = at % kTokens, sub = at / kTokens * 2;
        const u32 to = slot + (sub * kTokens + token) * 16, clean = scales & 0x7f7fu;
        store_shared4(to, operands(codes.x, codes.y));
        store_shared4(to + kTokens * 16, operands(codes.z, codes.w));
        const u32 factor = slot + kOperandBytes + (sub * kTokens + token) * 4;
        put_shared(factor, u32(table.of<0>(clean)));
        put_shared(factor + kTokens * 4, u32(table.of<1>(clean)));
    }
};

// What a team's warps share: its steps of K, its slots of activations.
struct Team {
    u32 slots, full, empty;  // slots, and kSlots barriers each
    int begin, end;          // steps

    DEVICE u32 slot(int i) const { return slots + i % kSlots * kSlotBytes; }
    DEVICE u32 full_at(int i) const { return full + i % kSlots * 8; }
    DEVICE u32 empty_at(int i) const { return empty + i % kSlots * 8; }
    // Of the i-th step: the first ones are filled without barriers.
    DEVICE static u32 phase(int i) { return u32(i / kSlots - 1) & 1u; }

    // Pieces `first`, first + by, ..., COUNT of them, of all steps' up to `limit`: loaded together.
    template <int COUNT, class F>
    DEVICE void decode(const Problem& p, const Table& table, int first, int by, int limit, F wait) const {
        Piece pieces[COUNT];
#pragma unroll
        for (int c = 0; c < COUNT; ++c) {
            const int i = min(first + c * by, limit - 1);
            pieces[c].load(p, begin + i / kPieces, i % kPieces);
        }
        wait();
#pragma unroll
        for (int c = 0; c < COUNT; ++c) {
            const int i = first + c * by;
            if (i < limit) {
                pieces[c].decode(table, slot(i / kPieces), i % kPieces);
            }
        }
    }
    // The first steps, by all threads of the team.
    DEVICE void begin_with(const Problem& p, const Table& table, int thread, int threads) const {
        const int limit = min(kSlots, end - begin) * kPieces;
        for (int first = thread; first < limit; first += 2 * threads) {
            decode<2>(p, table, first, threads, limit, [] {});
        }
    }
    // The others, by a warp.
    DEVICE void produce(const Problem& p, const Table& table, int lane) const {
        constexpr int kAtOnce = kPieces / 32 < 4 ? kPieces / 32 : 4;
        for (int i = kSlots; i < end - begin; ++i) {
#pragma unroll 1
            for (int first = 0; first < kPieces; first += 32 * kAtOnce) {
                decode<kAtOnce>(p, table, i * kPieces + first + lane, 32, (i + 1) * kPieces, [&] {
                    if (first == 0) {
                        barrier_wait(empty_at(i), phase(i));
                    }
                });
            }
            warp_arrive(full_at(i), lane);
        }
    }
};

typedef i64 Sums[kTiles][4];  // of a lane: rows g, g, g + 8, g + 8 and tokens 2t, 2t + 1 alternately

// A step's weights of a warp, in registers.
struct Packed {
    uint4 codes[kStepTiles];
    uint2 scales[kStepTiles];

    DEVICE Packed(u32 stage, int lane) {
#pragma unroll
        for (int i = 0; i < kStepTiles; ++i) {
            codes[i] = load_shared4(stage + i * kTileBytes + lane * 16);
            scales[i] = load_shared2(stage + i * kTileBytes + kScalesAt + lane / 4 * 8);
        }
    }
    DEVICE u32 loaded() const {
        u32 all = 0;
#pragma unroll
        for (int i = 0; i < kStepTiles; ++i) {
            all |= codes[i].x | scales[i].x;
        }
        return all;
    }
};

// sums += 16 rows, sub-block J of a tile, times that of all tokens, whose operands are at `from`.
template <int J>
DEVICE void multiply(Sums& sums, const Table& table, u32 word, uint2 scales, u32 from, u32 factors) {
    const u32 codes = permute(word, 0, 0x3120);  // row g's, then row g + 8's
    const u32 a0 = code_bytes(codes), a1 = code_bytes(codes >> 16);
    const int upper = table.of<J>(scales.x), lower = table.of<J>(scales.y);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        int dot[4];
        multiply_bytes(dot, a0, a1, load_shared(from + tile * 128));
        const uint2 token = load_shared2(factors + tile * 32);
        sums[tile][0] += i64(dot[0] * int(token.x)) * upper;
        sums[tile][1] += i64(dot[1] * int(token.y)) * upper;
        sums[tile][2] += i64(dot[2] * int(token.x)) * lower;
        sums[tile][3] += i64(dot[3] * int(token.y)) * lower;
    }
}

DEVICE void multiply_step(Sums& sums, const Table& table, const Packed& w, u32 slot, int lane) {
    const u32 from = slot + lane * 4, factors = slot + kOperandBytes + (lane & 3) * 8;
    static_for<kStepTiles>([&](auto i) {
        const uint4 codes = w.codes[i.value];
        const uint2 both = w.scales[i.value], scales = {both.x & 0x7f7f7f7fu, both.y & 0x7f7f7f7fu};
        const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
        static_for<4>([&](auto j) {
            constexpr int kAt = 4 * decltype(i)::value + decltype(j)::value;
            multiply<decltype(j)::value>(sums, table, words[j.value], scales, from + kAt * (kTokens * 16),
                                         factors + kAt * (kTokens * 4));
        });
    });
}

// A warp's weights of a row tile, kStages steps in flight.
struct Ring {
    const u8* from;  // of step 0
    u32 base, barriers;
    int k_tiles, lane;

    DEVICE void init() const {
        if (lane == 0) {
            for (int s = 0; s < kStages; ++s) {
                barrier_init(barriers + 8 * s, kCopyArrivals);
            }
            barriers_visible();
        }
        __syncwarp();
    }
    // Into the place of the i-th step of the team's. Tiles that K lacks stay what they were and meet zeros.
    DEVICE void fetch(const Team& team, int i, u32 shift) const {
        const int step = team.begin + i, tiles = min(kStepTiles, k_tiles - step * kStepTiles), s = i % kStages;
        if (step < team.end) {
            copy<1>({base + s * kStageBytes + shift}, {from + i64(step) * kStageBytes}, tiles * kTileBytes,
                    barriers + 8 * s, lane);
        }
    }
    DEVICE u32 wait(int i) const {
        barrier_wait(barriers + 8 * (i % kStages), i / kStages & 1);
        return base + i % kStages * kStageBytes;
    }
};

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
    nvfp4_exact(const u8* a_codes, const u8* a_scales, const u8* tiled, const float* row_scale, void* y, int m,
                int n, int columns, int rows, int teams, float w_scale, int out_dtype) {
    extern __shared__ __align__(1024) u8 memory[];
    const int lane = int(threadIdx.x & 31), number = uniform(int(threadIdx.x >> 5));
    const int team_number = number / (rows + 1), warp = number - team_number * (rows + 1);
    const int k_tiles = columns / 64, steps = (k_tiles + kStepTiles - 1) / kStepTiles;
    const u32 base = shared_address(memory), barriers = base + kTableBytes, rings = barriers + kBarrierBytes;
    const u32 team_barriers = barriers + (teams * rows * kStages + team_number * 2 * kSlots) * 8;
    const Team team{rings + teams * rows * (kStages * kStageBytes) + team_number * (kSlots * kSlotBytes),
                    team_barriers, team_barriers + kSlots * 8, steps * team_number / teams,
                    steps * (team_number + 1) / teams};
    const int row_tile = int(blockIdx.x) * rows + warp, row_tiles = (n + 15) / 16;
    const int ring_number = team_number * rows + warp;
    // Warps beyond the last row tile repeat it; their sums are not stored.
    const Ring ring{tiled + i64(min(row_tile, row_tiles - 1)) * k_tiles * kTileBytes,
                    rings + ring_number * (kStages * kStageBytes), barriers + ring_number * (kStages * 8),
                    k_tiles, lane};
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
    Table::fill(base, int(threadIdx.x), int(blockDim.x));
    __syncthreads();
    wait_for_previous();
    forget(a_codes, a_scales, row_scale);
    const Table table(memory, lane);
    const int first = int(blockIdx.y) * kTokens;
    const Problem p{a_codes, a_scales, columns, first, min(m, first + kTokens)};
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
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = p.first + tile * 8 + 2 * t + i % 2, column = row_tile * 16 + g + i / 2 * 8;
            if (r < p.end && column < n) {
                float value = __fmul_rn(__fmul_rn(__ll2float_rn(sums[tile][i]), kExactUnit), w_scale);
                value = row_scale != nullptr ? __fmul_rn(value, row_scale[r]) : value;
                store_rounded(y, i64(r) * n + column, value, out_dtype);
            }
        }
    }
}
