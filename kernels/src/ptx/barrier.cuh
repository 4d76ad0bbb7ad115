// Thin wrappers of named barriers: meetings of some of a block's warps. Barrier 0 is __syncthreads.
// No includes: fixed-width names are made here.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Comes to barrier `id` (1 to 15) of `threads` threads, whole warps, and does not wait. What it
// wrote before is seen by those that wait.
__device__ __forceinline__ void bar_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, and waits until all have arrived.
__device__ __forceinline__ void bar_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// `x`, of which the compiler knows nothing: what is made of it in a loop is made in each round,
// instead of taking registers all the time.
__device__ __forceinline__ u32 opaque(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}
