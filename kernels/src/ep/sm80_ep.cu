// Expert parallelism on any device; layer.cuh defines areas, records and flags. Three kernels
// synchronise with other ranks inside: tw_ep_route, tw_ep_push and tw_ep_return. In the latter two,
// the blocks that push have the lowest numbers and wait only for credits and receive buffers of
// peers, never for data, so few resident blocks are enough, in order of block number.

#include "../ptx/grid.cuh"
#include "layer.cuh"

struct TwRouting {
    const void* idx;  // [tokens * k] i32, or i64 if `wide`; -1 is masked
    u32* blocks;      // scratch [blocks][E]: copies of each block's choices
    u32 choices, wide;
    u32 span;         // choices of a warp, a multiple of 32
    u32 bad_input;    // code that reports an index that is no expert
    u32 part, pad;    // TW_WHOLE, or half of it
};

// Parts of tw_ep_route: both; counts alone, if the host exchanges them (NCCL); placement alone,
// from counts that have been exchanged.
enum { TW_WHOLE = 0, TW_COUNTS = 1, TW_PLACES = 2 };

// Dynamic shared memory of tw_ep_route. For each expert: its next row i64, copies of all ranks,
// copies of earlier ranks, its rank (u32 each); then `warp` [warps][E] u32. `first` (static): the
// first expert of each rank.
struct TwTable {
    u32* warp;
    i64* next;
    u32 *all, *earlier, *owner, *first;
};

extern __shared__ __align__(128) unsigned char tw_smem[];

__device__ __forceinline__ TwTable tw_table(const TwEp& l) {
    __shared__ u32 first[65];
    TwTable s;
    s.first = first;
    for (u32 r = threadIdx.x; r <= l.size; r += blockDim.x) first[r] = l.first[r];
    s.next = (i64*)tw_smem;
    s.all = (u32*)(s.next + l.experts);
    s.earlier = s.all + l.experts;
    s.owner = s.earlier + l.experts;
    s.warp = s.owner + l.experts;
    return s;
}

// The expert of choice i: -1 if masked or out of range of choices, E if there is no such expert.
__device__ __forceinline__ int tw_choice(const TwEp& l, const TwRouting& a, u64 i) {
    if (i >= a.choices) return -1;
    const i64 e = a.wide ? ((const i64*)a.idx)[i] : ((const int*)a.idx)[i];
    if (e == -1) return -1;
    return e < 0 || e >= l.experts ? (int)l.experts : (int)e;
}

