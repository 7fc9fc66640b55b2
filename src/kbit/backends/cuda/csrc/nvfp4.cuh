// What the NVFP4 kernels share: ue4m3, the quantizer of 16 elements, and their loads and stores.
//
// Bits are defined by kbit/nvfp4/kernels.py. All arithmetic goes through intrinsics that round to nearest, so
// that the compiler contracts nothing, and nothing flushes to zero.
//
// The quantizer is one thread's work: 16 elements in registers, up to 5 candidate scales. An element costs a
// candidate 7 instructions: scale, shift, round, mask, magnitude, distance, error. With its scale and
// reciprocal a candidate takes 138 (sm_90a, disassembled), so search about 890 for 16 elements, 200 of them
// for loading, the first scale and the codes. At 4096 x 2048 that is 14.6 million warp instructions or 28
// thousand cycles of an H200's 528 schedulers, where moving 21.5 MB takes 8 thousand: search is bound by
// arithmetic, plain rounding by memory.
#pragma once

#include "rows.cuh"

constexpr int kSub = 16;  // elements with a scale
constexpr u32 kLastScale = 0x7e;

// 0x7F is 0; bit 7 does not count. A byte shifted to a float32's exponent is the value times 2^-120.
DEVICE float decode_ue4m3(u32 byte) {
    byte &= 0x7fu;
    return byte == 0x7fu ? 0.0f : __fmul_rn(__uint_as_float(byte << 20), __uint_as_float(0x7b800000u));
}

// Nearest even over bytes 0 .. 0x7E; t is no NaN.
DEVICE u32 encode_ue4m3(float t) {
    if (!(t > 0.0f)) {
        return 0;
    }
    if (t < 0.015625f) {  // 2^-6: multiples of 2^-9, rounded by the adder at 2^23; 8 carries into e = 1
        return __float_as_uint(__fadd_rn(__fmul_rn(t, 512.0f), 8388608.0f)) - 0x4b000000u;
    }
    const u32 u = __float_as_uint(t), byte = ((u + 0x7ffffu + (u >> 20 & 1u)) >> 20) - (120u << 3);
    return byte < kLastScale ? byte : kLastScale;
}

// The e2m1 magnitude nearest to t >= 0, as bits of a float32 of 2^-126 times its value; shifted right by 22
// they are its index.
//
// 2^-126 turns [0, 1) into subnormal numbers. There, as in e2m1, steps are of one size, so that rounding to
// one bit of fraction is the same integer operation for all magnitudes: halves go down by adding just less
// than one. The product is rounded up: halfway values are representable and stay, larger ones stay larger.
template <bool TIES_EVEN>
DEVICE u32 nearest_magnitude(float t) {
    const float unit = __uint_as_float(0x00800000u);  // 2^-126
    if constexpr (!TIES_EVEN) {
        const int rounded = int(__float_as_uint(__fmul_ru(t, unit)) + 0x1fffffu);
        return u32(min(rounded, 0x01ffffff)) & 0xffc00000u;
    } else {
        // The adder rounds at 2^22 times the binade: steps of half of it, 0.5 below 1. Even multiples are
        // even indices.
        t = fminf(t, 6.0f);
        const float anchor = __uint_as_float((__float_as_uint(fmaxf(t, 1.0f)) & 0x7f800000u) + (22u << 23));
        return __float_as_uint(__fmul_rn(__fsub_rn(__fadd_rn(t, anchor), anchor), unit));
    }
}
DEVICE float magnitude_value(u32 bits) {
    return __fmul_rn(__uint_as_float(bits), __uint_as_float(0x7e800000u));  // 2^126
}

// 1 / scale, correctly rounded, for scales of ue4m3. For each of their mantissas (1 .. 15) one step of
// Newton's by fma rounds correctly from any start within 4 units in the last place; rcp.approx is within 1.
DEVICE float inverse_of(float scale) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(scale));
    inverse = __fmaf_rn(inverse, __fmaf_rn(-scale, inverse, 1.0f), inverse);
    return scale > 0.0f ? inverse : 0.0f;
}

// v[i] /= by, correctly rounded, for v of at most 11 significant bits, as 16-bit values have: they share the
// reciprocal, and one step of Newton's by fma does the rest. For all 2^33 pairs of their mantissas and those
// of float32 it gave what division gives, in 3 instructions for 20. False, and v as it was, where exponents
// could matter.
template <int N>
DEVICE bool divide_short(float (&v)[N], float by) {
    const float inverse = __frcp_rn(by);
    float quotients[N];
    u32 least = ~0u;  // bits of the smallest magnitude but 0, less 1
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float first = __fmul_rn(v[i], inverse);
        quotients[i] = __fmaf_rn(__fmaf_rn(-first, by, v[i]), inverse, first);
        least = min(least, (__float_as_uint(quotients[i]) & 0x7fffffffu) - 1);
    }
    if (!(by >= 0x1p-60f) || least < __float_as_uint(0x1p-40f) - 1) {
        return false;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        v[i] = quotients[i];
    }
    return true;
}

// v[i] /= by, correctly rounded.
template <int N>
DEVICE void divide_all(float (&v)[N], float by) {
    if (by != 1.0f) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            v[i] = __fdiv_rn(v[i], by);
        }
    }
}

