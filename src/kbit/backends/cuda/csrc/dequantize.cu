// out[n, k] = round(codebook_T[code] * decode(absmax) * scale), T = Config::dtype, from the canonical form.
//
// For whole matrices, chunks of their rows and, with `ids`, gathered rows (embedding). The tiled form is read
// by dequantize_tiled.cu.
//
//   packed    int32 [source matrices, rows, blocks * bits], 16-byte aligned
//   absmax    [source matrices, rows, blocks]: uint8 E4M4, float16 or float32 for absmax_format 0, 1, 2
//   codebook  float32 [2^bits], rounded to T here
//   scale     float32 [matrices]; with ids [1]
//   ids       null, or int64 [matrices]: matrix m is source matrix ids[m]; one outside 0..sources-1 traps,
//             as torch's embedding does
//   out       T [matrices, rows, columns]; 16-byte aligned where `contiguous`
//   contiguous columns is a multiple of 32, so blocks follow one another in out
// A matrix has fewer than 2^31 blocks.
//
// A warp decodes 32 blocks, one a lane: the planes are transposed to fields (0.7 instructions a weight), and
// a field becomes the offset of a level in a table with a copy per bank, so look-ups never conflict: one wave
// for 32 weights. Products are float32, left to right. Staged in shared memory, 16 bytes a lane are stored
// side by side. 9 instructions a weight in all; 80% of an H200's bandwidth leaves 19 (bfloat16, 4 bits).
//
// Shared memory: 2^bits * 128 + 4 warps * 1024 weights. grid.y deals matrices, grid.x tiles of 32 blocks.
#include "config.h"
#include "levels.cuh"

using D = Dense<Config::dtype>;
using F = Fields<Config::bits>;

constexpr int kBits = Config::bits;
constexpr int kWarps = 4;

struct Job {
    const u32* packed;  // of this matrix, as absmax and out
    const u8* absmax;
    u8* out;
    i64 columns;
    u32 blocks, row_blocks;
    int absmax_format;
    bool contiguous;
};

DEVICE float load_scale(const Job& job, u32 block) {
    if (job.absmax_format == 0) {
        return decode_e4m4(__ldg(job.absmax + block));
    }
    if (job.absmax_format == 1) {
        return Half<false>::widen(__ldg(reinterpret_cast<const u16*>(job.absmax) + block));
    }
    return __ldg(reinterpret_cast<const float*>(job.absmax) + block);
}

// A block's planes, zeros beyond kBits.
struct Planes {
    u32 w[F::kField];
    float scale;

    DEVICE void load(const Job& job, u32 block) {
#pragma unroll
        for (int i = 0; i < F::kField; ++i) {
            w[i] = 0;
        }
        scale = 0.0f;
        if (block >= job.blocks) {
            return;
        }
        load_words<kBits>(w, job.packed + i64(block) * kBits);
        scale = load_scale(job, block);
    }
};

DEVICE void store(const Job& job, u32 tile, u32 area, int lane) {
    const u32 first = tile * 32;
    if (job.contiguous) {
        u8* to = job.out + i64(first) * (kBlock * D::kBytes) + lane * 16;
#pragma unroll
        for (int i = 0; i < D::kPieces; ++i) {
            const int block = i * (32 / D::kPieces) + lane / D::kPieces;
            const uint4 v = load_shared4(area + D::at(block, lane % D::kPieces));
            if (first + block < job.blocks) {
                store16(to + i * 512, v);
            }
        }
        return;
    }
    i64 row = first / job.row_blocks, column = i64(first % job.row_blocks) * kBlock;
#pragma unroll 4
    for (int block = 0; block < 32; ++block) {
        if (first + block < job.blocks && column + lane < job.columns) {
            store_global<D::kBytes>(job.out + (row * job.columns + column + lane) * D::kBytes,
                                    load_shared_element<D::kBytes>(area + D::at_element(block, lane)));
        }
        column += kBlock;
        if (column >= job.columns) {
            column = 0;
            ++row;
        }
    }
}

// Elements FIRST.. of a block, one 16-byte piece after the other, into the staging area.
template <int PIECE>
DEVICE void decode(const Levels<kBits>& levels, const Planes& p, float factor, u32 area, int lane) {
    if constexpr (PIECE < D::kPieces) {
        float v[D::kPerPiece];
#pragma unroll
        for (int i = 0; i < D::kPerPiece; ++i) {
            const int element = PIECE * D::kPerPiece + i;
            const float level = levels.at(p.w[element % F::kField], element / F::kField * F::kField);
            v[i] = __fmul_rn(__fmul_rn(level, p.scale), factor);
        }
        store_shared4(area + D::at(lane, PIECE), D::piece(v));
        decode<PIECE + 1>(levels, p, factor, area, lane);
    }
}

DEVICE void dequantize_matrix(const Job& job, const Levels<kBits>& levels, float factor, u32 area) {
    const int lane = threadIdx.x % 32;
    const u32 tiles = (job.blocks + 31) / 32, stride = gridDim.x * kWarps;
    u32 tile = blockIdx.x * kWarps + threadIdx.x / 32;
    Planes next;
    next.load(job, tile < tiles ? tile * 32 + lane : job.blocks);
    for (; tile < tiles; tile += stride) {
        Planes now = next;
        next.load(job, tile + stride < tiles ? (tile + stride) * 32 + lane : job.blocks);
        F::transpose(now.w);
        __syncwarp();  // the area's last contents are stored
        decode<0>(levels, now, factor, area, lane);
        __syncwarp();
        store(job, tile, area, lane);
    }
}

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    dequantize(const u32* packed, const u8* absmax, const float* codebook, const float* scale, const i64* ids,
               u8* out, i64 matrices, i64 sources, i64 rows, i64 columns, int absmax_format, int contiguous) {
    __shared__ alignas(128) u8 table[Levels<kBits>::kBytes];
    __shared__ alignas(128) u8 staging[kWarps * D::kWarpBytes];
    const Levels<kBits> levels = Levels<kBits>::build<Config::dtype>(table, codebook);
    Job job;
    job.columns = columns;
    job.row_blocks = u32((columns + kBlock - 1) / kBlock);
    job.blocks = u32(rows) * job.row_blocks;
    job.absmax_format = absmax_format;
    job.contiguous = contiguous != 0;
    const u32 area = shared_address(staging) + threadIdx.x / 32 * D::kWarpBytes;
    const int scale_bytes = absmax_format == 0 ? 1 : absmax_format == 1 ? 2 : 4;
    for (i64 m = blockIdx.y; m < matrices; m += gridDim.y) {
        const i64 source = ids != nullptr ? ids[m] : m;
        if (source < 0 || source >= sources) {
            __trap();
        }
        job.packed = packed + source * job.blocks * kBits;
        job.absmax = absmax + source * job.blocks * scale_bytes;
        job.out = out + m * rows * columns * D::kBytes;
        dequantize_matrix(job, levels, ids != nullptr ? scale[0] : scale[m], area);
    }
}