// The first choice of this warp.
__device__ __forceinline__ u64 tw_span(const TwRouting& a) {
    return ((u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * a.span;
}

// Counts copies of each expert: s.warp among choices of earlier warps of this block, s.all and
// a.blocks among all choices of this block. False if an index is no expert.
__device__ __forceinline__ bool tw_route_count(const TwEp& l, const TwRouting& a, const TwTable& s) {
    const u32 warps = blockDim.x / 32, lane = threadIdx.x % 32;
    for (u32 i = threadIdx.x; i < warps * l.experts; i += blockDim.x) s.warp[i] = 0;
    __syncthreads();
    u32* mine = s.warp + threadIdx.x / 32 * l.experts;
    bool bad = false;
    for (u32 n = 0; n < a.span; n += 32) {
        const int e = tw_choice(l, a, tw_span(a) + n + lane);
        bad |= e == (int)l.experts;
        const u32 same = __match_any_sync(0xffffffffu, e);
        if (e >= 0 && e < (int)l.experts && (int)lane == __ffs(same) - 1) mine[e] += __popc(same);
        __syncwarp();
    }
    if (__syncthreads_or(bad)) return false;
    for (u32 e = threadIdx.x; e < l.experts; e += blockDim.x) {
        u32 sum = 0;
        for (u32 w = 0; w < warps; w++) {
            const u32 num = s.warp[w * l.experts + e];
            s.warp[w * l.experts + e] = sum;
            sum += num;
        }
        a.blocks[(u64)blockIdx.x * l.experts + e] = sum;
        s.all[e] = sum;
    }
    return true;
}

__device__ __forceinline__ u64* tw_counts(const TwEp& l, u64 epoch, u32 rank, u32 writer) {
    return (u64*)(l.counts + tw_step(l, rank)) + ((epoch & 1) * l.size + writer) * l.experts;
}

// The last block of the grid writes this rank's counts to every rank, its own included. Two
// buffers, used in turn, suffice: a rank writes the buffer of launch n + 1 only after it has the
// counts of launch n from all ranks, so all ranks have begun launch n and read the buffer of n - 1.
// Launch number and count are one word, so a relaxed store needs no further ordering.
__device__ __forceinline__ void tw_route_publish(const TwEp& l, const TwRouting& a, const TwTable& s, u64 epoch) {
    for (u32 e = threadIdx.x; e < l.experts; e += blockDim.x) {
        u32 sum = gridDim.x == 1 ? s.all[e] : 0;
        for (u32 b = 0; gridDim.x > 1 && b < gridDim.x; b++) sum += a.blocks[(u64)b * l.experts + e];
        if (gridDim.x > 1) __threadfence();
        for (u32 i = 1; i <= l.size; i++) {
            const u32 p = (l.me + i) % l.size;
            st_relaxed_sys_u64(tw_counts(l, epoch, p, l.me) + e, epoch << 32 | sum);
        }
    }
}

// Waits for the counts of all ranks: s.all sums over all ranks, s.earlier over ranks before this
// one. False if the team has a fault.
__device__ __forceinline__ bool tw_route_collect(const TwTeam& t, const TwEp& l, const TwMeet& m, const TwTable& s, u64 epoch) {
    bool good = true;
    for (u32 e = threadIdx.x; good && e < l.experts; e += blockDim.x) {
        u32 all = 0, earlier = 0;
        for (u32 r0 = 0; good && r0 < l.size; r0 += 8) {
            u64 seen[8];
            // Eight loads are in flight; only words that are not yet of this launch are waited for.
#pragma unroll
            for (u32 i = 0; i < 8; i++)
                if (r0 + i < l.size) seen[i] = ld_relaxed_sys_u64(tw_counts(l, epoch, l.me, r0 + i) + e);
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                const u32 r = r0 + i;
                if (!good || r >= l.size) continue;
                const u64* word = tw_counts(l, epoch, l.me, r) + e;
                if (seen[i] >> 32 != (u32)epoch) {
                    const TwWait w = {TW_OP_WAIT, m.slot, r, 0, 0, epoch << 32, 0, 0, 0};
                    good = tw_await(t, word, w);
                    seen[i] = ld_relaxed_sys_u64(word);
                }
                all += (u32)seen[i];
                earlier += r < l.me ? (u32)seen[i] : 0;
            }
        }
        s.all[e] = all;
        s.earlier[e] = earlier;
    }
    // My other blocks wrote a.blocks before the last block published. Reads of it are ordered
    // behind my own rank's word.
    __threadfence();
    return !__syncthreads_or(!good);
}

// The sum of `v` over earlier threads of the block; *all is the sum over the block.
__device__ __forceinline__ i64 tw_before(i64 v, i64* all) {
    __shared__ i64 sums[32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 upto = v;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const i64 other = __shfl_up_sync(0xffffffffu, upto, by);
        if (lane >= (u32)by) upto += other;
    }
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    // A lane for each warp: at most 32.
    i64 before = lane < warp ? sums[lane] : 0;
    *all = lane < blockDim.x / 32 ? sums[lane] : 0;
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        before += __shfl_xor_sync(0xffffffffu, before, by);
        *all += __shfl_xor_sync(0xffffffffu, *all, by);
    }
    before += upto - v;
    // The next call overwrites `sums`.
    __syncthreads();
    return before;
}

