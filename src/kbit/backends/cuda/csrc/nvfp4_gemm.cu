// y[r, n] = round((sum_k A[row(r), k] * W[e(r), n, k] * w_scale) * row_scale[row(r)]): NVFP4 by NVFP4.
//
//   a_codes   uint8 [any, columns / 2], a_scales uint8 [any, columns / 16]: 16-byte aligned
//   rows      int32 [m]: the row of A of each row of y; null: the same
//   bounds    int32 [experts + 1]: rows bounds[e] .. bounds[e + 1] - 1 of y take expert e, those beyond the
//             last are 0; null: one weight for all
//   w_codes   uint8 [experts, n, columns / 2], w_scales uint8 [experts, n, columns / 16]: 16-byte aligned
//   w_scales_f32  float32 [experts], or null for `w_scale`
//   row_scale float32 [any] or null
//   y         [m, n] of dtype `out_dtype` (0 float32, 1 float16, 2 bfloat16)
//   partial   null; or int64 [m, n], zeroed, to which exact sums are added instead of writing y
//   columns   a multiple of 64 (the caller pads), at most 2^20
//
// Config::accum: 0 `exact` and 1 `seq16` are the contracts of kbit/nvfp4/kernels.py, with the same bits for
// any configuration and device; 2 `tc` chains the accumulators of MMAs. Operands: nvfp4_decode.cuh.
//
// A warp owns 16 rows of W (the A operand of mma.m16n8k16) and meets Config::tokens rows of y (columns of B)
// in steps of 256 columns. Its weights come by asynchronous copies, kStages steps in flight, 144 bytes a row:
// 128 of codes, 16 of scales; so every weight is read once per tile of tokens, and 8 rows start 4 banks
// apart. A team of warps decodes its activations once for all of them, one step ahead, into operands in
// shared memory. Under `exact`, whose sums have no order, Config::teams of them take as many parts of K and
// add up in the end: one has too few warps to hide what integers wait for.
//
// Instructions for 16 x 16 weights and T / 8 tiles of tokens (sm_90a, disassembled): exact 27 + 11 T / 8,
// seq16 36 + 6 T / 8, tc 36 + 2 T / 8. At 4096 x 14336 and T = 8 exact is 17 thousand cycles of an H200's
// schedulers, where the weights' 33 MB take 13 thousand.
//
// grid: x blocks of 16 * warps rows of W, warps of a team; y tiles of tokens, of every expert its own (more
// than there are: the rest returns); z splits of K, only with `partial`. Without it and with one team, sums
// keep their order.
// Shared memory, of each team: warps * kStages * 2304, and the operands of two steps (kOperandBytes +
// kFactorBytes each).
#include "nvfp4_stage.cuh"
#include "warp_scan.cuh"

// Which expert and rows tile `slot` is; false if there are fewer tiles. Expert number `experts` owns the rows
// of none.
DEVICE bool find_tile(Problem& p, const int* bounds, int experts, int m, int slot) {
    const int lane = int(threadIdx.x & 31);
    if (bounds == nullptr) {
        p.expert = 0;
        p.first = slot * kTokens;
        p.end = min(p.first + kTokens, m);
        return p.first < m;
    }
    for (int base = 0; base <= experts; base += 32) {
        const int e = base + lane;
        const int first = e <= experts ? bounds[e] : m, end = e < experts ? bounds[e + 1] : m;
        const int tiles = (end - first + kTokens - 1) / kTokens;
        const int before = sum_up_to(tiles, lane);  // and this one
        const u32 beyond = __ballot_sync(kAll, before > slot);
        if (beyond != 0) {
            const int owner = __ffs(beyond) - 1;
            const int at = (slot - __shfl_sync(kAll, before - tiles, owner)) * kTokens;
            p.expert = base + owner;
            p.first = __shfl_sync(kAll, first, owner) + at;
            p.end = min(__shfl_sync(kAll, end, owner), p.first + kTokens);
            return true;
        }
        slot -= __shfl_sync(kAll, before, 31);
    }
    return false;
}

// ---- sums of a lane: [tile][i] is row g, g, g + 8, g + 8 and token 2t, 2t + 1 alternately

template <bool EXACT>
struct Sum {
    typedef float Type;
};
template <>
struct Sum<true> {
    typedef i64 Type;
};
typedef Sum<kExact>::Type Sums[kTiles][4];

