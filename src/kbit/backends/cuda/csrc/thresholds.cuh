// Codes of 16-bit weights by comparing them with thresholds, for quantize.cu without the scale search: half
// the instructions of nearest.cuh's quotients.
//
//   code = number of midpoints m with round(w / s) > m, which is: with q = w / s > t, for any t between the
//   largest q that rounds to m or less and the smallest that does not. And q > t is w > s * t: the sign of
//   fma(s, t, -w), which rounding does not change.
//
// w has P = 8 (bfloat16) or 11 significant bits and s has 5, so two different q are at least 2^-16 apart,
// relatively, and among the float32 between two of them there is one whose low `bits` bits are any we like.
// We like the code: an entry of the table is t, and its low bits are the number of midpoints below. Adding
// the sign to it makes it the code; a funnel shift takes the code off.
//
// Which midpoint to compare with: n = round(kScale * w / s) is a bucket, which has at most one. Its quotient
// needs no care, since a midpoint near a bucket's edge is in both buckets.
//
// Codebooks with two midpoints in a bucket or one below 2^-40, and factors outside 2^-30..1, take
// nearest.cuh's slow way. (Beyond 1 the threshold of midpoint 0, some 2^-145, could pass bfloat16's
// subnormals.)
#pragma once

#include "nearest.cuh"

template <bool BF16>
struct Thresholds {
    static constexpr int kDropped = 53 - (BF16 ? 8 : 11);  // bits of a double below those of a weight
    static constexpr u32 kStep = 1u << kBits;
    static constexpr u32 kNone = 0x7e000000u;  // 4e37: above s * any weight
    // Quotients are within 1.5: a scale of 2^-14, the smallest, stands for magnitudes up to 1.5 * 2^-14.
    static constexpr float kScale = (kBuckets / 2 - 1) / 1.5f;
    // 2^25, where neighbours are 4 apart: 4 n + this has n in its low bits, and shifted left by 7 no others.
    static constexpr u32 kCenter = 0x4c000000u + kBuckets / 2;

    // The largest weight not above x, as bits: of a negative one, whose magnitude is rounded up.
    static DEVICE i64 rounded_down(double x) {
        const i64 bits = __double_as_longlong(x);
        return (bits + (x < 0.0 ? (1ll << kDropped) - 1 : 0)) >> kDropped;
    }

    // Of midpoint `code`. All lanes of a warp.
    static DEVICE u32 entry(float midpoint, u32 code, int lane) {
        if (midpoint == 0.0f) {
            return code;  // below every weight / scale
        }
        const u32 bits = __float_as_uint(midpoint);
        const bool negative = bits >> 31 != 0;
        const double next = __uint_as_float(negative ? bits - 1 : bits + 1);
        const double boundary = 0.5 * (double(midpoint) + next);
        // Of the two candidates around the boundary, 16 lanes try one with a fraction of the scale each.
        const u32 nearby = (bits & ~(kStep - 1)) | code;
        const bool above = __uint_as_float(nearby) > boundary, want_above = lane >= 16;
        const u32 change = above == want_above ? 0 : want_above != negative ? kStep : ~kStep + 1;
        const u32 candidate = nearby + change;
        const double scale = 16 + lane % 16;
        const bool same = rounded_down(scale * __uint_as_float(candidate)) == rounded_down(scale * boundary);
        const u32 valid = __ballot_sync(kAll, same);
        const u32 lower = __shfl_sync(kAll, candidate, 0), upper = __shfl_sync(kAll, candidate, 16);
        return (valid & 0xffffu) == 0xffffu ? lower : upper;
    }

    // All threads of the block; t.midpoints are there.
    static DEVICE void build(Tables& t) {
        const int lane = threadIdx.x % 32;
        for (int i = threadIdx.x / 32; i + 1 < kLevels; i += blockDim.x / 32) {
            const u32 value = entry(t.midpoints[i], u32(i), lane);
            if (lane == 0) {
                t.levels[i] = __uint_as_float(value);
            }
        }
        __syncthreads();
        for (int b = threadIdx.x; b < kBuckets; b += blockDim.x) {
            // Rounding moves the edges by 2^-15 at most.
            const float first = float(b - kBuckets / 2) - 0.501f, last = first + 1.002f;
            u32 below = 0, inside = 0;
            bool tiny = false;
            for (int i = 0; i + 1 < kLevels; ++i) {
                const float m = t.midpoints[i], position = m * kScale;
                below += position < first;
                inside += position >= first && position <= last;
                tiny |= m != 0.0f && fabsf(m) < 9.094947e-13f;  // 2^-40
            }
            if (inside > 1 || tiny) {
                t.simple = 0;
            }
            const u32 value = inside != 0 ? __float_as_uint(t.levels[below]) : kNone | below;
            for (int i = 0; i < 8; ++i) {  // rotated: threads of a warp write to different banks
                store_shared4(shared_address(t.buckets) + b * 128 + (i + b) % 8 * 16,
                              make_uint4(value, value, value, value));
            }
        }
        __syncthreads();
    }

    u32 base;  // of this lane's copy
    float s = 1.0f, inverse = 1.0f;

    DEVICE Thresholds(const Tables& t, int lane) { base = opaque(shared_address(t.buckets) + lane * 4); }

    // Sets the scale, and weights to 0 where they count as such: s is 0, or they are not in the range that
    // the factor is made for, in which case the result is not kept.
    DEVICE void divide_by(float scale, float amax, float limit, u32 (&raw)[kWords]) {
        s = scale > 0.0f ? scale : 1.0f;
        float r;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(s));
        inverse = __fmul_rn(r, 4.0f * kScale);
        if (!(amax <= limit) || (scale == 0.0f && amax > 0.0f)) {
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                raw[i] = 0;
            }
        }
    }

    template <int I>
    DEVICE void add_codes(const u32 (&raw)[kWords], u32 (&w)[F::kField]) const {
        if constexpr (I < kBlock) {
            const float weight = D::get(raw, I);
            const u32 bucket = __float_as_uint(__fmaf_rn(weight, inverse, __uint_as_float(kCenter)));
            const u32 t = load_shared(bucket * 128u + base);
            const u32 sign = __float_as_uint(__fmaf_rn(s, __uint_as_float(t), -weight)) >> 31;
            u32& fields = w[I % F::kField];
            fields = __funnelshift_r(fields, t + sign, F::kField);
            add_codes<I + 1>(raw, w);
        }
    }
    DEVICE void planes(const u32 (&raw)[kWords], u32 (&w)[F::kField]) const {
#pragma unroll
        for (int i = 0; i < F::kField; ++i) {
            w[i] = 0;
        }
        add_codes<0>(raw, w);
        F::transpose(w);
    }
};
