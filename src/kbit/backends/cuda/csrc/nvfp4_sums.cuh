// Sums of float32 without rounding, for nvfp4_exact_wgmma.cu.
#pragma once

#include "decode.cuh"
#include "nvfp4_decode.cuh"

// Adders that turn a float32 into an integer, by the largest exponent field of scales among 64 rows of W.
//
// A scale of field e is below 2^(e - 6), its last bit 2^(max(e, 1) - 10). So 256 products are below
// 256 * (6 * 2^(e - 6) * 15 / 16) * 2688 < 2^(e + 15.9), half a range of 2^23 in units of `large`, 2^(e - 6);
// what rounding to these leaves, at most 2^(e - 7), is half a range in units of `small`, 2^(e - 29). A
// product with a scale of field f is a multiple of 2^(max(f, 1) - 21): nothing is left where f >= e - 8.
//
// Integers are 32 bits wide, and 511 tiles of K stay within: large ones since all of them together are below
// 2^(e + 24.9), small ones since each sum adds at most 2^22. A tile that is added in four parts is between
// two carries, which leave less than 2^23.
struct Units {
    int top;
    float large, small;

    DEVICE Units(u32 top_) : top(int(top_)), large(adder(top - 6)), small(adder(top - 29)) {}
    // 1.5 * 2^(23 + unit)
    static DEVICE float adder(int unit) { return __uint_as_float(u32(127 + 23 + unit) << 23 | 0x400000u); }
    static DEVICE int integer(float sum, float adder) {
        return int(__float_as_uint(sum) - __float_as_uint(adder));
    }
};

// What is left of a thread's sums, in units of 2^-20. A product leaves at most 2^(e - 30) <= 2^-15. They lie
// in the holes of the look-up table at `memory`, or, if not HOLES, there.
template <int N, int THREADS, bool HOLES>
struct Rests {
    u8* memory;
    int thread;

    DEVICE int& at(int i) const {
        using D = Decoder<Config::bits, Config::bf16>;
        const u32 place = u32(i * THREADS + thread) * 4;
        return *reinterpret_cast<int*>(memory + (HOLES ? D::hole(place) : place));
    }
    DEVICE void clear() const {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            at(i) = 0;
        }
    }
};

template <int N>
struct Sums {
    int large[N], small[N];

    // sums += v, of which Units::small leaves nothing.
    DEVICE void add(const float (&v)[N], const Units& units) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            add_one(i, v[i], units);
        }
    }
    template <class RESTS>
    DEVICE void add_apart(const float (&v)[N], const Units& units, const RESTS& rests) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float left = add_one(i, v[i], units);
            if (left != 0.0f) {
                rests.at(i) += int(__fmul_rn(left, 1 / kExactUnit));
            }
        }
    }
    // Returns what is left.
    DEVICE float add_one(int i, float v, const Units& units) {
        const float first = __fadd_rn(v, units.large);
        large[i] += Units::integer(first, units.large);
        const float rest = __fsub_rn(v, __fsub_rn(first, units.large));
        const float second = __fadd_rn(rest, units.small);
        small[i] += Units::integer(second, units.small);
        return __fsub_rn(rest, __fsub_rn(second, units.small));
    }
    // From small to large units, which are 2^23 times as large.
    DEVICE void carry() {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int whole = small[i] >> 23;
            large[i] += whole;
            small[i] -= whole * (1 << 23);
        }
    }
    // In units of 2^-20. Where small ones are smaller, their multiples are multiples of that.
    DEVICE i64 total(int i, const Units& units, int rest) const {
        const i64 sum = i64(large[i]) * (1 << 23) + small[i];
        const int shift = units.top - 9;
        return (shift >= 0 ? i64(u64(sum) << shift) : sum >> -shift) + rest;
    }
};
