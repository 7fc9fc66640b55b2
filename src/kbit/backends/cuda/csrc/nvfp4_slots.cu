// slots[inverse[i]] = i: from where each choice stands to which choice stands there.
//
//   inverse  int32 [count], a permutation; slots int32 [count]
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) nvfp4_slots(const int* inverse, int* slots, int count) {
    follow_previous(inverse);
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < u32(count); i += gridDim.x * blockDim.x) {
        slots[inverse[i]] = int(i);
    }
}
