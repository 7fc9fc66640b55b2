// Activations as nvfp4_exact_wgmma.cu takes them: decoded to float16, with bounds of their norms.
//
//   codes   uint8 [a_rows, columns / 2], 8-byte aligned; columns % 64 == 0
//   scales  uint8 [a_rows, columns / 16]
//   rows    int32 [m], which of them x has, or null for all
//   x       float16 [m, columns], 16-byte aligned: code * scale, which is exact
//   bounds  uint32 [ceil(m / 32), columns / 64]: B of nvfp4_marks.py, the largest of 32 rows, in byte 0 of 64
//           columns, in byte 1 of the 256 around
//
// A block has 32 rows by 256 columns, a thread 16 of these.
#include "groups.cuh"
#include "nvfp4.cuh"

constexpr int kWarps = 16, kBlockTokens = 32, kBlockColumns = 256;

// A token's squared norm in some columns, and the exponent field of its unit's scale.
struct Norm {
    float square;
    int field;

    // That of twice as many columns; the others' are in another lane.
    DEVICE void join(int step) {
        square = __fadd_rn(square, __shfl_xor_sync(kAll, square, step));
        field = min(field, __shfl_xor_sync(kAll, field, step));
    }
    // The least B with square < 2^B units squared; the factor makes up for rounded sums.
    DEVICE int bound() const {
        const u32 exponent = __float_as_uint(__fmul_rn(square, 1.000244140625f)) >> 23;
        return square > 0.0f ? int(exponent) - 126 - 2 * (field - 11) : 0;
    }
};

// Of each byte the larger.
DEVICE u32 larger_bounds(u32 a, u32 b) {
    return max(a & 255u, b & 255u) | max(a >> 8, b >> 8) << 8;
}

extern "C" __global__ void __launch_bounds__(kWarps * 32)
    nvfp4_exact_x(const u8* codes, const u8* scales, const int* rows, uint4* x, u32* bounds, int m,
                  int a_rows, int columns) {
    __shared__ u32 of_warps[kWarps][4];
    follow_previous(codes, scales, rows);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int across = (columns + kBlockColumns - 1) / kBlockColumns;
    const int token_block = blockIdx.x / across, column_block = blockIdx.x - token_block * across;
    const int token = token_block * kBlockTokens + warp * 2 + lane / 16;
    const int column = column_block * kBlockColumns + lane % 16 * kSub;
    Norm norm{0.0f, 15};
    if (token < m && column < columns) {
        const i64 at = i64(row_of_x(rows, token, a_rows)) * columns + column;
        const uint2 code = *reinterpret_cast<const uint2*>(codes + at / 2);
        const u32 byte = scales[at / kSub];
        const float scale = decode_ue4m3(byte);
        float v[kSub];
#pragma unroll
        for (int i = 0; i < kSub; ++i) {
            v[i] = __fmul_rn(code_value(code, i), scale);
            norm.square = __fmaf_rn(v[i], v[i], norm.square);
        }
        using Wide = Dense<1>;
#pragma unroll
        for (int piece = 0; piece < 2; ++piece) {
            float part[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                part[i] = v[8 * piece + i];
            }
            x[(i64(token) * columns + column) / 8 + piece] = Wide::piece(part);
        }
        norm.field = norm.square > 0.0f ? max(1, int(byte >> 3 & 15u)) : 15;
    }
    norm.join(1);
    norm.join(2);
    int narrow = norm.bound();
    narrow = max(narrow, __shfl_xor_sync(kAll, narrow, 16));
    norm.join(4);
    norm.join(8);
    int wide = norm.bound();
    wide = max(wide, __shfl_xor_sync(kAll, wide, 16));
    if (lane % 4 == 0 && lane < 16) {
        of_warps[warp][lane / 4] = narrow | wide << 8;
    }
    __syncthreads();
    const int step = column_block * 4 + threadIdx.x;
    if (threadIdx.x < 4 && step < columns / 64) {
        u32 all = 0;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) {
            all = larger_bounds(all, of_warps[i][threadIdx.x]);
        }
        bounds[i64(token_block) * (columns / 64) + step] = all;
    }
}