// sums += 16 rows at `stage` (this lane's codes of row g) times sub-block J of 4 of all tokens.
template <int J, class SUMS>
DEVICE void multiply(SUMS& sums, const CodeBytes& bytes, u32 stage, u32 operands, u32 factors, u32 upper,
                     u32 lower) {
    const u32 a = load_shared_element<2>(stage + J * 8);
    const u32 b = load_shared_element<2>(stage + 8 * kRowBytes + J * 8);
    const u32 scales = two_scales<J>(upper, lower) & 0x3f803f80u;
    const u32 from = operands + J * (kTiles * 32 * kLaneBytes);
    if constexpr (kExact) {
        const u32 a0 = bytes.of(a), a1 = bytes.of(b);
        const int first = scale_integer(u16(scales)), second = scale_integer(u16(scales >> 16));
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            int dot[4] = {};
            multiply_bytes(dot, a0, a1, load_shared(from + tile * 128));
            const uint2 token = load_shared2(factors + J * kTokens * 4 + tile * 32);
            sums[tile][0] += i64(dot[0] * int(token.x)) * first;
            sums[tile][1] += i64(dot[1] * int(token.y)) * first;
            sums[tile][2] += i64(dot[2] * int(token.x)) * second;
            sums[tile][3] += i64(dot[3] * int(token.y)) * second;
        }
    } else {
        const u32 operand = scale_operands(scales);
        u32 v[4];
        code_halves(permute(a, 0, 0x7170), permute(operand, 0, 0x1010), v[0], v[2]);
        code_halves(permute(b, 0, 0x7170), permute(operand, 0, 0x3232), v[1], v[3]);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const uint2 token = load_shared2(from + tile * 256);
            if constexpr (kChained) {
                Half<false>::mma(sums[tile], v, token.x, token.y);
            } else {
                float dot[4] = {};
                Half<false>::mma(dot, v, token.x, token.y);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sums[tile][i] = __fadd_rn(sums[tile][i], dot[i]);
                }
            }
        }
    }
}

DEVICE void multiply_step(Sums& sums, const CodeBytes& bytes, u32 stage, u32 operands, int quads, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const u32 row = stage + g * kRowBytes;
    u32 from = operands + lane * kLaneBytes, factors = operands + kOperandBytes + t * 8;
#pragma unroll 1
    for (int quad = 0; quad < quads; ++quad) {
        const u32 upper = clean_scales(load_shared(row + 128 + quad * 4));
        const u32 lower = clean_scales(load_shared(row + 8 * kRowBytes + 128 + quad * 4));
        const u32 codes = row + quad * 32 + t * 2;
        multiply<0>(sums, bytes, codes, from, factors, upper, lower);
        multiply<1>(sums, bytes, codes, from, factors, upper, lower);
        multiply<2>(sums, bytes, codes, from, factors, upper, lower);
        multiply<3>(sums, bytes, codes, from, factors, upper, lower);
        from += 4 * kTiles * 32 * kLaneBytes;
        factors += 4 * kTokens * 4;
    }
}

DEVICE float rounded(i64 sum) {
    return __fmul_rn(__ll2float_rn(sum), kExactUnit);
}
DEVICE float rounded(float sum) {
    return __fmul_rn(sum, kHalfUnit);
}

