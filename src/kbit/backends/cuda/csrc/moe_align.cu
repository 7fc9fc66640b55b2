// Rows sorted by expert: a stable counting sort of expert ids, without atomics, so that equal ids give equal
// bits. Ids outside 0 .. experts - 1 are key `experts` and come last.
//
//   ids      [n], int64 with Config::wide, else int32; n = tokens * choices
//   source   int32 [n]: the token (place / choices) of each sorted slot
//   bounds   int32 [experts + 1]: where each key begins; the last is the number of ids in range
//   inverse  int32 [n]: the slot of each place
//   counts   int32 [blocks, experts + 1], between the two launches of many ids; null in a single one
//
// The first `sorters` warps of a block own consecutive ranges of places and a row of the table each. They
// count 32 places at a time: match.any finds equal keys, their first lane adds. Then every key's column is
// replaced by the slots at which the warps' runs begin, and the warps go over their places again, now
// placing. Up to MAX_ALONE ids (routing.py) one block does all in one launch. Beyond, a first launch counts
// per block and a second one adds up the blocks before it, which at 128 blocks and 512 experts reads 34 MB of
// L2.
//
// grid: x blocks of `per_block` places. Shared memory: (sorters * (experts + 1) + 32) words.
#include "common.cuh"
#include "config.h"
#include "warp_scan.cuh"

constexpr u32 kNone = ~0u;
enum Phase { kWhole, kCount, kPlace };

DEVICE u32 key_of(const void* ids, int at, int end, int experts) {
    if (at >= end) {
        return kNone;
    }
    const long long id =
        Config::wide ? static_cast<const long long*>(ids)[at] : static_cast<const int*>(ids)[at];
    return id >= 0 && id < experts ? u32(id) : u32(experts);
}

// Sum of the values of the threads before this one; `all` becomes that of all threads. `sums`: 32 words.
DEVICE u32 sum_before(u32 value, u32* sums, u32& all) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 inclusive = sum_up_to(value, lane);
    __syncthreads();  // the sums of the round before have been read
    if (lane == 31) {
        sums[warp] = inclusive;
    }
    __syncthreads();
    u32 before = inclusive - value;
    all = 0;
    for (int w = 0; w < int(blockDim.x >> 5); ++w) {
        before += w < warp ? sums[w] : 0;
        all += sums[w];
    }
    return before;
}

// Where the runs of every key begin, instead of how long they are.
DEVICE void begin_runs(u32* table, u32* sums, const u32* counts, u32* bounds, int keys, int sorters) {
    u32 carry = 0;
    for (int first = 0; first < keys; first += blockDim.x) {
        const int key = first + threadIdx.x;
        u32 total = 0, before = 0, all;
        if (key < keys && counts == nullptr) {
            for (int w = 0; w < sorters; ++w) {
                total += table[w * keys + key];
            }
        } else if (key < keys) {
#pragma unroll 8
            for (int block = 0; block < int(gridDim.x); ++block) {
                const u32 count = counts[block * keys + key];
                before += block < int(blockIdx.x) ? count : 0;
                total += count;
            }
        }
        const u32 begin = carry + sum_before(total, sums, all);
        carry += all;
        if (key < keys) {
            if (blockIdx.x == 0) {
                bounds[key] = begin;
            }
            u32 slot = begin + before;
            for (int w = 0; w < sorters; ++w) {
                const u32 count = table[w * keys + key];
                table[w * keys + key] = slot;
                slot += count;
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    moe_align(const void* ids, u32* source, u32* bounds, u32* inverse, u32* counts, int n, int choices,
              int experts, int sorters, int per_block, int phase) {
    extern __shared__ u32 table[];
    const int keys = experts + 1, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32* const sums = table + sorters * keys;
    u32* const row = table + warp * keys;
    launch_early();
    for (int i = threadIdx.x; i < sorters * keys; i += blockDim.x) {
        table[i] = 0;
    }
    const int block_end = min(n, int(blockIdx.x + 1) * per_block);
    const int span = (per_block + 32 * sorters - 1) / (32 * sorters) * 32;
    const int begin = int(blockIdx.x) * per_block + warp * span;
    const int end = warp < sorters ? min(begin + span, block_end) : begin;
    __syncthreads();
    wait_for_previous();
    launch_late();
    for (int first = begin; first < end; first += 32) {
        const u32 key = key_of(ids, first + lane, end, experts), equal = __match_any_sync(~0u, key);
        if (key != kNone && lane == __ffs(equal) - 1) {
            row[key] += __popc(equal);
        }
        __syncwarp();
    }
    __syncthreads();
    if (phase == kCount) {
        for (int key = threadIdx.x; key < keys; key += blockDim.x) {
            u32 total = 0;
            for (int w = 0; w < sorters; ++w) {
                total += table[w * keys + key];
            }
            counts[blockIdx.x * keys + key] = total;
        }
        return;
    }
    begin_runs(table, sums, phase == kWhole ? nullptr : counts, bounds, keys, sorters);
    __syncthreads();
    for (int first = begin; first < end; first += 32) {
        const int at = first + lane;
        const u32 key = key_of(ids, at, end, experts), equal = __match_any_sync(~0u, key);
        const u32 run = key != kNone ? row[key] : 0;
        __syncwarp();  // all have read before the first lane moves on
        if (key != kNone) {
            const u32 slot = run + __popc(equal & ((1u << lane) - 1));
            if (lane == __ffs(equal) - 1) {
                row[key] = run + __popc(equal);
            }
            inverse[at] = slot;
            source[slot] = u32(at) / u32(choices);
        }
        __syncwarp();
    }
}
