// Expert parallelism on devices: the layer, the routing, and how the ranks of a launch synchronise.
// The host side is crates/ops/src/ep. Kernels in sm80_ep.cu, sm90_ep.cu and sm90_return.cu include
// this file.
//
// Source: routing.rs of that folder (which row a copy gets), research notes EP section 5 (one row
// crosses the wire for each (token, rank); rows follow from counts, without atomics or sorting).
// Equal inputs give equal bits.
//
// A *copy* is one (token, choice) pair that is sent to the rank of the chosen expert. P ranks, E
// experts in all, T = max_tokens of a rank, k choices for each token, `capacity` expert-major rows
// on each rank. Symmetric areas of a rank, at base + rank * stride (TW_EP_UNEVEN: at base +
// steps[rank]):
//   counts   [2][P][E] u64: launch number << 32 | number of copies that a rank sends to an expert
//   meta     [P * T] records of `meta_stride` bytes: k TwCopy, then scales f32
//   tokens   [P * T] rows, `row_stride` bytes each
//   returns  [P * T] records of `return_stride` bytes: a row of results, then k f32 gradients of
//            weights
//   flags    one set for tokens, one for returns: credits [P] u64, receive buffers [P] u64,
//            arrivals [P][chunks] u64
//   rows     optional, zero copy: receive buffers that peers write rows to directly
// Token t of rank s has record s * T + t in meta and tokens; in returns, record r * T + t is what
// rank r returns for token t. So ranks negotiate no positions. Each area counts its launches
// (`epoch`, equal on all ranks); every word that announces something carries the launch number, so
// no kernel clears an area. A rank that has read an area grants it for the next launch by raising
// its credit at every rank.
//
// Zero copy: a row has no position by token in a receive buffer. The sender writes it to the row of
// the first copy that the receiver gets of that token, and the receiver copies it from there to the
// rows of the token's other copies. The receiver's stream may use the buffer until the launch
// begins, so the receiver announces (launch number << 16 | buffer number) when peers may write.
//
// An exchange that the host carries out itself (NCCL) takes two launches: one whose blocks all
// push, to local areas that replace the peers', with flags of their own that are always raised; and
// one whose blocks all receive.
//
// Kernels write peers' memory and never read it. THREADS is the block size of kernels that only
// handle local rows, MOVERS that of kernels that synchronise with peers. TW_OUT_MANTISSA gives the
// type of results by its mantissa bits (23 f32, 10 f16, 7 bf16); payload rows are bytes.
//
// Names used throughout: t the team, l the layer (TwEp), m the launch's flags (TwMeet), h the
// routing (TwHandle), epoch the number of this launch.

#pragma once

#include "../common/convert.cuh"
#include "../comm/meet.cuh"

enum { THREADS = TW_EP_THREADS, MOVERS = TW_EP_MOVERS, WARPS = THREADS / 32 };
static_assert(THREADS % 32 == 0 && MOVERS % 32 == 0, "whole warps");

typedef TwElem<TW_OUT_MANTISSA> Out;
typedef TwQuads<TW_OUT_MANTISSA> OutQuad;

// One copy of a token, one 16-byte access. A record holds the copies that this launch has stamped,
// beginning with the first; entries behind them are left over from earlier launches.
struct __align__(16) TwCopy {
    int choice, row;
    float weight;
    u32 stamp;  // number of the launch, its lower half
};

// The layer (`l`): its sizes, and the addresses of its symmetric areas.
struct TwEp {
    u64 counts, meta, tokens, returns;  // addresses of rank 0's areas; rank r's are r * stride behind
    u64 stride;
    const u32* first;       // [P + 1] first expert of each rank
    const u64* steps;       // [P] TW_EP_UNEVEN: how far they are behind instead; `stride` has the bits of all of them
    u64 meta_stride, row_stride, return_stride;
    u32 size, me, max_tokens, top_k, experts, capacity, align, scales;
};

