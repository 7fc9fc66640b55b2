// out[t] = sum over u of weights[t, u] * y[inverse[t, u]]: the experts' results of every token, in float32,
// in the order of u, products and sums rounded apart (as the reference does, bit for bit), rounded once at
// the end.
//
//   y        [rows, columns] of Config::dtype (Dense in rows.cuh), sorted by expert
//   inverse  int32 [tokens, choices]: rows of y; those outside 0 .. rows - 1 count as zero and are not read
//   weights  [tokens, choices] of dtype `weights_dtype`, numbered likewise
//   end      where the rows end that an expert here computed; null: at `rows`
//   out      [tokens, columns] of y's dtype
//
// A thread has 16 bytes of a token's columns (Config::vector: columns are a multiple of that and y and out
// are aligned), else one element, and kBatch of a token's rows in flight: the kernel waits for memory only.
//
// grid: x tokens, y columns / kWidth / threads.
#include "config.h"
#include "rows.cuh"

using D = Dense<Config::dtype>;
constexpr int kWidth = Config::vector ? D::kPerPiece : 1;
constexpr int kBatch =
    11;  // Qwen3-Next's choices, the shared expert's too; beyond, one more round of memory latency

// 16 bytes, or one element in the low bits of the first word.
DEVICE void load_piece(u32 (&words)[4], const u8* from) {
    if constexpr (Config::vector) {
        load_words<4>(words, reinterpret_cast<const u32*>(from));
    } else {
        words[0] = load_global<D::kBytes>(from);
    }
}

template <int WIDTH>
DEVICE void store_piece(u8* to, const float (&sum)[WIDTH]) {
    if constexpr (WIDTH > 1) {
        store16(to, D::piece(sum));
    } else if constexpr (D::kBytes == 4) {
        store_global<4>(to, __float_as_uint(sum[0]));
    } else {
        store_global<2>(to, D::Bits::narrow(sum[0]));
    }
}

extern "C" __global__ void __launch_bounds__(128)
    moe_combine(const u8* y, const u32* inverse, const void* weights, const int* end, u8* out, int rows,
                int columns, int choices, int weights_dtype) {
    launch_early();
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
    if (column >= columns) {
        return;
    }
    wait_for_previous();
    launch_late();
    const int owned = end == nullptr ? rows : min(rows, *end);
    const u64 token = u64(blockIdx.x) * choices;
    float sum[kWidth] = {};
    for (int first = 0; first < choices; first += kBatch) {
        u32 piece[kBatch][4];
        float weight[kBatch];
        bool mine[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const bool there = first + i < choices;
            const int row = there ? int(inverse[token + first + i]) : -1;
            weight[i] = there ? load_widened(weights, token + first + i, weights_dtype) : 0.0f;
            mine[i] = row >= 0 && row < owned;
            if (mine[i]) {
                load_piece(piece[i], y + (u64(row) * columns + column) * D::kBytes);
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (mine[i]) {
#pragma unroll
                for (int j = 0; j < kWidth; ++j) {
                    sum[j] = __fadd_rn(sum[j], __fmul_rn(weight[i], D::get(piece[i], j)));
                }
            }
        }
    }
    store_piece(out + (u64(blockIdx.x) * columns + column) * D::kBytes, sum);
}
