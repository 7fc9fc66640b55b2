// Which rows of x meet which weight: rows sorted by expert, offsets[e] .. offsets[e + 1] being those of e.
//
// A block lists the experts that have rows, so that empty ones cost nothing later, and takes a share of the
// work that follows from the offsets alone: nothing is read on the host, and sums keep their order.
#pragma once

#include "common.cuh"

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

// Experts of a thread, for all threads of a block to have a part of the list. Their rows are cut in pieces of
// as many tokens as a kernel takes at once.
template <int WARPS, int EXPERTS>
struct Groups {
    static constexpr int kShare = (EXPERTS + WARPS * 32 - 1) / (WARPS * 32);

    int row[kShare + 1];  // where each one's begin, and the last one's end
    int active, pieces;   // experts with rows and pieces in front of this thread's
    int all_active, all_pieces;

    // tokens: of a piece, a power of two, as its logarithm.
    DEVICE int pieces_of(int i, int tokens) const {
        return row[i + 1] > row[i] ? (row[i + 1] - row[i] + (1 << tokens) - 1) >> tokens : 0;
    }

    // scratch: 2 * WARPS numbers in shared memory. Has one block barrier.
    DEVICE void find(int* scratch, const int* offsets, int experts, int rows, int tokens) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first = threadIdx.x * kShare;
#pragma unroll
        for (int i = 0; i <= kShare; ++i) {  // all on their way at once: each takes 700 clocks
            row[i] = first < experts ? row_offset(offsets, min(first + i, experts), rows) : 0;
        }
        int a = 0, b = 0;
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            a += row[i + 1] > row[i];
            b += pieces_of(i, tokens);
        }
        active = a;
        pieces = b;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int x = __shfl_up_sync(~0u, a, step), y = __shfl_up_sync(~0u, b, step);
            a += lane >= step ? x : 0;
            b += lane >= step ? y : 0;
        }
        if (lane == 31) {
            scratch[2 * warp] = a;
            scratch[2 * warp + 1] = b;
        }
        active = a - active;
        pieces = b - pieces;
        __syncthreads();
        all_active = all_pieces = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            active += w < warp ? scratch[2 * w] : 0;
            pieces += w < warp ? scratch[2 * w + 1] : 0;
            all_active += scratch[2 * w];
            all_pieces += scratch[2 * w + 1];
        }
    }
};

// An expert with rows, in a list of all those.
struct Group {
    int expert, first, end;  // its rows
    int before;              // pieces of the experts in front of it
};

// A list in shared memory, in rows of PER_ROW experts every ROW_BYTES.
template <int PER_ROW, int ROW_BYTES>
struct GroupList {
    u8* at;

    DEVICE Group& operator[](int i) const {
        return *reinterpret_cast<Group*>(at + i / PER_ROW * ROW_BYTES + i % PER_ROW * sizeof(Group));
    }
};

// All threads write the list; ends with a block barrier.
template <class LIST, int WARPS, int EXPERTS>
DEVICE void write_list(LIST list, const Groups<WARPS, EXPERTS>& groups, int tokens) {
    int at = groups.active, before = groups.pieces;
#pragma unroll
    for (int i = 0; i < groups.kShare; ++i) {
        const int pieces = groups.pieces_of(i, tokens), expert = threadIdx.x * groups.kShare + i;
        if (pieces > 0) {
            list[at++] = {expert, groups.row[i], groups.row[i + 1], before};
            before += pieces;
        }
    }
    __syncthreads();
}

// Whose piece `piece` is, which must exist.
template <class LIST>
DEVICE const Group& find_group(LIST list, int groups, int piece) {
    int low = 0, high = groups;  // the answer is in low .. high - 1
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (list[middle].before <= piece) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return list[low];
}

// Rows that experts own.
struct Owned {
    int first, count;

    DEVICE Owned(const int* offsets, int experts, int rows)
        : Owned(row_offset(offsets, 0, rows), row_offset(offsets, experts, rows)) {}
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
