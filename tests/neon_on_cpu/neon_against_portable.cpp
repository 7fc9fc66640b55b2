// Runs the NEON kernels beside the portable ones, which other tests know, on random problems of every width,
// dtype and edge: quantized and dequantized bits are equal, products are within a bound of those in double.
// Compiled with arm_neon.h of this folder, or by a compiler for ARM with its own.
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "convert.h"
#include "driver.h"
#include "isa.h"

using namespace kbit;

namespace {

std::mt19937 random_bits(1);
int failures = 0;

float normal() {
    return std::normal_distribution<float>()(random_bits);
}

int64_t size_of(DType dtype) {
    return dtype == DType::kFloat32 ? 4 : 2;
}

void put(std::vector<uint8_t>& to, int64_t i, DType dtype, float v) {
    with_dtype(dtype, [&](auto sample) {
        narrow(v, sample);
        memcpy(to.data() + i * int64_t(sizeof sample), &sample, sizeof sample);
    });
}

double get(const std::vector<uint8_t>& from, int64_t i, DType dtype) {
    double v = 0;
    with_dtype(dtype, [&](auto sample) {
        memcpy(&sample, from.data() + i * int64_t(sizeof sample), sizeof sample);
        v = widen(sample);
    });
    return v;
}

std::vector<uint8_t> values(int64_t count, DType dtype, float factor) {
    std::vector<uint8_t> made(size_t(count * size_of(dtype)));
    for (int64_t i = 0; i < count; ++i) {
        put(made, i, dtype, normal() * factor);
    }
    return made;
}

void require(bool holds, const char* what, int bits, DType dtype, int64_t n, int64_t k, int64_t m) {
    if (!holds) {
        std::printf("%s: %d bits, dtype %d, n %" PRId64 ", k %" PRId64 ", m %" PRId64 "\n", what, bits,
                    int(dtype), n, k, m);
        ++failures;
    }
}

struct Quantized {
    std::vector<uint32_t> packed;
    std::vector<uint8_t> absmax;
    float scale[2];

    bool operator==(const Quantized& other) const {
        return packed == other.packed && absmax == other.absmax && !memcmp(scale, other.scale, sizeof scale);
    }
};

struct Problem {
    int bits;
    DType dtype;
    int64_t experts, n, k;
    float codebook[kMaxLevels], midpoints[kMaxLevels];

    int64_t blocks() const { return (k + kBlock - 1) / kBlock; }

    Problem(int bits_, DType dtype_, int64_t experts_, int64_t n_, int64_t k_)
        : bits(bits_), dtype(dtype_), experts(experts_), n(n_), k(k_) {
        const int levels = 1 << bits;
        for (int i = 0; i < levels; ++i) {  // of no symmetry
            codebook[i] = -1.0f + (2.0f * float(i) + 0.3f * float(i % 3)) / float(levels);
        }
        for (int i = 0; i + 1 < levels; ++i) {
            midpoints[i] = (codebook[i] + codebook[i + 1]) / 2;
        }
    }

    Quantized quantize(const Kernels& isa, const std::vector<uint8_t>& w, bool search) const {
        Quantized q{std::vector<uint32_t>(size_t(experts * n * blocks() * bits)),
                    std::vector<uint8_t>(size_t(experts * n * blocks())),
                    {}};
        const QuantizeArgs args = {w.data(), dtype,           experts,         n,      k,
                                   bits,     codebook,        midpoints,       search, -4,
                                   4,        q.packed.data(), q.absmax.data(), q.scale};
        require(kbit::quantize(isa, args, 1) == 0, "not finite", bits, dtype, n, k, 0);
        return q;
    }

    WeightArgs weight(const Quantized& q) const {
        return {q.packed.data(), q.absmax.data(), codebook, q.scale, ScaleFormat::kE4M4, bits, experts, n, k};
    }

    std::vector<uint8_t> dequantize(const Kernels& isa, const Quantized& q, DType value, DType store) const {
        std::vector<uint8_t> w(size_t(experts * n * k * size_of(store)));
        kbit::dequantize(isa, weight(q), 0, experts * n, value, store, w.data(), 2);
        return w;
    }

    // In double, of the levels as they are multiplied: rounded to the dtype, not their products with scales.
    void check_product(const Kernels& isa, const Quantized& q, int64_t m) const {
        const std::vector<uint8_t> x = values(m * k, dtype, 1.0f), bias = values(n, dtype, 1.0f);
        std::vector<uint8_t> y(size_t((m * n + 2) * size_of(dtype)), 0x5a);
        linear(isa, weight(q), {x.data(), m, dtype, bias.data(), y.data() + size_of(dtype)}, 3);
        const bool within =
            !memcmp(y.data(), "\x5a\x5a\x5a\x5a", size_t(size_of(dtype))) &&
            !memcmp(y.data() + (m * n + 1) * size_of(dtype), "\x5a\x5a\x5a\x5a", size_t(size_of(dtype)));
        require(within, "written beyond y", bits, dtype, n, k, m);
        Problem rounded = *this;
        for (float& level : rounded.codebook) {
            std::vector<uint8_t> one(4);
            put(one, 0, dtype, level);
            level = float(get(one, 0, dtype));
        }
        const std::vector<uint8_t> w =
            rounded.dequantize(*supported_kernels().back(), q, DType::kFloat32, DType::kFloat32);
        const double unit = dtype == DType::kFloat32 ? 6e-8 : dtype == DType::kFloat16 ? 4.9e-4 : 3.91e-3;
        bool near = true;
        for (int64_t t = 0; t < m; ++t) {
            for (int64_t row = 0; row < n; ++row) {
                double sum = get(bias, row, dtype), terms = std::fabs(sum);
                for (int64_t i = 0; i < k; ++i) {
                    const double term = get(x, t * k + i, dtype) * get(w, row * k + i, DType::kFloat32);
                    sum += term;
                    terms += std::fabs(term);
                }
                const double got = get(y, 1 + t * n + row, dtype);
                near = near && std::fabs(got - sum) <= unit * std::fabs(sum) + 6e-8 * double(k + 4) * terms;
            }
        }
        require(near, "product", bits, dtype, n, k, m);
    }

    void check() const {
        const Kernels &neon = *neon_kernels(), &portable = *supported_kernels().back();
        const std::vector<uint8_t> w = values(experts * n * k, dtype, 0.02f);
        const Quantized q = quantize(portable, w, true);
        require(quantize(neon, w, true) == q, "search", bits, dtype, n, k, 0);
        require(quantize(neon, w, false) == quantize(portable, w, false), "quantize", bits, dtype, n, k, 0);
        for (DType store : {dtype, DType::kFloat32}) {
            require(dequantize(neon, q, dtype, store) == dequantize(portable, q, dtype, store), "dequantize",
                    bits, dtype, n, k, 0);
        }
        for (int64_t m : {1, 2, 3, 4, 5, 6, 7, 17}) {
            check_product(neon, q, experts == 1 ? m : 1);
        }
    }
};

}  // namespace

int main() {
    for (int bits = 2; bits <= 5; ++bits) {
        for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
            for (int64_t n : {1, 5, 70}) {
                for (int64_t k : {1, 31, 33, 64, 96, 160, 1100}) {
                    Problem(bits, dtype, 1, n, k).check();
                }
            }
            Problem(bits, dtype, 2, 3, 77).check();
        }
    }
    std::printf("%d failures\n", failures);
    return failures != 0;
}
