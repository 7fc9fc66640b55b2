// round(round(g / (1 + exp(-g))) * u), the product of a layer's gates and ups; with Config::quantize as
// NVFP4.
//
//   gate_up  Config::dtype [rows, 2 * columns]; with `wide` 16-byte aligned, columns a multiple of 16
//   out      Config::dtype [rows, columns], 16-byte aligned; without Config::quantize
//   codes    uint8 [rows, 8 * groups], 8-byte aligned, and scales uint8 [rows, groups]; with it
//   groups   ceil(columns / 16); rows * groups < 2^31
//
// exp is the polynomial of kbit/nvfp4/exact.py. The fold saves writing and reading the product, 4 bytes an
// element of 16 bits; the arithmetic is the same.
#include "config.h"
#include "nvfp4.cuh"

using D = Dense<Config::dtype>;

DEVICE float exp_defined(float x) {
    if (!(x == x)) {
        return x;
    }
    x = fminf(fmaxf(x, -104.0f), 104.0f);
    const float n = rintf(__fmul_rn(x, 0x1.715476p+0f));
    const float r = __fmaf_rn(n, 0x1.bd0106p-13f, __fmaf_rn(n, -0x1.63p-1f, x));
    float p = 0x1.a0d2cep-13f;
    p = __fmaf_rn(p, r, 0x1.6e879cp-10f);
    p = __fmaf_rn(p, r, 0x1.111210p-7f);
    p = __fmaf_rn(p, r, 0x1.555382p-5f);
    p = __fmaf_rn(p, r, 0x1.555554p-3f);
    p = __fmaf_rn(p, r, 0x1.000000p-1f);
    p = __fadd_rn(__fmaf_rn(p, __fmul_rn(r, r), r), 1.0f);
    const int power = int(n), half = power >> 1;
    const float first = __uint_as_float(u32(half + 127) << 23);
    return __fmul_rn(__fmul_rn(p, first), __uint_as_float(u32(power - half + 127) << 23));
}

DEVICE float silu_mul_defined(float gate, float up) {
    const float silu = __fdiv_rn(gate, __fadd_rn(exp_defined(-gate), 1.0f));
    return D::round(__fmul_rn(D::round(silu), up));
}

extern "C" __global__ void __launch_bounds__(256, 2)
    nvfp4_silu_mul(const u8* gate_up, u8* out, u8* codes, u8* scales, int rows, int columns, int groups,
                   float global_scale, int scaled, int search, int wide) {
    follow_previous(gate_up);
    const u32 total = u32(rows) * u32(groups);
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += gridDim.x * blockDim.x) {
        const u32 row = i / u32(groups);
        const int first = int(i - row * u32(groups)) * kSub;
        const u8* const gates = gate_up + i64(row) * 2 * columns * D::kBytes;
        float v[kSub], up[kSub];
        load_sub_block<D>(v, gates, first, columns, wide != 0);
        load_sub_block<D>(up, gates + i64(columns) * D::kBytes, first, columns, wide != 0);
#pragma unroll
        for (int j = 0; j < kSub; ++j) {
            v[j] = silu_mul_defined(v[j], up[j]);
        }
        if constexpr (Config::quantize) {
            if (scaled) {
#pragma unroll
                for (int j = 0; j < kSub; ++j) {
                    v[j] = __fdiv_rn(v[j], global_scale);
                }
            }
            store_coded(codes, scales, i, quantize_sub_block<Config::ties_even>(v, search != 0));
        } else {
            u8* const to = out + i64(row) * columns * D::kBytes;
#pragma unroll
            for (int piece = 0; piece < kSub / D::kPerPiece; ++piece) {
                float part[D::kPerPiece];
#pragma unroll
                for (int j = 0; j < D::kPerPiece; ++j) {
                    part[j] = v[piece * D::kPerPiece + j];
                    if (!wide && first + piece * D::kPerPiece + j < columns) {
                        store_rounded(to, first + piece * D::kPerPiece + j, part[j], Config::dtype);
                    }
                }
                if (wide) {
                    store16(to + i64(first) * D::kBytes + piece * 16, D::piece(part));
                }
            }
        }
    }
}
