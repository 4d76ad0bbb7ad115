// Dispatch by bulk copies, sm_90 and newer. The result equals tw_ep_push of sm80_ep.cu; a row is
// loaded into shared memory once and stored to each destination by one instruction. Rows, their
// addresses and strides are multiples of 16.
//
// Warp roles: PUSH warps write rows to peers, then help the LAY warps, which copy arrived rows to
// expert-major rows; one more warp zeroes rows that no token fills. Warps claim chunks from a
// global counter, so the launch ends with any number of resident blocks.

#include "../ptx/grid.cuh"
#include "../comm/stage.cuh"
#include "layer.cuh"

enum { PUSH = TW_EP_BULK_PUSH, LAY = TW_EP_BULK_LAY, PIECE = TW_EP_BULK_PIECE, ZERO = TW_EP_BULK_ZERO };
enum { BULK_WARPS = PUSH + LAY + 1, PIECES = TW_EP_BULK_PIECES };
static_assert(PIECE % 16 == 0 && ZERO % 16 == 0, "whole units");

// Pieces [PUSH + LAY][PIECES][PIECE], then ZERO bytes of 0.
extern __shared__ __align__(128) unsigned char tw_smem[];

typedef TwStage<PIECE, PIECES> Stage;

// Where the copy of this lane's choice `p` is stored: the first copy for a rank goes to the record
// of the token or, with a receive buffer, to its row; on this rank every copy that has a row goes
// to that row if rows are copied to recv.x. 0: nowhere.
__device__ __forceinline__ u64 tw_bulk_to(const TwEp& l, const TwRecv& recv, const TwPick& p, u32 token) {
    const bool mine = recv.x && p.rank == (int)l.me;
    if (p.row < 0 || (p.nth != 0 && (recv.rank_major || !mine))) return 0;
    const u64 record = (u64)l.me * l.max_tokens + token;
    if (mine || recv.buffer) return tw_recv_row(l, recv, p.rank, recv.rank_major ? record : p.row);
    return l.tokens + tw_step(l, p.rank) + record * l.row_stride;
}

// Called by a warp: moves rows of `bytes` through the warp's pieces. Row `i` of the mask `live`
// begins at from(i); each lane with row == i and a nonzero `to` stores it there. The caller has
// already issued the load of the first piece.
template <class From>
__device__ __forceinline__ void tw_bulk_rows(Stage& s, u64 bytes, u32 live, u32 row, u64 to, const From& from) {
    while (live != 0) {
        const u32 i = __ffs(live) - 1;
        live &= live - 1;
        for (u64 at = 0; at < bytes; at += PIECE) {
            const u64 left = bytes - at;
            const unsigned char* piece = tw_bulk_await(s);
            if (to && row == i) bulk_store((void*)(to + at), piece, (u32)min((u64)PIECE, left));
            tw_bulk_stored(s);
            if (left > PIECE) tw_bulk_fetch(s, from(i) + at + PIECE, left - PIECE);
            else if (live != 0) tw_bulk_fetch(s, from(__ffs(live) - 1), bytes);
        }
    }
}

// Called by a warp: pushes tokens [token, end) to the ranks of their choices.
__device__ __forceinline__ void tw_bulk_push_rows(const TwEp& l, const TwHandle& h, const TwPush& in, const TwRecv& recv,
                                             u64 epoch, u32 token, u32 end, Stage& s) {
    const u32 most = 32 / l.top_k, lane = threadIdx.x % 32;
    for (; token < end; token += most) {
        const u32 num = min(most, end - token);
        const auto from = [&](u32 i) { return in.x + (token + i) * in.row_bytes; };
        // The load of the first row overlaps the computation of its destinations.
        tw_bulk_fetch(s, from(0), in.row_bytes);
        const TwPick p = tw_push_copies(l, h, in, epoch, token, token + num);
        tw_bulk_rows(s, in.row_bytes, 0xffffffffu >> (32 - num), lane / l.top_k, tw_bulk_to(l, recv, p, token + lane / l.top_k), from);
    }
}

