// out[n - row_begin, k] = round(codebook_T[code] * decode(absmax) * scale), T = Config::dtype, for rows
// row_begin <= n < row_end, from the tiled layout (layout.py). The fallback of matmuls with many tokens.
//
//   tiled    [matrices, ceil(rows/16), ceil(columns/64)] tiles, 16-byte aligned
//   codebook float32 [2^bits], rounded to T here; scale float32 [matrices]
//   out      T [matrices, row_end - row_begin, columns]
//   wide     rows of out are multiples of 16 bytes, and so is its address
// A matrix has fewer than 2^31 tiles.
//
// A warp decodes one tile at a time, the words of its next one on their way meanwhile: 5 KB of loads in
// flight per SM carry 80% of an H200's bandwidth, since four fifths of the traffic are stores. To 16 bits,
// pairs of levels come out of decode.cuh's table, and one 16-bit product a pair does: an E4M4 scale is exact
// in T, so that product is rounded as the defined one is, unless the matrix has a factor; then products are
// float32, left to right. To float32, levels come one by one from a table with a copy per bank. The tile is
// turned into rows in shared memory, in chunks of 16 bytes at (chunk ^ row) so that neither side conflicts,
// and stored as 128 or 256 contiguous bytes a row. 5 instructions a weight (bfloat16, 4 bits).
//
// Shared memory, dynamic: the table (64 KB to 16 bits, else 2^bits * 128), then 16 warps * 1024 weights.
// Grid: x deals the tiles of all matrices.
#include "config.h"
#include "decode.cuh"
#include "levels.cuh"
#include "tile.cuh"

using D = Dense<Config::dtype>;

constexpr int kBits = Config::bits;
constexpr int kWarps = 16;
constexpr bool kWhole = Config::dtype == 0;  // float32
constexpr int kRowBytes = kTileColumns * D::kBytes;
constexpr int kChunks = kRowBytes / 16;  // of a row
using Table = Decoder<kBits, Config::dtype == 2>;
constexpr int kTableBytes = kWhole ? Levels<kBits>::kBytes : Table::kTableBytes;

// Where chunk `chunk` of row `row` of a tile is staged. Lanes 4g + t write pairs of row g (or g + 8) at
// chunks that differ by their row; those of float32 are two chunks apart already.
DEVICE u32 chunk_at(int row, int chunk) {
    const int turn = D::kBytes == 2 ? row & 7 : 2 * (row & 3);
    return u32(row * kRowBytes + ((chunk ^ turn) * 16));
}

struct Tile {
    u32 w[kBits];
    u32 scales;

    DEVICE void load(const u32* from, int lane) {
        Pairs<kBits>::load(w, from, lane);
        scales = __ldg(from + 32 * kBits + lane / 4);
    }
    DEVICE float scale(int byte) const { return decode_e4m4(scales >> (8 * byte) & 255u); }
};

// ---- to float32

template <int PAIR>
DEVICE void decode_whole(const Levels<kBits>& levels, const Tile& tile, const float (&scales)[4],
                         float factor, u32 area, int g, int t) {
    if constexpr (PAIR < 16) {
        using P = Pairs<kBits>;
        constexpr int kFirst = P::in_words(PAIR) ? P::bit(PAIR) : 0;
        const u32 word =
            P::in_words(PAIR) ? tile.w[P::in_words(PAIR) ? P::word(PAIR) : 0] : P::get(tile.w, PAIR);
        constexpr int kColumn = PAIR / 4 * 16 + PAIR % 4 / 2 * 8, kLow = PAIR % 2;  // and 2t; row g + 8 kLow
        const float scale = scales[2 * kLow + kColumn / 32];
        const float a = __fmul_rn(__fmul_rn(levels.at(word, kFirst), scale), factor);
        const float b = __fmul_rn(
            __fmul_rn(levels.at(word, kFirst + (P::in_words(PAIR) ? P::kSecond : kBits)), scale), factor);
        const u32 to = area + chunk_at(g + 8 * kLow, kColumn / 4 + t / 2) + t % 2 * 8;
        asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(a), "f"(b) : "memory");
        decode_whole<PAIR + 1>(levels, tile, scales, factor, area, g, t);
    }
}

