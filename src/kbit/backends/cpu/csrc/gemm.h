// y[t, n] = sum_k x[t, k] * W[n, k] + bias[n] for more tokens than gemv.h takes.
//
// kChunkRows rows are decoded, kChunkBytes of each at a time, into a buffer that fits the second-level cache,
// and multiplied with all tokens by a register tile of kTileTokens x kTileRows dot products: both operands
// are contiguous in k, lanes hold partial sums that are added up once per tile. Element is what the buffer
// holds: float32 (not rounded to T: the product of a 16-bit level and an E4M4 scale is exact) or bfloat16.
// Every y sums its k chunks in ascending order, whatever the threads and the other tokens. Workspace: scales,
// kChunkRows * kChunkBytes of weights, tokens * kChunkRows float32 sums.
#pragma once

#include "gemv.h"

namespace kbit {
namespace {

constexpr int64_t kChunkBytes = 4096;
constexpr int64_t kFewTokens = 16;
constexpr int64_t kPadBytes = 64;  // equal rows of a power of two apart would share cache sets

template <class Ops>
struct GemmChunk {
    const typename Ops::Element* weights;  // [kChunkRows, stride]
    const typename Ops::Element* x;        // [tokens, x_stride]
    int64_t stride, x_stride, depth;       // depth: elements to sum, a multiple of Ops::kStep
    float* sums;                           // [tokens, kChunkRows]
};

template <class Ops, int TOKENS>
void tile(const GemmChunk<Ops>& c, int64_t token, int64_t row) {
    const auto* x = c.x + token * c.x_stride;
    const auto* w = c.weights + row * c.stride;
    Vec acc[TOKENS][kTileRows];
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t) {
#pragma GCC unroll 4
        for (int r = 0; r < kTileRows; ++r) {
            acc[t][r] = splat(0.0f);
        }
    }
    for (int64_t k = 0; k < c.depth; k += Ops::kStep) {
        typename Ops::Operand xs[TOKENS];
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; ++t) {
            xs[t] = Ops::operand(x + t * c.x_stride + k);
        }
#pragma GCC unroll 4
        for (int r = 0; r < kTileRows; ++r) {
            const auto wr = Ops::operand(w + r * c.stride + k);
#pragma GCC unroll 8
            for (int t = 0; t < TOKENS; ++t) {
                acc[t][r] = Ops::multiply(xs[t], wr, acc[t][r]);
            }
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; ++t) {
        add_sums(acc[t], c.sums + (token + t) * kChunkRows + row);
    }
}

template <class Ops, int TOKENS>
inline void tile_tail(const GemmChunk<Ops>& c, int64_t left, int64_t token, int64_t row) {
    if (left == TOKENS) {
        tile<Ops, TOKENS>(c, token, row);
    } else if constexpr (TOKENS > 1) {
        tile_tail<Ops, TOKENS - 1>(c, left, token, row);
    }
}

// The token tile is the outer loop: it stays in the first-level cache while the rows pass by.
template <class Ops>
inline void multiply_chunk(const GemmChunk<Ops>& c, int64_t tokens, int64_t rows) {
    for (int64_t token = 0; token < tokens; token += kTileTokens) {
        for (int64_t row = 0; row < rows; row += kTileRows) {
            if (tokens - token >= kTileTokens) {
                tile<Ops, kTileTokens>(c, token, row);
            } else {
                tile_tail<Ops, kTileTokens - 1>(c, tokens - token, token, row);
            }
        }
    }
}

struct GemmBuffers {
    float* scales;
    void* weights;
    float* sums;
};

inline GemmBuffers gemm_buffers(void* workspace) {
    char* p = static_cast<char*>(workspace);
    return {reinterpret_cast<float*>(p), p + 1024,
            reinterpret_cast<float*>(p + 1024 + kChunkRows * (kChunkBytes + kPadBytes))};
}

inline size_t gemm_workspace(int64_t tokens) {
    return size_t(1024 + kChunkRows * (kChunkBytes + kPadBytes) + tokens * kChunkRows * 4);
}

template <class Ops>
inline void gemm_rows(const LinearJob& job, int64_t row_begin, int64_t row_end, void* workspace) {
    using Element = typename Ops::Element;
    constexpr int64_t kDepth = kChunkBytes / int64_t(sizeof(Element));
    constexpr int64_t kStride = kDepth + kPadBytes / int64_t(sizeof(Element));
    static_assert(kDepth / kBlock * 4 <= 1024, "scales overrun their part of the workspace");
    // Few tokens: rows are decoded four at a time and multiplied at once, and weights and activations both
    // stay in the first-level cache (8 KB and 32 KB). Writing 32 rows out and reading them back is slower by
    // a third then.
    const bool few = job.tokens <= kFewTokens;
    const int64_t depth_blocks = (few ? kDepth / 2 : kDepth) / kBlock, step = few ? kTileRows : kChunkRows;
    const Weight& w = job.weight;
    const GemmBuffers buffers = gemm_buffers(workspace);
    Element* weights = static_cast<Element*>(buffers.weights);
    // Columns are read in slabs, which hardware prefetchers do not follow: fetch the same slab kChunkRows
    // below.
    const int64_t ahead = kChunkRows * w.blocks * w.bits * 4;
    with_decoder(w, [&](auto decode) {
        using D = decltype(decode);
        constexpr int64_t kGroup = D::kBlocks * kBlock;
        for (int64_t row = row_begin; row < row_end; row += kChunkRows) {
            const int64_t rows = row_end - row < kChunkRows ? row_end - row : kChunkRows;
            memset(buffers.sums, 0, size_t(job.tokens * kChunkRows) * 4);
            for (int64_t first = 0; first < w.blocks; first += depth_blocks) {
                const int64_t blocks = w.blocks - first < depth_blocks ? w.blocks - first : depth_blocks;
                const Element* x = static_cast<const Element*>(job.x) + first * kBlock;
                for (int64_t part = 0; part < rows; part += step) {
                    const int64_t count = rows - part < step ? rows - part : step;
                    for (int64_t r = 0; r < count; ++r) {
                        Ops::decode_span(w, decode, row + part + r, first, blocks, buffers.scales, ahead,
                                         weights + r * kStride);
                    }
                    const int64_t depth = round_up(blocks * kBlock, kGroup);
                    multiply_chunk<Ops>({weights, x, kStride, job.x_stride, depth, buffers.sums + part},
                                        job.tokens, count);
                }
            }
            for (int64_t t = 0; t < job.tokens; ++t) {
                write_output(job, t, row, buffers.sums + t * kChunkRows, rows);
            }
        }
    });
}

}  // namespace
}  // namespace kbit
