// Dispatch by bulk copies, from sm_90 on: as tw_ep_send of sm80_ep.cu, with rows that go through shared memory,
// read once and stored to each place by one instruction. Rows, their addresses and strides are multiples
// of 16.
//
// Every block has SEND warps that write rows to peers and then help LAY warps, which lay out what comes, and one
// that writes rows that nobody feeds. Warps take the next chunk that nobody has taken, so the launch ends with
// any number of blocks that run at once.

enum { SEND = TW_EP_BULK_SEND, LAY = TW_EP_BULK_LAY, PIECE = TW_EP_BULK_PIECE, ZERO = TW_EP_BULK_ZERO };
enum { BULK_WARPS = SEND + LAY + 1, PIECES = TW_EP_BULK_PIECES };
static_assert(PIECE % 16 == 0 && ZERO % 16 == 0, "whole units");

// [SEND + LAY][PIECES][PIECE], then ZERO bytes that are 0.
extern __shared__ __align__(128) unsigned char tw_smem[];

typedef TwStage<PIECE, PIECES> Stage;

// Where the row of a token goes at rank `r`: to its place by number, or to the first row of its copies.
__device__ __forceinline__ u64 tw_bulk_to(const TwEp& l, const TwRecv& recv, u32 r, u32 token, u32 row) {
    if (recv.buffer) return tw_recv_row(l, recv, r, row);
    return l.tokens + r * l.stride + ((u64)l.me * l.max_tokens + token) * l.row_stride;
}

// By a warp: the rows of tokens [token, end) to the ranks that their choices name, a lane for each rank; here, if
// they are laid out, to the row of each copy, a lane for each choice.
__device__ __forceinline__ void tw_bulk_rows(const TwEp& l, const TwHandle& h, const TwSend& in, const TwRecv& recv,
                                             u64 epoch, u32 token, u32 end, Stage& s) {
    if (token < end) tw_bulk_fetch(s, in.x + token * in.row_bytes, in.row_bytes);
    for (; token < end; token++) {
        const u64 from = in.x + token * in.row_bytes;
        // The row comes while its ranks are found.
        u32 rows[2] = {0, 0};
        u64 mask = tw_send_metas(l, h, in, epoch, token, rows);
        int mine = -1;
        if (recv.x) {
            mask &= ~(1ull << l.me);
            const u64 i = (u64)token * l.top_k + threadIdx.x % 32;
            if (threadIdx.x % 32 < l.top_k && h.ranks[i] == (int)l.me) mine = h.rows[i];
        }
        for (u64 at = 0; at < in.row_bytes; at += PIECE) {
            const u64 left = in.row_bytes - at;
            const unsigned char* piece = tw_bulk_await(s);
            for (u32 r = threadIdx.x % 32; r < l.size; r += 32)
                if (mask >> r & 1)
                    bulk_store((void*)(tw_bulk_to(l, recv, r, token, rows[r / 32]) + at), piece, (u32)min((u64)PIECE, left));
            if (mine >= 0)
                bulk_store((void*)(recv.x + (u64)mine * recv.row_bytes + at), piece, (u32)min((u64)PIECE, left));
            tw_bulk_stored(s);
            if (left > PIECE) tw_bulk_fetch(s, from + at + PIECE, left - PIECE);
            else if (token + 1 < end) tw_bulk_fetch(s, from + in.row_bytes, in.row_bytes);
        }
    }
}

__device__ __forceinline__ void tw_bulk_push(const TwTeam& t, const TwEp& l, const TwMeet& m, const TwHandle& h,
                                             const TwSend& in, const TwRecv& recv, u64 epoch, Stage& s) {
    if (!tw_granted(t, l, m, epoch) || !tw_accepted(t, l, m, recv, epoch)) return;
    // The rows were read by bulk loads before they were granted, and are written by bulk stores.
    fence_proxy_async();
    for (u32 c; (c = tw_claim(m.ticket + 2)) < m.chunks;) {
        tw_bulk_rows(l, h, in, recv, epoch, c * m.chunk, min((c + 1) * m.chunk, in.tokens), s);
        // Written, and known to the lane that will say so, before the flags.
        bulk_wait_group<0>();
        fence_proxy_async();
        tw_send_flags(t, l, m, epoch, c);
    }
}