// ---- to 16 bits

// Registers h of the A operand of k16 step STEP: 8 x 8 squares, rows 8 (h & 1), columns 16 STEP + 8 (h >> 1).
template <int STEP>
DEVICE void put_squares(const u32 (&a)[4], u32 area, int lane) {
#if __CUDA_ARCH__ >= 900
    // Lane 8h + i says where row i of square h goes. The steps differ in bits 1 and 2 of the chunk's number.
    const u32 to = area + (chunk_at(lane % 16, lane / 16) ^ (STEP * 32));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a[0]),
                 "r"(a[1]), "r"(a[2]), "r"(a[3])
                 : "memory");
#else
#pragma unroll
    for (int h = 0; h < 4; ++h) {
        put_shared(area + chunk_at(lane / 4 + 8 * (h & 1), 2 * STEP + (h >> 1)) + lane % 4 * 4, a[h]);
    }
#endif
}

template <bool UNIT>
DEVICE void decode_half(const Table& table, const Tile& tile, float factor, u32 area, int lane) {
    using H = typename D::Bits;
    using S = Scales<false, Config::dtype == 2>;
    static_for<4>([&](auto index) {
        constexpr int kStep = decltype(index)::value;
        u32 a[4];
        table.template step<kStep>(tile.w, a);
        if constexpr (UNIT) {
            S::template scale<kStep>(a, tile.scales);
        } else {
#pragma unroll
            for (int h = 0; h < 4; ++h) {
                const float scale = tile.scale(2 * (h % 2) + kStep / 2) * (1.0f / S::kLevelUnit);
                const float low = H::widen(u16(a[h])), high = H::widen(u16(a[h] >> 16));
                a[h] = H::pack(__fmul_rn(__fmul_rn(low, scale), factor),
                               __fmul_rn(__fmul_rn(high, scale), factor));
            }
        }
        put_squares<kStep>(a, area, lane);
    });
}

// ---- where tiles are

struct Shape {
    const u32* tiled;
    u8* out;  // of row_begin
    i64 columns, row_begin, row_end;
    u32 matrices, row_tiles, column_tiles, first_row_tile, used_row_tiles;
    bool wide;
};

// The tiles that a warp takes, one every `stride` of all.
struct Cursor {
    u32 matrix, row, column;  // row: of the used ones

    DEVICE Cursor(const Shape& shape, u32 number) {
        column = number % shape.column_tiles;
        number /= shape.column_tiles;
        row = number % shape.used_row_tiles;
        matrix = number / shape.used_row_tiles;
    }
    DEVICE void advance(const Shape& shape, const Cursor& stride) {
        column += stride.column;
        const u32 next_row = column >= shape.column_tiles;
        column -= next_row ? shape.column_tiles : 0;
        row += stride.row + next_row;
        const u32 next_matrix = row >= shape.used_row_tiles;
        row -= next_matrix ? shape.used_row_tiles : 0;
        matrix += stride.matrix + next_matrix;
    }
    DEVICE const u32* words(const Shape& shape) const {
        const i64 rows = i64(matrix) * shape.row_tiles + shape.first_row_tile + row;
        return shape.tiled + (rows * shape.column_tiles + column) * kTileWords<kBits>;
    }
};