// The routing of one microbatch (`h`), in this rank's memory.
struct TwHandle {
    int* rows;       // [T * k] row of each choice of mine at its rank, or -1
    int* ranks;      // [T * k] that rank
    u32* num;        // [P * T] number of received copies of each record
    TwCopy* copies;  // [P * T * k]
    int* source;     // [capacity] record of each expert-major row, or -1
    int* place;      // [P * T] received row of each record (flat layout)
    i64* counts;     // [local experts] true number of copies
    i64* m_splits;   // [local experts] rows, with padding, within the capacity
    i64* total;      // [1] rows needed
    i64* dropped;    // [1] copies left out here
    i64* lost;       // [P] copies left out at each rank
};

// Flags and counters of one area for one launch (`m`). A chunk of tokens has one arrival flag.
struct TwMeet {
    u64 flags;   // address of rank 0's credits and arrivals of this area
    u64 stride;  // from rank to rank
    u64* epoch;  // launches so far
    u32* ticket; // [4] two counts of finished blocks; claimed chunks, to push and to receive;
                 // 0 between launches
    u32 slot;    // for reports: the credit's; the arrival's is the next
    u32 chunk, slices;  // tokens of a chunk; parts of a row for so many warps
    u32 chunks;
    u32 senders; // blocks, from the first on, that write to peers
    u32 leave;   // 1: the last block grants the next launch; 0: tw_ep_leave will
};

// Distance of a rank's memory from rank 0's: rank * stride, or a table entry. Additions wrap
// around.
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

// Launch number << 16 | the receive buffer in which `writer` takes rows.
__device__ __forceinline__ u64* tw_buffer(const TwEp& l, const TwMeet& m, u32 rank, u32 writer) {
    return (u64*)(m.flags + tw_step(l, m.stride, rank)) + l.size + writer;
}

__device__ __forceinline__ u64 tw_meta(const TwEp& l, u32 rank, u64 record) {
    return l.meta + tw_step(l, rank) + record * l.meta_stride;
}

// Counts the launch, and grants the area to all ranks for the next one. One block calls this, after
// the last read of the area.
__device__ __forceinline__ void tw_grant(const TwTeam& t, const TwEp& l, const TwMeet& m, u64 epoch) {
    if (threadIdx.x == 0) *m.epoch = epoch;
    if (tw_is_over(t)) return;
    fence_acq_rel_sys();
    for (u32 r = threadIdx.x; r < l.size; r += blockDim.x) st_relaxed_sys_u64(tw_credit(l, m, r, l.me), epoch);
}

// The end of every block of a launch that synchronises with peers. The last block resets the claim
// counters and grants the next launch (if m.leave). If the team has a fault it then poisons all
// outputs, because other blocks may have written values that look like results.
__device__ __forceinline__ void tw_end(const TwTeam& t, const TwEp& l, const TwMeet& m, u64 epoch, const TwPoison& p) {
    if (!tw_comes_last(m.ticket)) return;
    if (threadIdx.x < 2) m.ticket[2 + threadIdx.x] = 0;
    if (m.leave) tw_grant(t, l, m, epoch);
    if (tw_told(t)) tw_spoil(p);
}

// Called by a warp: waits until all ranks have granted this launch. False if the team has a fault.
__device__ __forceinline__ bool tw_granted(const TwTeam& t, const TwEp& l, const TwMeet& m, u64 epoch) {
    bool good = !tw_is_over(t);
    for (u32 r = threadIdx.x % 32; good && r < l.size; r += 32) {
        const TwWait w = {TW_OP_WAIT, m.slot, r, 0, 0, epoch - 1, 0, 0, 0};
        good = tw_await(t, tw_credit(l, m, l.me, r), w);
    }
    // Lane i writes to ranks whose credit another lane has acquired.
    __syncwarp();
    return __all_sync(0xffffffffu, good);
}

