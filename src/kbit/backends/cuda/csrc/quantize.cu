// packed, absmax = quantize(w): E4M4 scales and nearest codes, bit for bit as quantizers/ defines them.
//
//   byte = E4M4(amax / factor); s = decode(byte) * factor
//   code = number of midpoints below w / s, or below 0 where s is 0
//
// Config::search takes, of the bytes in a window around that one, the one with the least squared error
// (w - codebook[code] * s)^2 of the block, added by halves: i + 16, then 8, 4, 2, 1. The first of equals
// wins, the plain byte before all.
//
//   w          Config::dtype [matrices, rows, columns]; 16-byte aligned where `contiguous`
//   codebook   float32 [2^bits]; midpoints float32 [2^bits - 1]
//   packed     int32 [matrices, rows, blocks * bits], 16-byte aligned; absmax uint8 [matrices, rows, blocks]
//   scale      float32 [matrices], written by pass 1
//   nonfinite  u64 count of NaN and Inf, then per matrix two u32, as bits: largest absmax and ~(smallest
//              non-zero absmax); zeroed by the caller
//   contiguous columns is a multiple of 32, so blocks follow one another in memory
// A matrix has fewer than 2^31 blocks.
//
// Launched twice. Pass 0 quantizes with factor 1 and measures; pass 1 derives each matrix's factor and
// quantizes again only those where it is not 1. So the usual case reads w once. grid.y deals matrices, grid.x
// tiles of 32 blocks, one tile a warp and one block a lane.
//
// How the nearest level is found: nearest.cuh. 16 instructions a weight (plain, bfloat16, 4 bits, sm_90a).
//
// Shared memory: 2 * 4 warps * 1024 weights + kBuckets * 128 + codebook and midpoints.
#include "nearest.cuh"

constexpr int kWarps = 4;
// Registers: 96 to 168. ptxas aims at more blocks and spills a few words for it; on sm_90 it needs fewer.
#if __CUDA_ARCH__ == 900
constexpr int kBlocksPerSm = Config::search ? 3 : kBits % 2 ? 4 : 5;
#else
constexpr int kBlocksPerSm = Config::search ? 2 : 3;
#endif
constexpr u32 kInf = 0x7f800000u;

// Bits of the largest magnitude; NaN is larger than Inf.
DEVICE u32 largest_magnitude(const u32 (&raw)[kWords]) {
    u32 most = 0;
    if constexpr (Config::dtype == 0) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            most = max(most, raw[i] & 0x7fffffffu);
        }
        return most;
    } else {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const u32 magnitude = raw[i] & 0x7fff7fffu;
            if constexpr (Config::dtype == 1) {
                asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(most) : "r"(magnitude));
            } else {
                asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(magnitude));
            }
        }
        const u32 both[1] = {most};
        return max(__float_as_uint(D::get(both, 0)) & 0x7fffffffu,
                   __float_as_uint(D::get(both, 1)) & 0x7fffffffu);
    }
}

// The least power of two by which the largest absmax fits, if some absmax does not fit as it is.
DEVICE float factor_of(u32 largest, u32 smallest) {
    if (largest == 0 || (largest <= 0x41f80000u && smallest >= 0x3a800000u)) {  // 31 and 2^-10
        return 1.0f;
    }
    const int power = int(largest >> 23) - 131 + ((largest & 0x7fffffu) > 0x780000u);
    return __uint_as_float(u32(max(power, -126) + 127) << 23);
}

struct Job {
    const u8* w;  // of this matrix, as packed and absmax
    u32* packed;
    u8* absmax;
    i64 columns;
    u32 blocks, row_blocks;
    bool contiguous;
};

// Blocks 32 * tile .. + 31 of the matrix into a staging area; what lies outside becomes 0.
DEVICE void fetch(const Job& job, u32 tile, u32 area, int lane) {
    const u32 first = tile * 32;
    if (job.contiguous && first + 32 <= job.blocks) {
        // Blocks 16 apart are staged alike, so few of these addresses are computed in the loop.
        const u8* from = job.w + i64(first) * (kBlock * D::kBytes) + lane * 16;
#pragma unroll
        for (int i = 0; i < D::kPieces; ++i) {
            const int block = i * (32 / D::kPieces) + lane / D::kPieces;
            stage16(area + D::at(block, lane % D::kPieces), from + i * 512);
        }
    } else if (job.contiguous) {
#pragma unroll
        for (int i = 0; i < D::kPieces; ++i) {
            const int piece = i * 32 + lane, block = piece / D::kPieces;
            const bool valid = first + block < job.blocks;
            const i64 offset = valid ? i64(first) * (kBlock * D::kBytes) + piece * 16 : 0;
            stage16_if(area + D::at(block, piece % D::kPieces), job.w + offset, valid);
        }
    } else {
        i64 row = first / job.row_blocks, column = i64(first % job.row_blocks) * kBlock;
#pragma unroll 4
        for (int block = 0; block < 32; ++block) {
            const bool valid = first + block < job.blocks && column + lane < job.columns;
            const u8* from = job.w + (row * job.columns + column + lane) * D::kBytes;
            const u32 value = valid ? load_global<D::kBytes>(from) : 0;
            put_shared_element<D::kBytes>(area + D::at_element(block, lane), value);
            column += kBlock;
            if (column >= job.columns) {
                column = 0;
                ++row;
            }
        }
    }
    end_stage();
}

