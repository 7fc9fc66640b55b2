// The canonical form to the tiled layout (layout.py), or back with Config::inverse: a permutation of bits.
//
//   packed  int32 [matrices, rows, blocks * bits]; absmax uint8 [matrices, rows, blocks], E4M4
//   tiled   [matrices, ceil(rows/16), ceil(columns/64)] tiles; all 16-byte aligned
//
// A warp permutes one tile. Lane 4g + s holds block s & 1 of the tile in row g + 8 (s >> 1); the pairs of
// lane 4g + t are spread over just those four lanes. So each lane cuts its planes into four chunks, one for
// each t (a shift and a LOP3 for every bit and column parity, 2 a weight at 4 bits), four lanes exchange
// chunks by a 4 x 4 transposition of shuffles, and each assembles its words. Nothing passes through shared
// memory; about 6 instructions a weight. Row pieces are 2 * bits words, 32 bytes at 4 bits; the warps of a
// block take neighbouring ones.
//
// grid: z matrices, y row tiles, x column tiles / 8.
#include "config.h"
#include "tile.cuh"

constexpr int kBits = Config::bits;
constexpr int kWarps = 8;
constexpr u32 kFirstOfByte = 0x01010101u;
using P = Pairs<kBits>;
// A chunk is 4 pairs of 2 * bits bits: byte q of word 0 is pair q, at 5 bits without bit 4 of its codes;
// these are bits 0 and 1 of byte q of word 1.
constexpr int kChunkWords = P::kSigned ? 2 : 1;
// Of which plane, and of which code of a pair, bit `bit` of a chunk's pairs is.
constexpr __device__ int plane_of(int bit) {
    return !P::kSigned ? bit % kBits : bit < 8 ? bit % 4 : 4;
}
constexpr __device__ int code_of(int bit) {
    return !P::kSigned ? bit / kBits : bit < 8 ? bit / 4 : bit - 8;
}

// To position `to` of every byte, from position `from`.
DEVICE u32 move_bits(u32 word, int from, int to) {
    return (from < to ? word << (to - from) : word >> (from - to)) & (kFirstOfByte << to);
}

// c[s] of lane t becomes c[t] of lane s, within each four lanes.
DEVICE void transpose(u32 (&c)[4], int lane) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool upper = (lane & step) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((i & step) == 0) {
                const u32 got = __shfl_xor_sync(kAll, upper ? c[i] : c[i + step], step);
                c[i] = upper ? got : c[i];
                c[i + step] = upper ? c[i + step] : got;
            }
        }
    }
}

// chunks[word][t] from the planes of a block: columns 8q + 2t and the next are pair q.
DEVICE void cut(u32 (&chunks)[kChunkWords][4], const u32 (&planes)[kBits]) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#pragma unroll
        for (int bit = 0; bit < 2 * kBits; ++bit) {
            const u32 moved = move_bits(planes[plane_of(bit)], 2 * t + code_of(bit), bit % 8);
            chunks[bit / 8][t] = (bit % 8 == 0 ? 0 : chunks[bit / 8][t]) | moved;
        }
    }
}
DEVICE void join(u32 (&planes)[kBits], const u32 (&chunks)[kChunkWords][4]) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#pragma unroll
        for (int bit = 0; bit < 2 * kBits; ++bit) {
            const u32 moved = move_bits(chunks[bit / 8][t], bit % 8, 2 * t + code_of(bit));
            const int plane = plane_of(bit);
            planes[plane] = (t == 0 && code_of(bit) == 0 ? 0 : planes[plane]) | moved;
        }
    }
}

// Chunks of lanes s = block + 2 * (row / 8) hold the pairs 8 * block + 2q + row / 8. `bytes`: 4 pairs each.
DEVICE void chunks_to_bytes(u32 (&bytes)[4], const u32 (&c)[4]) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
        bytes[2 * block] = permute(c[block], c[block + 2], 0x5140);
        bytes[2 * block + 1] = permute(c[block], c[block + 2], 0x7362);
    }
}
DEVICE void bytes_to_chunks(u32 (&c)[4], const u32 (&bytes)[4]) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
        c[block] = permute(bytes[2 * block], bytes[2 * block + 1], 0x6420);
        c[block + 2] = permute(bytes[2 * block], bytes[2 * block + 1], 0x7531);
    }
}

// 5 bits: the low planes from codes to what tiles have of them, and back.
DEVICE void turn(u32 (&planes)[kBits]) {
#pragma unroll
    for (int i = 0; P::kSigned && i < 4; ++i) {
        planes[i] ^= planes[kBits - 1];
    }
}

