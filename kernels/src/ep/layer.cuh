// Expert parallelism: the layer, the routing, and how the ranks meet; crates/ops/src/ep on the
// device.
//
// Source: routing.rs of that folder (which row a copy gets), research notes EP section 5 (one row
// over the wire for each (token, rank); slots from counts, without atomics or sorting). Equal
// inputs give equal bits.
//
// P ranks, E experts in all, T = max_tokens of a rank, k choices, capacity rows on each rank.
// Symmetric areas of a rank, at base + rank * stride for every rank, or where a table says:
//   counts   [2][P][E] u64: number of the launch << 32 | copies that a rank sends to an expert
//   meta     [P * T] records of `meta_stride` bytes: k TwCopy, then scales f32
//   tokens   [P * T] rows, `row_stride` bytes each
//   returns  [P * T] records of `return_stride` bytes: a row of results, then k f32 gradients of
//            weights
//   flags    one set for tokens, one for returns: credits [P] u64, receive buffers [P] u64,
//            arrivals [P][chunks] u64
//   rows     optional, zero copy: receive buffers that peers write rows to directly
// Token t of rank s has index s * T + t in an area, so that no position is negotiated. Each area
// counts its launches (`epoch`, the same on all ranks); a word of a launch carries its number, so
// nothing is ever cleared. A rank that has read an area grants it, by its credit, for the next
// launch. Rows that are written to a receive buffer have no position by token: a row goes to the
// first of the rows that its copies have at that rank, and the receiver copies it to the others.
// The receiver's stream may use the buffer up to the launch itself, so the receiver announces, by
// the number of the launch and of the buffer, that rows may be written.
//
// What the host exchanges itself takes two launches: one whose blocks all push, to areas that stand
// for those of the ranks and with flags of their own that are always up, and one whose blocks all
// receive.
//
// Kernels write peers' memory, and never read it. THREADS of blocks that lay out, MOVERS of those
// that meet. Types of results by mantissa bits: TW_OUT_MANTISSA (23 f32, 10 f16, 7 bf16); payload
// is bytes.

#pragma once

#include "../common/convert.cuh"
#include "../comm/meet.cuh"

enum { THREADS = TW_EP_THREADS, MOVERS = TW_EP_MOVERS, WARPS = THREADS / 32 };
static_assert(THREADS % 32 == 0 && MOVERS % 32 == 0, "whole warps");

typedef TwElem<TW_OUT_MANTISSA> Out;
typedef TwQuads<TW_OUT_MANTISSA> OutQuad;

// A copy of a token, one access of 16 bytes. A record has those that this launch has stamped, the
// first ones: what stands behind them is of earlier launches.
struct __align__(16) TwCopy {
    int choice, row;
    float weight;
    u32 stamp;  // number of the launch, its lower half
};

// The layer and the team, and where their memory is.
struct TwEp {
    u64 counts, meta, tokens, returns;  // addresses of rank 0's areas; rank r's are r * stride behind
    u64 stride;
    const u32* first;       // [P + 1] first expert of each rank
    const u64* steps;       // [P] TW_EP_UNEVEN: how far they are behind instead; `stride` has the bits of all of them
    u64 meta_stride, row_stride, return_stride;
    u32 size, me, max_tokens, top_k, experts, capacity, align, scales;
};

// The routing of one microbatch, in this rank's memory.
struct TwHandle {
    int* rows;       // [T * k] row of each choice of mine at its rank, or -1
    int* ranks;      // [T * k] that rank
    u32* num;        // [P * T] copies of each record that came
    TwCopy* copies;  // [P * T * k]
    int* source;     // [capacity] record of each expert-major row, or -1
    int* place;      // [P * T] received row of each record (flat layout)
    i64* counts;     // [local experts] true number of copies
    i64* m_splits;   // [local experts] rows, with padding, within the capacity
    i64* total;      // [1] rows needed
    i64* dropped;    // [1] copies left out here
    i64* lost;       // [P] copies left out at each rank
};