DEVICE void store(const Shape& shape, const Cursor& at, u32 area, int lane) {
    const i64 row0 = i64(shape.first_row_tile + at.row) * kTileRows, column0 = i64(at.column) * kTileColumns;
    const i64 pitch = shape.columns * D::kBytes;
    u8* out = shape.out + (at.matrix * (shape.row_end - shape.row_begin) + row0 - shape.row_begin) * pitch;
    out += column0 * D::kBytes;
    const bool whole = row0 >= shape.row_begin && row0 + kTileRows <= shape.row_end &&
                       column0 + kTileColumns <= shape.columns;
    if (whole && shape.wide) {
        out += lane / kChunks * pitch + lane % kChunks * 16;
#pragma unroll
        for (int i = 0; i < kTileRows * kChunks / 32; ++i) {
            const int row = i * (32 / kChunks) + lane / kChunks;
            store16(out, load_shared4(area + chunk_at(row, lane % kChunks)));
            out += 32 / kChunks * pitch;
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < 2 * kTileRows; ++i) {
        const int row = i / 2, column = i % 2 * 32 + lane;
        const i64 n = row0 + row;
        if (n >= shape.row_begin && n < shape.row_end && column0 + column < shape.columns) {
            const u32 from = area + chunk_at(row, column / D::kPerPiece) + column % D::kPerPiece * D::kBytes;
            store_global<D::kBytes>(out + row * pitch + column * D::kBytes,
                                    load_shared_element<D::kBytes>(from));
        }
    }
}

// decode(tile, factor) stages a tile, whose words it gets.
template <class DECODE>
DEVICE void decode_tiles(const Shape& shape, const float* scale, Tile next, Cursor at, u32 area,
                         DECODE decode) {
    const int lane = threadIdx.x % 32;
    const Cursor stride(shape, gridDim.x * kWarps);
    while (at.matrix < shape.matrices) {
        const Tile now = next;
        const Cursor here = at;
        const float factor = __ldg(scale + here.matrix);
        at.advance(shape, stride);
        if (at.matrix < shape.matrices) {
            next.load(at.words(shape), lane);
        }
        __syncwarp();  // the area's last contents are stored
        decode(now, factor);
        __syncwarp();
        store(shape, here, area, lane);
    }
}

extern "C" __global__ void __launch_bounds__(32 * kWarps, 2)
    dequantize_tiled(const u32* tiled, const float* codebook, const float* scale, u8* out, i64 matrices,
                     i64 rows, i64 columns, i64 row_begin, i64 row_end, int wide) {
    extern __shared__ __align__(1024) u8 shared[];
    const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
    const u32 area = shared_address(shared) + kTableBytes + warp * D::kWarpBytes;
    Shape shape{tiled, out, columns, row_begin, row_end};
    shape.matrices = u32(matrices);
    shape.row_tiles = u32((rows + kTileRows - 1) / kTileRows);
    shape.column_tiles = u32((columns + kTileColumns - 1) / kTileColumns);
    shape.first_row_tile = u32(row_begin / kTileRows);
    shape.used_row_tiles = u32((row_end + kTileRows - 1) / kTileRows) - shape.first_row_tile;
    shape.wide = wide != 0;
    const Cursor first(shape, blockIdx.x * kWarps + warp);
    Tile next = {};
    if (first.matrix < shape.matrices) {  // on its way while the table is filled
        next.load(first.words(shape), lane);
    }
    if constexpr (kWhole) {
        const Levels<kBits> levels = Levels<kBits>::template build<0>(shared, codebook);
        decode_tiles(shape, scale, next, first, area, [&](const Tile& tile, float factor) {
            const float scales[4] = {tile.scale(0), tile.scale(1), tile.scale(2), tile.scale(3)};
            decode_whole<0>(levels, tile, scales, factor, area, lane / 4, lane % 4);
        });
    } else {
        Table::fill(shared, Table::level(codebook, lane), threadIdx.x, 32 * kWarps);
        __syncthreads();
        const Table table(shared, lane);
        decode_tiles(shape, scale, next, first, area, [&](const Tile& tile, float factor) {
            if (factor == 1.0f) {
                decode_half<true>(table, tile, factor, area, lane);
            } else {
                decode_half<false>(table, tile, factor, area, lane);
            }
        });
    }
}
