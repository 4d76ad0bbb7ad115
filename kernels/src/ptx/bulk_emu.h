// The wrappers of bulk.cuh for the emulator (kernels/emu). The declarations are the same; a test
// compares them. A copy is done when it is issued, so a barrier has nothing left to wait for.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

inline void emu_bulk(const void* a, const void* b, u32 bytes) {
    if ((u64)a % 16 != 0 || (u64)b % 16 != 0 || bytes % 16 != 0) emu_fail("a bulk copy not in units of 16 bytes");
}

// A barrier that completes a phase after `count` arrivals and all bytes that they announced.
__device__ __forceinline__ void mbarrier_init(u64* bar, u32 count) {
    *bar = count;
}

// Makes barriers known to bulk copies.
__device__ __forceinline__ void fence_mbarrier_init_release_cluster() {
}

// Arrives, and announces `bytes` that bulk loads will bring.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* bar, u32 bytes) {
    if (*bar == 0 || bytes % 16 != 0) emu_fail("an arrival at a barrier that was not made");
}

// True once the phase of this parity is complete; may wait a while.
__device__ __forceinline__ bool mbarrier_try_wait_parity(u64* bar, u32 parity) {
    return *bar != 0 && parity < 2;
}

// From global to shared memory; its bytes arrive at `bar`.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, u32 bytes, u64* bar) {
    emu_bulk(shared, global, bytes);
    if (*bar == 0) emu_fail("a bulk load with a barrier that was not made");
    __builtin_memcpy(shared, global, bytes);
}

// From shared to global memory, of a peer too; part of the thread's open group.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, u32 bytes) {
    emu_bulk(global, shared, bytes);
    __builtin_memcpy(global, shared, bytes);
}

__device__ __forceinline__ void bulk_commit_group() {
}

// Waits until all groups of this thread but the latest N have read their shared memory.
template <int N>
__device__ __forceinline__ void bulk_wait_group_read() {
}

// Waits until all groups of this thread but the latest N have been written.
template <int N>
__device__ __forceinline__ void bulk_wait_group() {
}