// How a launch of one area meets: a chunk of tokens arrives as a whole.
struct TwMeet {
    u64 flags;   // address of rank 0's credits and arrivals of this area
    u64 stride;  // from rank to rank
    u64* epoch;  // launches so far
    u32* ticket; // [4] blocks that are through, twice, and chunks that were taken, to send and to lay out;
                 // 0 between launches
    u32 slot;    // for reports: the credit's; the arrival's is the next
    u32 chunk, slices;  // tokens of a chunk; parts of a row for so many warps
    u32 chunks;
    u32 senders; // blocks, from the first on, that write to peers
    u32 leave;   // 1: the last block grants the next launch; 0: tw_ep_leave will
};

// How far the memory of a rank is behind that of rank 0, in even steps by default.
// Addresses wrap.
__device__ __forceinline__ u64 tw_step(const TwEp& l, u64 stride, u32 rank) {
#ifdef TW_EP_UNEVEN
    return l.steps[rank];
#else
    return rank * stride;
#endif
}

__device__ __forceinline__ u64 tw_step(const TwEp& l, u32 rank) { return tw_step(l, l.stride, rank); }

__device__ __forceinline__ u64* tw_credit(const TwEp& l, const TwMeet& m, u32 rank, u32 writer) {
    return (u64*)(m.flags + tw_step(l, m.stride, rank)) + writer;
}

__device__ __forceinline__ u64* tw_arrival(const TwEp& l, const TwMeet& m, u32 rank, u32 writer, u32 c) {
    return (u64*)(m.flags + tw_step(l, m.stride, rank)) + 2 * l.size + (u64)writer * m.chunks + c;
}

// Number of the launch << 16 | the receive buffer that `writer` takes its rows to.
__device__ __forceinline__ u64* tw_buffer(const TwEp& l, const TwMeet& m, u32 rank, u32 writer) {
    return (u64*)(m.flags + tw_step(l, m.stride, rank)) + l.size + writer;
}

__device__ __forceinline__ u64 tw_meta(const TwEp& l, u32 rank, u64 record) {
    return l.meta + tw_step(l, rank) + record * l.meta_stride;
}

// The launch is counted, and the area is everybody's for the next one. By one block, behind all
// readers.
__device__ __forceinline__ void tw_grant(const TwTeam& t, const TwEp& l, const TwMeet& m, u64 epoch) {
    if (threadIdx.x == 0) *m.epoch = epoch;
    if (tw_is_over(t)) return;
    fence_acq_rel_sys();
    for (u32 r = threadIdx.x; r < l.size; r += blockDim.x) st_relaxed_sys_u64(tw_credit(l, m, r, l.me), epoch);
}

// The end of every block of a launch that meets: the last one grants the next launch, and fills the
// outputs of a team that is over, since other blocks may have written what looks like results.
__device__ __forceinline__ void tw_end(const TwTeam& t, const TwEp& l, const TwMeet& m, u64 epoch, const TwPoison& p) {
    if (!tw_comes_last(m.ticket)) return;
    if (threadIdx.x < 2) m.ticket[2 + threadIdx.x] = 0;
    if (m.leave) tw_grant(t, l, m, epoch);
    if (tw_told(t)) tw_spoil(p);
}

// By a warp: all peers have granted this launch. False if the team is over.
__device__ __forceinline__ bool tw_granted(const TwTeam& t, const TwEp& l, const TwMeet& m, u64 epoch) {
    bool good = !tw_is_over(t);
    for (u32 r = threadIdx.x % 32; good && r < l.size; r += 32) {
        const TwWait w = {TW_OP_WAIT, m.slot, r, 0, 0, epoch - 1, 0, 0, 0};
        good = tw_await(t, tw_credit(l, m, l.me, r), w);
    }
    // A lane writes to a rank whose word another one has seen.
    __syncwarp();
    return __all_sync(0xffffffffu, good);
}

