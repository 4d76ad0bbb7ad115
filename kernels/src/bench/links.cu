// Kernels of `tilewire bench links`, which measure what a link can do. They move bytes and order
// nothing but their own end: the host waits for all of them before it reads.

#include "../ptx/ld_st.cuh"

// Copies n times 16 bytes by plain stores to a peer. Any grid and block.
extern "C" __global__ void tw_link_store(u64 dst, u64 src, u64 n) {
    u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) ((uint4*)dst)[i] = ((const uint4*)src)[i];
}

// Copies n times 16 bytes by plain loads from a peer. Any grid and block.
extern "C" __global__ void tw_link_load(u64 dst, u64 src, u64 n) {
    uint4* to = (uint4*)dst;
    const uint4* from = (const uint4*)src;
    u64 step = (u64)gridDim.x * blockDim.x;
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    // Four loads are in flight: a load from a peer takes a microsecond.
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
        to[i] = a;
        to[i + step] = b;
        to[i + 2 * step] = c;
        to[i + 3 * step] = d;
    }
    for (; i < n; i += step) to[i] = from[i];
}

// Sends `n` round trips between two ranks; *out receives their nanoseconds, or 0 if the peer did
// not answer within 2 s of the kernel's begin. The words must be zero. Grid: 1 thread.
extern "C" __global__ void __launch_bounds__(1) tw_link_ping(u64* mine, u64* peer, u64* out, u64 n, u32 first) {
    u64 start = globaltimer();
    *out = 0;
    for (u64 i = 1; i <= n; i++) {
        if (first) st_release_sys_u64(peer, i);
        for (u32 polls = 1; ld_acquire_sys_u64(mine) < i; polls++)
            if (polls % 64 == 0 && globaltimer() - start > 2000000000ull) return;
        if (!first) st_release_sys_u64(peer, i);
    }
    *out = globaltimer() - start;
}

// Does nothing: measures a launch.
extern "C" __global__ void __launch_bounds__(64) tw_link_empty() {}

// Runs for `ns`, so that work queued behind it meanwhile begins at once afterwards. *out receives
// the nanoseconds. Grid: 1 thread.
extern "C" __global__ void __launch_bounds__(1) tw_link_delay(u64* out, u64 ns) {
    const u64 start = globaltimer();
    while (globaltimer() - start < ns) {
    }
    *out = globaltimer() - start;
}
