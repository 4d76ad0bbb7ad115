// Thin wrappers of named barriers, which synchronise some of a block's warps. Barrier 0 is
// __syncthreads. No includes: fixed-width types are defined here.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Arrives at barrier `id` (1 to 15), for which `threads` threads (whole warps) are expected, and
// does not wait. Threads that wait at the barrier see what this thread wrote before.
__device__ __forceinline__ void bar_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives, and waits until all `threads` have arrived.
__device__ __forceinline__ void bar_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Returns `x`, hidden from the optimiser: values computed from it in a loop are computed again in
// each iteration instead of occupying registers throughout.
__device__ __forceinline__ u32 opaque(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}