// Computes rows from all counts: s.next[e] becomes the row of the first copy of e among this
// block's choices. The first block also writes counts, m_splits, total, dropped and lost of the
// handle. One pass over all experts: a rank's rows begin at the sum over the experts of all earlier
// ranks.
__device__ __forceinline__ void tw_route_scan(const TwEp& l, const TwRouting& a, const TwHandle& h, const TwTable& s) {
    __shared__ u64 lost[64], rows[65];
    const i64 cap = l.capacity;
    if (threadIdx.x < 64) lost[threadIdx.x] = 0;
    i64 sum = 0, all;
    for (u32 e0 = 0; e0 < l.experts; e0 += blockDim.x) {
        const u32 e = e0 + threadIdx.x;
        const u32 total = e < l.experts ? s.all[e] : 0;
        const i64 at = sum + tw_before((i64)tw_ceil(total, l.align) * l.align, &all);
        sum += all;
        if (e < l.experts) s.next[e] = at;
    }
    __syncthreads();
    // The first row of each rank; a rank without experts begins where the next one does.
    for (u32 r = threadIdx.x; r <= l.size; r += blockDim.x) rows[r] = s.first[r] < l.experts ? s.next[s.first[r]] : sum;
    __syncthreads();
    for (u32 e = threadIdx.x; e < l.experts; e += blockDim.x) {
        // Comparisons instead of a search: the reads do not depend on each other.
        u32 r = 0;
        for (u32 i = 1; i < l.size; i++) r += e >= s.first[i];
        const i64 total = s.all[e], at = s.next[e] - (i64)rows[r], padded = (i64)tw_ceil(s.all[e], l.align) * l.align;
        u32 blocks = 0;
        for (u32 b = 0; b < blockIdx.x; b++) blocks += a.blocks[(u64)b * l.experts + e];
        s.next[e] = at + s.earlier[e] + blocks;
        s.owner[e] = r;
        const i64 left = max(at + total, cap) - max(at, cap);
        // Integer sums do not depend on order.
        if (left > 0) atomicAdd(&lost[r], (u64)left);
        if (r != l.me || blockIdx.x != 0) continue;
        h.counts[e - s.first[r]] = total;
        h.m_splits[e - s.first[r]] = min(at + padded, cap) - min(at, cap);
    }
    __syncthreads();
    for (u32 r = threadIdx.x; blockIdx.x == 0 && r < l.size; r += blockDim.x) {
        h.lost[r] = (i64)lost[r];
        if (r == l.me) *h.total = (i64)(rows[r + 1] - rows[r]), *h.dropped = (i64)lost[r];
    }
}

// Stores row and rank of each choice of the block, in the order of choices.
__device__ __forceinline__ void tw_route_place(const TwEp& l, const TwRouting& a, const TwHandle& h, const TwTable& s) {
    const u32 lane = threadIdx.x % 32;
    u32* mine = s.warp + threadIdx.x / 32 * l.experts;
    for (u32 n = 0; n < a.span; n += 32) {
        const u64 i = tw_span(a) + n + lane;
        const int e = tw_choice(l, a, i);
        const u32 same = __match_any_sync(0xffffffffu, e);
        const i64 at = e >= 0 ? s.next[e] + mine[e] + __popc(same & ((1u << lane) - 1)) : l.capacity;
        if (i < a.choices) {
            h.rows[i] = at < l.capacity ? (int)at : -1;
            h.ranks[i] = e >= 0 ? (int)s.owner[e] : -1;
        }
        __syncwarp();
        if (e >= 0 && (int)lane == __ffs(same) - 1) mine[e] += __popc(same);
        __syncwarp();
    }
}