// By a warp: what the handle and the outputs keep of a record of `num` copies; a lane for each copy.
__device__ __forceinline__ void tw_bulk_meta(const TwEp& l, const TwHandle& h, const TwRecv& out, u64 record, u32 num) {
    const TwCopy* copies = (const TwCopy*)((const TwMeta*)tw_meta(l, l.me, record) + 1);
    const float* scales = (const float*)(copies + l.top_k);
    for (u32 n = threadIdx.x % 32; n < num; n += 32) {
        const TwCopy c = copies[n];
        h.copies[record * l.top_k + n] = c;
        // Rows within the capacity are all that a peer sends; another would be outside of the memory.
        if ((u32)c.row >= l.capacity) continue;
        h.source[c.row] = (int)record;
        if (out.weights) out.weights[c.row] = c.weight;
        if (out.index) out.index[c.row] = c.row;
        for (u32 i = 0; out.scales && i < l.scales; i++) out.scales[(u64)c.row * l.scales + i] = scales[i];
    }
}

// By a warp: where the payload of record first + lane is, if it has `num` copies and any of them is still to be
// laid out; else 0. In a receive buffer the first copy is in its place, and this rank's own rows always are.
__device__ __forceinline__ u64 tw_bulk_payload(const TwEp& l, const TwRecv& out, u64 record, u32 num) {
    if (!out.x || num == 0 || record / l.max_tokens == l.me) return 0;
    if (!out.buffer) return l.tokens + l.me * l.stride + record * l.row_stride;
    if (num == 1) return 0;
    const u32 row = (u32)((const TwCopy*)((const TwMeta*)tw_meta(l, l.me, record) + 1))->row;
    return row < l.capacity ? tw_recv_row(l, out, l.me, row) : 0;
}

// By a warp: records first + j, of `num` copies each (lane j has it), to the rows of their copies.
__device__ __forceinline__ void tw_bulk_records(const TwEp& l, const TwHandle& h, const TwRecv& out, u64 first, u32 num,
                                                Stage& s) {
    const u32 full = 0xffffffffu;
    const u64 payload = tw_bulk_payload(l, out, first + threadIdx.x % 32, num);
    u32 there = __ballot_sync(full, num > 0), live = __ballot_sync(full, payload != 0);
    const u64 begin = __shfl_sync(full, payload, live != 0 ? __ffs(live) - 1 : 0);
    if (live != 0) tw_bulk_fetch(s, begin, out.row_bytes);
    while (there != 0) {
        const u32 j = __ffs(there) - 1, copies = __shfl_sync(full, num, j);
        const bool lays = live >> j & 1;
        there &= there - 1;
        live &= ~(1u << j);
        const u64 from = __shfl_sync(full, payload, j), next = __shfl_sync(full, payload, live != 0 ? __ffs(live) - 1 : 0);
        tw_bulk_meta(l, h, out, first + j, copies);
        const TwCopy* list = (const TwCopy*)((const TwMeta*)tw_meta(l, l.me, first + j) + 1);
        for (u64 at = 0; lays && at < out.row_bytes; at += PIECE) {
            const u64 left = out.row_bytes - at;
            const unsigned char* piece = tw_bulk_await(s);
            for (u32 n = threadIdx.x % 32 + (out.buffer ? 1 : 0); n < copies; n += 32) {
                const u32 row = (u32)list[n].row;
                if (row < l.capacity) bulk_store((void*)(out.x + row * out.row_bytes + at), piece, (u32)min((u64)PIECE, left));
            }
            tw_bulk_stored(s);
            if (left > PIECE) tw_bulk_fetch(s, from + at + PIECE, left - PIECE);
            else if (live != 0) tw_bulk_fetch(s, next, out.row_bytes);
        }
    }
}

