// Finds the block that finishes last.

#pragma once

// Called by all threads of `num` blocks: true in all threads of the block that calls last. That
// block sees everything that the other blocks wrote before their calls. `ticket` is 0 before the
// first call, and the last one resets it to 0.
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
    // The next call overwrites `last`.
    __syncthreads();
    return mine;
}

// The same for all blocks of the grid.
__device__ __forceinline__ bool tw_comes_last(u32* ticket) {
    return tw_last_of(ticket, gridDim.x);
}