// The routing: writes this rank's counts to all ranks, waits for all counts, and computes rows.
// Each warp handles a.span choices in sequence.
//   Grid: at most 16 blocks, all resident at once. Block: at most TW_EP_MOVERS threads.
//   Dynamic shared memory: TwTable for E experts and the block's warps.
//   t the team, l the layer, m the counters of the routing, a its input, h its result, out the
//   outputs to poison.
// A bad index or a fault ends the launch without rows; the last block then poisons `out`.
extern "C" __global__ void __launch_bounds__(TW_EP_MOVERS, 1)
tw_ep_route(const __grid_constant__ TwTeam t, const __grid_constant__ TwEp l, const __grid_constant__ TwMeet m,
            const __grid_constant__ TwRouting a, const __grid_constant__ TwHandle h, const __grid_constant__ TwPoison out) {
    const u64 epoch = ld_relaxed_gpu_u64(m.epoch) + 1;
    const TwTable s = tw_table(l);
    bool good = !__syncthreads_or(tw_is_over(t));
    if (good && !tw_route_count(l, a, s)) {
        good = false;
        const TwWait w = {TW_OP_INPUT, a.bad_input, l.me, TW_OTHER, l.me, 0, 1, 0, 0};
        if (threadIdx.x == 0) tw_fail(t, w);
    }
    // Every block takes this ticket exactly once, also after a fault.
    const bool last = gridDim.x == 1 || tw_comes_last(m.ticket + 1);
    if (a.part != TW_PLACES && last && good && !__syncthreads_or(tw_is_over(t))) tw_route_publish(l, a, s, epoch);
    if (a.part != TW_COUNTS && good && tw_route_collect(t, l, m, s, epoch)) {
        // The kernel waits for no peer from here on, so a dispatch behind it may take free
        // multiprocessors.
        griddepcontrol_launch_dependents();
        tw_route_scan(l, a, h, s);
        __syncthreads();
        tw_route_place(l, a, h, s);
    }
    if (!tw_comes_last(m.ticket)) return;
    if (threadIdx.x == 0 && a.part != TW_COUNTS) *m.epoch = epoch;
    if (tw_told(t)) tw_spoil(out);
}

// Called by a warp: writes a row to the ranks of `mask`, in the order me + 1, me + 2, ...
template <class Piece>
__device__ __forceinline__ void tw_push_pieces(const TwEp& l, const TwPush& in, u32 t, u64 mask) {
    const u64 from = in.x + t * in.row_bytes, to = l.tokens + ((u64)l.me * l.max_tokens + t) * l.row_stride;
    for (u64 i = threadIdx.x % 32; i < in.row_bytes / sizeof(Piece); i += 64) {
        const u64 k = i + 32;
        const bool two = k < in.row_bytes / sizeof(Piece);
        const Piece a = ((const Piece*)from)[i], b = ((const Piece*)from)[two ? k : i];
        for (u32 n = 1; n <= l.size; n++) {
            const u32 r = (l.me + n) % l.size;
            if (!(mask >> r & 1)) continue;
            ((Piece*)(to + tw_step(l, r)))[i] = a;
            if (two) ((Piece*)(to + tw_step(l, r)))[k] = b;
        }
    }
}

// Called by a warp: writes a row to the receive buffer of each rank that has a kept choice in `p`.
__device__ __forceinline__ void tw_push_rows(const TwEp& l, const TwPush& in, const TwRecv& recv, u32 t, const TwPick& p) {
    for (u32 first = __ballot_sync(0xffffffffu, p.row >= 0 && p.nth == 0); first != 0; first &= first - 1) {
        const u32 from = __ffs(first) - 1;
        const u32 r = __shfl_sync(0xffffffffu, (u32)p.rank, from), row = __shfl_sync(0xffffffffu, (u32)p.row, from);
        const u64 to[2] = {tw_recv_row(l, recv, r, recv.rank_major ? (u64)l.me * l.max_tokens + t : row), 0};
        tw_lay(in.x + t * in.row_bytes, in.row_bytes, to, 0, 1);
    }
}

