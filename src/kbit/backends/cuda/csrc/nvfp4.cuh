// What the NVFP4 kernels share: ue4m3, the quantizer of 16 elements, and their loads and stores.
//
// Bits are defined by kbit/nvfp4/kernels.py. All arithmetic goes through intrinsics that round to nearest, so
// that the compiler contracts nothing, and nothing flushes to zero.
//
// The quantizer is one thread's work: 16 elements in registers, up to 5 candidate scales. An element costs a
// candidate 7 instructions: scale, shift, round and limit, mask, magnitude, distance, error. With its scale
// and reciprocal a candidate takes 135 (sm_90a, disassembled, bfloat16, ties toward zero), so search about
// 830 for 16 elements, 156 of them for loading, the first scale, the codes and storing: 2 of these for an
// element to be scaled, 2 to be packed. At 4096 x 2048 search is 13.6 million warp instructions or 26
// thousand cycles of an H200's 528 schedulers, plain rounding 5 thousand, where moving 21.5 MB takes 8
// thousand: search is bound by arithmetic, plain rounding by memory.
#pragma once

#include "rows.cuh"

constexpr int kSub = 16;  // elements with a scale
constexpr u32 kLastScale = 0x7e;

// 0x7F is 0; bit 7 does not count. A byte shifted to a float32's exponent is the value times 2^-120.
DEVICE float decode_ue4m3(u32 byte) {
    byte &= 0x7fu;
    return byte == 0x7fu ? 0.0f : __fmul_rn(__uint_as_float(byte << 20), __uint_as_float(0x7b800000u));
}

// The same for bytes 0 .. kLastScale only.
DEVICE float decode_scale(u32 byte) {
    return __fmul_rn(__uint_as_float(byte << 20), 0x1p120f);
}

