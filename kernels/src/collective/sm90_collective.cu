// A collective as one kernel that meets the other ranks itself, from sm_90 on: parts go to their
// ranks by bulk copies, piece by piece with a flag behind each, and what arrives is taken in as it
// arrives. It is copied to the output, or added in f32 in the order of the ranks and rounded once,
// with the bits of sm80_reduce.cu; a sum goes on to all ranks, if there is a second phase.
//
// Of the WARPS of a block one thread of each of the first SEND sends: chunks go through a ring in
// shared memory, some being loaded, others being stored, and a flag follows once its piece is
// written. The fence before a flag waits for all that its thread has stored, some microseconds, so
// that several threads send, and pieces are several chunks. The other warps, and at last those,
// take in what arrives. Sums wait for pieces that ranks send, and what is taken in last waits for
// sums, so that a warp does these in that order, and some warps do the last alone. Warps take the
// next thing that nobody has taken: the launch ends with any number of blocks that run at once.
//
// A flag holds the number of its launch: nothing is ever cleared, and a replayed graph needs no new
// values. A rank that has read what arrived grants its memory for the next launch. Peers' memory is
// written, read never.

#include "../common/convert.cuh"
#include "../comm/meet.cuh"
#include "../comm/stage.cuh"
#include "sum.cuh"

enum { WARPS = TW_COLLECTIVE_WARPS, RANKS = TW_COLLECTIVE_RANKS, PIECE = TW_COLLECTIVE_PIECE };
enum { SEND = TW_COLLECTIVE_SEND, CHUNK = TW_COLLECTIVE_CHUNK, STAGES = TW_COLLECTIVE_STAGES, LEAD = STAGES / 2 };
static_assert(PIECE % 16 == 0 && CHUNK % 16 == 0 && STAGES % 2 == 0, "whole units, halves of a ring");
static_assert(RANKS <= 32, "a lane for each rank");

typedef TwQuads<TW_OUT_MANTISSA> Quad;
typedef TwStage<PIECE, 1> Stage;

// [WARPS][PIECE] of what is taken in, then [SEND][STAGES][CHUNK] of what is sent.
extern __shared__ __align__(128) unsigned char tw_smem[];

struct TwPart {
    u64 src, dst, len;
};

// Flags of a rank: credits [P] u64, then arrivals [2][P][pieces] u64 of what is sent and of sums.
struct TwCollective {
    u64 flags[RANKS];
    u64* epoch;         // launches so far
    u32* ticket;        // [4] blocks that are through, and what was taken to send, to add, to take in; 0 between launches
    u32 slot, pieces;   // for reports: the credit's, the arrival's is the next; flags of a rank
    u32 piece, slice;   // bytes behind a flag: as they are sent, and of a sum
    u32 sends, sums, takes;  // the most of each part
    u32 same;           // 1: all ranks are sent the same bytes
    u32 summers, pad;   // warps of a block that add
    TwPart send[RANKS]; // mine for each rank; to myself: to the output
    TwPart take[RANKS]; // what comes from each rank, and where it belongs
};

// My part of a sum of `len` bytes: that of rank r lies at slots + r * stride, mine at `own`. Where
// rank r gets it, or 0.
struct TwTotal {
    u64 slots, stride, own, len;
    u64 to[RANKS];
    float scale;
    u32 pad;
};

__device__ __forceinline__ u64* tw_credit(const TwCollective& c, u32 rank, u32 writer) {
    return (u64*)c.flags[rank] + writer;
}

__device__ __forceinline__ u64* tw_arrival(const TwTeam& t, const TwCollective& c, u32 phase, u32 rank, u32 writer, u32 n) {
    return (u64*)c.flags[rank] + t.size + (u64)(phase * t.size + writer) * c.pieces + n;
}

// By a warp, a lane for each peer: its word at word(r) has reached `count`. False if the team is
// over.
template <class Word>
__device__ __forceinline__ bool tw_all_reached(const TwTeam& t, u32 slot, u64 count, const Word& word) {
    const u32 r = threadIdx.x % 32;
    bool good = true;
    if (r < t.size && r != t.me) {
        const TwWait w = {TW_OP_WAIT, slot, r, 0, 0, count, 0, 0, 0};
        good = tw_await(t, word(r), w);
    }
    // Every lane reads behind the words that the others have seen.
    __syncwarp();
    return __all_sync(0xffffffffu, good);
}

