// slots[inverse[i]] = i: from where each choice stands to which choice stands there.
//
//   inverse  int32 [count], a permutation; slots int32 [count]
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) nvfp4_slots(const int* inverse, int* slots, int count) {
    follow_previous(inverse);
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) {
        slots[inverse[i]] = i;
    }
}
