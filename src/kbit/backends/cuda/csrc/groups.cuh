// Which rows of x meet which weight: rows sorted by expert, offsets[e] .. offsets[e + 1] being those of e.
//
// A block takes a share of the work that follows from the offsets alone: nothing is read on the host, and
// sums keep their order.
#pragma once

#include "common.cuh"
#include "warp_scan.cuh"

// Offsets as they come, made harmless: within the rows there are. Not by __ldg, as nothing that the kernel
// before may write: the compiler moves such loads up, beyond wait_for_previous.
DEVICE int row_offset(const int* offsets, int expert, int rows) {
    const int at = offsets[expert];
    return at < 0 ? 0 : at < rows ? at : rows;
}

// The offsets of experts from one on: a warp loads the next 30, and the first and the last of all, at once.
// Where all blocks want the same ones, four loads of each thread took 0.1 us longer.
struct Offsets {
    static constexpr int kNext = 30;
    const int* offsets;
    int from, rows, mine;

    // All lanes of a warp, as everywhere here.
    DEVICE Offsets(const int* offsets_, int from_, int experts, int rows_, int lane)
        : offsets(offsets_),
          from(from_),
          rows(rows_),
          mine(row_offset(offsets_,
                          lane < kNext    ? min(from_ + lane, experts)
                          : lane == kNext ? 0
                                          : experts,
                          rows_)) {}
    DEVICE int of(int expert) const {
        return expert - from < kNext ? __shfl_sync(~0u, mine, expert - from)
                                     : row_offset(offsets, expert, rows);
    }
    DEVICE int first() const { return __shfl_sync(~0u, mine, kNext); }
    DEVICE int last() const { return __shfl_sync(~0u, mine, kNext + 1); }
};

// Which row of x a sorted row is: `source` says, or is null, and x is sorted. Harmless, too.
DEVICE int row_of_x(const int* source, int row, int x_rows) {
    return source ? max(0, min(source[row], x_rows - 1)) : row;
}

// n / divisor for 0 <= n with a quotient below 2^21, by a reciprocal that is there before n is.
struct Divider {
    int divisor;
    float inverse;

    DEVICE Divider(int by) : divisor(by), inverse(__fdividef(1.0f, float(by))) {}
    DEVICE int operator()(int n) const {
        const int q = int(float(n) * inverse), rest = n - q * divisor;
        return rest < 0 ? q - 1 : rest >= divisor ? q + 1 : q;
    }
};

// Rows that experts own.
struct Owned {
    int first, count;

    DEVICE Owned(int first_, int end) : first(first_), count(max(0, end - first_)) {}
    // The others' y becomes zero; by thread `thread` of `threads` of a block.
    DEVICE void clear_others(u16* y, int rows, int width, int thread, int threads) const {
        for (int row = blockIdx.x; row < rows - count; row += gridDim.x) {
            u16* const to = y + u64(row < first ? row : row + count) * width;
            for (int i = thread; i < width; i += threads) {
                to[i] = 0;
            }
        }
    }
};

// Pieces of so many tokens that rows are cut in, known when compiled or a power of two.
template <int TOKENS>
struct Pieces {
    DEVICE int operator()(int first, int end) const {
        return end > first ? (end - first + TOKENS - 1) / TOKENS : 0;
    }
};
struct PowerPieces {
    int log;
    DEVICE int operator()(int first, int end) const {
        return end > first ? (end - first + (1 << log) - 1) >> log : 0;
    }
};

// The experts of a thread, for all threads of a block to have a part: thread t has t and, of many, those
// every WARPS * 32 from there on. Their rows are cut in pieces of as many tokens as a kernel takes at once.
//
// A block loads every offset once: all blocks want the same few cache lines at the same time, and with a
// thread's neighbours, the first and the last one loaded by every thread they took 1000 clocks.
template <int WARPS, int EXPERTS>
struct Groups {
    static constexpr int kThreads = WARPS * 32;
    static constexpr int kShare = EXPERTS ? (EXPERTS + kThreads - 1) / kThreads : 1;  // 0: not used
    // In scratch: pieces of chunks of 32 experts; the first row of an expert, and that behind the last. After
    // write_list: pieces in front of each chunk.
    static constexpr int kChunks = 32, kOwnedAt = kChunks * 4, kBeforeAt = kOwnedAt + 16;
    static constexpr int kScratchBytes = kBeforeAt + kChunks * 4;
    static_assert(EXPERTS <= 32 * kChunks);

