// Row-wise operations: dequantize, embedding, quantize.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "convert.h"
#include "driver.h"
#include "parallel.h"

namespace kbit {
namespace {

int64_t element_bytes(DType dtype) {
    return dtype == DType::kFloat32 ? 4 : 2;
}

constexpr int64_t kElementsPerItem = 65536;  // 10 to 100 us of work

int64_t rows_per_item(int64_t k) {
    return std::max<int64_t>(1, kElementsPerItem / k);
}

float round_to(float value, DType dtype) {
    with_dtype(dtype, [&](auto sample) {
        narrow(value, sample);
        value = widen(sample);
    });
    return value;
}

template <class F>
void for_each_row(int64_t rows, int64_t k, int threads, F f) {
    const int64_t step = rows_per_item(k);
    parallel_for((rows + step - 1) / step, threads, [&](int64_t item, int slot) {
        for (int64_t row = item * step; row < std::min(rows, (item + 1) * step); ++row) {
            f(row, slot);
        }
    });
}

// The smallest e with largest / 2^e <= 31, unless every block maximum is an ordinary E4M4 value already.
float tensor_factor(const Measurement& m) {
    if (m.largest == 0.0f || (m.smallest >= 0.0009765625f && m.largest <= 31.0f)) {
        return 1.0f;
    }
    int exponent;
    const double mantissa = std::frexp(double(m.largest) / 31.0, &exponent);  // in [0.5, 1)
    if (mantissa == 0.5) {
        --exponent;
    }
    return std::ldexp(1.0f, std::clamp(exponent, -126, 127));
}

QuantizeJob make_job(const QuantizeArgs& args, int64_t expert) {
    QuantizeJob job = {};
    job.k = args.k;
    job.n = args.n;
    job.blocks = (args.k + kBlock - 1) / kBlock;
    job.bits = args.bits;
    job.dtype = args.dtype;
    job.w = static_cast<const char*>(args.w) + expert * args.n * args.k * element_bytes(args.dtype);
    std::copy_n(args.codebook, 1 << args.bits, job.codebook);
    std::copy_n(args.midpoints, (1 << args.bits) - 1, job.midpoints);
    job.search = args.search;
    job.window_low = args.window_low;
    job.window_high = args.window_high;
    job.packed = args.packed + expert * args.n * job.blocks * args.bits;
    job.absmax = args.absmax + expert * args.n * job.blocks;
    return job;
}

Measurement measure(const Kernels& isa, const QuantizeJob& job, int threads) {
    const Measurement none = {std::numeric_limits<float>::infinity(), 0.0f, 0};
    std::vector<Measurement> found(size_t(threads), none);
    for_each_row(job.n, job.k, threads, [&](int64_t row, int slot) {
        const Measurement m = isa.measure_row(job, row);
        Measurement& total = found[size_t(slot)];
        total.smallest = std::min(total.smallest, m.smallest);
        total.largest = std::max(total.largest, m.largest);
        total.nonfinite += m.nonfinite;
    });
    Measurement total = none;
    for (const Measurement& m : found) {
        total.smallest = std::min(total.smallest, m.smallest);
        total.largest = std::max(total.largest, m.largest);
        total.nonfinite += m.nonfinite;
    }
    return total;
}

}  // namespace

Weight make_weight(const WeightArgs& args, int64_t expert, DType arithmetic) {
    Weight w;
    w.blocks = (args.k + kBlock - 1) / kBlock;
    const int64_t rows = expert * args.n * w.blocks;
    const int64_t scale_bytes = args.format == ScaleFormat::kE4M4      ? 1
                                : args.format == ScaleFormat::kFloat16 ? 2
                                                                       : 4;
    w.packed = static_cast<const uint8_t*>(args.packed) + rows * args.bits * 4;
    w.absmax = static_cast<const uint8_t*>(args.absmax) + rows * scale_bytes;
    w.format = args.format;
    w.tensor_scale = args.scale[expert];
    w.bits = args.bits;
    w.arithmetic = arithmetic;
    w.n = args.n;
    w.k = args.k;
    for (int i = 0; i < kMaxLevels; ++i) {
        w.table[i] = round_to(args.codebook[i % (1 << args.bits)], arithmetic);
    }
    return w;
}

void dequantize(const Kernels& isa, const WeightArgs& args, int64_t row_begin, int64_t row_end, DType value,
                DType store, void* out, int threads) {
    std::vector<DecodeJob> jobs;
    const int64_t first = row_begin / args.n;
    for (int64_t e = first; e * args.n < row_end; ++e) {
        jobs.push_back({make_weight(args, e, value), store});
    }
    const int64_t row_bytes = args.k * element_bytes(store);
    for_each_row(row_end - row_begin, args.k, threads, [&](int64_t i, int) {
        const int64_t row = row_begin + i;
        isa.decode_row(jobs[size_t(row / args.n - first)], row % args.n,
                       static_cast<char*>(out) + i * row_bytes);
    });
}

void embedding(const Kernels& isa, const WeightArgs& args, const int64_t* ids, int64_t count, DType dtype,
               void* out, int threads) {
    const DecodeJob job = {make_weight(args, 0, dtype), dtype};
    const int64_t row_bytes = args.k * element_bytes(dtype);
    for_each_row(count, args.k, threads, [&](int64_t i, int) {
        isa.decode_row(job, ids[i], static_cast<char*>(out) + i * row_bytes);
    });
}

int64_t quantize(const Kernels& isa, const QuantizeArgs& args, int threads) {
    std::vector<QuantizeJob> jobs;
    int64_t nonfinite = 0;
    for (int64_t e = 0; e < args.experts; ++e) {
        jobs.push_back(make_job(args, e));
        const Measurement m = measure(isa, jobs.back(), threads);
        jobs.back().tensor_scale = tensor_factor(m);
        nonfinite += m.nonfinite;
    }
    if (nonfinite != 0) {
        return nonfinite;
    }
    for (int64_t e = 0; e < args.experts; ++e) {
        args.scale[e] = jobs[size_t(e)].tensor_scale;
    }
    for_each_row(args.experts * args.n, args.k, threads,
                 [&](int64_t row, int) { isa.quantize_row(jobs[size_t(row / args.n)], row % args.n); });
    return 0;
}

}  // namespace kbit
