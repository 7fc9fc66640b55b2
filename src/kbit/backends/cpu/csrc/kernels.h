// What one instruction set offers, as plain structs and function pointers.
//
// Each isa_*.cpp is compiled with its own -m flags and exports one `Kernels`. This header holds no inline
// code: an inline function shared by translation units with different flags could be merged into the AVX-512
// copy and crash an older CPU. For the same reason the isa_*.cpp files use no std:: templates and keep all
// code in anonymous namespaces.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kbit {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "bit-plane words are read as bytes");

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
enum class ScaleFormat : int { kE4M4 = 0, kFloat16 = 1, kFloat32 = 2 };

constexpr int kBlock = 32;      // weights that share a scale
constexpr int kMaxLevels = 32;  // 2^5

// One quantized matrix [n, k] in canonical form.
struct Weight {
    const uint8_t* packed;    // n * blocks * bits little-endian 32-bit bit-plane words, 4-byte aligned
    const uint8_t* absmax;    // n * blocks entries of `format`
    ScaleFormat format;       //
    float tensor_scale;       // power of two, 1 for most tensors
    int bits;                 // 2..5
    int64_t n, k, blocks;     // blocks = ceil(k / 32)
    DType arithmetic;         // T
    float table[kMaxLevels];  // codebook rounded to T, repeated to fill 32 entries
};

// Decoding whole rows: round_T(table[code] * scale * tensor_scale), stored as `store` (T itself, or float32
// when a float32 matmul is to follow).
struct DecodeJob {
    Weight weight;
    DType store;
};

// y[tokens, n] = x[tokens, k] @ W^T + bias.
struct LinearJob {
    Weight weight;
    const void* x;     // written by prepare_x: [tokens, x_stride], zero-padded, 64-byte aligned rows
    int64_t x_stride;  // elements
    int64_t tokens;
    const void* bias;  // [n] of `dtype`, or null
    void* out;         // [tokens, out_stride] of `dtype`
    int64_t out_stride;
    DType dtype;  // T
};

struct LinearKernels {
    int element_bytes;  // of prepared x: 4 (float32) or 2 (bfloat16)
    int64_t (*padded_k)(int bits, int64_t k);
    // One token's activations, widened and put into the order in which the decoder delivers weights.
    void (*prepare_x)(const void* x, DType dtype, int64_t k, int bits, void* dst);
    size_t (*workspace_bytes)(const LinearJob&);
    void (*rows)(const LinearJob&, int64_t row_begin, int64_t row_end, void* workspace);
};

struct QuantizeJob {
    const void* w;  // [n, k] of `dtype`
    DType dtype;
    int64_t n, k, blocks;
    int bits;
    float codebook[kMaxLevels];
    float midpoints[kMaxLevels];
    float tensor_scale;
    bool search;
    int window_low, window_high;
    uint32_t* packed;
    uint8_t* absmax;
};

struct Measurement {
    float smallest;     // non-zero block maximum, +inf when there is none
    float largest;      // block maximum
    int64_t nonfinite;  // NaN and Inf among the weights
};

struct Kernels {
    const char* name;
    void (*decode_row)(const DecodeJob&, int64_t row, void* dst);
    LinearKernels linear;              // float32 arithmetic, any dtype
    const LinearKernels* linear_bf16;  // bfloat16 dot products, or null
    Measurement (*measure_row)(const QuantizeJob&, int64_t row);
    void (*quantize_row)(const QuantizeJob&, int64_t row);
};

const Kernels* portable_kernels();
const Kernels* neon_kernels();
const Kernels* avx2_kernels();
const Kernels* avx2gfni_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512bf16_kernels();

}  // namespace kbit
