// packed, absmax = quantize(w): E4M4 scales and nearest codes, bit for bit as quantizers/ defines them.
//
//   byte = E4M4(amax / factor); s = decode(byte) * factor
//   code = number of midpoints below w / s, or below 0 where s is 0
//
// Config::search takes, of the bytes in a window around that one, the one with the least squared error
// (w - codebook[code] * s)^2 of the block, added by halves: i + 16, then 8, 4, 2, 1; padding counts 0. The
// first of equals wins, the plain byte before all.
//
//   w          Config::dtype [matrices, rows, columns]; 16-byte aligned where `contiguous`
//   codebook   float32 [2^bits]; midpoints float32 [2^bits - 1]
//   packed     int32 [matrices, rows, blocks * bits], 16-byte aligned; absmax uint8 [matrices, rows, blocks]
//   scale      float32 [matrices], written by pass 1
//   nonfinite  u64: NaN and Inf in w, complete after pass 1
//   stats      [matrices, slots] of four u32, 16-byte aligned: what each block of pass 0 found: as bits,
//              the largest absmax and the smallest one that is not 0, less 1; as u64, how many NaN and Inf
//   slots      gridDim.x of pass 0
//   contiguous columns is a multiple of 32, so blocks follow one another in memory
// A matrix has fewer than 2^31 blocks. Nothing needs to be initialized.
//
// Launched twice, pass 1 as a dependent. Pass 0 quantizes with factor 1 and measures; pass 1 derives each
// matrix's factor and quantizes again only those where it is not 1. So the usual case reads w once. grid.y
// deals matrices, grid.x tiles of 32 blocks, one tile a warp and one block a lane.
//
// How the nearest level is found: thresholds.cuh and, in float32, with the search or for rare codebooks and
// factors, nearest.cuh. 11 to 14 instructions a weight (2 to 5 bits, plain, 16-bit, sm_90a); 80% of an H200's
// bandwidth leaves 20. What is in flight suffices: 24 warps * 2 KB per SM.
//
// Shared memory: 2 * 4 warps * 1024 weights + kBuckets * 128 + codebook and midpoints.
#include "blocks.cuh"
#include "thresholds.cuh"

constexpr int kWarps = 4;
// Registers: 80 to 206. ptxas aims at more blocks and spills a few words for it; on sm_90 it needs fewer, but
// for the search in float16 and even widths.
#if __CUDA_ARCH__ == 900
constexpr int kSearchBlocks = Config::dtype == 1 && kBits % 2 == 0 ? 2 : 3;
constexpr int kPlainBlocks = kByThresholds ? (kBits == 5 ? 5 : 6) : kBits % 2 ? 4 : 5;
constexpr int kBlocksPerSm = Config::search ? kSearchBlocks : kPlainBlocks;
#else
constexpr int kBlocksPerSm = Config::search ? 2 : 3;
#endif
constexpr u32 kInf = 0x7f800000u;
constexpr float kLargestFactor = kByThresholds ? 1.0f : 1024.0f;  // for the fast way

template <bool BY_THRESHOLDS>
struct Fast {
    typedef Nearest<true> Coder;
};
template <>
struct Fast<true> {
    typedef Thresholds<Config::dtype == 2> Coder;
};
using FastCoder = Fast<kByThresholds>::Coder;

// All threads of the block.
DEVICE void build(Tables& tables, const float* codebook, const float* midpoints) {
    load_levels(tables, codebook, midpoints);
    if constexpr (kByThresholds) {
        Thresholds<Config::dtype == 2>::build(tables);
    } else {
        build_buckets(tables);
    }
}

// Bits of the largest magnitude; NaN is larger than Inf.
DEVICE u32 largest_magnitude(const u32 (&raw)[kWords]) {
    u32 most = raw[0];
    if constexpr (Config::dtype == 0) {
        most = 0;
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            most = max(most, raw[i] & 0x7fffffffu);
        }
        return most;
    } else {  // the extremes of both halves; a magnitude instead of two extremes is an AND more a word
        u32 least = raw[0];
#pragma unroll
        for (int i = 1; i < kWords; ++i) {
            if constexpr (Config::dtype == 1) {
                asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(most) : "r"(raw[i]));
                asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(least) : "r"(raw[i]));
            } else {
                asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(raw[i]));
                asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(least) : "r"(raw[i]));
            }
        }
        const u32 all[2] = {most, least};
        u32 magnitude = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            magnitude = max(magnitude, __float_as_uint(D::get(all, i)) & 0x7fffffffu);
        }
        return magnitude;
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

// Of blocks: their absmax as bits, the smallest one that is not 0.
struct Stats {
    u32 largest = 0, smallest = ~0u;  // smallest: less 1
    u64 nonfinite = 0;
};

DEVICE u32 count_nonfinite(const u32 (&raw)[kWords]) {
    u32 count = 0;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
        count += (__float_as_uint(D::get(raw, i)) & 0x7fffffffu) >= kInf;
    }
    return count;
}

// byte: of the largest magnitude, and the chosen one.
template <bool FAST>
DEVICE void encode(Nearest<FAST>& nearest, u32 (&raw)[kWords], u32 staged, u32, float factor, u32& byte,
                   u32 (&planes)[F::kField]) {
    if constexpr (Config::search) {
        byte = nearest.search(raw, staged, byte, factor);
    }
    nearest.divide_by(__fmul_rn(decode_e4m4(byte), factor));
    nearest.planes(raw, staged, planes);
}
template <bool BF16>
DEVICE void encode(Thresholds<BF16>& thresholds, u32 (&raw)[kWords], u32, u32 amax, float factor, u32& byte,
                   u32 (&planes)[F::kField]) {
    const float scale = __fmul_rn(decode_e4m4(byte), factor);
    thresholds.divide_by(scale, __uint_as_float(amax), __fmul_rn(32.0f, factor), raw);
    thresholds.planes(raw, planes);
}

