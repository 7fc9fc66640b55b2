// Which rows of x meet which weight: rows sorted by expert, offsets[e] .. offsets[e + 1] being those of e.
//
// A block lists the experts that have rows, so that empty ones cost nothing later, and takes a share of the
// work that follows from the offsets alone: nothing is read on the host, and sums keep their order.
#pragma once

#include "common.cuh"

// An expert with rows, which are cut in pieces of as many tokens as a kernel takes at once.
struct Group {
    int expert, first, count;
    int before;  // pieces of the experts in front of it; after the last: of all
};

struct Listed {
    int groups, pieces;
};

// Offsets as they come, made harmless: within the rows there are.
DEVICE int row_offset(const int* offsets, int expert, int rows) {
    const int at = offsets[expert];
    return at < 0 ? 0 : at < rows ? at : rows;
}

// All threads of a block list the experts with rows, in order, and an end. `list` has room for experts + 1,
// `scratch` for 64 numbers. Ends with a block barrier.
DEVICE Listed list_groups(Group* list, int* scratch, const int* offsets, int experts, int rows, int tokens) {
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, warps = blockDim.x >> 5;
    const int share = (experts + blockDim.x - 1) / blockDim.x, first = thread * share;
    const int last = first + share < experts ? first + share : experts;
    int active = 0, pieces = 0;
    for (int e = first; e < last; ++e) {
        const int count = row_offset(offsets, e + 1, rows) - row_offset(offsets, e, rows);
        active += count > 0;
        pieces += count > 0 ? (count + tokens - 1) / tokens : 0;
    }
    int active_before = active, pieces_before = pieces;  // inclusive, then exclusive
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int a = __shfl_up_sync(~0u, active_before, step), b = __shfl_up_sync(~0u, pieces_before, step);
        active_before += lane >= step ? a : 0;
        pieces_before += lane >= step ? b : 0;
    }
    if (lane == 31) {
        scratch[2 * warp] = active_before;
        scratch[2 * warp + 1] = pieces_before;
    }
    active_before -= active;
    pieces_before -= pieces;
    __syncthreads();
    Listed all = {};
    for (int w = 0; w < warps; ++w) {
        active_before += w < warp ? scratch[2 * w] : 0;
        pieces_before += w < warp ? scratch[2 * w + 1] : 0;
        all.groups += scratch[2 * w];
        all.pieces += scratch[2 * w + 1];
    }
    for (int e = first; e < last; ++e) {
        const int row = row_offset(offsets, e, rows), count = row_offset(offsets, e + 1, rows) - row;
        if (count > 0) {
            list[active_before++] = {e, row, count, pieces_before};
            pieces_before += (count + tokens - 1) / tokens;
        }
    }
    if (thread == 0) {
        list[all.groups] = {0, 0, 0, all.pieces};
    }
    __syncthreads();
    return all;
}

// Where in the list piece `piece` is, which must exist.
DEVICE int find_group(const Group* list, int groups, int piece) {
    int low = 0, high = groups;  // the answer is in low .. high - 1
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (list[middle].before <= piece) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Rows of y that no expert owns become zero.
DEVICE void clear_other_rows(u16* y, const int* offsets, int experts, int rows, int width) {
    const int first = row_offset(offsets, 0, rows), end = row_offset(offsets, experts, rows);
    const int owned = end > first ? end - first : 0;
    for (int row = blockIdx.x; row < rows - owned; row += gridDim.x) {
        u16* const to = y + u64(row < first ? row : row + owned) * width;
        for (int i = threadIdx.x; i < width; i += blockDim.x) {
            to[i] = 0;
        }
    }
}
