// Where the lanes of a warp find 8 x 8 matrices in shared memory, for matrices.cuh to load four at once. Rows
// lie `pitch` bytes apart.
#pragma once

#include "common.cuh"

// Of A's operand, or, transposed, of two of B's next to each other whose rows are rows here.
DEVICE u32 by_rows(int lane, u32 pitch) {
    return lane % 16 * pitch + lane / 16 * 16;
}
// Of A's operand transposed, or of two of B's whose columns are rows here.
DEVICE u32 by_columns(int lane, u32 pitch) {
    return (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 16;
}
