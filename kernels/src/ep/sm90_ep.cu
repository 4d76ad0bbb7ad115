// Dispatch by bulk copies, from sm_90 on: tw_ep_send of sm80_ep.cu with rows that go through shared memory,
// read once and stored to each rank by one instruction. Rows, their addresses and strides are multiples
// of 16.

enum { SENDERS = TW_EP_BULK_WARPS, PIECE = TW_EP_BULK_PIECE };
static_assert(SENDERS * 32 <= MOVERS && PIECE % 16 == 0, "warps of a block, whole units");

extern __shared__ __align__(128) unsigned char tw_smem[];

// By lane 0 of a warp: a piece of a row, on its way to the warp's shared memory.
__device__ __forceinline__ void tw_bulk_fetch(u64 from, u64 bytes, u64* full) {
    if (threadIdx.x % 32 != 0) return;
    const u32 len = (u32)min((u64)PIECE, bytes);
    mbarrier_arrive_expect_tx(full, len);
    bulk_load(tw_smem + threadIdx.x / 32 * PIECE, (const void*)from, len, full);
}

// By a warp: a row whose first piece was fetched, piece by piece, to the ranks of `mask`, a lane for each.
// `full` is the warp's barrier and `turn` the number of its pieces so far.
__device__ __forceinline__ void tw_bulk_row(const TwEp& l, const TwSend& in, u32 token, u64 mask, u64* full, u32* turn) {
    const u64 from = in.x + token * in.row_bytes, to = l.tokens + ((u64)l.me * l.max_tokens + token) * l.row_stride;
    for (u64 at = 0; at < in.row_bytes; at += PIECE, ++*turn) {
        const u32 len = (u32)min((u64)PIECE, in.row_bytes - at);
        if (at > 0) tw_bulk_fetch(from + at, in.row_bytes - at, full);
        __syncwarp();
        // The bytes of our own load: they always come.
        while (!mbarrier_try_wait_parity(full, *turn & 1)) {
        }
        for (u32 r = threadIdx.x % 32; r < l.size; r += 32)
            if (mask >> r & 1) bulk_store((void*)(to + r * l.stride + at), tw_smem + threadIdx.x / 32 * PIECE, len);
        bulk_commit_group();
        // The next load may take the piece once all lanes' stores have read it.
        bulk_wait_group_read<0>();
        __syncwarp();
    }
}

__device__ __forceinline__ void tw_bulk_push(const TwTeam& t, const TwEp& l, const TwMeet& m, const TwHandle& h,
                                             const TwSend& in, u64 epoch) {
    __shared__ __align__(8) u64 barriers[SENDERS];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= SENDERS || !tw_granted(t, l, m, epoch)) return;
    u64* full = barriers + warp;
    if (lane == 0) {
        mbarrier_init(full, 1);
        fence_mbarrier_init_release_cluster();
    }
    __syncwarp();
    u32 turn = 0;
    for (u32 c = blockIdx.x + warp * m.senders; c < m.chunks; c += m.senders * SENDERS) {
        const u32 end = min((c + 1) * m.chunk, in.tokens);
        for (u32 token = c * m.chunk; token < end; token++) {
            // The row comes while its ranks are found.
            tw_bulk_fetch(in.x + token * in.row_bytes, in.row_bytes, full);
            const u64 mask = tw_send_metas(l, h, in, epoch, token);
            tw_bulk_row(l, in, token, mask, full, &turn);
        }
        // Written, and known to the lane that will say so, before the flags.
        bulk_wait_group<0>();
        fence_proxy_async();
        tw_send_flags(t, l, m, epoch, c);
    }
}

// As tw_ep_send. Dynamic shared memory: SENDERS * PIECE.
extern "C" __global__ void __launch_bounds__(TW_EP_MOVERS)
tw_ep_send_bulk(const __grid_constant__ TwTeam t, const __grid_constant__ TwEp l, const __grid_constant__ TwMeet m,
                const __grid_constant__ TwHandle h, const __grid_constant__ TwSend in, const __grid_constant__ TwRecv recv,
                const __grid_constant__ TwPoison out) {
    const u64 epoch = ld_relaxed_gpu_u64(m.epoch) + 1;
    if (blockIdx.x < m.senders) tw_bulk_push(t, l, m, h, in, epoch);
    else tw_receive(t, l, m, h, recv, epoch);
    tw_end(t, l, m, epoch, out);
}
