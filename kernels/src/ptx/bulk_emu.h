// The wrappers of bulk.cuh for the emulator (kernels/emu). The declarations are the same; a test
// compares them. A copy is done when it is issued: what completes late on a device is early here.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

inline void emu_bulk(const void* a, const void* b, u32 bytes) {
    if ((u64)a % 16 != 0 || (u64)b % 16 != 0 || bytes % 16 != 0) emu_fail("a bulk copy not in units of 16 bytes");
}

// In a barrier's word: arrivals of a phase, those that are missing, its parity, bytes that are missing.
inline void emu_barrier(u64* bar, u64 arrivals, i64 bytes) {
    if (*bar == 0) emu_fail("a barrier that was not made");
    u64 count = *bar & 0xff, missing = (*bar >> 8 & 0xff) - arrivals, parity = *bar >> 16 & 1;
    i64 tx = ((i64)*bar >> 17) + bytes;
    if (missing == 0 && tx == 0) missing = count, parity ^= 1;
    *bar = (u64)tx << 17 | parity << 16 | missing << 8 | count;
}

// A barrier that completes a phase after `count` arrivals and all bytes that they announced.
__device__ __forceinline__ void mbarrier_init(u64* bar, u32 count) {
    *bar = count << 8 | count;
}

// Makes barriers known to bulk copies.
__device__ __forceinline__ void fence_mbarrier_init_release_cluster() {
}

// Arrives, and announces `bytes` that bulk loads will bring.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* bar, u32 bytes) {
    if (bytes % 16 != 0) emu_fail("bytes not in units of 16");
    emu_barrier(bar, 1, bytes);
}

// True once the phase of this parity is complete; may wait a while.
__device__ __forceinline__ bool mbarrier_try_wait_parity(u64* bar, u32 parity) {
    emu_point("mbarrier.try_wait", bar, 8);
    if (*bar == 0 || parity > 1) emu_fail("a wait for a barrier that was not made");
    return (*bar >> 16 & 1) != parity;
}

// From global to shared memory; its bytes arrive at `bar`.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, u32 bytes, u64* bar) {
    emu_bulk(shared, global, bytes);
    emu_point("bulk.load", global, 16);
    __builtin_memcpy(shared, global, bytes);
    emu_barrier(bar, 0, -(i64)bytes);
}

// From shared to global memory, of a peer too; part of the thread's open group.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, u32 bytes) {
    emu_bulk(global, shared, bytes);
    emu_point("bulk.store", global, 16);
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

// What this thread did to memory by loads, stores and signals is ordered before the bulk copies that it
// issues next.
__device__ __forceinline__ void fence_proxy_async() {
}

// The same of what it did to shared memory alone.
__device__ __forceinline__ void fence_proxy_async_shared_cta() {
}