// Piece `n` of what is sent has arrived from all ranks.
__device__ __forceinline__ bool tw_all_came(const TwTeam& t, const TwCollective& c, u64 epoch, u32 n) {
    return tw_all_reached(t, c.slot + 1, epoch, [&](u32 r) { return tw_arrival(t, c, 0, t.me, r, n); });
}

// By a warp: `len` bytes to the output.
__device__ __forceinline__ void tw_copy(u64 from, u64 to, u64 len, Stage& s) {
    if ((from | to | len) % 16 == 0) {
        tw_bulk_fetch(s, from, len);
        for (u64 at = 0; at < len; at += PIECE) {
            const u64 left = len - at;
            const unsigned char* piece = tw_bulk_await(s);
            if (threadIdx.x % 32 == 0) bulk_store((void*)(to + at), piece, (u32)min((u64)PIECE, left));
            tw_bulk_stored(s);
            if (left > PIECE) tw_bulk_fetch(s, from + at + PIECE, left - PIECE);
        }
        return;
    }
    const u64 places[2] = {to, 0};
    tw_lay(from, len, places, 0, 1);
}

// By a warp that has written piece `n` to rank `r` of each lane with `announced`: it has arrived.
__device__ __forceinline__ void tw_announce(const TwTeam& t, const TwCollective& c, u64 epoch, u32 phase, bool announced, u32 r, u32 n) {
    // Written, and known to the lane that says so.
    bulk_wait_group<0>();
    fence_proxy_async();
    __syncwarp();
    fence_acq_rel_sys();
    if (announced && r != t.me) st_relaxed_sys_u64(tw_arrival(t, c, phase, r, t.me, n), epoch);
}

// A chunk on its way: where it is in its part, and its piece if it is the last of that.
struct TwChunk {
    u64 at;
    u32 len, item, last;
};

// Chunks in shared memory, and what is known of those that are loaded, stored or not yet announced.
struct TwRing {
    unsigned char* at;
    u64* full;
    TwChunk* chunk;  // [2 * STAGES]
};

// The piece that is cut into chunks: items are pieces, to one rank after the other from me + 1 on,
// or to all at once.
struct TwCut {
    u32 item, r;
    u64 at, end;
};

__device__ __forceinline__ u32 tw_fan(const TwTeam& t, const TwCollective& c) {
    return c.same ? 1 : t.size;
}

// Cuts item `i`. False if there is nothing of it.
__device__ __forceinline__ bool tw_cut(const TwTeam& t, const TwCollective& c, u32 i, TwCut& cut) {
    const u32 fan = tw_fan(t, c);
    cut.item = i;
    cut.r = (t.me + 1 + i % fan) % t.size;
    cut.at = (u64)(i / fan) * c.piece;
    cut.end = min(cut.at + c.piece, c.send[cut.r].len);
    return cut.at < cut.end;
}

// Pieces up to chunk `end` have been written: they have arrived.
__device__ __forceinline__ void tw_announce_chunks(const TwTeam& t, const TwCollective& c, u64 epoch, const TwRing& ring, u32& announced, u32 end) {
    bool fenced = false;
    const u32 fan = tw_fan(t, c);
    for (; announced != end; announced++) {
        const TwChunk& k = ring.chunk[announced % (2 * STAGES)];
        if (!k.last) continue;
        if (!fenced) {
            fence_proxy_async();
            fence_acq_rel_sys();
        }
        fenced = true;
        for (u32 j = 0; j < (c.same ? t.size : 1); j++) {
            const u32 r = (t.me + 1 + (c.same ? j : k.item % fan)) % t.size;
            if (r != t.me) st_relaxed_sys_u64(tw_arrival(t, c, 0, r, t.me, k.item / fan), epoch);
        }
    }
}

