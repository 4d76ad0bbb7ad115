// Measures a link with bulk copies: sm_90 and newer. Like links.cu, it orders nothing but its own
// end.

#include "../ptx/ld_st.cuh"
#include "../ptx/bulk.cuh"

// Bulk copies of a block that are in flight.
constexpr int TW_STAGES = 8;

extern __shared__ __align__(128) unsigned char tw_smem[];

// Copies `bytes` at `src`, chunk by chunk, to `num` ranks in turn from me + 1 on; with num 0 to
// `dst` itself. Rank r's memory begins at dst + r * stride.
struct TwBulk {
    u64 dst, stride, src, bytes;
    u32 chunk, me, size, num;
};

__device__ __forceinline__ void tw_bulk_fetch(const TwBulk& p, u64* full, u64 k) {
    u64 c = blockIdx.x + k * gridDim.x;
    int s = k % TW_STAGES;
    mbarrier_arrive_expect_tx(full + s, p.chunk);
    bulk_load(tw_smem + s * p.chunk, (const void*)(p.src + c * p.chunk), p.chunk, full + s);
}

// One thread issues all copies: half of the stages are being loaded, half are being stored. Any
// grid of 32 threads; dynamic shared memory: TW_STAGES * chunk bytes.
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
        // No deadline: the thread's own loads always complete.
        while (!mbarrier_try_wait_parity(full + s, k / TW_STAGES & 1)) {
        }
        u64 c = blockIdx.x + k * gridDim.x;
        u64 to = p.num == 0 ? p.dst : p.dst + (p.me + 1 + c % p.num) % p.size * p.stride;
        bulk_store((void*)(to + c * p.chunk), tw_smem + s * p.chunk, p.chunk);
        bulk_commit_group();
        // All but the latest half have been read, so the next load may overwrite the oldest stage.
        bulk_wait_group_read<TW_STAGES / 2 - 1>();
        if (k + TW_STAGES / 2 < mine) tw_bulk_fetch(p, full, k + TW_STAGES / 2);
    }
    bulk_wait_group<0>();
}