// The planes of 32 blocks, one block a lane; `area` is free to use.
DEVICE void write_planes(const Job& job, u32 tile, const u32 (&planes)[F::kField], u32 area, int lane) {
    u32* to = job.packed + i64(tile) * (32 * kBits);
    const int count = int(min(job.blocks - tile * 32, 32u));
    if constexpr (kBits % 2 == 0) {
        if (lane < count) {
            store_words<kBits>(to + lane * kBits, planes);
        }
    } else {  // 3 and 5 words a block are odd strides: no bank conflicts
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kBits; ++i) {
            put_shared(area + (lane * kBits + i) * 4, planes[i]);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kBits; ++i) {
            const int word = i * 32 + lane;
            if (word < count * kBits) {
                to[word] = load_shared(area + word * 4);
            }
        }
    }
}

struct Stats {
    u32 largest = 0, inverse_smallest = 0;
};

template <bool FAST>
DEVICE Stats quantize_matrix(const Job& job, const Tables& tables, float factor, u64* nonfinite, u32 area) {
    const int lane = threadIdx.x % 32;
    const u32 tiles = (job.blocks + 31) / 32, stride = gridDim.x * kWarps;
    const float inverse_factor = __uint_as_float((254u << 23) - __float_as_uint(factor));  // exact
    u32 tile = blockIdx.x * kWarps + threadIdx.x / 32;
    Nearest<FAST> nearest(tables, lane);
    Stats stats;
    if (tile < tiles) {
        fetch(job, tile, area, lane);
    }
    for (u32 turn = 0; tile < tiles; tile += stride, turn ^= D::kWarpBytes) {
        if (tile + stride < tiles) {
            fetch(job, tile + stride, area + (turn ^ D::kWarpBytes), lane);
        } else {
            end_stage();
        }
        wait_for_stage();
        __syncwarp();
        u32 raw[kWords];
#pragma unroll
        for (int i = 0; i < D::kPieces; ++i) {
            const uint4 v = load_shared4(area + turn + D::at(lane, i));
            raw[4 * i] = v.x;
            raw[4 * i + 1] = v.y;
            raw[4 * i + 2] = v.z;
            raw[4 * i + 3] = v.w;
        }
        const u32 amax = largest_magnitude(raw);
        stats.largest = max(stats.largest, amax);
        stats.inverse_smallest = max(stats.inverse_smallest, amax != 0 ? ~amax : 0);
        if (amax >= kInf && nonfinite != nullptr) {
            u32 count = 0;
#pragma unroll
            for (int i = 0; i < kBlock; ++i) {
                count += (__float_as_uint(D::get(raw, i)) & 0x7fffffffu) >= kInf;
            }
            atomicAdd(nonfinite, u64(count));
        }
        u32 byte = encode_e4m4(__fmul_rn(__uint_as_float(amax), inverse_factor));
        if constexpr (Config::search) {
            byte = nearest.search(raw, area + turn, byte, factor);
        }
        nearest.divide_by(__fmul_rn(decode_e4m4(byte), factor));
        u32 planes[F::kField];
        nearest.planes(raw, area + turn, planes);
        if (tile * 32 + lane < job.blocks) {
            job.absmax[tile * 32 + lane] = u8(byte);
        }
        write_planes(job, tile, planes, area + turn, lane);
        __syncwarp();
    }
    return stats;
}

extern "C" __global__ void __launch_bounds__(32 * kWarps, kBlocksPerSm)
    quantize(const u8* w, const float* codebook, const float* midpoints, u32* packed, u8* absmax,
             float* scale, u64* nonfinite, i64 matrices, i64 rows, i64 columns, int pass, int contiguous) {
    __shared__ Tables tables;
    __shared__ alignas(128) u8 staging[kWarps * 2 * D::kWarpBytes];
    u32* stats = reinterpret_cast<u32*>(nonfinite + 1);
    const u32 area = shared_address(staging) + threadIdx.x / 32 * 2 * D::kWarpBytes;
    bool built = false;
    Job job;
    job.columns = columns;
    job.row_blocks = u32((columns + kBlock - 1) / kBlock);
    job.blocks = u32(rows) * job.row_blocks;
    job.contiguous = contiguous != 0;
    for (i64 m = blockIdx.y; m < matrices; m += gridDim.y) {
        float factor = 1.0f;
        if (pass == 1) {
            factor = factor_of(stats[2 * m], ~stats[2 * m + 1]);
            if (blockIdx.x == 0 && threadIdx.x == 0) {
                scale[m] = factor;
            }
            if (factor == 1.0f) {
                continue;
            }
        }
        if (!built) {
            build(tables, codebook, midpoints);
            built = true;
        }
        job.w = w + m * rows * columns * D::kBytes;
        job.packed = packed + m * i64(job.blocks) * kBits;
        job.absmax = absmax + m * i64(job.blocks);
        const bool fast = tables.simple != 0 && factor >= 9.313226e-10f && factor <= 1024.0f;  // 2^-30, 2^10
        u64* const count = pass == 0 ? nonfinite : nullptr;
        const Stats s = fast ? quantize_matrix<true>(job, tables, factor, count, area)
                             : quantize_matrix<false>(job, tables, factor, count, area);
        if (pass == 0) {
            const u32 largest = __reduce_max_sync(kAll, s.largest);
            const u32 inverse = __reduce_max_sync(kAll, s.inverse_smallest);
            if (threadIdx.x % 32 == 0) {
                atomicMax(stats + 2 * m, largest);
                atomicMax(stats + 2 * m + 1, inverse);
            }
        }
    }
}