// By a warp: chunk `c` of `src` has arrived. False if the team is over.
__device__ __forceinline__ bool tw_arrived(const TwTeam& t, const TwEp& l, const TwMeet& m, u64 epoch, u32 src, u32 c) {
    bool good = true;
    if (threadIdx.x % 32 == 0) {
        const TwWait w = {TW_OP_WAIT, m.slot + 1, src, 0, 0, epoch, 0, 0, 0};
        good = tw_await(t, tw_arrival(l, m, l.me, src, c), w);
    }
    // The other lanes read behind the word that lane 0 has seen.
    __syncwarp();
    return __all_sync(0xffffffffu, good);
}

// What a dispatch delivers; any may be 0. Rows are expert-major, one for each copy, or
// `rank_major`: row i is that of record i, zero if it did not come. With a `buffer`, x lies in
// symmetric memory, at the same place of all ranks, and their rows come to it directly.
struct TwRecv {
    u64 x;
    float* weights;
    float* scales;
    int* index;
    u64 row_bytes;
    u32 buffer, bad_input;
    u32 rank_major, pad;
};

// Row `row` of the receive buffer of rank `r`; of my own output also where that is no such buffer.
__device__ __forceinline__ u64 tw_recv_row(const TwEp& l, const TwRecv& out, u32 r, u64 row) {
    return out.x + tw_step(l, r) - tw_step(l, l.me) + row * out.row_bytes;
}

// By the first warp of a launch: from now on rows may come to the buffer.
__device__ __forceinline__ void tw_announce(const TwTeam& t, const TwEp& l, const TwMeet& m, const TwRecv& out, u64 epoch) {
    if (blockIdx.x != 0 || threadIdx.x >= 32 || tw_is_over(t)) return;
    fence_acq_rel_sys();
    for (u32 r = threadIdx.x; r < l.size; r += 32) st_relaxed_sys_u64(tw_buffer(l, m, r, l.me), epoch << 16 | out.buffer);
}

// By a warp: all ranks take the rows of this launch to the buffer that I do. False if the team is
// over.
__device__ __forceinline__ bool tw_accepted(const TwTeam& t, const TwEp& l, const TwMeet& m, const TwRecv& out, u64 epoch) {
    if (out.buffer == 0) return true;
    bool good = true;
    for (u32 r = threadIdx.x % 32; good && r < l.size; r += 32) {
        const TwWait w = {TW_OP_WAIT, m.slot, r, 0, 0, epoch << 16, 0, 0, 0};
        good = tw_await(t, tw_buffer(l, m, l.me, r), w);
        // A rank that has all of this launch may be at the next one.
        const u64 word = ld_relaxed_sys_u64(tw_buffer(l, m, l.me, r));
        if (good && word >> 16 == epoch && (u32)(word & 0xffff) != out.buffer) {
            const TwWait bad = {TW_OP_INPUT, out.bad_input, l.me, TW_OTHER, l.me, 0, 1, 0, 0};
            tw_fail(t, bad);
            good = false;
        }
    }
    __syncwarp();
    return __all_sync(0xffffffffu, good);
}

// By a warp: zeros, by plain stores.
struct TwZeros {
    __device__ __forceinline__ void operator()(u64 to, u64 len) const {
        const TwPiece zero = {{0, 0, 0, 0}};
        const u64 pieces = to % 16 == 0 ? len / 16 : 0;
        for (u64 i = threadIdx.x % 32; i < pieces; i += 32) ((TwPiece*)to)[i] = zero;
        for (u64 i = 16 * pieces + threadIdx.x % 32; i < len; i += 32) ((u8*)to)[i] = 0;
    }
};

// The copies of a record of my area. By a warp: how many there are, and lane n has the n-th.
__device__ __forceinline__ u32 tw_copies(const TwEp& l, u64 record, u64 epoch, TwCopy& c) {
    const u32 lane = threadIdx.x % 32;
    c.stamp = (u32)epoch - 1;
    if (lane < l.top_k) c = ((const TwCopy*)tw_meta(l, l.me, record))[lane];
    return __popc(__ballot_sync(0xffffffffu, c.stamp == (u32)epoch));
}

