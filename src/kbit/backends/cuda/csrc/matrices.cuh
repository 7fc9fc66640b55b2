// 16-bit matrices in shared memory as tensor cores' operands, and copies that bring them there (sm_80 on).
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
DEVICE void put_shared16(u32 address, u16 v) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(v) : "memory");
}

// 16 bytes on their way to shared memory, or zeros.
DEVICE void copy_or_clear(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}
// Ends a group of a thread's copies; waits until all but the last N groups are there.
DEVICE void copies_end() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N>
DEVICE void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