// Sender blocks: write a record of each token to each rank that has a kept copy of it, a chunk at a
// time for each warp, and raise the chunk's flags.
__device__ __forceinline__ void tw_push(const TwTeam& t, const TwEp& l, const TwMeet& m, const TwHandle& h, const TwPush& in,
                                        const TwRecv& recv, u64 epoch) {
    if (!tw_granted(t, l, m, epoch) || !tw_accepted(t, l, m, recv, epoch)) return;
    const u32 warps = m.senders * (blockDim.x / 32);
    for (u32 c = blockIdx.x + threadIdx.x / 32 * m.senders; c < m.chunks; c += warps) {
        const u32 end = min((c + 1) * m.chunk, in.tokens);
        for (u32 token = c * m.chunk; token < end; token++) {
            const TwPick p = tw_push_copies(l, h, in, epoch, token, token + 1);
            if (recv.buffer) {
                tw_push_rows(l, in, recv, token, p);
                continue;
            }
            u64 mask = 0;
            for (u32 i = 0; i < l.top_k; i++) {
                const int r = __shfl_sync(0xffffffffu, p.row >= 0 ? p.rank : -1, i);
                mask |= r >= 0 ? 1ull << r : 0;
            }
            const u64 bits = in.x | in.row_bytes | l.tokens | l.row_stride | l.stride;
            if (bits % 16 == 0) tw_push_pieces<TwPiece>(l, in, token, mask);
            else if (bits % 4 == 0) tw_push_pieces<u32>(l, in, token, mask);
            else if (bits % 2 == 0) tw_push_pieces<u16>(l, in, token, mask);
            else tw_push_pieces<u8>(l, in, token, mask);
        }
        tw_push_flags(t, l, m, epoch, c);
    }
}

// A dispatch, or the push of gradients of a combine. Blocks below m.senders push (a launch with all
// or none of them as senders is one half of an exchange by the host); blocks behind them copy
// arrived rows to `recv`. Without recv.x (flat rows, gradients of a combine) rows stay in the area
// for a later kernel.
//   Grid: any m.senders and any number of blocks behind. Block: at most TW_EP_MOVERS / 2 threads.
//   No dynamic shared memory.
// After a fault waits return false, blocks end, and the last one poisons `out`.
extern "C" __global__ void __launch_bounds__(TW_EP_MOVERS / 2, 1)
tw_ep_push(const __grid_constant__ TwTeam t, const __grid_constant__ TwEp l, const __grid_constant__ TwMeet m,
           const __grid_constant__ TwHandle h, const __grid_constant__ TwPush in, const __grid_constant__ TwRecv recv,
           const __grid_constant__ TwPoison out) {
    const u64 epoch = ld_relaxed_gpu_u64(m.epoch) + 1;
    tw_announce(t, l, m, recv, epoch);
    if (blockIdx.x < m.senders) tw_push(t, l, m, h, in, recv, epoch);
    else tw_receive(t, l, m, h, recv, epoch);
    tw_end(t, l, m, epoch, out);
}

// Grants the area after later kernels have read it (m.leave = 0 in the launch before). Grid: 1.
extern "C" __global__ void __launch_bounds__(TW_EP_THREADS)
tw_ep_leave(const __grid_constant__ TwTeam t, const __grid_constant__ TwEp l, const __grid_constant__ TwMeet m) {
    const u64 epoch = ld_relaxed_gpu_u64(m.epoch) + 1;
    __syncthreads();
    tw_grant(t, l, m, epoch);
}

// Called by a block: copies `len` bytes in the largest pieces that both addresses allow.
template <class Piece> __device__ __forceinline__ void tw_copy_piece(u64 to, u64 src, u64 len) {
#pragma unroll 1
    for (u64 i = threadIdx.x; i < len / sizeof(Piece); i += THREADS) ((Piece*)to)[i] = ((const Piece*)src)[i];
}

__device__ __forceinline__ void tw_copy_one(u64 to, u64 src, u64 len) {
    const u64 bits = to | src | len;
    if (bits % 16 == 0) tw_copy_piece<TwPiece>(to, src, len);
    else if (bits % 4 == 0) tw_copy_piece<u32>(to, src, len);
    else if (bits % 2 == 0) tw_copy_piece<u16>(to, src, len);
    else tw_copy_piece<u8>(to, src, len);
}