// Nearest even over bytes 0 .. kLastScale; t >= 0. The adder rounds at 2^20 times the binade, below 2^-6 as
// in it, to 3 bits of fraction.
DEVICE u32 encode_ue4m3(float t) {
    t = fminf(t, 448.0f);
    const float anchor = __uint_as_float((__float_as_uint(fmaxf(t, 0x1p-6f)) & 0x7f800000u) + (20u << 23));
    return __float_as_uint(__fmul_rn(__fsub_rn(__fadd_rn(t, anchor), anchor), 0x1p-120f)) >> 20;
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

// The value of the i-th of 16 codes.
DEVICE float code_value(uint2 codes, int i) {
    const u32 nibble = (i < 8 ? codes.x : codes.y) >> (4 * (i % 8));
    // Index bits at the top of a float32's fraction, and the sign.
    return magnitude_value((nibble & 7u) << 22 | (nibble & 8u) << 28);
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

// The scale byte of 16 elements, amax of which is the largest magnitude, without search.
//
// The quotient is correctly rounded by one step of Newton's for all 2^23 mantissas; where amax is so small
// that the remainder could be subnormal, the byte is 0 for any quotient near it.
DEVICE u32 plain_scale(float amax) {
    const float sixth = 0x1.555556p-3f, first = __fmul_rn(amax, sixth);
    return encode_ue4m3(__fmaf_rn(__fmaf_rn(-first, 6.0f, amax), sixth, first));
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
    float amax = fabsf(v[0]);
#pragma unroll
    for (int i = 1; i < N; ++i) {
        amax = larger(amax, fabsf(v[i]));
    }
    return amax;
}

struct Coded {
    u32 low, high;  // element i in nibble i
    u32 scale;
};

// The bits of `yes` where those of `mask` are 1, else of `no`. As C++ of a constant mask it was two
// instructions.
DEVICE u32 select_bits(u32 mask, u32 yes, u32 no) {
    u32 picked;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(picked) : "r"(mask), "r"(yes), "r"(no));
    return picked;
}

// 16 elements, amax of which is the largest magnitude, under a scale; ties toward zero.
//
// As in nearest_magnitude, t = v / scale becomes a subnormal number where it is below 1, but with its sign
// and a factor of 2^-126 (1 - 2^-24), rounded toward zero. A halfway value T, at most 1.75 of its binade,
// then lies below 2^-126 T, and the next float32, at least (1 + 2^-23 / 1.75) T, does not. So the upper 16
// bits tell on which side of T a number is, and rounding them, halves up, rounds t, halves down, two elements
// at a time. (t is halved first, as 2^-126 - 2^-150 is no float32.) The product's sign is that of v < 0, even
// where it underflows: adding +0 changes -0 only. Run for all float32 t below 7, and for all 16-bit v under
// all scales.
DEVICE Coded code_toward_zero(float (&v)[kSub], float amax, u32 scale) {
    const float doubled = __fmul_rn(__uint_as_float(scale << 20), 0x1p121f);
    // Under scale 0 magnitudes are at most 6 * 2^-10: any factor up to 1 gives index 0 and keeps signs.
    const float half_inverse = doubled > 0.0f ? inverse_of(doubled) : 1.0f;
    // t >= 7, as it may be under the last scale, a subnormal one or one that search found; or v is NaN or
    // infinite, and its block becomes zeros.
    if (!(__fmul_rn(amax, half_inverse) < 3.5f)) {
        const bool finite = amax < __uint_as_float(0x7f800000u);
        const float limit = finite ? __fmul_rn(doubled, 3.0f) : 0.0f;
        scale = finite ? scale : 0;
#pragma unroll
        for (int i = 0; i < kSub; ++i) {
            v[i] = fminf(fmaxf(v[i], -limit), limit);
        }
    }
    u32 words[2];
#pragma unroll
    for (int word = 0; word < 2; ++word) {
        // Elements i and i + 4 in the halves of pairs[i]: the sign is bit 15, the index bits 8 to 6.
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 bits[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float half = __fmaf_rn(v[8 * word + 4 * j + i], half_inverse, 0.0f);
                bits[j] = __float_as_uint(__fmul_rz(half, 0x1.fffffep-126f));
            }
            pairs[i] = permute(bits[0], bits[1], 0x7632);
        }
        // Elements 0 and 1, then 2 and 3: signs in bits 11 and 15, indices from bits 2 and 6 on, rounded.
        const u32 low = select_bits(0x081e081eu, pairs[0] >> 4, pairs[1]) + 0x00220022u;
        const u32 high = select_bits(0x081e081eu, pairs[2] >> 4, pairs[3]) + 0x00220022u;
        // Bytes 0 and 2 are the one's, 1 and 3 the other's.
        words[word] = permute(select_bits(0x00880088u, low >> 8, low >> 2),
                              select_bits(0x88008800u, high, high << 6), 0x7250);
    }
    return {words[0], words[1], scale};
}

template <bool TIES_EVEN>
DEVICE Coded quantize_sub_block(float (&v)[kSub], bool search) {
    const float amax = largest_of(v);
    const u32 plain = plain_scale(amax);
    u32 chosen = plain;
    if (search) {
        float least = 0.0f;
        // As a loop it took a sixth longer: its jumps wait for instructions.
#pragma unroll
        for (int i = 0; i < kCandidates; ++i) {
            const u32 candidate = candidate_scale(plain, i);
            const float scale = decode_scale(candidate), inverse = inverse_of(scale);
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
    if constexpr (!TIES_EVEN) {
        return code_toward_zero(v, amax, chosen);
    }
    if (!(amax < __uint_as_float(0x7f800000u))) {
        return {0, 0, 0};
    }
    const float inverse = inverse_of(decode_scale(chosen));
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
    const u8* from = row + i64(first) * D::kBytes;
    u32 raw[kWords];
    if (wide) {
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
            if (i < columns - first) {
                const u32 bits = load_global<D::kBytes>(from + i * D::kBytes);
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
