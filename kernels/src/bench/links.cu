// What a link can do: the kernels of `tilewire bench links`. They move bytes and keep no order
// beyond their own end: the host waits for all of them before it looks.

// Bulk copies in flight of a block.
constexpr int TW_STAGES = 8;

extern __shared__ __align__(128) unsigned char tw_smem[];

// The bytes at `src` to the ranks behind `me`, chunk by chunk in turn: `num` of them, 0 for `dst`
// itself. Rank r's memory begins at dst + r * stride.
struct TwBulk {
    u64 dst, stride, src, bytes;
    u32 chunk, me, size, num;
};

extern "C" __global__ void tw_link_store(u64 dst, u64 src, u64 n) {
    u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) ((uint4*)dst)[i] = ((const uint4*)src)[i];
}

extern "C" __global__ void tw_link_load(u64 dst, u64 src, u64 n) {
    uint4* to = (uint4*)dst;
    const uint4* from = (const uint4*)src;
    u64 step = (u64)gridDim.x * blockDim.x;
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    // Four loads in flight: a load from a peer takes a microsecond.
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
        to[i] = a;
        to[i + step] = b;
        to[i + 2 * step] = c;
        to[i + 3 * step] = d;
    }
    for (; i < n; i += step) to[i] = from[i];
}

__device__ __forceinline__ void tw_bulk_fetch(const TwBulk& p, u64* full, u64 k) {
    u64 c = blockIdx.x + k * gridDim.x;
    int s = k % TW_STAGES;
    mbarrier_arrive_expect_tx(full + s, p.chunk);
    bulk_load(tw_smem + s * p.chunk, (const void*)(p.src + c * p.chunk), p.chunk, full + s);
}

// One thread issues everything: half of the stages are being loaded, half are being stored.
extern "C" __global__ void __launch_bounds__(32) tw_link_bulk(TwBulk p) {
    __shared__ __align__(8) u64 full[TW_STAGES];
    if (threadIdx.x != 0) return;
    for (int s = 0; s < TW_STAGES; s++) mbarrier_init(full + s, 1);
    fence_mbarrier_init_release_cluster();
    u64 chunks = p.bytes / p.chunk;
    u64 mine = blockIdx.x < chunks ? (chunks - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
    for (u64 k = 0; k < TW_STAGES / 2 && k < mine; k++) tw_bulk_fetch(p, full, k);
    for (u64 k = 0; k < mine; k++) {
        int s = k % TW_STAGES;
        // The bytes of our own loads: they always come.
        while (!mbarrier_try_wait_parity(full + s, k / TW_STAGES & 1)) {
        }
        u64 c = blockIdx.x + k * gridDim.x;
        u64 to = p.num == 0 ? p.dst : p.dst + (p.me + 1 + c % p.num) % p.size * p.stride;
        bulk_store((void*)(to + c * p.chunk), tw_smem + s * p.chunk, p.chunk);
        bulk_commit_group();
        // All but the latest half have left their stages: the next load may take the oldest.
        bulk_wait_group_read<TW_STAGES / 2 - 1>();
        if (k + TW_STAGES / 2 < mine) tw_bulk_fetch(p, full, k + TW_STAGES / 2);
    }
    bulk_wait_group<0>();
}

// `n` times there and back; the nanoseconds that it took, or 0 if the peer did not answer. The words
// must be zero. It gives up 2 s after it has begun.
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

extern "C" __global__ void __launch_bounds__(64) tw_link_empty() {}

// Ends `ns` after it has begun: what is queued behind it meanwhile begins at once then. `out` takes the nanoseconds.
extern "C" __global__ void __launch_bounds__(1) tw_link_delay(u64* out, u64 ns) {
    const u64 start = globaltimer();
    while (globaltimer() - start < ns) {
    }
    *out = globaltimer() - start;
}
