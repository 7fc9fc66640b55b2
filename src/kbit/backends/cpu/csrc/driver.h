// The operations on whole matrices: arguments from Python, split into items for parallel_for.
#pragma once

#include "kernels.h"

namespace kbit {

// `experts` quantized matrices of one shape, one after the other in memory.
struct WeightArgs {
    const void* packed;
    const void* absmax;
    const float* codebook;  // [2^bits] float32
    const float* scale;     // [experts] tensor factors
    ScaleFormat format;
    int bits;
    int64_t experts, n, k;
};

Weight make_weight(const WeightArgs& args, int64_t expert, DType arithmetic);

struct Activations {
    const void* x;  // [tokens, k] of `dtype`
    int64_t tokens;
    DType dtype;
    const void* bias;  // [n] of `dtype`, or null
    void* out;         // [tokens, n] of `dtype`
};

void linear(const Kernels&, const WeightArgs&, const Activations&, int threads);

// Tokens [offsets[e], offsets[e + 1]) meet expert e; output rows of no expert become zero.
void grouped_linear(const Kernels&, const WeightArgs&, const Activations&, const int32_t* offsets,
                    int threads);

// Rows [row_begin, row_end) counted through all experts, to a contiguous out [rows, k].
void dequantize(const Kernels&, const WeightArgs&, int64_t row_begin, int64_t row_end, DType value,
                DType store, void* out, int threads);

void embedding(const Kernels&, const WeightArgs&, const int64_t* ids, int64_t count, DType dtype, void* out,
               int threads);

struct QuantizeArgs {
    const void* w;  // [experts, n, k] of `dtype`
    DType dtype;
    int64_t experts, n, k;
    int bits;
    const float* codebook;
    const float* midpoints;
    bool search;
    int window_low, window_high;
    uint32_t* packed;
    uint8_t* absmax;
    float* scale;  // [experts]
};

// Returns how many weights are NaN or Inf; unless that is 0, nothing has been written.
int64_t quantize(const Kernels&, const QuantizeArgs&, int threads);

}  // namespace kbit