// By one thread: pieces that no block has taken. LEAD chunks are being loaded, others are being
// stored.
__device__ __forceinline__ void tw_push_ring(const TwTeam& t, const TwCollective& c, u64 epoch, const TwRing& ring) {
    TwCut cut = {0, 0, 0, 0};
    u32 asked = 0, stored = 0, announced = 0;
    const u32 fan = tw_fan(t, c), items = c.sends * fan;
    for (;;) {
        while (cut.item < items && asked - stored < LEAD) {
            if (cut.at >= cut.end) {
                const u32 i = atomicAdd(c.ticket + 1, 1u);
                if (i >= items) cut.item = i;
                else tw_cut(t, c, i, cut);
                continue;
            }
            const u32 len = (u32)min((u64)CHUNK, cut.end - cut.at), stage = asked % STAGES;
            mbarrier_arrive_expect_tx(ring.full + stage, len);
            bulk_load(ring.at + stage * CHUNK, (const void*)(c.send[cut.r].src + cut.at), len, ring.full + stage);
            ring.chunk[asked++ % (2 * STAGES)] = {cut.at, len, cut.item, cut.at + len == cut.end};
            cut.at += len;
        }
        if (stored == asked) break;
        const u32 stage = stored % STAGES;
        // The bytes of our own loads: they always come.
        while (!mbarrier_try_wait_parity(ring.full + stage, stored / STAGES & 1)) {
        }
        const TwChunk k = ring.chunk[stored++ % (2 * STAGES)];
        for (u32 j = 0; j < (c.same ? t.size : 1); j++) {
            const u32 r = (t.me + 1 + (c.same ? j : k.item % fan)) % t.size;
            bulk_store((void*)(c.send[r].dst + k.at), ring.at + stage * CHUNK, k.len);
        }
        bulk_commit_group();
        // All but the latest have left their stages: the next load may take the oldest.
        bulk_wait_group_read<STAGES - LEAD - 1>();
        bulk_wait_group<LEAD>();
        if (stored > LEAD) tw_announce_chunks(t, c, epoch, ring, announced, stored - LEAD);
    }
    bulk_wait_group<0>();
    tw_announce_chunks(t, c, epoch, ring, announced, stored);
}

// By a warp: the same at any alignment.
__device__ __noinline__ void tw_push_any(const TwTeam& t, const TwCollective& c, u64 epoch) {
    const u32 fan = tw_fan(t, c), lane = threadIdx.x % 32;
    for (u32 i; (i = tw_claim(c.ticket + 1)) < c.sends * fan;) {
        TwCut cut;
        if (!tw_cut(t, c, i, cut)) continue;
        for (u32 j = 0; j < (c.same ? t.size : 1); j++) {
            const TwPart& part = c.send[c.same ? (t.me + 1 + j) % t.size : cut.r];
            const u64 to[2] = {part.dst + cut.at, 0};
            tw_lay(part.src + cut.at, cut.end - cut.at, to, 0, 1);
        }
        const u32 r = c.same ? (t.me + 1 + lane) % t.size : cut.r;
        tw_announce(t, c, epoch, 0, lane < (c.same ? t.size : 1), r, i / fan);
    }
}

// By a warp: my parts to all ranks.
__device__ __forceinline__ void tw_push(const TwTeam& t, const TwCollective& c, u64 epoch, const TwRing& ring) {
    const u32 lane = threadIdx.x % 32;
    if (tw_warp_is_over(t)) return;
    const auto credit = [&](u32 r) { return tw_credit(c, t.me, r); };
    if (!tw_all_reached(t, c.slot, epoch - 1, credit)) return;
    // What was there was read by bulk loads before it was granted, and is written by bulk stores.
    fence_proxy_async();
    const TwPart mine = lane < t.size ? c.send[lane] : TwPart{0, 0, 0};
    if (!__all_sync(0xffffffffu, (mine.src | mine.dst | mine.len) % 16 == 0)) tw_push_any(t, c, epoch);
    else if (lane == 0) tw_push_ring(t, c, epoch, ring);
    __syncwarp();
}

struct __align__(16) TwUnit {
    Quad q[16 / sizeof(Quad)];
};
enum { WIDE = 16 / sizeof(Quad) };

__device__ __forceinline__ u64 tw_part(const TwTeam& t, const TwTotal& a, u32 r) {
    return r == t.me ? a.own : a.slots + r * a.stride;
}

