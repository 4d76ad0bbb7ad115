// A block that comes last.

#pragma once

// True in all threads of the block that comes last of `num`; what the others did before is visible
// to it. The ticket is 0 before the first and after the last.
__device__ __forceinline__ bool tw_last_of(u32* ticket, u32 num) {
    __shared__ u32 last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(ticket, 1u) == num - 1;
        if (last) *ticket = 0;
        __threadfence();
    }
    __syncthreads();
    const bool mine = last;
    // The next call writes the word again.
    __syncthreads();
    return mine;
}

// Of a grid.
__device__ __forceinline__ bool tw_comes_last(u32* ticket) {
    return tw_last_of(ticket, gridDim.x);
}