DEVICE void assemble(u32 (&w)[kBits], const u32 (&bytes)[kChunkWords][4]) {
#pragma unroll
    for (int i = 0; i < kBits; ++i) {
        w[i] = kBits >= 4 && i < 4 ? bytes[0][i % 4] : 0;
    }
#pragma unroll
    for (int pair = 0; pair < 16; ++pair) {
        const u32 at = pair % 4 * 8;
        if constexpr (P::kSigned) {
            const u32 signs = bytes[kChunkWords - 1][pair / 4] >> at;
            w[kBits - 1] |= (signs & 1) << P::sign_bit(pair, 0) | (signs >> 1 & 1) << P::sign_bit(pair, 1);
        } else if constexpr (kBits < 4) {
            P::put(w, pair, bytes[0][pair / 4] >> at & 255u);
        }
    }
}
DEVICE void take_apart(u32 (&bytes)[kChunkWords][4], const u32 (&w)[kBits]) {
#pragma unroll
    for (int i = 0; i < 4 * kChunkWords; ++i) {
        bytes[i / 4][i % 4] = kBits >= 4 && i < 4 ? w[i % kBits] : 0;
    }
#pragma unroll
    for (int pair = 0; pair < 16; ++pair) {
        const u32 at = pair % 4 * 8;
        if constexpr (P::kSigned) {
            const u32 last = w[kBits - 1];
            const u32 signs = (last >> P::sign_bit(pair, 0) & 1) | (last >> P::sign_bit(pair, 1) & 1) << 1;
            bytes[kChunkWords - 1][pair / 4] |= signs << at;
        } else if constexpr (kBits < 4) {
            bytes[0][pair / 4] |= P::get(w, pair) << at;
        }
    }
}

// A lane's block of the canonical form; outside the matrix there is none, and it reads as zeros.
struct Block {
    u32* packed;
    u8* absmax;
    bool inside;
};

DEVICE void to_tile(const Block& block, u32* tile, int lane) {
    u32 planes[kBits] = {};
    u32 scale = 0;
    if (block.inside) {
        load_words<kBits>(planes, block.packed);
        scale = __ldg(block.absmax);
    }
    u32 chunks[kChunkWords][4], bytes[kChunkWords][4], w[kBits];
    turn(planes);
    cut(chunks, planes);
#pragma unroll
    for (int i = 0; i < kChunkWords; ++i) {
        transpose(chunks[i], lane);
        chunks_to_bytes(bytes[i], chunks[i]);
    }
    assemble(w, bytes);
    P::store(tile, w, lane);
    scale <<= lane % 4 * 8;
    scale |= __shfl_xor_sync(kAll, scale, 1);
    scale |= __shfl_xor_sync(kAll, scale, 2);
    if (lane % 4 == 0) {
        tile[32 * kBits + lane / 4] = scale;
    }
}

DEVICE void from_tile(const Block& block, const u32* tile, int lane) {
    u32 chunks[kChunkWords][4], bytes[kChunkWords][4], planes[kBits], w[kBits];
    P::load(w, tile, lane);
    const u32 scales = __ldg(tile + 32 * kBits + lane / 4);
    take_apart(bytes, w);
#pragma unroll
    for (int i = 0; i < kChunkWords; ++i) {
        bytes_to_chunks(chunks[i], bytes[i]);
        transpose(chunks[i], lane);
    }
    join(planes, chunks);
    turn(planes);
    if (block.inside) {
        store_words<kBits>(block.packed, planes);
        *block.absmax = u8(scales >> (lane % 4 * 8));
    }
}

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    repack(u32* packed, u8* absmax, u32* tiled, i64 matrices, i64 rows, i64 columns) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 blocks = (columns + kBlock - 1) / kBlock;
    const i64 row_tiles = (rows + kTileRows - 1) / kTileRows;
    const i64 column_tiles = (columns + kTileColumns - 1) / kTileColumns;
    for (i64 m = blockIdx.z; m < matrices; m += gridDim.z) {
        for (i64 i = blockIdx.y; i < row_tiles; i += gridDim.y) {
            const i64 row = i * kTileRows + lane / 4 + lane % 4 / 2 * 8;
            for (i64 j = i64(blockIdx.x) * kWarps + warp; j < column_tiles; j += i64(gridDim.x) * kWarps) {
                const i64 column = 2 * j + lane % 2, at = (m * rows + row) * blocks + column;
                const Block block = {packed + at * kBits, absmax + at, row < rows && column < blocks};
                u32* tile = tiled + ((m * row_tiles + i) * column_tiles + j) * kTileWords<kBits>;
                if constexpr (Config::inverse) {
                    from_tile(block, tile, lane);
                } else {
                    to_tile(block, tile, lane);
                }
            }
        }
    }
}