// Behind the copies.
__device__ __forceinline__ float* tw_scales(const TwEp& l, u32 rank, u64 record) {
    return (float*)(tw_meta(l, rank, record) + (u64)l.top_k * sizeof(TwCopy));
}

// A row that no token fills, but for its bytes.
__device__ __forceinline__ void tw_no_source(const TwHandle& h, const TwRecv& out, u64 row) {
    h.source[row] = -1;
    if (out.weights) out.weights[row] = 0.0f;
    if (out.index) out.index[row] = -1;
}

// By a warp: a received row that no token fills, of bytes that `fill` writes.
template <class Fill>
__device__ __forceinline__ void tw_empty_row(const TwEp& l, const TwRecv& out, u64 row, const Fill& fill) {
    if (out.scales)
        for (u32 i = threadIdx.x % 32; i < l.scales; i += 32) out.scales[row * l.scales + i] = 0.0f;
    if (out.x) fill(out.x + row * out.row_bytes, out.row_bytes);
}

// By a warp: an expert-major row that pads its expert's.
template <class Fill>
__device__ __forceinline__ void tw_pad_row(const TwEp& l, const TwHandle& h, const TwRecv& out, u64 row, const Fill& fill) {
    if (threadIdx.x % 32 == 0) tw_no_source(h, out, row);
    if (!out.rank_major) tw_empty_row(l, out, row, fill);
}

// Rows that no token fills, from the counts of the routing: warp `w` of `num` takes every num-th.
// They are known before anything has arrived. Behind the rows of all experts nothing is filled:
// nobody reads there.
template <class Fill>
__device__ __forceinline__ void tw_pad(const TwEp& l, const TwHandle& h, const TwRecv& out, u64 w, u64 num, const Fill& fill) {
    const u32 full = 0xffffffffu, local = l.first[l.me + 1] - l.first[l.me], lane = threadIdx.x % 32;
    i64 at = 0;
    i64 next = w;  // of the rows that nobody feeds, from here on
    for (u32 e0 = 0; e0 < local; e0 += 32) {
        const u32 e = e0 + lane;
        const i64 rows = e < local ? h.m_splits[e] : 0, fed = e < local ? min(h.counts[e], rows) : 0;
        // Rows up to this lane's expert, and those of them that no token fills.
        i64 end = rows, pads = rows - fed;
#pragma unroll
        for (u32 by = 1; by < 32; by *= 2) {
            const i64 a = __shfl_up_sync(full, end, by), b = __shfl_up_sync(full, pads, by);
            if (lane >= by) end += a, pads += b;
        }
        for (const i64 all = __shfl_sync(full, pads, 31); next < all; next += num) {
            // The last row of the expert is that of its last pad.
            const u32 owner = __popc(__ballot_sync(full, pads <= next));
            tw_pad_row(l, h, out, at + __shfl_sync(full, end - pads, owner) + next, fill);
        }
        next -= __shfl_sync(full, pads, 31);
        at += __shfl_sync(full, end, 31);
    }
    for (u64 row = at + 32 * w + lane; row < l.capacity; row += 32 * num) tw_no_source(h, out, row);
}

// Address of the row where copy `n` of a record stays, which a receive buffer may already hold; 0
// if there is none: rank-major only the first one has a row. As the copies of a peer are, c.row is
// not trusted.
__device__ __forceinline__ u64 tw_kept_row(const TwEp& l, const TwRecv& out, u64 record, u32 n, const TwCopy& c) {
    const u64 row = out.rank_major ? record : (u32)c.row;
    return out.x && (out.rank_major ? n == 0 : row < l.capacity) ? out.x + row * out.row_bytes : 0;
}

// By one lane: how many copies of a record came, and the row of a rank-major layout.
__device__ __forceinline__ void tw_keep_record(const TwHandle& h, const TwRecv& out, u64 record, u32 num) {
    h.num[record] = num;
    if (out.rank_major) h.place[record] = num > 0 ? (int)record : -1;
}