// What comes, chunk after chunk: of each chunk all sources, from me + 1 on.
__device__ __forceinline__ void tw_bulk_receive(const TwTeam& t, const TwEp& l, const TwMeet& m, const TwHandle& h,
                                                const TwRecv& out, u64 epoch, Stage& s) {
    const u32 lane = threadIdx.x % 32;
    if (tw_warp_is_over(t)) return;
    for (u32 i; (i = tw_claim(m.ticket + 3)) < m.chunks * l.size;) {
        const u32 c = i / l.size, src = (l.me + 1 + i % l.size) % l.size;
        if (!tw_arrived(t, l, m, epoch, src, c)) return;
        // Rows were written by a peer's bulk copies, and are read by mine.
        fence_proxy_async();
        const u32 begin = c * m.chunk, end = min(begin + m.chunk, l.max_tokens);
        for (u32 token = begin; token < end; token += 32) {
            const u64 first = (u64)src * l.max_tokens + token;
            u32 num = 0;
            if (token + lane < end) {
                const u64 word = ((const TwMeta*)tw_meta(l, l.me, first + lane))->num;
                num = (u32)(word >> 32) == (u32)epoch ? min((u32)word, l.top_k) : 0;
                h.num[first + lane] = num;
            }
            tw_bulk_records(l, h, out, first, num, s);
        }
    }
}

// Rows that nobody feeds, stored from bytes that are 0.
struct TwBulkZeros {
    const unsigned char* zeros;

    __device__ __forceinline__ void operator()(u64 to, u64 len) const {
        for (u64 at = threadIdx.x % 32 * ZERO; at < len; at += 32 * ZERO)
            bulk_store((void*)(to + at), zeros, (u32)min((u64)ZERO, len - at));
        bulk_commit_group();
    }
};

__device__ __forceinline__ void tw_bulk_pad(const TwTeam& t, const TwEp& l, const TwHandle& h, const TwRecv& out) {
    const u32 lane = threadIdx.x % 32;
    const TwBulkZeros fill = {tw_smem + (SEND + LAY) * PIECES * PIECE};
    for (u32 i = lane; i < ZERO / 4; i += 32) ((u32*)fill.zeros)[i] = 0;
    fence_proxy_async();
    __syncwarp();
    if (!tw_warp_is_over(t)) tw_pad(l, h, out, blockIdx.x, gridDim.x, fill);
}

// As tw_ep_send, with any number of blocks. Dynamic shared memory: (SEND + LAY) * PIECES * PIECE + ZERO.
extern "C" __global__ void __launch_bounds__(BULK_WARPS * 32, 1)
tw_ep_send_bulk(const __grid_constant__ TwTeam t, const __grid_constant__ TwEp l, const __grid_constant__ TwMeet m,
                const __grid_constant__ TwHandle h, const __grid_constant__ TwSend in, const __grid_constant__ TwRecv recv,
                const __grid_constant__ TwPoison out) {
    __shared__ __align__(8) u64 barriers[PIECES * (SEND + LAY)];
    const u64 epoch = ld_relaxed_gpu_u64(m.epoch) + 1;
    const u32 warp = threadIdx.x / 32;
    tw_announce(t, l, m, recv, epoch);
    if (warp < SEND + LAY) {
        Stage s = tw_stage<PIECE, PIECES>(tw_smem, barriers);
        if (warp < SEND) tw_bulk_push(t, l, m, h, in, recv, epoch, s);
        // What has sent lays out, too.
        tw_bulk_receive(t, l, m, h, recv, epoch, s);
    } else {
        tw_bulk_pad(t, l, h, recv);
    }
    // What a lane has stored is there, and no shared memory is read any more.
    bulk_wait_group<0>();
    fence_proxy_async();
    tw_end(t, l, m, epoch, out);
}