// error + the squared error of a magnitude under a scale; one step of their sum, in order.
template <bool TIES_EVEN>
DEVICE float add_error(float error, float magnitude, float scale, float inverse) {
    const float level = magnitude_value(nearest_magnitude<TIES_EVEN>(__fmul_rn(magnitude, inverse)));
    // level * scale is exact, so this is the rounded difference.
    const float distance = __fmaf_rn(-level, scale, magnitude);
    return __fmaf_rn(distance, distance, error);
}

// The larger, or NaN if either is.
DEVICE float larger(float a, float b) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
    return a;
}

// The I-th scale that search tries, of 5: plain + 0, -1, +1, -2, +2. Only those up to kLastScale exist.
constexpr int kCandidates = 5;
DEVICE u32 candidate_scale(u32 plain, int i) {
    return plain + u32(i & 1 ? -((i + 1) >> 1) : i >> 1);
}

// An element's code under the scale whose reciprocal is `inverse`.
template <bool TIES_EVEN>
DEVICE u32 code_of(float v, float inverse) {
    const u32 index = nearest_magnitude<TIES_EVEN>(__fmul_rn(fabsf(v), inverse)) >> 22;
    return v < 0.0f ? index | 8u : index;
}

template <int N>
DEVICE float largest_of(const float (&v)[N]) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        amax = larger(amax, fabsf(v[i]));
    }
    return amax;
}

struct Coded {
    u32 low, high;  // element i in nibble i
    u32 scale;
};

template <bool TIES_EVEN>
DEVICE Coded quantize_sub_block(const float (&v)[kSub], bool search) {
    const float amax = largest_of(v);
    if (!(amax < __uint_as_float(0x7f800000u))) {
        return {0, 0, 0};
    }
    const u32 plain = encode_ue4m3(__fdiv_rn(amax, 6.0f));
    u32 chosen = plain;
    if (search) {
        float least = 0.0f;
#pragma unroll 1
        for (int i = 0; i < kCandidates; ++i) {
            const u32 candidate = candidate_scale(plain, i);
            const float scale = decode_ue4m3(candidate), inverse = inverse_of(scale);
            float error = 0.0f;
#pragma unroll
            for (int j = 0; j < kSub; ++j) {
                error = add_error<TIES_EVEN>(error, fabsf(v[j]), scale, inverse);
            }
            if (i == 0 || (candidate <= kLastScale && error < least)) {
                least = error;
                chosen = candidate;
            }
        }
    }
    const float inverse = inverse_of(decode_ue4m3(chosen));
    u32 words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kSub; ++i) {
        words[i / 8] |= code_of<TIES_EVEN>(v[i], inverse) << (4 * (i % 8));
    }
    return {words[0], words[1], chosen};
}

// 16 elements of a row from column `first` on; zeros from `columns` on. `wide`: rows are whole sub-blocks and
// start at multiples of 16 bytes.
template <class D>
DEVICE void load_sub_block(float (&v)[kSub], const u8* row, int first, int columns, bool wide) {
    constexpr int kWords = kSub * D::kBytes / 4;
    u32 raw[kWords];
    if (wide) {
        const u32* from = reinterpret_cast<const u32*>(row + i64(first) * D::kBytes);
#pragma unroll
        for (int i = 0; i < kWords / 4; ++i) {
            const uint4 part = __ldg(reinterpret_cast<const uint4*>(from) + i);
            raw[4 * i] = part.x;
            raw[4 * i + 1] = part.y;
            raw[4 * i + 2] = part.z;
            raw[4 * i + 3] = part.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            raw[i] = 0;
        }
#pragma unroll
        for (int i = 0; i < kSub; ++i) {
            if (first + i < columns) {
                const u32 bits = load_global<D::kBytes>(row + i64(first + i) * D::kBytes);
                raw[i / D::kPerWord] |= bits << (i % D::kPerWord * 16);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kSub; ++i) {
        v[i] = D::get(raw, i);
    }
}

// The largest of a block's threads, in all of them, or NaN. `of_warp`: shared, for as many as there are
// warps; a barrier must come before it is written again.
DEVICE float largest_of_block(float amax, float* of_warp) {
    const auto of_lanes = [](float v) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            v = larger(v, __shfl_xor_sync(kAll, v, step));
        }
        return v;
    };
    const int lane = int(threadIdx.x) % 32;
    amax = of_lanes(amax);
    if (lane == 0) {
        of_warp[threadIdx.x / 32] = amax;
    }
    __syncthreads();
    return of_lanes(lane < int(blockDim.x) / 32 ? of_warp[lane] : 0.0f);
}

// A row's factor, from the largest magnitude in it.
DEVICE float row_scale_of(float amax, float global_scale) {
    const float scale = __fdiv_rn(__fdiv_rn(amax, global_scale), 2688.0f);
    const bool normal = scale >= __uint_as_float(0x00800000u) && scale < __uint_as_float(0x7f800000u);
    return normal ? scale : 1.0f;
}

DEVICE void store_coded(u8* codes, u8* scales, i64 at, const Coded& coded) {
    *reinterpret_cast<uint2*>(codes + at * 8) = make_uint2(coded.low, coded.high);
    scales[at] = u8(coded.scale);
}