    int row[kShare], end[kShare];  // of each expert
    int before[kShare];            // pieces in front of it
    int all_pieces;

    static DEVICE int expert(int i) { return threadIdx.x + i * kThreads; }
    // scratch: a shared address; pieces: Pieces or PowerPieces. Has one block barrier.
    template <class PIECES>
    DEVICE void find(u32 scratch, const int* offsets, int experts, int rows, PIECES pieces) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
        for (int i = 0; i < kShare; ++i) {  // all on their way at once
            row[i] = end[i] = 0;
            if (i * kThreads < experts) {
                row[i] = row_offset(offsets, min(expert(i), experts), rows);
                end[i] = lane == 31 ? row_offset(offsets, min(expert(i) + 1, experts), rows) : 0;
            }
        }
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            const int chunk = i * WARPS + warp;
            int sum = 0;
            if (i * kThreads < experts) {
                const int next = __shfl_down_sync(~0u, row[i], 1);
                end[i] = lane == 31 ? end[i] : next;
                const int mine = pieces(row[i], end[i]);
                sum = sum_up_to(mine, lane);
                before[i] = sum - mine;
            }
            if (lane == 31 && chunk < kChunks) {
                put_shared(scratch + chunk * 4, sum);
            }
            if (expert(i) == 0) {
                put_shared(scratch + kOwnedAt, row[i]);
            }
            if (expert(i) == experts - 1) {
                put_shared(scratch + kOwnedAt + 4, end[i]);
            }
        }
        __syncthreads();
        const int sum = load_shared(scratch + lane * 4);
        all_pieces = __reduce_add_sync(~0u, sum);
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            before[i] += __reduce_add_sync(~0u, lane < i * WARPS + warp ? sum : 0);
        }
    }
    // After `find`.
    static DEVICE Owned owned(u32 scratch) {
        return Owned(load_shared(scratch + kOwnedAt), load_shared(scratch + kOwnedAt + 4));
    }
};

// The first rows of experts, and the row behind the last one's, in shared memory: PER_ROW of them every
// ROW_BYTES. With each expert's pieces, too, it would take 8 KB more: a step in flight.
template <int PER_ROW, int ROW_BYTES>
struct GroupList {
    u8* firsts;
    u32 before;  // shared address: pieces in front of each 32 experts

    DEVICE int& first(int expert) const {
        return *reinterpret_cast<int*>(firsts + expert / PER_ROW * ROW_BYTES + expert % PER_ROW * 4);
    }
};

// All threads write the list; ends with a block barrier.
template <class LIST, int WARPS, int EXPERTS>
DEVICE void write_list(LIST list, const Groups<WARPS, EXPERTS>& groups, int experts) {
#pragma unroll
    for (int i = 0; i < groups.kShare; ++i) {
        const int expert = groups.expert(i);
        if (expert < experts) {
            list.first(expert) = groups.row[i];
            if (expert % 32 == 0) {
                put_shared(list.before + expert / 32 * 4, groups.before[i]);
            }
            if (expert == experts - 1) {
                list.first(experts) = groups.end[i];
            }
        }
    }
    __syncthreads();
}

struct Group {
    int expert, first, end;  // its rows
    int before;              // pieces of the experts in front of it
};

// Whose piece `piece` is, which must exist. All lanes of a warp, which look at 32 experts at once: halving a
// list of pieces, of 128 experts, took 1050 clocks on an H100, a quarter of a tile of 128 rows, 512 columns
// and 16 tokens.
template <class LIST, class PIECES>
DEVICE Group find_group(LIST list, int experts, int piece, PIECES pieces) {
    const int lane = threadIdx.x & 31, before = lane * 32 < experts ? load_shared(list.before + lane * 4) : 0;
    const int chunk = __popc(__ballot_sync(~0u, lane * 32 < experts && before <= piece)) - 1;
    const int expert = min(chunk * 32 + lane, experts), first = list.first(expert);
    const int end = list.first(min(expert + 1, experts)), mine = pieces(first, end);
    const int sum = sum_up_to(mine, lane) + __shfl_sync(~0u, before, chunk);
    const int at = __popc(__ballot_sync(~0u, sum <= piece));  // how many end in front of it
    return {chunk * 32 + at, __shfl_sync(~0u, first, at), __shfl_sync(~0u, end, at),
            __shfl_sync(~0u, sum - mine, at)};
}
