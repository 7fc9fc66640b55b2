// Few rows of x as NVFP4, with factors of their own or without. The bits are those of nvfp4_quantize_rows.cu
// and nvfp4_quantize.cu, which with many rows are faster: a thread of theirs quantizes 16 elements alone.
//
//   x          Config::dtype [rows, columns]; where `wide` all rows start at, and are, multiples of 16 bytes
//   row_scale  float32 [rows], written; or null: rows have no factors
//   codes      uint8 [rows, 8 * groups]; scales uint8 [rows, groups]; groups = ceil(columns / 16)
//
// Few rows leave most of a GPU idle, and what counts is how long one thread takes. So eight lanes quantize 16
// elements, of which each divides and encodes two, and five try a scale each. A block takes as many pairs of
// elements of a row as it has threads, and finds the row's factor by itself.
//
// grid: x parts of a row, y rows
#include "config.h"
#include "nvfp4.cuh"

using D = Dense<Config::dtype>;
constexpr int kLanes = kSub / 2;

// Elements 2 * pair and the next; zeros from `columns` on.
DEVICE void load_pair(float (&v)[2], const u8* row, int pair, int columns, bool wide) {
    const int first = 2 * pair;
    u32 raw[2] = {};
    if (wide && first < columns) {
        if constexpr (D::kBytes == 4) {
            const uint2 both = __ldg(reinterpret_cast<const uint2*>(row) + pair);
            raw[0] = both.x;
            raw[1] = both.y;
        } else {
            raw[0] = __ldg(reinterpret_cast<const u32*>(row) + pair);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (first + i < columns) {
                raw[i / D::kPerWord] |= load_global<D::kBytes>(row + i64(first + i) * D::kBytes)
                                        << (i % D::kPerWord * 16);
            }
        }
    }
    v[0] = D::get(raw, 0);
    v[1] = D::get(raw, 1);
}

// The largest magnitude that a thread sees in its share of a row, or NaN.
DEVICE float largest_of_elements(const u8* row, int columns) {
    float amax = 0.0f;
    for (int i = int(threadIdx.x); i < columns; i += int(blockDim.x)) {
        const u32 raw = load_global<D::kBytes>(row + i64(i) * D::kBytes);
        amax = larger(amax, fabsf(D::get(&raw, 0)));
    }
    return amax;
}
DEVICE float largest_of_pieces(const u8* row, int pieces) {
    constexpr int kAtOnce = 4;  // loads in flight
    float amax = 0.0f;
    for (int first = int(threadIdx.x); first < pieces; first += kAtOnce * int(blockDim.x)) {
        uint4 v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int piece = first + i * int(blockDim.x);
            v[i] = piece < pieces ? __ldg(reinterpret_cast<const uint4*>(row) + piece) : uint4{};
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const u32 words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
            for (int j = 0; j < D::kPerPiece; ++j) {
                amax = larger(amax, fabsf(D::get(words, j)));
            }
        }
    }
    return amax;
}

// The scale byte of 16 elements, in all of their eight lanes. `mine`: two magnitudes of each lane, of which
// lane i tries candidate i. A loop, because many multiprocessors wait for instructions that run once.
DEVICE u32 best_scale(const float (&mine)[2], u32 plain, int lane) {
    const int group = int(threadIdx.x) % 32 - lane;
    u32 chosen = candidate_scale(plain, lane), place = u32(lane);
    const float scale = decode_ue4m3(chosen), inverse = inverse_of(scale);
    float least = 0.0f;
#pragma unroll 2
    for (int i = 0; i < kLanes; ++i) {
        const float first = __shfl_sync(kAll, mine[0], group + i),
                    second = __shfl_sync(kAll, mine[1], group + i);
        least = add_error<Config::ties_even>(least, first, scale, inverse);
        least = add_error<Config::ties_even>(least, second, scale, inverse);
    }
    if (lane >= kCandidates || chosen > kLastScale) {
        least = __uint_as_float(0x7f800000u);
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
        const float error = __shfl_xor_sync(kAll, least, step);
        const u32 other = __shfl_xor_sync(kAll, chosen, step), before = __shfl_xor_sync(kAll, place, step);
        if (error < least || (error == least && before < place)) {
            least = error;
            chosen = other;
            place = before;
        }
    }
    return chosen;
}

extern "C" __global__ void __launch_bounds__(Config::threads)
    nvfp4_quantize_few(const u8* x, float* row_scale, u8* codes, u8* scales, int columns, int groups,
                       float global_scale, int search, int wide) {
    __shared__ float of_warp[Config::threads / 32];
    follow_previous(x);
    const int row = int(blockIdx.y), thread = int(threadIdx.x), threads = int(blockDim.x);
    const int pairs = groups * kLanes, lane = thread % kLanes, pair = int(blockIdx.x) * threads + thread;
    const u8* from = x + i64(row) * columns * D::kBytes;
    float mine[2];
    load_pair(mine, from, pair, columns, wide != 0);
    float own = 1.0f;
    if (row_scale != nullptr) {
        float amax =
            wide ? largest_of_pieces(from, columns / D::kPerPiece) : largest_of_elements(from, columns);
        own = row_scale_of(largest_of_block(amax, of_warp), global_scale);
        if (thread == 0 && blockIdx.x == 0) {
            row_scale[row] = own;
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (2 * pair + i < columns) {  // others are +0, whatever the row's factor
            mine[i] = global_scale == 1.0f ? mine[i] : __fdiv_rn(mine[i], global_scale);
            mine[i] = row_scale == nullptr ? mine[i] : __fdiv_rn(mine[i], own);
        }
    }
    const float magnitudes[2] = {fabsf(mine[0]), fabsf(mine[1])};
    float amax = larger(magnitudes[0], magnitudes[1]);
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
        amax = larger(amax, __shfl_xor_sync(kAll, amax, step));
    }
    const bool finite = amax < __uint_as_float(0x7f800000u);
    const u32 plain = finite ? plain_scale(amax) : 0;
    const u32 best = search ? best_scale(magnitudes, plain, lane) : plain, scale = finite ? best : 0;
    if (pair < pairs) {
        const float inverse = inverse_of(decode_ue4m3(scale));
        const u32 low = code_of<Config::ties_even>(mine[0], inverse);
        const u32 high = code_of<Config::ties_even>(mine[1], inverse);
        codes[i64(row) * pairs + pair] = finite ? u8(low | high << 4) : 0;
        if (lane == 0) {
            scales[i64(row) * groups + pair / kLanes] = u8(scale);
        }
    }
}
