// Bulk copies as they should be, and with one mistake each, which must show.

enum {
    B_RIGHT,
    B_NO_LOAD_WAIT,
    B_NO_FENCE,
    B_NO_READ_WAIT,
    B_FLAG_WHEN_READ,
    B_SOURCE_CHANGES,
    B_UNWRITTEN,  // no mistake: written by the end of the kernel
    B_OTHERS_FENCE,
    // What is reported, whatever the seed.
    B_NO_COMMIT,
    B_NO_WAIT_AT_END,
    B_LOAD_LEFT,
    B_BARRIER_NOT_MADE,
    B_BARRIER_NOT_KNOWN,
    B_TWO_ARRIVALS,
    B_ACQUIRED,
    B_ACQUIRED_BY_LANE_5,
    B_FENCED_BY_LANE_5,  // no mistake
    B_MISALIGNED,
    B_PAST_THE_END,
    B_NOT_SHARED,
};

constexpr u32 B_WORDS = 16;  // of a piece

// By one lane: a piece on its way to the stage.
__device__ __forceinline__ void b_fetch(u32* stage, u32* src, u64* full, u32 wrong) {
    u32 elsewhere[B_WORDS];
    const u32 bytes = wrong == B_PAST_THE_END ? 8 * B_WORDS : 4 * B_WORDS;
    mbarrier_arrive_expect_tx(full, bytes);
    if (wrong == B_TWO_ARRIVALS) mbarrier_arrive_expect_tx(full, bytes);
    bulk_load(wrong == B_NOT_SHARED ? elsewhere : stage, src + (wrong == B_MISALIGNED ? 1 : 0), bytes, full);
    if (wrong == B_SOURCE_CHANGES) src[5] = 7;
}

// By one lane: the stage on its way to a place.
__device__ __forceinline__ void b_leave(u32* dst, const u32* stage, u64* flag, u32 i, u32 wrong) {
    bulk_store(dst, stage, 4 * B_WORDS);
    if (wrong != B_NO_COMMIT) bulk_commit_group();
    if (wrong != B_NO_READ_WAIT && wrong != B_NO_WAIT_AT_END) bulk_wait_group_read<0>();
    if (flag == nullptr) return;
    if (wrong != B_FLAG_WHEN_READ) bulk_wait_group<0>();
    st_release_sys_u64(flag, i + 1);
}

// A warp takes pieces through one stage and adds 1 to each word. With a flag, each piece is told
// of.
extern "C" __global__ void p_bulk(u32* src, u32* dst, u64* flag, u64* gate, u32 n, u32 wrong) {
    __shared__ __align__(8) u64 full;
    u32* stage = (u32*)tw_smem;
    const u32 lane = threadIdx.x;
    if (lane == 0 && wrong != B_BARRIER_NOT_MADE) mbarrier_init(&full, 1);
    if (lane == 0 && wrong != B_BARRIER_NOT_KNOWN) fence_mbarrier_init_release_cluster();
    if (lane == 5) ld_acquire_sys_u64(gate);
    if (lane == 5 && wrong == B_FENCED_BY_LANE_5) fence_proxy_async();
    __syncwarp();
    if (lane == 0 && wrong == B_ACQUIRED) fence_proxy_async();
    if (lane == 0 && wrong == B_ACQUIRED) ld_acquire_sys_u64(gate);
    const bool none = wrong == B_ACQUIRED || wrong == B_ACQUIRED_BY_LANE_5 || wrong == B_FENCED_BY_LANE_5;
    if (lane == 0 && !none && wrong != B_BARRIER_NOT_KNOWN) fence_proxy_async();
    for (u32 i = 0; i < n; i++) {
        if (lane == 0) b_fetch(stage, src + B_WORDS * i, &full, wrong);
        while (wrong != B_NO_LOAD_WAIT && !mbarrier_try_wait_parity(&full, i & 1)) {
        }
        if (lane < B_WORDS) stage[lane] += 1;
        if (wrong != B_NO_FENCE && wrong != B_OTHERS_FENCE) fence_proxy_async_shared_cta();
        __syncwarp();
        if (lane == 0 && wrong == B_OTHERS_FENCE) fence_proxy_async_shared_cta();
        if (lane == 0) b_leave(dst + B_WORDS * i, stage, flag, i, wrong);
        __syncwarp();
    }
    if (lane == 0 && wrong == B_LOAD_LEFT) b_fetch(stage, src, &full, B_RIGHT);
    if (wrong == B_UNWRITTEN) bulk_wait_group_read<0>();
    else if (wrong != B_NO_WAIT_AT_END) bulk_wait_group<0>();
}

// What is there once each piece was told of.
extern "C" __global__ void p_bulk_peer(const u32* dst, const u64* flag, u32* out, u32 n) {
    for (u32 i = 0; i < n; i++) {
        while (ld_acquire_sys_u64(flag) < i + 1) {
        }
        for (u32 w = 0; w < B_WORDS; w++) out[B_WORDS * i + w] = ((const volatile u32*)dst)[B_WORDS * i + w];
    }
}
