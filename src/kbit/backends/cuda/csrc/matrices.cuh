// 16-bit matrices in shared memory as tensor cores' operands (sm_80 on).
#pragma once

#include "common.cuh"

// Four 8 x 8 matrices, whose rows of 16 bytes lie where lanes 8 i .. 8 i + 7 say: of A's operand, rows 0 to
// 7, 8 to 15, and both again of the next 8 columns.
DEVICE void load_matrices(u32 (&v)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(row));
}
// Two, of B's operand, whose columns are rows here; lanes 0 to 15 say where.
DEVICE void load_matrices(u32 (&v)[2], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(v[0]), "=r"(v[1])
                 : "r"(row));
}
// Four, each turned over.
DEVICE void load_transposed(u32 (&v)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(row));
}
// One, as the tensor cores hold it: a lane's two neighbours in a row are two in a column afterwards.
DEVICE u32 transposed(u32 v) {
    u32 turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(v));
    return turned;
}
