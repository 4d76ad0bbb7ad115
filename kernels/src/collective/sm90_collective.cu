// A collective as one kernel that synchronises with the other ranks itself, sm_90 and newer. Each
// rank pushes a part to every rank by bulk copies, in pieces that have a flag each, and handles
// received pieces as they arrive: it copies them to the output, or sums them in f32 in rank order
// and rounds once, with the bits of sm80_reduce.cu. If there is a second phase, the sums are pushed
// to all ranks and copied to their outputs.
//
// Warp roles, WARPS in a block:
//   push  lane 0 of each of the first SEND warps: moves chunks (a piece is several chunks) through
//         a ring in shared memory, some being loaded while others are being stored, and raises the
//         flag of a piece once the piece is written. The fence before a flag waits for all stores
//         of its thread, some microseconds; so several threads push, and a piece is several chunks.
//         If an address or length is no multiple of 16, the whole warp copies by plain stores.
//   sum   the first `summers` warps: sum slices of this rank's part.
//   take  all warps: copy received pieces, or sums of the owners, to the output.
// A warp with several roles takes them in that order, because sums wait for pushed pieces, and
// `take` waits for sums; warps beyond SEND and `summers` only take. Work is claimed from global
// counters, so the launch ends with any number of resident blocks.
//
// A flag holds the launch number, so no kernel clears flags, and a replayed graph needs no new
// values. A rank that has read what arrived grants its memory for the next launch. Kernels write
// peers' memory and never read it.
//
// Names used throughout: t the team, c the collective, a this rank's sum, s the warp's stage in
// shared memory, k a chunk, r a rank.

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

// [WARPS][PIECE] stages of sums and of takes, then [SEND][STAGES][CHUNK] rings of pushes.
extern __shared__ __align__(128) unsigned char tw_smem[];

struct TwPart {
    u64 src, dst, len;
};

// One launch (`c`). Flags of a rank: credits [P] u64, then arrivals [2][P][pieces] u64: of phase 0,
// pushed parts, and of phase 1, sums.
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
    TwPart take[RANKS]; // received from each rank, and its destination in the output
};

// The sum of this rank's part (`a`), `len` bytes: the operand from rank r is at slots + r * stride,
// my own at `own`. to[r] is where the sum is stored for rank r, or 0.
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

// Called by a warp, lane r for peer r: waits until the word at word(r) has reached `count`. False
// if the team has a fault.
template <class Word>
__device__ __forceinline__ bool tw_all_reached(const TwTeam& t, u32 slot, u64 count, const Word& word) {
    const u32 r = threadIdx.x % 32;
    bool good = true;
    if (r < t.size && r != t.me) {
        const TwWait w = {TW_OP_WAIT, slot, r, 0, 0, count, 0, 0, 0};
        good = tw_await(t, word(r), w);
    }
    // Every lane reads data that words acquired by other lanes announce.
    __syncwarp();
    return __all_sync(0xffffffffu, good);
}

// Waits until piece `n` of phase 0 has arrived from all ranks.
__device__ __forceinline__ bool tw_all_came(const TwTeam& t, const TwCollective& c, u64 epoch, u32 n) {
    return tw_all_reached(t, c.slot + 1, epoch, [&](u32 r) { return tw_arrival(t, c, 0, t.me, r, n); });
}

// Called by a warp: copies `len` bytes from a received piece to the output.
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

// Called by a warp that has written piece `n`: each lane with `announced` raises the flag at rank
// `r`.
__device__ __forceinline__ void tw_announce(const TwTeam& t, const TwCollective& c, u64 epoch, u32 phase, bool announced, u32 r, u32 n) {
    // The bulk stores of each lane are complete and ordered before the flags.
    bulk_wait_group<0>();
    fence_proxy_async();
    __syncwarp();
    fence_acq_rel_sys();
    if (announced && r != t.me) st_relaxed_sys_u64(tw_arrival(t, c, phase, r, t.me, n), epoch);
}

// A chunk in flight: its offset in the part, its length, its item (see TwCut), and whether it is
// the last of its piece.
struct TwChunk {
    u64 at;
    u32 len, item, last;
};