// Called by a warp: pushes chunk `first`, then chunks that it claims.
__device__ __forceinline__ void tw_bulk_push(const TwTeam& t, const TwEp& l, const TwMeet& m, const TwHandle& h, const TwPush& in,
                                             const TwRecv& recv, u64 epoch, u32 first, Stage& s) {
    if (!tw_granted(t, l, m, epoch) || !tw_accepted(t, l, m, recv, epoch)) return;
    // Orders the credits, acquired by loads, before the bulk stores that they permit.
    fence_proxy_async();
    for (u32 c = first; c < m.chunks; c = tw_claim(m.ticket + 2)) {
        tw_bulk_push_rows(l, h, in, recv, epoch, c * m.chunk, min((c + 1) * m.chunk, in.tokens), s);
        // The bulk stores of each lane must be complete, and ordered by its fence, before the
        // flags.
        bulk_wait_group<0>();
        fence_proxy_async();
        tw_push_flags(t, l, m, epoch, c);
    }
}

// By bulk stores from zero bytes in shared memory, the calling warp zeroes a row.
struct TwBulkZeros {
    __device__ __forceinline__ void operator()(u64 to, u64 len) const {
        const unsigned char* zeros = tw_smem + (PUSH + LAY) * PIECES * PIECE;
        for (u64 at = threadIdx.x % 32 * ZERO; at < len; at += 32 * ZERO)
            bulk_store((void*)(to + at), zeros, (u32)min((u64)ZERO, len - at));
        bulk_commit_group();
    }
};

// Called by a warp: copies records [record, record + num), at most 32 / top_k, to the rows of their
// copies, except to rows that are already in place: this rank's own, and the first copy of each
// record in a receive buffer. Lane i has copy i % top_k of record record + i / top_k.
__device__ __forceinline__ void tw_bulk_lay(const TwEp& l, const TwHandle& h, const TwRecv& out, u64 epoch, u64 record, u32 num,
                                            Stage& s) {
    const u32 full = 0xffffffffu, lane = threadIdx.x % 32, k = l.top_k, i = lane / k, n = lane % k;
    TwCopy c;
    c.row = -1, c.stamp = (u32)epoch - 1;
    if (i < num) c = ((const TwCopy*)tw_meta(l, l.me, record + i))[n];
    const bool valid = c.stamp == (u32)epoch;
    const u64 row = valid ? tw_kept_row(l, out, record + i, n, c) : 0, first = __shfl_sync(full, row, i * k % 32);
    const bool there = record / l.max_tokens == l.me || (out.buffer && (n == 0 || !first));
    const u64 to = there ? 0 : row;
    const auto from = [&](u32 r) {
        return out.buffer ? __shfl_sync(full, first, r * k) : l.tokens + tw_step(l, l.me) + (record + r) * l.row_stride;
    };
    const u32 stamped = __ballot_sync(full, valid), open = __ballot_sync(full, to != 0);
    u32 live = 0;
    for (u32 r = 0; r < num; r++) live |= (open >> r * k & 0xffffffffu >> (32 - k)) != 0 ? 1u << r : 0;
    if (live != 0) tw_bulk_fetch(s, from(__ffs(live) - 1), out.row_bytes);
    if (i < num && n == 0) tw_keep_record(h, out, record + i, __popc(stamped >> lane & 0xffffffffu >> (32 - k)));
    if (valid) tw_keep_copy(l, h, out, record + i, n, c);
    for (u32 some = out.scales ? stamped : 0; some != 0; some &= some - 1) {
        const u32 of = __ffs(some) - 1;
        tw_keep_scales(l, out, record + of / k, of % k, __shfl_sync(full, (u32)c.row, of));
    }
    // Rank-major: a record without copies has a row, too, which is zeroed.
    u32 none = __ballot_sync(full, out.rank_major && i < num && n == 0 && !valid);
    for (; none != 0; none &= none - 1) tw_empty_row(l, out, record + (__ffs(none) - 1) / k, TwBulkZeros());
    tw_bulk_rows(s, out.row_bytes, live, i, to, from);
}