// What the handle and the outputs keep of the copy `n` of a record, but for scales. Rows within the
// capacity are all that a peer sends; another would be outside of the memory.
__device__ __forceinline__ void tw_keep_copy(const TwEp& l, const TwHandle& h, const TwRecv& out, u64 record, u32 n, const TwCopy& c) {
    h.copies[record * l.top_k + n] = c;
    if ((u32)c.row >= l.capacity) return;
    h.source[c.row] = (int)record;
    if (out.weights) out.weights[c.row] = c.weight;
    if (out.index) out.index[c.row] = out.rank_major ? (int)record : c.row;
}

// By a warp: the scales of a record to the row of its copy `n`.
__device__ __forceinline__ void tw_keep_scales(const TwEp& l, const TwRecv& out, u64 record, u32 n, u32 row) {
    if (!out.scales || (out.rank_major ? n != 0 : row >= l.capacity)) return;
    const u64 to = out.rank_major ? record : row;
    const float* scales = tw_scales(l, l.me, record);
    for (u32 s = threadIdx.x % 32; s < l.scales; s += 32) out.scales[to * l.scales + s] = scales[s];
}

// By a warp: a slice of a record that has arrived, to the rows of its copies; with the first slice
// what the handle keeps of it.
__device__ __forceinline__ void tw_lay_record(const TwEp& l, const TwHandle& h, const TwRecv& out, u64 record, u64 epoch,
                                              u32 j, u32 slices) {
    const u32 full = 0xffffffffu, lane = threadIdx.x % 32;
    TwCopy c;
    const u32 num = tw_copies(l, record, epoch, c);
    if (j == 0 && lane == 0) tw_keep_record(h, out, record, num);
    if (j == 0 && lane < num) tw_keep_copy(l, h, out, record, lane, c);
    if (j == 0 && num == 0 && out.rank_major) tw_empty_row(l, out, record, TwZeros());
    for (u32 n = 0; j == 0 && n < num; n++) tw_keep_scales(l, out, record, n, __shfl_sync(full, (u32)c.row, n));
    const u64 row = lane < num ? tw_kept_row(l, out, record, lane, c) : 0, first = __shfl_sync(full, row, 0);
    const u64 from = out.buffer ? first : l.tokens + tw_step(l, l.me) + record * l.row_stride;
    // The first one is where it stays if it came to a receive buffer.
    for (u32 n = out.buffer ? 1 : 0; from && n < num; n += 2) {
        const u64 a = __shfl_sync(full, row, n), b = __shfl_sync(full, row, n + 1 < num ? n + 1 : n);
        u64 to[2] = {a, n + 1 < num ? b : 0};
        if (!to[0]) to[0] = to[1], to[1] = 0;
        if (to[0]) tw_lay(from, out.row_bytes, to, j, slices);
    }
}

// Blocks behind the senders: rows that no token fills while the others travel, then what arrives,
// as it arrives.
__device__ __forceinline__ void tw_receive(const TwTeam& t, const TwEp& l, const TwMeet& m, const TwHandle& h,
                                           const TwRecv& out, u64 epoch) {
    const u32 warps = blockDim.x / 32;
    const u64 w = (u64)(blockIdx.x - m.senders) * warps + threadIdx.x / 32, num = (u64)(gridDim.x - m.senders) * warps;
    if (tw_warp_is_over(t)) return;
    tw_pad(l, h, out, w, num, TwZeros());
    for (u64 i = w; i < (u64)m.chunks * l.size * m.slices; i += num) {
        const u32 j = i % m.slices, c = i / m.slices / l.size, s = (l.me + 1 + i / m.slices % l.size) % l.size;
        if (!tw_arrived(t, l, m, epoch, s, c)) return;
        const u32 end = min((c + 1) * m.chunk, l.max_tokens);
        for (u32 token = c * m.chunk; token < end; token++)
            tw_lay_record(l, h, out, (u64)s * l.max_tokens + token, epoch, j, m.slices);
    }
}

// What is sent: rows, and weights [tokens, k] and scales [tokens, scales], which may be null.
struct TwPush {
    u64 x;
    const float* weights;
    const float* scales;
    u64 row_bytes;
    u32 tokens, pad;
};

