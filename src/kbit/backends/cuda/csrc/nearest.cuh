// The nearest level of w / s, and the scale with the least error, for quantize.cu. Without the scale search,
// 16-bit weights go by thresholds.cuh, if their codebook allows it.
//
// A division by IEEE rules and 15 comparisons a weight would take 9 + 30 instructions; 80% of an H200's
// bandwidth leaves 19 (bfloat16, 4 bits). So:
//   * w / s is fma(w, high, w * low), high + low = 1 / s. s has 5 significant bits, so a quotient is never
//     within 1/62 ulp of a rounding boundary, and this is the correctly rounded one: tried for all 2^23
//     fractions of w and all 16 of s. `high` is below 1 / s, so that a quotient of 2^-150 becomes 0 as well.
//   * u = saturate(v / 2 + 1/2) picks one of kBuckets; its entry holds the one midpoint in the bucket and the
//     number of those below. Every step is monotone, so this is exact. A table copy per bank: no conflicts.
// Codebooks with two midpoints in a bucket or one below 2^-40, factors outside 2^-30..2^10, and the scale
// search of rows that end with padding take float64 quotients (no float32 one is a double rounding away, for
// the same reason) and binary search instead.
#pragma once

#include "config.h"
#include "rows.cuh"

using D = Dense<Config::dtype>;
using F = Fields<Config::bits>;

constexpr int kBits = Config::bits;
constexpr int kLevels = 1 << kBits;
constexpr int kWords = kBlock * D::kBytes / 4;
constexpr bool kByThresholds = !Config::search && Config::dtype != 0;
// nf's closest midpoints are 0.036 apart at 5 bits, 0.077 at 4. Fitted codebooks may have closer ones; with
// float32 weights 128 buckets would pass 48 KB of shared memory. Those of thresholds.cuh cover -1.5 to 1.5.
constexpr int kBuckets = kByThresholds ? kBits == 5 ? 192 : 128 : kBits == 5 && Config::dtype != 0 ? 128 : 64;
constexpr u32 kMagic = 0x4b400000u;  // 1.5 * 2^23: adding it rounds to an integer in the low bits

struct Tables {
    alignas(128) u8 buckets[kBuckets * 128];
    float levels[kLevels];
    float midpoints[kLevels];
    int simple;
};

DEVICE u32 bucket_of(float v) {
    float u;
    asm("fma.rn.sat.f32 %0, %1, %2, %2;" : "=f"(u) : "f"(v), "f"(0.5f));
    return __float_as_uint(__fmaf_rn(u, float(kBuckets - 1), __uint_as_float(kMagic)));
}

// All threads of the block.
DEVICE void load_levels(Tables& t, const float* codebook, const float* midpoints) {
    if (threadIdx.x == 0) {
        t.simple = 1;
    }
    for (int i = threadIdx.x; i < kLevels; i += blockDim.x) {
        t.levels[i] = codebook[i];
        t.midpoints[i] = i + 1 < kLevels ? midpoints[i] : __uint_as_float(0x7f800000u);
    }
    __syncthreads();
}

// All threads of the block; levels and midpoints are there.
DEVICE void build_buckets(Tables& t) {
    for (int b = threadIdx.x; b < kBuckets; b += blockDim.x) {
        u32 below = 0, inside = 0;
        bool tiny = false;
        for (int i = 0; i + 1 < kLevels; ++i) {
            const float m = t.midpoints[i];
            const u32 bucket = bucket_of(m) - kMagic;
            below += bucket < u32(b);
            inside += bucket == u32(b);
            tiny |= m != 0.0f && fabsf(m) < 9.094947e-13f;  // 2^-40
        }
        if (inside > 1 || tiny) {
            t.simple = 0;
        }
        uint4 v;
        v.x = inside != 0 ? __float_as_uint(t.midpoints[below]) : 0x7f800000u;
        v.y = below;
        v.z = v.x;
        v.w = v.y;
        if constexpr (Config::search) {
            v.y = __float_as_uint(t.levels[below]);
            v.z = __float_as_uint(t.levels[below + (inside != 0)]);
            v.w = below;
        }
        for (int i = 0; i < 8; ++i) {  // rotated: threads of a warp write to different banks
            store_shared4(shared_address(t.buckets) + b * 128 + (i + b) % 8 * 16, v);
        }
    }
    __syncthreads();
}

// 1 / s for any float32 s > 0, to 2^-52: Newton's steps on the fraction, no branch, no call.
DEVICE double reciprocal(float s) {
    const u64 bits = u64(__double_as_longlong(double(s)));
    const double fraction = __longlong_as_double(i64((bits & 0xfffffffffffffull) | 0x3ff0000000000000ull));
    float start;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(start) : "f"(float(fraction)));
    double r = start;
    r = fma(fma(-fraction, r, 1.0), r, r);
    r = fma(fma(-fraction, r, 1.0), r, r);
    return r * __longlong_as_double(i64(2046 - (bits >> 52)) << 52);
}

// Division by a scale, and the nearest level of the quotient.
template <bool FAST>
struct Nearest {
    const Tables& tables;
    int lane;
    u32 base;              // of this lane's copy, less the magic number's share
    int columns = kBlock;  // that the block has; behind them padding counts no error. Only the slow way asks
    float s = 0.0f, high = 0.0f, low = 0.0f;
    double inverse = 0.0;