// Called by a warp: waits until chunk `c` of `src` has arrived. False if the team has a fault.
__device__ __forceinline__ bool tw_arrived(const TwTeam& t, const TwEp& l, const TwMeet& m, u64 epoch, u32 src, u32 c) {
    bool good = true;
    if (threadIdx.x % 32 == 0) {
        const TwWait w = {TW_OP_WAIT, m.slot + 1, src, 0, 0, epoch, 0, 0, 0};
        good = tw_await(t, tw_arrival(l, m, l.me, src, c), w);
    }
    // The other lanes read data that the flag acquired by lane 0 announces.
    __syncwarp();
    return __all_sync(0xffffffffu, good);
}

// The outputs of a dispatch; any may be 0. Rows are expert-major, one for each copy, or
// `rank_major`: row i is that of record i, and zero if no copy of it arrived. With a `buffer`
// number (zero copy), x is in symmetric memory at the same offset on all ranks, and peers write
// rows to it directly.
struct TwRecv {
    u64 x;
    float* weights;
    float* scales;
    int* index;
    u64 row_bytes;
    u32 buffer, bad_input;
    u32 rank_major, pad;
};

// Row `row` of the receive buffer of rank `r`; for r == me also valid if x is no receive buffer.
__device__ __forceinline__ u64 tw_recv_row(const TwEp& l, const TwRecv& out, u32 r, u64 row) {
    return out.x + tw_step(l, r) - tw_step(l, l.me) + row * out.row_bytes;
}

// The first warp of the grid announces that peers may write rows of this launch to the buffer.
__device__ __forceinline__ void tw_announce(const TwTeam& t, const TwEp& l, const TwMeet& m, const TwRecv& out, u64 epoch) {
    if (blockIdx.x != 0 || threadIdx.x >= 32 || tw_is_over(t)) return;
    fence_acq_rel_sys();
    for (u32 r = threadIdx.x; r < l.size; r += 32) st_relaxed_sys_u64(tw_buffer(l, m, r, l.me), epoch << 16 | out.buffer);
}

