// Asynchronous copies of 16 bytes to a shared address, which the threads themselves ask for.
#pragma once

#include "common.cuh"

DEVICE void stage16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Zeros where `valid` is false.
DEVICE void stage16_if(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}
DEVICE void end_stage() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// All of this thread's stages but the last LATER ended are there.
template <int LATER = 1>
DEVICE void wait_for_stage() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}
