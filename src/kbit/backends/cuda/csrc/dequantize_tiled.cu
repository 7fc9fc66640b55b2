// out[n - row_begin, k] = round(codebook_T[code] * decode(absmax) * scale), T = Config::dtype, for rows
// row_begin <= n < row_end, from the tiled layout (layout.py). The fallback of matmuls with many tokens.
//
//   tiled    [matrices, ceil(rows/16), ceil(columns/64)] tiles, 16-byte aligned
//   codebook float32 [2^bits], rounded to T here; scale float32 [matrices]
//   out      T [matrices, row_end - row_begin, columns]
//   wide     rows of out are multiples of 16 bytes, and so is its address
//
// A warp decodes one tile: each lane its 16 pairs, whose levels come from a table with a copy per bank, then
// the tile is turned into rows in shared memory, in chunks of 16 bytes at (chunk ^ row) so that neither side
// conflicts, and stored as 128 or 256 contiguous bytes a row. About 11 instructions a weight.
//
// Shared memory: 2^bits * 128 + 8 warps * 1024 weights. grid: z matrices, y row tiles, x column tiles / 8.
#include "config.h"
#include "levels.cuh"
#include "tile.cuh"

using D = Dense<Config::dtype>;

constexpr int kBits = Config::bits;
constexpr int kWarps = 8;
constexpr int kRowBytes = kTileColumns * D::kBytes;
constexpr int kChunks = kRowBytes / 16;  // of a row

// Where chunk `chunk` of row `row` of a tile is staged. Lanes 4g + t write pairs of row g (or g + 8) at
// chunks that differ by their row; those of float32 are two chunks apart already.
DEVICE u32 chunk_at(int row, int chunk) {
    const int turn = D::kBytes == 2 ? row & 7 : 2 * (row & 3);
    return u32(row * kRowBytes + ((chunk ^ turn) * 16));
}

template <int PAIR>
DEVICE void decode(const Levels<kBits>& levels, const u32 (&w)[kBits], const float (&scales)[4], float factor,
                   u32 area, int g, int t) {
    if constexpr (PAIR < 16) {
        using P = Pairs<kBits>;
        constexpr int kFirst = P::in_words(PAIR) ? P::bit(PAIR) : 0;
        const u32 word = P::in_words(PAIR) ? w[P::in_words(PAIR) ? P::word(PAIR) : 0] : P::get(w, PAIR);
        constexpr int kColumn = PAIR / 4 * 16 + PAIR % 4 / 2 * 8, kLow = PAIR % 2;  // and 2t; row g + 8 kLow
        const float scale = scales[2 * kLow + kColumn / 32];
        const float a = __fmul_rn(__fmul_rn(levels.at(word, kFirst), scale), factor);
        const float b = __fmul_rn(__fmul_rn(levels.at(word, kFirst + kBits), scale), factor);
        const int row = g + 8 * kLow;
        if constexpr (Config::dtype == 0) {
            const u32 to = area + chunk_at(row, kColumn / 4 + t / 2) + t % 2 * 8;
            asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(a), "f"(b) : "memory");
        } else {
            put_shared(area + chunk_at(row, kColumn / 8) + t * 4, D::Bits::pack(a, b));
        }
        decode<PAIR + 1>(levels, w, scales, factor, area, g, t);
    }
}

struct Rows {
    u8* out;  // of row_begin
    i64 begin, end, columns;
    bool wide;
};

DEVICE void store(const Rows& rows, i64 row0, i64 column0, u32 area, int lane) {
    if (rows.wide) {
#pragma unroll
        for (int i = 0; i < 16 * kChunks / 32; ++i) {
            const int row = (i * 32 + lane) / kChunks, chunk = (i * 32 + lane) % kChunks;
            const i64 n = row0 + row, k = column0 + chunk * D::kPerPiece;
            const uint4 v = load_shared4(area + chunk_at(row, chunk));
            if (n >= rows.begin && n < rows.end && k < rows.columns) {
                store16(rows.out + ((n - rows.begin) * rows.columns + k) * D::kBytes, v);
            }
        }
        return;
    }
#pragma unroll 4
    for (int i = 0; i < 32; ++i) {
        const int row = i / 2, column = i % 2 * 32 + lane;
        const i64 n = row0 + row, k = column0 + column;
        if (n >= rows.begin && n < rows.end && k < rows.columns) {
            const u32 from = area + chunk_at(row, column / D::kPerPiece) + column % D::kPerPiece * D::kBytes;
            store_global<D::kBytes>(rows.out + ((n - rows.begin) * rows.columns + k) * D::kBytes,
                                    load_shared_element<D::kBytes>(from));
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    dequantize_tiled(const u32* tiled, const float* codebook, const float* scale, u8* out, i64 matrices,
                     i64 rows, i64 columns, i64 row_begin, i64 row_end, int wide) {
    __shared__ alignas(128) u8 table[Levels<kBits>::kBytes];
    __shared__ alignas(128) u8 staging[kWarps * D::kWarpBytes];
    const Levels<kBits> levels = Levels<kBits>::build<Config::dtype>(table, codebook);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 area = shared_address(staging) + warp * D::kWarpBytes;
    const i64 row_tiles = (rows + 15) / 16, column_tiles = (columns + 63) / 64;
    const i64 end = (row_end + 15) / 16;
    for (i64 m = blockIdx.z; m < matrices; m += gridDim.z) {
        const float factor = scale[m];
        const Rows part = {out + m * (row_end - row_begin) * columns * D::kBytes, row_begin, row_end, columns,
                           wide != 0};
        for (i64 i = row_begin / 16 + blockIdx.y; i < end; i += gridDim.y) {
            const u32* tiles = tiled + (m * row_tiles + i) * column_tiles * kTileWords<kBits>;
            for (i64 j = i64(blockIdx.x) * kWarps + warp; j < column_tiles; j += i64(gridDim.x) * kWarps) {
                const u32* tile = tiles + j * kTileWords<kBits>;
                u32 w[kBits];
                Pairs<kBits>::load(w, tile, lane);
                const u32 bytes = __ldg(tile + 32 * kBits + lane / 4);
                const float scales[4] = {decode_e4m4(bytes & 255u), decode_e4m4(bytes >> 8 & 255u),
                                         decode_e4m4(bytes >> 16 & 255u), decode_e4m4(bytes >> 24)};
                __syncwarp();  // the area's last contents are stored
                decode<0>(levels, w, scales, factor, area, lane / 4, lane % 4);
                __syncwarp();
                store(part, i * 16, j * 64, area, lane);
            }
        }
    }
}
