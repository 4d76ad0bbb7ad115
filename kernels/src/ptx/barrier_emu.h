// The wrappers of barrier.cuh for the emulator (kernels/emu). The declarations are the same; a test
// compares them.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

__device__ __forceinline__ void bar_arrive(u32 id, u32 threads) {
    emu_barrier("bar.arrive", id, threads, false);
}

__device__ __forceinline__ void bar_sync(u32 id, u32 threads) {
    emu_barrier("bar.sync", id, threads, true);
}

__device__ __forceinline__ u32 opaque(u32 x) {
    return x;
}
