// Thin wrappers of bulk copies (TMA without a tensor map) and of the mbarriers in shared memory
// that they complete on: sm_90 and newer. Addresses and lengths are multiples of 16. No includes:
// fixed-width types are defined here.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Initialises a barrier whose phases complete after `count` arrivals and all bytes that these
// announce.
__device__ __forceinline__ void mbarrier_init(u64* bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(bar)), "r"(count) : "memory");
}

// Makes initialised barriers visible to bulk copies.
__device__ __forceinline__ void fence_mbarrier_init_release_cluster() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and announces `bytes` that bulk loads will deliver.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(bar)), "r"(bytes) : "memory");
}

// True once the phase of this parity is complete; may suspend the thread for a while.
__device__ __forceinline__ bool mbarrier_try_wait_parity(u64* bar, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"((u32)__cvta_generic_to_shared(bar)), "r"(parity)
        : "memory");
    return done != 0;
}

// The same, at once.
__device__ __forceinline__ bool mbarrier_test_wait_parity(u64* bar, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"((u32)__cvta_generic_to_shared(bar)), "r"(parity)
        : "memory");
    return done != 0;
}

// Copies from global to shared memory; the bytes are counted at `bar`.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, u32 bytes, u64* bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     (u32)__cvta_generic_to_shared(shared)),
                 "l"(global), "r"(bytes), "r"((u32)__cvta_generic_to_shared(bar))
                 : "memory");
}

// Copies from shared to global memory, also a peer's; belongs to the thread's open group.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"((u32)__cvta_generic_to_shared(shared)), "r"(bytes)
                 : "memory");
}

// Adds f32 of shared memory to those of global memory, each by itself; belongs to the thread's open
// group. Sums of several copies have no order, unless each is written before the next is issued.
__device__ __forceinline__ void bulk_reduce_add_f32(void* global, const void* shared, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
                 "r"((u32)__cvta_generic_to_shared(shared)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all groups of this thread except the latest N have read their shared memory.
template <int N>
__device__ __forceinline__ void bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Waits until all groups of this thread except the latest N are written.
template <int N>
__device__ __forceinline__ void bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// Brings `bytes` of global memory to L2, some time: both multiples of 16.
__device__ __forceinline__ void bulk_prefetch_l2(const void* p, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}

// Orders this thread's earlier loads, stores and signals before the bulk copies that it issues
// next.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async;" ::: "memory");
}

// The same for shared memory alone.
__device__ __forceinline__ void fence_proxy_async_shared_cta() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
