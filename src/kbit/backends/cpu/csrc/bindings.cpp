// The Python module kbit._cpu. Tensors arrive as addresses and sizes, checked by the Python wrapper and, as
// far as sizes tell, once more here: a wrong call raises ValueError instead of reading out of bounds.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "driver.h"
#include "isa.h"

namespace nb = nanobind;

namespace kbit {
namespace {

void require(bool condition, const char* message) {
    if (!condition) {
        throw nb::value_error(message);
    }
}

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

const Kernels& kernels_at(int isa) {
    require(isa >= 0 && size_t(isa) < supported_kernels().size(), "kbit._cpu: no such instruction set");
    return *supported_kernels()[size_t(isa)];
}

DType dtype_at(int dtype) {
    require(dtype >= 0 && dtype <= 2, "kbit._cpu: dtype must be 0 (float32), 1 (float16) or 2 (bfloat16)");
    return DType(dtype);
}

int threads_at(int threads) {
    require(threads >= 1 && threads <= 4096, "kbit._cpu: threads must be in 1..4096");
    return threads;
}

// Addresses and sizes of one quantized tensor; built by the wrapper for each call.
WeightArgs make_args(uintptr_t packed, int64_t words, uintptr_t absmax, int64_t scales, int format,
                     uintptr_t codebook, int bits, uintptr_t scale, int64_t experts, int64_t n, int64_t k) {
    require(bits >= 2 && bits <= 5, "kbit._cpu: bits must be in 2..5");
    require(format >= 0 && format <= 2, "kbit._cpu: absmax must be 0 (E4M4), 1 (float16) or 2 (float32)");
    require(experts >= 1 && n >= 1 && k >= 1, "kbit._cpu: experts, n and k must be positive");
    const int64_t blocks = (k - 1) / kBlock + 1;
    require(scales / blocks / n == experts && scales == experts * n * blocks,
            "kbit._cpu: absmax has not experts * n * blocks entries");
    require(words == scales * bits, "kbit._cpu: packed has not experts * n * blocks * bits words");
    require(packed && absmax && codebook && scale, "kbit._cpu: null pointer");
    return {pointer<void>(packed),
            pointer<void>(absmax),
            pointer<float>(codebook),
            pointer<float>(scale),
            ScaleFormat(format),
            bits,
            experts,
            n,
            k};
}

void py_linear(int isa, int threads, const WeightArgs& w, uintptr_t x, int64_t tokens, int dtype,
               uintptr_t bias, uintptr_t out) {
    const Kernels& kernels = kernels_at(isa);
    const Activations a = {pointer<void>(x), tokens, dtype_at(dtype), pointer<void>(bias),
                           pointer<void>(out)};
    require(w.experts == 1, "kbit._cpu: linear takes one matrix");
    require(tokens >= 0 && (tokens == 0 || (x && out)), "kbit._cpu: null pointer");
    threads = threads_at(threads);
    nb::gil_scoped_release release;
    if (tokens > 0) {
        linear(kernels, w, a, threads);
    }
}

void py_grouped_linear(int isa, int threads, const WeightArgs& w, uintptr_t x, int64_t tokens, int dtype,
                       uintptr_t offsets, uintptr_t out) {
    const Kernels& kernels = kernels_at(isa);
    const Activations a = {pointer<void>(x), tokens, dtype_at(dtype), nullptr, pointer<void>(out)};
    require(offsets != 0 && tokens >= 0 && (tokens == 0 || (x && out)), "kbit._cpu: null pointer");
    threads = threads_at(threads);
    const int32_t* bounds = pointer<const int32_t>(offsets);
    for (int64_t e = 0; e <= w.experts; ++e) {
        require(bounds[e] >= (e == 0 ? 0 : bounds[e - 1]) && bounds[e] <= tokens,
                "grouped_linear: expert_offsets must ascend from 0 at the least to the number of rows of x "
                "at most");
    }
    nb::gil_scoped_release release;
    if (tokens > 0) {
        grouped_linear(kernels, w, a, bounds, threads);
    }
}

void py_dequantize(int isa, int threads, const WeightArgs& w, int64_t row_begin, int64_t row_end, int value,
                   int store, uintptr_t out) {
    const Kernels& kernels = kernels_at(isa);
    const DType round = dtype_at(value), kept = dtype_at(store);
    require(round == kept || kept == DType::kFloat32,
            "kbit._cpu: rows are stored as they are rounded, or float32");
    require(0 <= row_begin && row_begin <= row_end && row_end <= w.experts * w.n,
            "kbit._cpu: rows out of range");
    require(out != 0 || row_begin == row_end, "kbit._cpu: null pointer");
    threads = threads_at(threads);
    nb::gil_scoped_release release;
    dequantize(kernels, w, row_begin, row_end, round, kept, pointer<void>(out), threads);
}

void py_embedding(int isa, int threads, const WeightArgs& w, uintptr_t ids, int64_t count, int dtype,
                  uintptr_t out) {
    const Kernels& kernels = kernels_at(isa);
    const DType type = dtype_at(dtype);
    require(w.experts == 1, "kbit._cpu: embedding takes one matrix");
    require(count >= 0 && (count == 0 || (ids && out)), "kbit._cpu: null pointer");
    threads = threads_at(threads);
    const int64_t* rows = pointer<const int64_t>(ids);
    for (int64_t i = 0; i < count; ++i) {
        if (rows[i] < 0 || rows[i] >= w.n) {
            throw nb::index_error(("embedding: id " + std::to_string(rows[i]) + " at position " +
                                   std::to_string(i) + " is outside 0.." + std::to_string(w.n - 1))
                                      .c_str());
        }
    }
    nb::gil_scoped_release release;
    embedding(kernels, w, rows, count, type, pointer<void>(out), threads);
}

int64_t py_quantize(int isa, int threads, uintptr_t w, int dtype, int64_t experts, int64_t n, int64_t k,
                    int bits, uintptr_t codebook, uintptr_t midpoints, bool search, int low, int high,
                    uintptr_t packed, uintptr_t absmax, uintptr_t scale) {
    const Kernels& kernels = kernels_at(isa);
    require(bits >= 2 && bits <= 5, "kbit._cpu: bits must be in 2..5");
    require(experts >= 1 && n >= 1 && k >= 1, "kbit._cpu: experts, n and k must be positive");
    require(low >= -255 && low <= high && high <= 255,
            "kbit._cpu: the search window must be within -255..255");
    require(w && codebook && midpoints && packed && absmax && scale, "kbit._cpu: null pointer");
    threads = threads_at(threads);
    const QuantizeArgs args = {
        pointer<void>(w),         dtype_at(dtype),           experts, n,   k,    bits,
        pointer<float>(codebook), pointer<float>(midpoints), search,  low, high, pointer<uint32_t>(packed),
        pointer<uint8_t>(absmax), pointer<float>(scale)};
    nb::gil_scoped_release release;
    return quantize(kernels, args, threads);
}

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (const Kernels* kernels : supported_kernels()) {
        names.emplace_back(kernels->name);
    }
    return names;
}

}  // namespace
}  // namespace kbit

NB_MODULE(_cpu, m) {
    using namespace kbit;
    nb::class_<WeightArgs>(m, "Weight");
    m.def("weight", &make_args);
    m.def("linear", &py_linear);
    m.def("grouped_linear", &py_grouped_linear);
    m.def("dequantize", &py_dequantize);
    m.def("embedding", &py_embedding);
    m.def("quantize", &py_quantize);
    m.def("supported_isas", &supported_isas);
}