// DEEP sums of GROUP ranks at a time, from unit `i` on, 32 units apart; all of them where it is
// FULL. Loads have no branches between them and stay in registers: kept in local memory they came
// one after the other.
template <u32 GROUP, u32 DEEP, bool FULL>
__device__ __forceinline__ void tw_add_deep(const TwTeam& t, const TwTotal& a, u64 at, u32 i, u32 units, TwUnit* out) {
    float sum[DEEP][WIDE][4] = {};
    for (u32 r0 = 0; r0 < t.size; r0 += GROUP) {
        TwUnit part[GROUP][DEEP] = {};
#pragma unroll
        for (u32 k = 0; k < GROUP; k++) {
            // The last rank again: read, but not added.
            const TwUnit* p = (const TwUnit*)(tw_part(t, a, min(r0 + k, t.size - 1)) + at) + i;
#pragma unroll
            for (u32 d = 0; d < DEEP; d++)
                if (FULL || i + 32 * d < units) part[k][d] = p[32 * d];
        }
#pragma unroll
        for (u32 k = 0; k < GROUP; k++) {
            if (r0 + k < t.size) {
#pragma unroll
                for (u32 d = 0; d < DEEP; d++)
#pragma unroll
                    for (u32 w = 0; w < WIDE; w++) {
                        const Quad& q = part[k][d].q[w];
                        tw_add(sum[d][w], q.term(0), q.term(1), q.term(2), q.term(3), r0 + k == 0);
                    }
            }
        }
    }
#pragma unroll
    for (u32 d = 0; d < DEEP; d++) {
        TwUnit v;
#pragma unroll
        for (u32 w = 0; w < WIDE; w++) {
#pragma unroll
            for (int j = 0; j < 4; j++) sum[d][w][j] = __fmul_rn(sum[d][w][j], a.scale);
            v.q[w].round_all(sum[d][w]);
        }
        if (FULL || i + 32 * d < units) out[i + 32 * d] = v;
    }
}

// By a warp: sums of whole units from byte `at` on.
template <u32 GROUP, u32 DEEP>
__device__ __forceinline__ void tw_add_units(const TwTeam& t, const TwTotal& a, u64 at, u32 units, TwUnit* out) {
    u32 i = threadIdx.x % 32;
    for (; i / 32 * 32 + 32 * DEEP <= units; i += 32 * DEEP) tw_add_deep<GROUP, DEEP, true>(t, a, at, i, units, out);
    if (i / 32 * 32 < units) tw_add_deep<GROUP, DEEP, false>(t, a, at, i, units, out);
}

// By a warp: the same at any alignment, to all its places.
__device__ __noinline__ void tw_add_quads(const TwTeam& t, const TwTotal& a, u64 at, u64 len) {
    const u64 num = len / sizeof(Quad::Elem::Bits);
    for (u64 n = threadIdx.x % 32; 4 * n < num; n += 32) {
        float sum[4];
        for (u32 r = 0; r < t.size; r++) {
            const Quad q = tw_quad<Quad>(tw_part(t, a, r) + at, n, num);
            tw_add(sum, q.term(0), q.term(1), q.term(2), q.term(3), r == 0);
        }
        for (int j = 0; j < 4; j++) sum[j] = __fmul_rn(sum[j], a.scale);
        Quad v;
        v.round_all(sum);
        for (u32 r = 0; r < t.size; r++)
            if (a.to[r]) tw_put_quad<Quad>(a.to[r] + at, n, num, v);
    }
}

// Slices of my part, as they come from all ranks.
__device__ __forceinline__ void tw_sum(const TwTeam& t, const TwCollective& c, const TwTotal& a, u64 epoch, Stage& s) {
    const u32 lane = threadIdx.x % 32, r = (t.me + 1 + lane) % t.size;
    const u64 to = lane < t.size ? a.to[r] : 0;
    const bool whole = __all_sync(0xffffffffu, (a.slots | a.stride | a.own | a.len | to) % 16 == 0);
    for (u32 i; (i = tw_claim(c.ticket + 2)) < c.sums;) {
        const u64 at = (u64)i * c.slice, len = min((u64)c.slice, a.len - at);
        if (!tw_all_came(t, c, epoch, at / c.piece)) break;
        if (whole) {
            // The sum before this one has left.
            bulk_wait_group_read<0>();
            __syncwarp();
            if (t.size <= 4) tw_add_units<4, 2>(t, a, at, len / 16, (TwUnit*)s.piece);
            else tw_add_units<8, 1>(t, a, at, len / 16, (TwUnit*)s.piece);
            // Behind the flags that were waited for, and behind the sum.
            fence_proxy_async();
            __syncwarp();
            if (to) bulk_store((void*)(to + at), s.piece, len);
            bulk_commit_group();
        } else {
            tw_add_quads(t, a, at, len);
        }
        if (c.takes > 0) tw_announce(t, c, epoch, 1, lane < t.size, r, i);
    }
    bulk_wait_group_read<0>();
    __syncwarp();
}

