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
// Which rows these are, and their weights, a warp loads at once, a lane each, from lines that have been asked
// for while the previous kernel ran.
//
// grid: x tokens, y columns / kWidth / threads.
#include "config.h"
#include "rows.cuh"

using D = Dense<Config::dtype>;
constexpr int kWidth = Config::vector ? D::kPerPiece : 1;
// Qwen3-Next's choices, the shared expert's too; beyond, one more round of memory latency.
constexpr int kBatch = 11;

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
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth, lane = threadIdx.x & 31;
    const bool has_column = column < columns;
    const u64 token = u64(blockIdx.x) * choices;
    if (threadIdx.x == 0) {  // of y and out, whose content comes later, the addresses' translation
        const u8* const its_weights = static_cast<const u8*>(weights) + token * (weights_dtype ? 2 : 4);
        const void* const places[] = {y, inverse + token, its_weights,
                                      end ? static_cast<const void*>(end) : y, out};
#pragma unroll
        for (const void* place : places) {
            prefetch(place);
        }
    }
    wait_for_previous();
    launch_late();
    forget(y, inverse, weights, end);
    const int owned = end == nullptr ? rows : min(rows, *end);
    float sum[kWidth] = {};
    for (int first = 0; first < choices; first += kBatch) {
        const bool there = lane < kBatch && first + lane < choices;
        const int of_lane = there ? int(inverse[token + first + lane]) : -1;
        const float its_weight = there ? load_widened(weights, token + first + lane, weights_dtype) : 0.0f;
        u32 piece[kBatch][4];
        bool mine[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = __shfl_sync(kAll, of_lane, i);
            mine[i] = row >= 0 && row < owned && has_column;
            if (mine[i]) {
                load_piece(piece[i], y + (u64(row) * columns + column) * D::kBytes);
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const float weight = __shfl_sync(kAll, its_weight, i);
            if (mine[i]) {
#pragma unroll
                for (int j = 0; j < kWidth; ++j) {
                    sum[j] = __fadd_rn(sum[j], __fmul_rn(weight, D::get(piece[i], j)));
                }
            }
        }
    }
    if (has_column) {
        store_piece(out + (u64(blockIdx.x) * columns + column) * D::kBytes, sum);
    }
}