template <class CODER>
DEVICE Stats quantize_matrix(CODER coder, const Job& job, float factor, u32 area) {
    const int lane = threadIdx.x % 32;
    const Lane own(lane);
    const u32 tiles = (job.blocks + 31) / 32, stride = gridDim.x * kWarps;
    const float inverse_factor = __uint_as_float((254u << 23) - __float_as_uint(factor));  // exact
    u32 tile = blockIdx.x * kWarps + threadIdx.x / 32;
    Stats stats;
    if (tile < tiles) {
        fetch(job, tile, area, own);
    }
    for (u32 turn = 0; tile < tiles; tile += stride, turn ^= D::kWarpBytes) {
        if (tile + stride < tiles) {
            fetch(job, tile + stride, area + (turn ^ D::kWarpBytes), own);
        } else {
            end_stage();
        }
        wait_for_stage();
        __syncwarp();
        u32 raw[kWords];
#pragma unroll
        for (int i = 0; i < D::kPieces; ++i) {
            const uint4 v = load_shared4(own.get_at(area + turn, i));
            raw[4 * i] = v.x;
            raw[4 * i + 1] = v.y;
            raw[4 * i + 2] = v.z;
            raw[4 * i + 3] = v.w;
        }
        const u32 amax = largest_magnitude(raw);
        stats.largest = max(stats.largest, amax);
        stats.smallest = min(stats.smallest, amax - 1);
        if (amax >= kInf) {
            stats.nonfinite += count_nonfinite(raw);
        }
        u32 byte = encode_e4m4(__fmul_rn(__uint_as_float(amax), inverse_factor));
        u32 planes[F::kField];
        if constexpr (Config::search) {
            coder.columns = job.columns_of(tile * 32 + lane);
        }
        encode(coder, raw, area + turn, amax, factor, byte, planes);
        if (tile * 32 + lane < job.blocks) {
            job.absmax[tile * 32 + lane] = u8(byte);
        }
        write_planes(job, tile, planes, area + turn, lane);
        __syncwarp();
    }
    return stats;
}

// ---- what blocks of threads found

struct Found {
    u32 largest, smallest;  // as in Stats
    u64 nonfinite;
};

// The sum of all threads' stats, in thread 0. All threads of the block.
DEVICE Found combined(const Stats& own, Found& shared) {
    if (threadIdx.x == 0) {
        shared = {0, ~0u, 0};
    }
    __syncthreads();
    const u32 largest = __reduce_max_sync(kAll, own.largest);
    const u32 smallest = __reduce_min_sync(kAll, own.smallest);
    if (threadIdx.x % 32 == 0) {
        atomicMax(&shared.largest, largest);
        atomicMin(&shared.smallest, smallest);
    }
    if (own.nonfinite != 0) {
        atomicAdd(&shared.nonfinite, own.nonfinite);
    }
    __syncthreads();
    return shared;
}

// Of a matrix: what the blocks of pass 0 found, for all threads of a block.
DEVICE Found found_by_all(const Found* slots, int count, Found& shared) {
    __syncthreads();  // the matrix before: all have read what it gave
    Stats own;
    for (int i = threadIdx.x; i < count; i += 32 * kWarps) {
        const Found& slot = slots[i];
        own.largest = max(own.largest, slot.largest);
        own.smallest = min(own.smallest, slot.smallest);
        own.nonfinite += slot.nonfinite;
    }
    return combined(own, shared);
}

extern "C" __global__ void __launch_bounds__(32 * kWarps, kBlocksPerSm)
    quantize(const u8* w, const float* codebook, const float* midpoints, u32* packed, u8* absmax,
             float* scale, u64* nonfinite, Found* stats, i64 matrices, i64 rows, i64 columns, int slots,
             int pass, int contiguous) {
    __shared__ Tables tables;
    __shared__ alignas(128) u8 staging[kWarps * 2 * D::kWarpBytes];
    __shared__ Found found;
    if (pass == 0) {
        launch_dependents();
        if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
            *nonfinite = 0;
        }
    } else {
        wait_for_previous();
    }
    const int lane = threadIdx.x % 32;
    const u32 area = opaque(shared_address(staging) + threadIdx.x / 32 * 2 * D::kWarpBytes);
    bool built = false;
    Job job;
    job.columns = columns;
    job.row_blocks = u32((columns + kBlock - 1) / kBlock);
    job.blocks = u32(rows) * job.row_blocks;
    job.contiguous = contiguous != 0;
    for (i64 m = blockIdx.y; m < matrices; m += gridDim.y) {
        float factor = 1.0f;
        if (pass == 1) {
            const Found all = found_by_all(stats + m * slots, slots, found);
            factor = factor_of(all.largest, all.smallest + 1);
            if (blockIdx.x == 0 && threadIdx.x == 0) {
                scale[m] = factor;
                if (all.nonfinite != 0) {
                    atomicAdd(nonfinite, all.nonfinite);
                }
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
        const bool padded = Config::search && columns % kBlock != 0;
        const bool in_range = factor >= 9.313226e-10f && factor <= kLargestFactor;  // 2^-30
        const bool fast = tables.simple != 0 && in_range && !padded;
        const Stats own = fast ? quantize_matrix(FastCoder(tables, lane), job, factor, area)
                               : quantize_matrix(Nearest<false>(tables, lane), job, factor, area);
        if (pass == 0) {
            const Found all = combined(own, found);
            if (threadIdx.x == 0) {
                stats[m * slots + blockIdx.x] = all;
            }
        }
    }
}