    DEVICE Nearest(const Tables& t, int lane_) : tables(t), lane(lane_) {
        base = shared_address(t.buckets) + (Config::search ? lane % 8 * 16 : lane % 16 * 8) - kMagic * 128u;
    }
    DEVICE void divide_by(float scale) {
        s = scale;
        if constexpr (FAST) {
            float r;  // within one ulp of 1 / s
            asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(s));
            high = s > 0.0f ? __uint_as_float(__float_as_uint(r) - 2) : 0.0f;
            low = __fmul_rn(__fmaf_rn(-s, high, 1.0f), high);
        } else {
            inverse = s > 0.0f ? reciprocal(s) : 0.0;
        }
    }
    // The slow way reads weights again where they are staged: unrolled, it took registers from the fast one.
    DEVICE float staged_element(u32 staged, int i) const {
        const u32 word[1] = {load_shared_element<D::kBytes>(staged + D::at_element(lane, i))};
        return D::get(word, 0);
    }
    DEVICE float quotient(float w) const {
        if constexpr (FAST) {
            return __fmaf_rn(w, high, __fmul_rn(w, low));
        } else {
            const double first = double(w) * inverse;
            return __double2float_rn(fma(fma(-first, double(s), double(w)), inverse, first));
        }
    }
    DEVICE u32 slow_code(float v) const {
        u32 code = 0;
#pragma unroll
        for (int step = kLevels / 2; step > 0; step /= 2) {
            code += v > tables.midpoints[code + step - 1] ? step : 0;
        }
        return code;
    }
    // fields += code of w << SHIFT
    template <int SHIFT>
    DEVICE void add_code(u32& fields, float w) const {
        const float v = quotient(w);
        const u32 entry = bucket_of(v) * 128u + base;
        uint2 e;  // midpoint, codes below
        if constexpr (Config::search) {
            const uint4 all = load_shared4(entry);
            e = make_uint2(all.x, all.w);
        } else {
            e = load_shared2(entry);
        }
        fields += e.y << SHIFT;
        // As C++ it costs a copy of `fields` more, 1 of 15 instructions.
        asm("{ .reg .pred above; setp.gt.f32 above, %1, %2; @above add.u32 %0, %0, %3; }"
            : "+r"(fields)
            : "f"(v), "f"(__uint_as_float(e.x)), "n"(1u << SHIFT));
    }
    DEVICE float level(float w) const {
        const float v = quotient(w);
        if constexpr (FAST) {
            const uint4 e = load_shared4(bucket_of(v) * 128u + base);
            return __uint_as_float(v > __uint_as_float(e.x) ? e.z : e.y);
        } else {
            return tables.levels[slow_code(v)];
        }
    }

    DEVICE float squared_error(float w) const {
        const float d = __fsub_rn(w, __fmul_rn(level(w), s));
        return __fmul_rn(d, d);
    }
    // Squared errors of elements I, I + STRIDE, ... of a block, in the defined order.
    template <int STRIDE, int I>
    DEVICE float sum(const u32 (&raw)[kWords]) const {
        if constexpr (STRIDE == kBlock) {
            return squared_error(D::get(raw, I));
        } else {
            const float first = sum<2 * STRIDE, I>(raw);
            return __fadd_rn(first, sum<2 * STRIDE, I + STRIDE>(raw));
        }
    }
    // The same of element i, i + 4, ... of the staged block.
    DEVICE float sum_quarter(u32 staged, int i) const {
        float t[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            t[j] = i + 4 * j < columns ? squared_error(staged_element(staged, i + 4 * j)) : 0.0f;
        }
#pragma unroll
        for (int half = 4; half > 0; half /= 2) {
#pragma unroll
            for (int j = 0; j < half; ++j) {
                t[j] = __fadd_rn(t[j], t[j + half]);
            }
        }
        return t[0];
    }
    DEVICE float error(const u32 (&raw)[kWords], u32 staged) const {
        if constexpr (FAST) {
            return sum<1, 0>(raw);
        } else {
            float even = 0.0f, odd = 0.0f;
#pragma unroll 1
            for (int i = 0; i < 2; ++i) {
                even = __fadd_rn(even, sum_quarter(staged, 2 * i));
                odd = __fadd_rn(odd, sum_quarter(staged, 2 * i + 1));
            }
            return __fadd_rn(even, odd);
        }
    }

    DEVICE u32 search(const u32 (&raw)[kWords], u32 staged, u32 plain, float factor) {
        divide_by(__fmul_rn(decode_e4m4(plain), factor));
        float least = error(raw, staged);
        u32 best = plain;
#pragma unroll 1
        for (int step = Config::low; step <= Config::high; ++step) {
            const int byte = int(plain) + step;
            const bool legal = step != 0 && plain != 0 && byte >= 1 && byte <= 255;
            divide_by(__fmul_rn(decode_e4m4(legal ? byte : plain), factor));
            const float e = error(raw, staged);
            if (legal && e < least) {
                least = e;
                best = byte;
            }
        }
        return best;
    }

    template <int I>
    DEVICE void add_codes(const u32 (&raw)[kWords], u32 (&w)[F::kField]) const {
        if constexpr (I < kBlock) {
            add_code<I / F::kField * F::kField>(w[I % F::kField], D::get(raw, I));
            add_codes<I + 1>(raw, w);
        }
    }
    DEVICE void planes(const u32 (&raw)[kWords], u32 staged, u32 (&w)[F::kField]) const {
#pragma unroll
        for (int i = 0; i < F::kField; ++i) {
            w[i] = 0;
        }
        if constexpr (FAST) {
            add_codes<0>(raw, w);
            F::transpose(w);
        } else {
#pragma unroll 1
            for (int i = 0; i < kBlock; ++i) {
                const u32 code = slow_code(quotient(staged_element(staged, i)));
#pragma unroll
                for (int plane = 0; plane < kBits; ++plane) {
                    w[plane] |= (code >> plane & 1u) << i;
                }
            }
        }
    }
};