// A choice of a token: its row and rank, and how many kept ones of the token go to that rank before
// it. Row -1 if it is not kept.
struct TwPick {
    int row, rank;
    u32 nth;
};

// By a warp: the copies of tokens [t, end), at most 32 / top_k, to their ranks, in the order of
// choices. A lane has choice lane % top_k of token t + lane / top_k: all are read at once, since
// one after the other they would take longer than a row.
__device__ __forceinline__ TwPick tw_push_copies(const TwEp& l, const TwHandle& h, const TwPush& in, u64 epoch, u32 t, u32 end) {
    const u32 full = 0xffffffffu, lane = threadIdx.x % 32, token = t + lane / l.top_k, i = lane % l.top_k;
    const bool mine = lane < 32 / l.top_k * l.top_k && token < end;
    const u64 at = (u64)token * l.top_k + i;
    TwPick p = {mine ? h.rows[at] : -1, mine ? h.ranks[at] : -1, 0};
    const float weight = mine && in.weights ? in.weights[at] : 0.0f;
    const u32 same = __match_any_sync(full, p.row >= 0 ? (int)(token - t) << 6 | p.rank : -1);
    p.nth = __popc(same & ((1u << lane) - 1));
    const u64 record = (u64)l.me * l.max_tokens + token;
    if (p.row >= 0) {
        const TwCopy c = {(int)i, p.row, weight, (u32)epoch};
        ((TwCopy*)tw_meta(l, p.rank, record))[p.nth] = c;
    }
    for (u32 first = in.scales ? __ballot_sync(full, p.row >= 0 && p.nth == 0) : 0; first != 0; first &= first - 1) {
        const u32 from = __ffs(first) - 1, of = t + from / l.top_k;
        float* scales = tw_scales(l, __shfl_sync(full, (u32)p.rank, from), (u64)l.me * l.max_tokens + of);
        for (u32 s = lane; s < l.scales; s += 32) scales[s] = in.scales[(u64)of * l.scales + s];
    }
    return p;
}

// By a warp whose lanes have written everything of chunk `c`: it has arrived.
__device__ __forceinline__ void tw_push_flags(const TwTeam& t, const TwEp& l, const TwMeet& m, u64 epoch, u32 c) {
    __syncwarp();
    fence_acq_rel_sys();
    for (u32 r = threadIdx.x % 32; r < l.size; r += 32) st_relaxed_sys_u64(tw_arrival(l, m, r, l.me, c), epoch);
}

// Four elements of a row of `hidden`; 0 behind its end.
__device__ __forceinline__ OutQuad tw_quad(u64 row, u32 n, u32 hidden) {
    if (hidden % 4 == 0 && row % sizeof(OutQuad) == 0) return ((const OutQuad*)row)[n];
    OutQuad q;
    q.clear();
#pragma unroll
    for (u32 j = 0; j < 4; j++)
        if (4 * n + j < hidden) q.set(j, ((const Out::Bits*)row)[4 * n + j]);
    return q;
}

__device__ __forceinline__ void tw_store(u64 row, u32 n, u32 hidden, const float (&v)[4]) {
    OutQuad q;
    q.clear();
#pragma unroll
    for (int j = 0; j < 4; j++) q.set(j, Out::round(v[j]));
    if (hidden % 4 == 0 && row % sizeof(OutQuad) == 0) {
        ((OutQuad*)row)[n] = q;
        return;
    }
#pragma unroll
    for (u32 j = 0; j < 4; j++)
        if (4 * n + j < hidden) ((Out::Bits*)row)[4 * n + j] = (Out::Bits)q.bits(j);
}

// What returns: y with a row for each copy (`expert_major`, weighted by `weights` if given), or for
// each record; gradients of weights by rows. `out` [tokens, hidden] and `dw_out` [tokens, k] take
// what arrives.
struct TwReturn {
    const Out::Bits* y;
    const float *weights, *dw;
    Out::Bits* out;
    float* dw_out;
    u32 hidden, expert_major, tokens, pad;
};
