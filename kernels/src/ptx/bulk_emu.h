// The wrappers of bulk.cuh for the emulator (kernels/emu). The declarations are the same; a test
// compares them. A copy completes some time after it was issued: emu/bulk.h.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// A barrier that completes a phase after `count` arrivals and all bytes that they announced.
__device__ __forceinline__ void mbarrier_init(u64* bar, u32 count) {
    emu_mbar_init(bar, count);
}

// Makes barriers known to bulk copies.
__device__ __forceinline__ void fence_mbarrier_init_release_cluster() {
    emu_proxy_fence(EMU_BARRIERS);
}

// Arrives, and announces `bytes` that bulk loads will bring.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* bar, u32 bytes) {
    emu_mbar_arrive(bar, bytes);
}

// True once the phase of this parity is complete; may wait a while.
__device__ __forceinline__ bool mbarrier_try_wait_parity(u64* bar, u32 parity) {
    emu_point("mbarrier.try_wait", bar, 8);
    return emu_mbar_done(bar, parity);
}

// The same, at once.
__device__ __forceinline__ bool mbarrier_test_wait_parity(u64* bar, u32 parity) {
    emu_point("mbarrier.test_wait", bar, 8);
    return emu_mbar_done(bar, parity);
}

// From global to shared memory; its bytes arrive at `bar`.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, u32 bytes, u64* bar) {
    emu_bulk_load(shared, global, bytes, bar);
}

// From shared to global memory, of a peer too; part of the thread's open group.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, u32 bytes) {
    emu_bulk_store(global, shared, bytes);
}

// Adds f32 of shared memory to those of global memory; part of the thread's open group.
__device__ __forceinline__ void bulk_reduce_add_f32(void* global, const void* shared, u32 bytes) {
    emu_bulk_reduce_add(global, shared, bytes);
}

__device__ __forceinline__ void bulk_commit_group() {
    emu_bulk_commit();
}

// Waits until all groups of this thread but the latest N have read their shared memory.
template <int N>
__device__ __forceinline__ void bulk_wait_group_read() {
    emu_bulk_wait(N, false);
}

// Waits until all groups of this thread but the latest N have been written.
template <int N>
__device__ __forceinline__ void bulk_wait_group() {
    emu_bulk_wait(N, true);
}

__device__ __forceinline__ void bulk_prefetch_l2(const void* p, u32 bytes) {
    emu_bulk_prefetch(p, bytes);
}

// What this thread did to memory by loads, stores and signals is ordered before the bulk copies
// that it issues next.
__device__ __forceinline__ void fence_proxy_async() {
    emu_proxy_fence(EMU_ALL);
}

// The same of what it did to shared memory alone.
__device__ __forceinline__ void fence_proxy_async_shared_cta() {
    emu_proxy_fence(EMU_SHARED);
}
