// Thin wrappers of copies by tensor maps (TMA, sm_90 and newer). Coordinates count from the
// innermost dimension on; what a box reaches beyond the tensor reads as zeros and is not written.
// Tiles in shared memory begin at multiples of 128 bytes, swizzled ones at multiples of 1024. No
// includes: fixed-width types are defined here.

#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// A CUtensorMap: a parameter of the kernel, `const __grid_constant__ TwTensorMap`.
struct alignas(64) TwTensorMap {
    u64 words[16];
};

__device__ __forceinline__ void tensor_prefetch(const TwTensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Makes a map that lies in global memory, and was written before the kernel, known to this thread:
// before its first copy by it. Maps that are parameters need none.
__device__ __forceinline__ void tensor_acquire(const TwTensorMap* map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}

// Loads the box at (x, y, z) into shared memory; its bytes are counted at `bar`.
__device__ __forceinline__ void tensor_load_3d(void* shared, const TwTensorMap* map, u64* bar, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
            (u32)__cvta_generic_to_shared(shared)),
        "l"(map), "r"((u32)__cvta_generic_to_shared(bar)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// The same into the shared memory of every block of the cluster whose bit is set in `blocks`, at
// the same place; the bytes are counted at each one's barrier.
__device__ __forceinline__ void tensor_load_3d_multicast(void* shared, const TwTensorMap* map, u64* bar, int x, int y, int z, u32 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(
            (u32)__cvta_generic_to_shared(shared)),
        "l"(map), "r"((u32)__cvta_generic_to_shared(bar)), "r"(x), "r"(y), "r"(z), "h"((u16)blocks)
        : "memory");
}

__device__ __forceinline__ void tensor_load_4d(void* shared, const TwTensorMap* map, u64* bar, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
            (u32)__cvta_generic_to_shared(shared)),
        "l"(map), "r"((u32)__cvta_generic_to_shared(bar)), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

__device__ __forceinline__ void tensor_load_4d_multicast(void* shared, const TwTensorMap* map, u64* bar, int x, int y, int z, int w, u32 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(
            (u32)__cvta_generic_to_shared(shared)),
        "l"(map), "r"((u32)__cvta_generic_to_shared(bar)), "r"(x), "r"(y), "r"(z), "r"(w), "h"((u16)blocks)
        : "memory");
}

// Stores a box from shared memory; belongs to the thread's open group of bulk copies.
__device__ __forceinline__ void tensor_store_3d(const TwTensorMap* map, const void* shared, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"((u32)__cvta_generic_to_shared(shared)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

__device__ __forceinline__ void tensor_store_4d(const TwTensorMap* map, const void* shared, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"((u32)__cvta_generic_to_shared(shared)), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

// Adds a box of shared memory to the tensor, element by element: in no order among stores of
// others.
__device__ __forceinline__ void tensor_reduce_add_3d(const TwTensorMap* map, const void* shared, int x, int y, int z) {
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"((u32)__cvta_generic_to_shared(shared)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

__device__ __forceinline__ void tensor_reduce_add_4d(const TwTensorMap* map, const void* shared, int x, int y, int z, int w) {
    asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"((u32)__cvta_generic_to_shared(shared)), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}