// The other teams' sums, through the memory that their weights came to.
DEVICE void add_teams(Sums& sums, u32 base, int team, int thread, int threads) {
    static_assert(kTeams == 1 || (kExact && kTiles * 4 * 8 * 32 <= kStages * kStageBytes));
#pragma unroll
    for (int other = 1; other < kTeams; ++other) {
        __syncthreads();  // everyone is done with that memory
        if (team == other) {
#pragma unroll
            for (int i = 0; i < kTiles * 4; ++i) {
                const u64 sum = u64(sums[i / 4][i % 4]);
                store_shared2(base + u32(i * threads + thread) * 8, make_uint2(u32(sum), u32(sum >> 32)));
            }
        }
        __syncthreads();
        if (team == 0) {
#pragma unroll
            for (int i = 0; i < kTiles * 4; ++i) {
                const uint2 part = load_shared2(base + u32(i * threads + thread) * 8);
                sums[i / 4][i % 4] += i64(u64(part.y) << 32 | part.x);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kTeams * 256, 1)
    nvfp4_gemm(const u8* a_codes, const u8* a_scales, const int* rows, const int* bounds, const u8* w_codes,
               const u8* w_scales, const float* w_scales_f32, const float* row_scale, void* y, u64* partial,
               int m, int n, int columns, int experts, float w_scale, int out_dtype) {
    extern __shared__ __align__(16) u8 memory[];
    wait_and_launch();  // not before: their blocks would take the multiprocessors that these wait for
    forget(a_codes, a_scales, rows, bounds, w_codes, w_scales, w_scales_f32, row_scale);
    const int threads = int(blockDim.x) / kTeams, warps = threads / 32;
    const int lane = int(threadIdx.x & 31), all = uniform(int(threadIdx.x >> 5));
    const int team = kTeams == 1 ? 0 : all / warps, warp = all - team * warps;
    const int g = lane >> 2, t = lane & 3, row = (int(blockIdx.x) * warps + warp) * 16;
    Problem p{a_codes, a_scales, columns};
    p.thread = warp * 32 + lane;
    p.threads = threads;
    if (!find_tile(p, bounds, experts, m, int(blockIdx.y))) {
        return;
    }
    const bool none = bounds != nullptr && p.expert == experts, active = row < n && !none;
    const int steps = none ? 0 : (columns + kStepColumns - 1) / kStepColumns;
    const int part = int(blockIdx.z) * kTeams + team, parts = int(gridDim.z) * kTeams;
    p.begin = steps * part / parts;
    p.end_step = steps * (part + 1) / parts;
    const int rounds = (steps + parts - 1) / parts;  // of the team with most steps

    const u32 memory_at = shared_address(memory), weights_bytes = warps * (kStages * kStageBytes);
    const u32 base = memory_at + team * (weights_bytes + 2 * kStepBytes), operands = base + weights_bytes;
    const i64 expert_rows = i64(none ? 0 : p.expert) * n;
    const Weights w{w_codes + expert_rows * (columns / 2),
                    w_scales + expert_rows * (columns / 16),
                    base + warp * (kStages * kStageBytes),
                    row,
                    n,
                    columns};
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        if (active && p.begin + i < p.end_step) {
            w.fetch(p.begin + i, i, lane);
        }
        end_stage();
    }
    const CodeBytes bytes;
    Activations act;
    act.locate(p, rows);
    if (p.begin < p.end_step) {
        act.load(p, p.begin);
        act.decode(p, bytes, operands);
        act.load(p, p.begin + 1);
    }
    Sums sums = {};
    int slot = 0;
    for (int step = p.begin; step < p.begin + rounds; ++step) {
        asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
        __syncthreads();  // this step is there; the one before is done with its slot and operands
        if (active && step + kStages - 1 < p.end_step) {
            w.fetch(step + kStages - 1, slot == 0 ? kStages - 1 : slot - 1, lane);
        }
        end_stage();
        const u32 odd = u32(step - p.begin) & 1u;
        if (step + 1 < p.end_step) {
            act.decode(p, bytes, operands + (odd ^ 1u) * kStepBytes);
            act.load(p, step + 2);
        }
        if (active && step < p.end_step) {
            const int quads = min(kStepColumns, columns - step * kStepColumns) / 64;
            multiply_step(sums, bytes, w.base + slot * kStageBytes, operands + odd * kStepBytes, quads, lane);
        }
        slot = slot + 1 == kStages ? 0 : slot + 1;
    }
    if constexpr (kTeams > 1) {
        add_teams(sums, memory_at, team, p.thread, threads);
        if (team > 0) {
            return;
        }
    }

    const float factor = w_scales_f32 == nullptr ? w_scale : none ? 0.0f : w_scales_f32[p.expert];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = p.first + tile * 8 + 2 * t + i % 2, column = row + g + i / 2 * 8;
            if (r >= p.end || column >= n) {
                continue;
            }
            const i64 at = i64(r) * n + column;
            if constexpr (kExact) {
                if (partial != nullptr) {
                    atomicAdd(partial + at, u64(sums[tile][i]));
                    continue;
                }
            }
            float value = __fmul_rn(rounded(sums[tile][i]), factor);
            if (row_scale != nullptr && !none) {
                value = __fmul_rn(value, row_scale[rows != nullptr ? rows[r] : r]);
            }
            store_rounded(y, at, none ? 0.0f : value, out_dtype);
        }
    }
}
