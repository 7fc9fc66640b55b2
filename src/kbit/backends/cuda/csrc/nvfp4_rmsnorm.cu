// RMS norm of h = x, or round(x + residual); with Config::quantize the norm as NVFP4, too.
//
//   x, residual  Config::dtype [rows, columns]; residual may be null
//   weight       [columns] of dtype `weight_dtype` (0 float32, 1 float16, 2 bfloat16)
//   h            Config::dtype [rows, columns], written where there is a residual
//   norm         Config::dtype [rows, columns] or null
//   codes        uint8 [rows, 8 * groups], 8-byte aligned, and scales uint8 [rows, groups], with
//                Config::quantize
//   groups       ceil(columns / 16)
//   wide         columns are a multiple of 8 and all rows start at multiples of 16 bytes
//
// A block takes a row. The sum of squares has one order, with and without quantizing: thread t takes columns
// 8t .. 8t + 7, those + 2048 and so on; butterflies over 32 threads; then warps in turn. Only what happens to
// the norm afterwards is dealt out anew, 16 elements a thread.
//
// Shared memory: 16 * groups elements, h and then the norm.
#include "config.h"
#include "nvfp4.cuh"

using D = Dense<Config::dtype>;
constexpr int kThreads = 256, kVector = 8;
constexpr int kWords = kVector * D::kBytes / 4;

// Eight elements, those from `count` on 0.
DEVICE void load_vector(float (&v)[kVector], const u8* from, int count, bool wide) {
    u32 raw[kWords] = {};
    if (wide && count >= kVector) {
#pragma unroll
        for (int i = 0; i < kWords / 4; ++i) {
            const uint4 part = reinterpret_cast<const uint4*>(from)[i];
            raw[4 * i] = part.x;
            raw[4 * i + 1] = part.y;
            raw[4 * i + 2] = part.z;
            raw[4 * i + 3] = part.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            if (i < count) {
                raw[i / D::kPerWord] |= load_global<D::kBytes>(from + i * D::kBytes)
                                        << (i % D::kPerWord * 16);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        v[i] = D::get(raw, i);
    }
}

DEVICE void store_vector(u8* to, const float (&v)[kVector], int count, bool wide) {
    if (wide && count >= kVector) {
#pragma unroll
        for (int piece = 0; piece < kVector / D::kPerPiece; ++piece) {
            float part[D::kPerPiece];
#pragma unroll
            for (int i = 0; i < D::kPerPiece; ++i) {
                part[i] = v[piece * D::kPerPiece + i];
            }
            *reinterpret_cast<uint4*>(to + piece * 16) = D::piece(part);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            if (i < count) {
                store_rounded(to, i, v[i], Config::dtype);
            }
        }
    }
}

// The sum over the block of every thread's partial sum.
DEVICE float add_block(float partial) {
    __shared__ float warps[kThreads / 32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        partial = __fadd_rn(partial, __shfl_xor_sync(kAll, partial, step));
    }
    if (threadIdx.x % 32 == 0) {
        warps[threadIdx.x / 32] = partial;
    }
    __syncthreads();
    float sum = warps[0];
#pragma unroll
    for (int warp = 1; warp < kThreads / 32; ++warp) {
        sum = __fadd_rn(sum, warps[warp]);
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    nvfp4_rmsnorm(const u8* x, const u8* residual, const void* weight, u8* h, u8* norm, u8* codes, u8* scales,
                  int columns, int groups, int weight_dtype, float eps, float global_scale, int scaled,
                  int search, int wide) {
    extern __shared__ __align__(16) u8 memory[];
    follow_previous(x, residual, weight);
    const i64 row = blockIdx.x, at = row * columns * D::kBytes;
    const int width = groups * kSub, thread = int(threadIdx.x);
    float sum = 0.0f;
    for (int first = thread * kVector; first < width; first += kThreads * kVector) {
        float v[kVector];
        const i64 from = at + i64(first) * D::kBytes;
        load_vector(v, x + from, columns - first, wide != 0);
        if (residual != nullptr) {
            float other[kVector];
            load_vector(other, residual + from, columns - first, wide != 0);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                v[i] = D::round(__fadd_rn(v[i], other[i]));
            }
            store_vector(h + from, v, columns - first, wide != 0);
        }
        store_vector(memory + first * D::kBytes, v, kVector, true);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            sum = __fmaf_rn(v[i], v[i], sum);
        }
    }
    const float mean = __fadd_rn(__fdiv_rn(add_block(sum), float(columns)), eps);
    const float factor = __fdiv_rn(1.0f, __fsqrt_rn(mean));
    for (int first = thread * kVector; first < width; first += kThreads * kVector) {
        float v[kVector];
        load_vector(v, memory + first * D::kBytes, kVector, true);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            const float own = first + i < columns ? load_widened(weight, first + i, weight_dtype) : 0.0f;
            const float normed = D::round(__fmul_rn(D::round(__fmul_rn(v[i], factor)), own));
            v[i] = first + i < columns ? normed : 0.0f;
        }
        if (norm != nullptr) {
            store_vector(norm + at + i64(first) * D::kBytes, v, columns - first, wide != 0);
        }
        if constexpr (Config::quantize) {
            store_vector(memory + first * D::kBytes, v, kVector, true);
        }
    }
    if constexpr (Config::quantize) {
        __syncthreads();
        for (int group = thread; group < groups; group += kThreads) {
            float v[kSub];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float part[kVector];
                load_vector(part, memory + (group * kSub + half * kVector) * D::kBytes, kVector, true);
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    v[half * kVector + i] = scaled ? __fdiv_rn(part[i], global_scale) : part[i];
                }
            }
            store_coded(codes, scales, row * groups + group,
                        quantize_sub_block<Config::ties_even>(v, search != 0));
        }
    }
}