// The ring of a pushing thread: stages, their barriers, and the chunks that are being loaded, being
// stored, or stored but not yet announced.
struct TwRing {
    unsigned char* at;
    u64* full;
    TwChunk* chunk;  // [2 * STAGES]
};

// The piece that is being cut into chunks. An item is one piece for one rank, ranks in the order me
// + 1, me + 2, ...; or one piece for all ranks if they get the same bytes (`same`).
struct TwCut {
    u32 item, r;
    u64 at, end;
};

__device__ __forceinline__ u32 tw_fan(const TwTeam& t, const TwCollective& c) {
    return c.same ? 1 : t.size;
}

// Starts item `i`. False if the part ends before it.
__device__ __forceinline__ bool tw_cut(const TwTeam& t, const TwCollective& c, u32 i, TwCut& cut) {
    const u32 fan = tw_fan(t, c);
    cut.item = i;
    cut.r = (t.me + 1 + i % fan) % t.size;
    cut.at = (u64)(i / fan) * c.piece;
    cut.end = min(cut.at + c.piece, c.send[cut.r].len);
    return cut.at < cut.end;
}

// Chunks below `end` have been written: raises the flags of the pieces that end among them.
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

// Called by one thread: claims items and pushes them. Up to LEAD chunks are being loaded while
// others are being stored.
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
        // No deadline: the thread's own loads always complete.
        while (!mbarrier_try_wait_parity(ring.full + stage, stored / STAGES & 1)) {
        }
        const TwChunk k = ring.chunk[stored++ % (2 * STAGES)];
        for (u32 j = 0; j < (c.same ? t.size : 1); j++) {
            const u32 r = (t.me + 1 + (c.same ? j : k.item % fan)) % t.size;
            bulk_store((void*)(c.send[r].dst + k.at), ring.at + stage * CHUNK, k.len);
        }
        bulk_commit_group();
        // All but the latest STAGES - LEAD - 1 groups have been read, so the next load may
        // overwrite the oldest stage. All but the latest LEAD groups are written.
        bulk_wait_group_read<STAGES - LEAD - 1>();
        bulk_wait_group<LEAD>();
        if (stored > LEAD) tw_announce_chunks(t, c, epoch, ring, announced, stored - LEAD);
    }
    bulk_wait_group<0>();
    tw_announce_chunks(t, c, epoch, ring, announced, stored);
}

// Called by a warp: the same with plain stores, for any alignment.
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