// Numbers received records without gaps, by source and token: h.place[record] is the row or -1, and
// row_source[row] the record. The caller has filled row_source with -1. Grid: 1 block of THREADS.
extern "C" __global__ void __launch_bounds__(TW_EP_THREADS)
tw_ep_flat(const __grid_constant__ TwEp l, const __grid_constant__ TwHandle h, int* row_source) {
    const u64 records = (u64)l.size * l.max_tokens;
    i64 row = 0, all;
    for (u64 r0 = 0; r0 < records; r0 += THREADS) {
        const u64 r = r0 + threadIdx.x;
        const bool there = r < records && h.num[r] > 0;
        const i64 at = row + tw_before(there, &all);
        row += all;
        if (r < records) h.place[r] = there ? (int)at : -1;
        if (there) row_source[at] = (int)r;
    }
}

// index[row] = the received row that feeds an expert-major row, -1 in padding. `place` is null
// where received rows are expert-major. Grid: capacity / THREADS, rounded up; block: THREADS.
extern "C" __global__ void __launch_bounds__(TW_EP_THREADS)
tw_ep_row_index(const __grid_constant__ TwEp l, const __grid_constant__ TwHandle h, const int* place, int* index) {
    const u64 row = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (row >= l.capacity) return;
    const int record = h.source[row];
    index[row] = record < 0 ? -1 : place ? place[record] : (int)row;
}

// out[row] = the payload of record row_source[row], 0 where that is -1; scales likewise (may be
// null). Grid: one block of THREADS for each row.
extern "C" __global__ void __launch_bounds__(TW_EP_THREADS)
tw_ep_gather(const __grid_constant__ TwEp l, const int* row_source, u8* out, u64 row_bytes, float* scales) {
    const u64 row = blockIdx.x;
    const int record = row_source[row];
    const u64 to = (u64)out + row * row_bytes;
    if (record < 0) {
        for (u64 i = threadIdx.x; i < row_bytes; i += THREADS) ((u8*)to)[i] = 0;
    } else {
        tw_copy_one(to, l.tokens + tw_step(l, l.me) + record * l.row_stride, row_bytes);
    }
    if (!scales) return;
    const float* from = tw_scales(l, l.me, record < 0 ? 0 : record);
    for (u32 i = threadIdx.x; i < l.scales; i += THREADS) scales[row * l.scales + i] = record < 0 ? 0.0f : from[i];
}