// Called by a warp: claims (chunk, source) pairs, sources of a chunk in the order me + 1, me + 2,
// ..., and copies each to expert-major rows once it has arrived.
__device__ __forceinline__ void tw_bulk_receive(const TwTeam& t, const TwEp& l, const TwMeet& m, const TwHandle& h,
                                                const TwRecv& out, u64 epoch, u32 first, Stage& s) {
    if (tw_warp_is_over(t)) return;
    for (u32 j = first; j < m.chunks * l.size; j = tw_claim(m.ticket + 3)) {
        const u32 c = j / l.size, src = (l.me + 1 + j % l.size) % l.size;
        if (!tw_arrived(t, l, m, epoch, src, c)) return;
        // The flag was acquired by a load; this warp reads the rows that it announces by bulk
        // loads.
        fence_proxy_async();
        const u32 end = min((c + 1) * m.chunk, l.max_tokens), most = 32 / l.top_k;
        for (u32 token = c * m.chunk; token < end; token += most)
            tw_bulk_lay(l, h, out, epoch, (u64)src * l.max_tokens + token, min(most, end - token), s);
    }
}

// A dispatch; parameters, result and behaviour after a fault are those of tw_ep_push. Grid: any
// number of blocks. Block: BULK_WARPS warps. Dynamic shared memory: (PUSH + LAY) * PIECES * PIECE +
// ZERO bytes. The launch may begin while the kernel before it ends (griddepcontrol).
extern "C" __global__ void __launch_bounds__(BULK_WARPS * 32, 1)
tw_ep_push_bulk(const __grid_constant__ TwTeam t, const __grid_constant__ TwEp l, const __grid_constant__ TwMeet m,
                const __grid_constant__ TwHandle h, const __grid_constant__ TwPush in, const __grid_constant__ TwRecv recv,
                const __grid_constant__ TwPoison out) {
    __shared__ __align__(8) u64 barriers[PIECES * (PUSH + LAY)];
    __shared__ u32 taken[2];
    const u32 warp = threadIdx.x / 32;
    // Bulk stores read these zeros.
    for (u32 i = threadIdx.x; i < ZERO / 4; i += blockDim.x) ((u32*)(tw_smem + (PUSH + LAY) * PIECES * PIECE))[i] = 0;
    fence_proxy_async();
    griddepcontrol_wait();
    const u64 epoch = ld_relaxed_gpu_u64(m.epoch) + 1;
    tw_announce(t, l, m, recv, epoch);
    // A block claims its even share of pushes and of receives at once, at most one for each warp:
    // few tokens spread over all blocks, and warps do not start with contention on the counters.
    const u32 each[2] = {tw_ceil(m.chunks, gridDim.x), tw_ceil(m.chunks * l.size, gridDim.x)};
    const u32 share[2] = {min((u32)PUSH, each[0]), min((u32)LAY, each[1])};
    if (threadIdx.x == 0) taken[0] = atomicAdd(m.ticket + 2, share[0]), taken[1] = atomicAdd(m.ticket + 3, share[1]);
    __syncthreads();
    if (warp < PUSH + LAY) {
        Stage s = tw_stage<PIECE, PIECES>(tw_smem, barriers);
        const u32 push = warp < PUSH && warp >= share[0] ? tw_claim(m.ticket + 2) : taken[0] + warp;
        if (warp < PUSH) tw_bulk_push(t, l, m, h, in, recv, epoch, push, s);
        // PUSH warps that find no chunk left receive, too.
        const bool has = warp >= PUSH && warp - PUSH < share[1];
        tw_bulk_receive(t, l, m, h, recv, epoch, has ? taken[1] + warp - PUSH : tw_claim(m.ticket + 3), s);
    } else {
        if (!tw_warp_is_over(t)) tw_pad(l, h, recv, blockIdx.x, gridDim.x, TwBulkZeros());
    }
    // The bulk stores of each lane are complete, and no bulk copy reads shared memory any more.
    bulk_wait_group<0>();
    fence_proxy_async();
    tw_end(t, l, m, epoch, out);
}