// Called by a warp: waits for the credits of all ranks, then pushes this rank's parts.
__device__ __forceinline__ void tw_push(const TwTeam& t, const TwCollective& c, u64 epoch, const TwRing& ring) {
    const u32 lane = threadIdx.x % 32;
    if (tw_warp_is_over(t)) return;
    const auto credit = [&](u32 r) { return tw_credit(c, t.me, r); };
    if (!tw_all_reached(t, c.slot, epoch - 1, credit)) return;
    // Orders the credits, acquired by loads, before the bulk stores that they permit.
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

// Sums of all ranks' operands at DEEP units, 32 units apart, from unit `i` on; GROUP ranks are
// loaded at a time. FULL: all DEEP units exist. Loads have no branches between them and their
// results stay in registers: in local memory they were loaded one after the other.
template <u32 GROUP, u32 DEEP, bool FULL>
__device__ __forceinline__ void tw_add_deep(const TwTeam& t, const TwTotal& a, u64 at, u32 i, u32 units, TwUnit* out) {
    float sum[DEEP][WIDE][4] = {};
    for (u32 r0 = 0; r0 < t.size; r0 += GROUP) {
        TwUnit part[GROUP][DEEP] = {};
#pragma unroll
        for (u32 k = 0; k < GROUP; k++) {
            // Behind the last rank its operand is read again, but not added.
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

// Called by a warp: sums `units` whole units from byte `at` on, into `out`.
template <u32 GROUP, u32 DEEP>
__device__ __forceinline__ void tw_add_units(const TwTeam& t, const TwTotal& a, u64 at, u32 units, TwUnit* out) {
    u32 i = threadIdx.x % 32;
    for (; i / 32 * 32 + 32 * DEEP <= units; i += 32 * DEEP) tw_add_deep<GROUP, DEEP, true>(t, a, at, i, units, out);
    if (i / 32 * 32 < units) tw_add_deep<GROUP, DEEP, false>(t, a, at, i, units, out);
}

// Called by a warp: the same at any alignment, stored to all destinations.
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

// Called by a warp: claims slices of this rank's part, waits for their piece from all ranks, and
// sums.
__device__ __forceinline__ void tw_sum(const TwTeam& t, const TwCollective& c, const TwTotal& a, u64 epoch, Stage& s) {
    const u32 lane = threadIdx.x % 32, r = (t.me + 1 + lane) % t.size;
    const u64 to = lane < t.size ? a.to[r] : 0;
    const bool whole = __all_sync(0xffffffffu, (a.slots | a.stride | a.own | a.len | to) % 16 == 0);
    for (u32 i; (i = tw_claim(c.ticket + 2)) < c.sums;) {
        const u64 at = (u64)i * c.slice, len = min((u64)c.slice, a.len - at);
        if (!tw_all_came(t, c, epoch, at / c.piece)) break;
        if (whole) {
            // The bulk store of the sum before has read the stage.
            bulk_wait_group_read<0>();
            __syncwarp();
            if (t.size <= 4) tw_add_units<4, 2>(t, a, at, len / 16, (TwUnit*)s.piece);
            else tw_add_units<8, 1>(t, a, at, len / 16, (TwUnit*)s.piece);
            // Orders the bulk stores behind the acquired flags, and behind the plain stores of the
            // sum.
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

// Called by a warp: claims received pieces (phase 0) or sums (phase 1), and copies them to the
// output.
__device__ __forceinline__ void tw_take(const TwTeam& t, const TwCollective& c, u64 epoch, Stage& s) {
    const u32 lane = threadIdx.x % 32, phase = c.sums > 0, fan = t.size - 1, bytes = phase ? c.slice : c.piece;
    if (c.takes == 0 || tw_warp_is_over(t)) return;
    // Waits for the first piece of every rank first: a rank that has not begun is then the one
    // reported, and not a peer whose sum is missing because of it.
    if (phase && !tw_all_came(t, c, epoch, 0)) return;
    for (u32 i; (i = tw_claim(c.ticket + 3)) < c.takes * fan;) {
        // While a rank pushes to rank me + k, rank me - k pushes to it.
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
        // The flag was acquired by a load; this warp reads the piece that it announces by bulk
        // loads.
        fence_proxy_async();
        tw_copy(c.take[r].src + at, c.take[r].dst + at, min((u64)bytes, len - at), s);
    }
}

// Counts the launch, and grants the receive memory for the next one. One block calls this, after
// the last read.
__device__ __forceinline__ void tw_grant(const TwTeam& t, const TwCollective& c, u64 epoch) {
    if (threadIdx.x == 0) *c.epoch = epoch;
    if (tw_is_over(t)) return;
    fence_acq_rel_sys();
    for (u32 r = threadIdx.x; r < t.size; r += blockDim.x) st_relaxed_sys_u64(tw_credit(c, r, t.me), epoch);
}

// The kernel of all collectives; the head of this file describes roles and parameters (t, c, a).
//   Grid: any number of blocks. Block: WARPS warps.
//   Dynamic shared memory: WARPS * PIECE + SEND * STAGES * CHUNK bytes.
//   No slice of a sum is larger than PIECE.
// After a fault waits return false and blocks end; the last block then poisons `out`.
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
    // The bulk stores of each lane are complete, and no bulk copy reads shared memory any more.
    bulk_wait_group<0>();
    fence_proxy_async();
    if (!tw_comes_last(c.ticket)) return;
    if (threadIdx.x < 3) c.ticket[1 + threadIdx.x] = 0;
    tw_grant(t, c, epoch);
    // After a fault other blocks may have written values that look like results.
    if (tw_told(t)) tw_spoil(out);
}

// Counts and grants a launch that was carried out in another way. Grid: 1 block of 64 threads.
extern "C" __global__ void __launch_bounds__(64)
tw_collective_leave(const __grid_constant__ TwTeam t, const __grid_constant__ TwCollective c) {
    const u64 epoch = ld_relaxed_gpu_u64(c.epoch) + 1;
    // All threads have read the counter before it is written.
    __syncthreads();
    tw_grant(t, c, epoch);
}