// Called by a warp: sums slice `j` of the copies of a record of token t of rank s, in f32, in the
// order of choices, beginning with the first term, rounded once; writes it to the returns area of
// rank s. The caller with slice 0 also writes the gradients of its weights.
__device__ __forceinline__ void tw_return(const TwEp& l, const TwHandle& h, const TwReturn& b, u32 s, u32 t, u32 j, u32 slices) {
    const u64 record = (u64)s * l.max_tokens + t;
    const u32 num = h.num[record], lane = threadIdx.x % 32, rows = b.expert_major ? num : 1;
    if (num == 0) return;
    const TwCopy* copies = h.copies + record * l.top_k;
    const u64 to = l.returns + tw_step(l, s) + ((u64)l.me * l.max_tokens + t) * l.return_stride;
    u64 begin, end;
    tw_slice(tw_ceil(b.hidden, 4), j, slices, &begin, &end);
    for (u64 n = begin + lane; n < end; n += 128) {
        float sum[4][4] = {};
        for (u32 c = 0; c < rows; c++) {
            const u64 row = b.expert_major ? copies[c].row : h.place[record];
            const float w = b.expert_major && b.weights ? b.weights[row] : 1.0f;
            OutQuad q[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (n + 32 * i < end) q[i] = tw_quad((u64)(b.y + row * b.hidden), n + 32 * i, b.hidden);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                if (n + 32 * i >= end) break;
#pragma unroll
                for (int v = 0; v < 4; v++) {
                    const float term = __fmul_rn(w, q[i].term(v));
                    sum[i][v] = c == 0 ? term : __fadd_rn(sum[i][v], term);
                }
            }
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (n + 32 * i < end) tw_store(to, n + 32 * i, b.hidden, sum[i]);
    }
    float* grads = (float*)(to + l.return_stride) - l.top_k;
    if (b.dw && j == 0)
        for (u32 n = lane; n < num; n += 32) grads[n] = b.dw[copies[n].row];
}

// Sender blocks: each takes one (chunk, rank) pair at a time, ranks in the order me + 1, me + 2,
// ..., and one fence orders all rows of the pair before its flag.
__device__ __forceinline__ void tw_return_all(const TwTeam& t, const TwEp& l, const TwMeet& m, const TwHandle& h,
                                              const TwReturn& b, u64 epoch) {
    const bool good = tw_granted(t, l, m, epoch);
    if (!__syncthreads_and(good)) return;
    const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (u32 i = blockIdx.x; i < m.chunks * l.size; i += m.senders) {
        const u32 c = i / l.size, s = (l.me + 1 + i % l.size) % l.size, first = c * m.chunk;
        const u32 num = (min(first + m.chunk, l.max_tokens) - first) * m.slices;
        for (u32 n = warp; n < num; n += warps) tw_return(l, h, b, s, first + n / m.slices, n % m.slices, m.slices);
        __syncthreads();
        if (threadIdx.x != 0) continue;
        fence_acq_rel_sys();
        st_relaxed_sys_u64(tw_arrival(l, m, s, l.me, c), epoch);
    }
}

// Called by a warp: sums slice `j` of the returned rows of token t, in f32, in rank order, rounded
// once. The caller with slice 0 also writes the gradient of each choice, 0 if the choice was not
// kept.
__device__ __forceinline__ void tw_sum(const TwEp& l, const TwHandle& h, const TwReturn& b, u32 t, u32 j, u32 slices) {
    const u32 k = l.top_k, lane = threadIdx.x % 32;
    const u64 mine = l.returns + tw_step(l, l.me);
    const int *ranks = h.ranks + (u64)t * k, *rows = h.rows + (u64)t * k;
    u64 mask = 0;
    for (u32 i = 0; i < k; i++) mask |= rows[i] >= 0 ? 1ull << ranks[i] : 0;
    u64 begin, end;
    tw_slice(tw_ceil(b.hidden, 4), j, slices, &begin, &end);
    for (u64 n = begin + lane; n < end; n += 128) {
        float sum[4][4] = {};
        const u64 first = mask & (0 - mask);
        for (u32 r = 0; r < l.size; r++) {
            if (!(mask >> r & 1)) continue;
            const u64 from = mine + ((u64)r * l.max_tokens + t) * l.return_stride;
            OutQuad q[4];
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (n + 32 * i < end) q[i] = tw_quad(from, n + 32 * i, b.hidden);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                if (n + 32 * i >= end) break;
#pragma unroll
                for (int v = 0; v < 4; v++) sum[i][v] = first >> r & 1 ? q[i].term(v) : __fadd_rn(sum[i][v], q[i].term(v));
            }
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (n + 32 * i < end) tw_store((u64)(b.out + (u64)t * b.hidden), n + 32 * i, b.hidden, sum[i]);
    }
    for (u32 i = lane; b.dw_out && j == 0 && i < k; i += 32) {
        const bool sent = rows[i] >= 0;
        u32 n = 0;  // earlier choices of the same rank that were kept
        for (u32 e = 0; e < i; e++) n += ranks[e] == ranks[i] && rows[e] >= 0;
        const u64 record = mine + ((u64)(sent ? ranks[i] : 0) * l.max_tokens + t) * l.return_stride;
        b.dw_out[(u64)t * k + i] = sent ? ((const float*)(record + l.return_stride) - k)[n] : 0.0f;
    }
}

// The blocks behind the senders: each warp waits for the token's chunk from all ranks, then sums
// one slice of it.
__device__ __forceinline__ void tw_sum_all(const TwTeam& t, const TwEp& l, const TwMeet& m, const TwHandle& h,
                                           const TwReturn& b, u64 epoch) {
    if (tw_warp_is_over(t)) return;
    const u32 all = blockDim.x / 32, first = (blockIdx.x - m.senders) * all + threadIdx.x / 32;
    for (u32 i = first; i < b.tokens * m.slices; i += (gridDim.x - m.senders) * all) {
        const u32 token = i / m.slices;
        // Each lane waits for one source.
        bool good = true;
        for (u32 r = threadIdx.x % 32; good && r < l.size; r += 32) {
            const TwWait w = {TW_OP_WAIT, m.slot + 1, r, 0, 0, epoch, 0, 0, 0};
            good = tw_await(t, tw_arrival(l, m, l.me, r, token / m.chunk), w);
        }
        // All lanes read data that flags acquired by single lanes announce.
        __syncwarp();
        if (!__all_sync(0xffffffffu, good)) return;
        tw_sum(l, h, b, token, i % m.slices, m.slices);
    }
}

// A combine, or the backward of a dispatch. Blocks below m.senders sum the copies of arrived
// records and push the sums to the records' ranks; blocks behind them sum what all ranks return.
//   Grid: any m.senders and any number of blocks behind. Block: at most TW_EP_MOVERS / 2 threads.
//   No dynamic shared memory.
//   b are inputs and outputs of the return (TwReturn), out the outputs to poison.
// After a fault waits return false, blocks end, and the last one poisons `out`.
extern "C" __global__ void __launch_bounds__(TW_EP_MOVERS / 2, 1)
tw_ep_return(const __grid_constant__ TwTeam t, const __grid_constant__ TwEp l, const __grid_constant__ TwMeet m,
           const __grid_constant__ TwHandle h, const __grid_constant__ TwReturn b, const __grid_constant__ TwPoison out) {
    const u64 epoch = ld_relaxed_gpu_u64(m.epoch) + 1;
    if (blockIdx.x < m.senders) tw_return_all(t, l, m, h, b, epoch);
    else tw_sum_all(t, l, m, h, b, epoch);
    tw_end(t, l, m, epoch, out);
}

// The backward of a combine at the experts: dy[row] = weights[row] * g of the row's record (g
// itself without weights), 0 in padding; with weights also d_weights[row] = <g, y[row]>, summed by
// lane, then in pairs, then by warp. Rows behind the last expert's get no dy, because consumers do
// not read them. Grid: one block of THREADS for each row of the capacity.
extern "C" __global__ void __launch_bounds__(TW_EP_THREADS)
tw_ep_gather_bwd(const __grid_constant__ TwEp l, const __grid_constant__ TwHandle h, Out::Bits* dy,
                 const float* weights, const Out::Bits* y, float* d_weights, u32 hidden) {
    __shared__ float sums[WARPS];
    const u64 row = blockIdx.x;
    if (row >= (u64)*h.total) {
        if (weights && threadIdx.x == 0) d_weights[row] = 0.0f;
        return;
    }
    const int record = h.source[row];
    const u64 from = l.tokens + tw_step(l, l.me) + (record < 0 ? 0 : record) * l.row_stride;
    float dot = 0;
    for (u32 n = threadIdx.x; n < tw_ceil(hidden, 4); n += THREADS) {
        float v[4] = {0, 0, 0, 0};
        if (record >= 0) {
            const OutQuad g = tw_quad(from, n, hidden);
            const float w = weights ? weights[row] : 1.0f;
            if (weights) {
                const OutQuad out = tw_quad((u64)(y + row * hidden), n, hidden);
#pragma unroll
                for (int j = 0; j < 4; j++) dot = __fmaf_rn(g.at(j), out.at(j), dot);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = weights ? __fmul_rn(w, g.at(j)) : g.at(j);
        }
        tw_store((u64)(dy + row * hidden), n, hidden, v);
    }
    if (!weights) return;
#pragma unroll
    for (int by = 16; by > 0; by /= 2) dot = __fadd_rn(dot, __shfl_xor_sync(0xffffffffu, dot, by));
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = dot;
    __syncthreads();
    if (threadIdx.x != 0) return;
    float all = 0;
    for (u32 w = 0; w < WARPS; w++) all = __fadd_rn(all, sums[w]);
    d_weights[row] = record < 0 ? 0.0f : all;
}