// What comes to the output: what was sent, or sums.
__device__ __forceinline__ void tw_take(const TwTeam& t, const TwCollective& c, u64 epoch, Stage& s) {
    const u32 lane = threadIdx.x % 32, phase = c.sums > 0, fan = t.size - 1, bytes = phase ? c.slice : c.piece;
    if (c.takes == 0 || tw_warp_is_over(t)) return;
    // A rank that has not begun is reported as such: sums of others may be missing because of it.
    if (phase && !tw_all_came(t, c, epoch, 0)) return;
    for (u32 i; (i = tw_claim(c.ticket + 3)) < c.takes * fan;) {
        // While rank me + k is sent to, rank me - k sends to me.
        const u32 n = i / fan, r = (t.me + t.size - 1 - i % fan) % t.size;
        const u64 at = (u64)n * bytes, len = c.take[r].len;
        if (at >= len) continue;
        bool good = true;
        if (lane == 0) {
            const TwWait w = {TW_OP_WAIT, c.slot + 1, r, 0, 0, epoch, 0, 0, 0};
            good = tw_await(t, tw_arrival(t, c, phase, t.me, r, n), w);
        }
        __syncwarp();
        if (!__all_sync(0xffffffffu, good)) return;
        // Written by a peer's bulk copies, and read by mine.
        fence_proxy_async();
        tw_copy(c.take[r].src + at, c.take[r].dst + at, min((u64)bytes, len - at), s);
    }
}

// The launch is counted, and what arrived was read. By one block, behind all readers.
__device__ __forceinline__ void tw_grant(const TwTeam& t, const TwCollective& c, u64 epoch) {
    if (threadIdx.x == 0) *c.epoch = epoch;
    if (tw_is_over(t)) return;
    fence_acq_rel_sys();
    for (u32 r = threadIdx.x; r < t.size; r += blockDim.x) st_relaxed_sys_u64(tw_credit(c, r, t.me), epoch);
}

// Dynamic shared memory: WARPS * PIECE + SEND * STAGES * CHUNK. No sum is larger than a warp's
// piece.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
tw_collective(const __grid_constant__ TwTeam t, const __grid_constant__ TwCollective c, const __grid_constant__ TwTotal a,
              const __grid_constant__ TwPoison out) {
    __shared__ __align__(8) u64 barriers[WARPS], full[SEND][STAGES];
    __shared__ TwChunk chunks[SEND][2 * STAGES];
    const u64 epoch = ld_relaxed_gpu_u64(c.epoch) + 1;
    const u32 warp = threadIdx.x / 32;
    Stage s = tw_stage<PIECE, 1>(tw_smem, barriers);
    if (warp < SEND) {
        const TwRing ring = {tw_smem + WARPS * PIECE + warp * STAGES * CHUNK, full[warp], chunks[warp]};
        if (threadIdx.x % 32 == 0) {
            for (u32 i = 0; i < STAGES; i++) mbarrier_init(ring.full + i, 1);
            fence_mbarrier_init_release_cluster();
        }
        __syncwarp();
        tw_push(t, c, epoch, ring);
    }
    if (warp < c.summers) tw_sum(t, c, a, epoch, s);
    tw_take(t, c, epoch, s);
    // What a lane has stored is there, and no shared memory is read any more.
    bulk_wait_group<0>();
    fence_proxy_async();
    if (!tw_comes_last(c.ticket)) return;
    if (threadIdx.x < 3) c.ticket[1 + threadIdx.x] = 0;
    tw_grant(t, c, epoch);
    // Other blocks may have written what looks like results.
    if (tw_told(t)) tw_spoil(out);
}

// Behind a launch that went another way: it is counted, and its memory is granted. One block.
extern "C" __global__ void __launch_bounds__(64)
tw_collective_leave(const __grid_constant__ TwTeam t, const __grid_constant__ TwCollective c) {
    const u64 epoch = ld_relaxed_gpu_u64(c.epoch) + 1;
    // All have read it.
    __syncthreads();
    tw_grant(t, c, epoch);
}