// Called by a warp: waits until all ranks take the rows of this launch in the same buffer as this
// rank; another buffer number is reported as bad input. False if the team has a fault.
__device__ __forceinline__ bool tw_accepted(const TwTeam& t, const TwEp& l, const TwMeet& m, const TwRecv& out, u64 epoch) {
    if (out.buffer == 0) return true;
    bool good = true;
    for (u32 r = threadIdx.x % 32; good && r < l.size; r += 32) {
        const TwWait w = {TW_OP_WAIT, m.slot, r, 0, 0, epoch << 16, 0, 0, 0};
        good = tw_await(t, tw_buffer(l, m, l.me, r), w);
        // The word may already be of the next launch: such a rank has received all of this one.
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

// Called by a warp: writes `len` zero bytes with plain stores.
struct TwZeros {
    __device__ __forceinline__ void operator()(u64 to, u64 len) const {
        const TwPiece zero = {{0, 0, 0, 0}};
        const u64 pieces = to % 16 == 0 ? len / 16 : 0;
        for (u64 i = threadIdx.x % 32; i < pieces; i += 32) ((TwPiece*)to)[i] = zero;
        for (u64 i = 16 * pieces + threadIdx.x % 32; i < len; i += 32) ((u8*)to)[i] = 0;
    }
};

// Called by a warp: lane n loads the n-th copy of a record of this rank's area. Returns their
// number.
__device__ __forceinline__ u32 tw_copies(const TwEp& l, u64 record, u64 epoch, TwCopy& c) {
    const u32 lane = threadIdx.x % 32;
    c.stamp = (u32)epoch - 1;
    if (lane < l.top_k) c = ((const TwCopy*)tw_meta(l, l.me, record))[lane];
    return __popc(__ballot_sync(0xffffffffu, c.stamp == (u32)epoch));
}

// The scales of a record, behind its k copies.
__device__ __forceinline__ float* tw_scales(const TwEp& l, u32 rank, u64 record) {
    return (float*)(tw_meta(l, rank, record) + (u64)l.top_k * sizeof(TwCopy));
}

// Handle entry, weight and index of an expert-major row without a token. The row's bytes stay.
__device__ __forceinline__ void tw_no_source(const TwHandle& h, const TwRecv& out, u64 row) {
    h.source[row] = -1;
    if (out.weights) out.weights[row] = 0.0f;
    if (out.index) out.index[row] = -1;
}

// Called by a warp: zeroes scales and row of a received row without a token; `fill` writes the
// bytes.
template <class Fill>
__device__ __forceinline__ void tw_empty_row(const TwEp& l, const TwRecv& out, u64 row, const Fill& fill) {
    if (out.scales)
        for (u32 i = threadIdx.x % 32; i < l.scales; i += 32) out.scales[row * l.scales + i] = 0.0f;
    if (out.x) fill(out.x + row * out.row_bytes, out.row_bytes);
}

// Called by a warp: a padding row of an expert.
template <class Fill>
__device__ __forceinline__ void tw_pad_row(const TwEp& l, const TwHandle& h, const TwRecv& out, u64 row, const Fill& fill) {
    if (threadIdx.x % 32 == 0) tw_no_source(h, out, row);
    if (!out.rank_major) tw_empty_row(l, out, row, fill);
}

// Called by `num` warps, w this warp's number: pads the rows of each expert that no token fills,
// every num-th by this warp. The counts of the routing give these rows before any data arrives.
// Rows behind the last expert's only get their handle entries: consumers do not read their bytes.
template <class Fill>
__device__ __forceinline__ void tw_pad(const TwEp& l, const TwHandle& h, const TwRecv& out, u64 w, u64 num, const Fill& fill) {
    const u32 full = 0xffffffffu, local = l.first[l.me + 1] - l.first[l.me], lane = threadIdx.x % 32;
    i64 at = 0;
    i64 next = w;  // index of this warp's next padding row, from `at` on
    for (u32 e0 = 0; e0 < local; e0 += 32) {
        const u32 e = e0 + lane;
        const i64 rows = e < local ? h.m_splits[e] : 0, fed = e < local ? min(h.counts[e], rows) : 0;
        // Inclusive scans over lanes: rows up to this lane's expert, and padding rows among them.
        i64 end = rows, pads = rows - fed;
#pragma unroll
        for (u32 by = 1; by < 32; by *= 2) {
            const i64 a = __shfl_up_sync(full, end, by), b = __shfl_up_sync(full, pads, by);
            if (lane >= by) end += a, pads += b;
        }
        for (const i64 all = __shfl_sync(full, pads, 31); next < all; next += num) {
            // `next` is the index of a padding row. Its expert's last row is also that expert's
            // last padding row.
            const u32 owner = __popc(__ballot_sync(full, pads <= next));
            tw_pad_row(l, h, out, at + __shfl_sync(full, end - pads, owner) + next, fill);
        }
        next -= __shfl_sync(full, pads, 31);
        at += __shfl_sync(full, end, 31);
    }
    for (u64 row = at + 32 * w + lane; row < l.capacity; row += 32 * num) tw_no_source(h, out, row);
}

// Address of the expert-major row of copy `n` of a record (rank-major: of the record's row, for n =
// 0 alone), or 0 if the copy has no row. With a receive buffer the row may already be there. c.row
// was written by a peer, so it is checked against the capacity.
__device__ __forceinline__ u64 tw_kept_row(const TwEp& l, const TwRecv& out, u64 record, u32 n, const TwCopy& c) {
    const u64 row = out.rank_major ? record : (u32)c.row;
    return out.x && (out.rank_major ? n == 0 : row < l.capacity) ? out.x + row * out.row_bytes : 0;
}

// Called by one lane: stores the number of copies of a record, and its row in a rank-major layout.
__device__ __forceinline__ void tw_keep_record(const TwHandle& h, const TwRecv& out, u64 record, u32 num) {
    h.num[record] = num;
    if (out.rank_major) h.place[record] = num > 0 ? (int)record : -1;
}

// Stores handle entries, weight and index of copy `n` of a record, without scales. Correct peers
// send only rows within the capacity; any other would be out of bounds and is ignored.
__device__ __forceinline__ void tw_keep_copy(const TwEp& l, const TwHandle& h, const TwRecv& out, u64 record, u32 n, const TwCopy& c) {
    h.copies[record * l.top_k + n] = c;
    if ((u32)c.row >= l.capacity) return;
    h.source[c.row] = (int)record;
    if (out.weights) out.weights[c.row] = c.weight;
    if (out.index) out.index[c.row] = out.rank_major ? (int)record : c.row;
}

// Called by a warp: copies the scales of a record to the row of its copy `n`.
__device__ __forceinline__ void tw_keep_scales(const TwEp& l, const TwRecv& out, u64 record, u32 n, u32 row) {
    if (!out.scales || (out.rank_major ? n != 0 : row >= l.capacity)) return;
    const u64 to = out.rank_major ? record : row;
    const float* scales = tw_scales(l, l.me, record);
    for (u32 s = threadIdx.x % 32; s < l.scales; s += 32) out.scales[to * l.scales + s] = scales[s];
}

// Called by a warp: copies slice `j` of an arrived record to the expert-major rows of its copies;
// the caller with slice 0 also stores the handle entries.
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
    // In a receive buffer the first copy's row is already in place.
    for (u32 n = out.buffer ? 1 : 0; from && n < num; n += 2) {
        const u64 a = __shfl_sync(full, row, n), b = __shfl_sync(full, row, n + 1 < num ? n + 1 : n);
        u64 to[2] = {a, n + 1 < num ? b : 0};
        if (!to[0]) to[0] = to[1], to[1] = 0;
        if (to[0]) tw_lay(from, out.row_bytes, to, j, slices);
    }
}

// The blocks behind the senders: they pad rows while data is in flight, then copy chunks to
// expert-major rows in the order me + 1, me + 2, ... of sources, as each arrives.
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

// Inputs of a push: rows x, and weights [tokens, k] and scales [tokens, scales], which may be null.
struct TwPush {
    u64 x;
    const float* weights;
    const float* scales;
    u64 row_bytes;
    u32 tokens, pad;
};

// One choice of a token: its row and rank, and the number of earlier kept choices of the same token
// that go to that rank (`nth`). Row -1: the choice is not kept.
struct TwPick {
    int row, rank;
    u32 nth;
};

// Called by a warp: writes the TwCopy entries and scales of tokens [t, end), at most 32 / top_k of
// them, to their ranks, in the order of choices. Lane i has choice i % top_k of token t + i /
// top_k: all lanes read at once, because reads one after the other would take longer than moving a
// row.
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

// Called by a warp whose lanes have written all of chunk `c`: raises the chunk's arrival flag at
// all ranks. __syncwarp and the fence order the writes of all lanes before the flags.
__device__ __forceinline__ void tw_push_flags(const TwTeam& t, const TwEp& l, const TwMeet& m, u64 epoch, u32 c) {
    __syncwarp();
    fence_acq_rel_sys();
    for (u32 r = threadIdx.x % 32; r < l.size; r += 32) st_relaxed_sys_u64(tw_arrival(l, m, r, l.me, c), epoch);
}

// Elements 4n to 4n + 3 of a row of `hidden` elements; elements behind its end are 0.
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

// Inputs and outputs of a return. y has a row for each copy (`expert_major`, multiplied by
// `weights` if given) or for each record. `dw` are gradients of weights by expert-major row. `out`
// [tokens, hidden] and `dw_out` [tokens, k] get the sums of what the ranks return.
struct TwReturn {
    const Out::Bits* y;
    const float *weights, *dw;
    Out::Bits* out;
    float* dw_out;
    u32 hidden, expert_major, tokens, pad;
};
