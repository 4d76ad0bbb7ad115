// Combine by bulk loads, sm_90 and newer. The result equals tw_ep_return of sm80_ep.cu; rows pass
// through shared memory, a ring of slices for each warp, so that few multiprocessors have enough
// bytes in flight. Rows, their addresses and strides are multiples of 16; a chunk has at most
// TOKENS tokens, a token at most ENTRIES copies, and the team at most ENTRIES ranks.
//
// Warp roles: RETURN warps sum the copies of a record and push the sum to its rank; SUM warps sum
// the returned rows. RETURN warps that find no chunk left sum, too. Warps claim chunks from a
// global counter, so the launch ends with any number of resident blocks.

#include "../ptx/bulk.cuh"
#include "layer.cuh"

enum { RETURN = TW_EP_RETURN_PUSH, SUM = TW_EP_RETURN_SUM, SLICE = TW_EP_RETURN_SLICE, STAGES = TW_EP_RETURN_STAGES };
// Tokens that a warp claims at a time when it sums returned rows.
enum { PART = 4 };
enum { TOKENS = TW_EP_RETURN_TOKENS, ENTRIES = TW_EP_RETURN_ENTRIES, ALL_WARPS = RETURN + SUM };
// Bytes that a lane reads at a time. With 16 the code for sm_100 runs out of registers (bf16: 28
// bytes spilled).
#if __CUDA_ARCH__ >= 1000
enum { UNIT = sizeof(OutQuad) };
#else
enum { UNIT = sizeof(TwPiece) };
#endif
// QUADS: quads of a unit; UNITS: units of a slice for each lane.
enum { QUADS = UNIT / sizeof(OutQuad), UNITS = (SLICE + 32 * UNIT - 1) / (32 * UNIT) };
static_assert(SLICE % sizeof(TwPiece) == 0 && ENTRIES <= 32, "whole units, a lane for each entry");

struct __align__(UNIT) TwUnit {
    OutQuad q[QUADS];
};
static_assert(sizeof(TwUnit) == UNIT, "one access");

// [ALL_WARPS][STAGES + 1][SLICE], the last slice of each warp for sums, then a TwList for each
// warp.
extern __shared__ __align__(128) unsigned char tw_smem[];

struct TwEntry {
    u32 row;
    float weight;
};

// For each token of a chunk: the rows to be summed, and their weights.
struct TwList {
    u32 num[TOKENS];
    TwEntry e[TOKENS][ENTRIES];
};

// A warp's ring: STAGES slices and one for sums at `at`, a barrier for each stage, the stage of the
// next load (`ask`), the stage to be read next (`use`) and the barrier phase of the latter.
struct TwRing {
    unsigned char* at;
    u64* full;
    u32 ask, use, phase;
};

// A comparison instead of a remainder: this runs for every slice.
__device__ __forceinline__ u32 tw_stage_after(u32 stage) {
    return stage + 1 == STAGES ? 0 : stage + 1;
}

// The memory that row numbers of a list refer to. Rows have less than 2^20 elements, so 32 bits do:
// registers are the limit of this kernel.
struct TwRows {
    u64 base;
    u32 stride, bytes;
};

// The next load of a list: token by token, slice by slice of a token, its rows in turn.
struct TwCursor {
    u32 token, n, at;
};

__device__ __forceinline__ void tw_skip(const TwList& list, u32 tokens, TwCursor& c) {
    while (c.token < tokens && list.num[c.token] == 0) c.token++;
}

// Called by a warp: issues the next load of the list, if there is one. Its stage must be free.
__device__ __forceinline__ void tw_ask(const TwList& list, u32 tokens, const TwRows& rows, TwCursor& c, TwRing& ring) {
    if (c.token >= tokens) return;
    if (threadIdx.x % 32 == 0) {
        const u32 len = min((u32)SLICE, rows.bytes - c.at);
        mbarrier_arrive_expect_tx(ring.full + ring.ask, len);
        const u64 from = rows.base + (u64)list.e[c.token][c.n].row * rows.stride + c.at;
        bulk_load(ring.at + ring.ask * SLICE, (const void*)from, len, ring.full + ring.ask);
    }
    ring.ask = tw_stage_after(ring.ask);
    if (++c.n < list.num[c.token]) return;
    c.n = 0;
    c.at += SLICE;
    if (c.at < rows.bytes) return;
    c.at = 0;
    c.token++;
    tw_skip(list, tokens, c);
}

// Called by a warp: adds a slice of `units` to the sums, or starts them with it (FIRST). FULL:
// every lane has UNITS units, so there are no branches and the reads of shared memory overlap.
template <bool FULL, bool WEIGHTED, bool FIRST>
__device__ __forceinline__ void tw_add_slice(float (&sum)[UNITS][QUADS][4], const TwUnit* slice, u32 units, float w) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 i = 0; i < UNITS; i++) {
        if (!FULL && lane + 32 * i >= units) continue;
        const TwUnit v = slice[lane + 32 * i];
#pragma unroll
        for (int q = 0; q < QUADS; q++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float term = WEIGHTED ? __fmul_rn(w, v.q[q].term(k)) : v.q[q].term(k);
                sum[i][q][k] = FIRST ? term : __fadd_rn(sum[i][q][k], term);
            }
    }
}

// Called by a warp: waits for the next slice. No deadline: the warp's own load always completes.
__device__ __forceinline__ const TwUnit* tw_next_slice(TwRing& ring) {
    const u32 stage = ring.use;
    while (!mbarrier_try_wait_parity(ring.full + stage, ring.phase)) {
    }
    ring.use = tw_stage_after(stage);
    ring.phase ^= ring.use == 0;
    return (const TwUnit*)(ring.at + stage * SLICE);
}

// Called by a warp: returns the slice for sums once the bulk store of the sum before has read it.
__device__ __forceinline__ TwUnit* tw_own_slice(TwRing& ring) {
    bulk_wait_group_read<0>();
    __syncwarp();
    return (TwUnit*)(ring.at + STAGES * SLICE);
}

// Called by a warp: sums the slices of token `j` in list order, beginning with the first term, in
// f32, each multiplied by its weight if WEIGHTED; rounds once, into the ring's slice for sums. A
// single slice without a weight is copied unchanged.
template <bool FULL, bool WEIGHTED>
__device__ __forceinline__ void tw_add_slices(const TwList& list, u32 tokens, const TwRows& rows, TwRing& ring, u32 j, u32 units,
                                              TwCursor& next) {
    const u32 lane = threadIdx.x % 32, num = list.num[j];
    if (num == 1 && !WEIGHTED) {
        const TwUnit* from = tw_next_slice(ring);
        TwUnit* out = tw_own_slice(ring);
#pragma unroll
        for (u32 i = 0; i < UNITS; i++)
            if (FULL || lane + 32 * i < units) out[lane + 32 * i] = from[lane + 32 * i];
        __syncwarp();
        tw_ask(list, tokens, rows, next, ring);
    } else {
        float sum[UNITS][QUADS][4] = {};
        // The first slice has a call of its own: with FIRST decided in the loop the sums would be
        // held twice, which needs too many registers.
        if (num != 0) {
            tw_add_slice<FULL, WEIGHTED, true>(sum, tw_next_slice(ring), units, list.e[j][0].weight);
            // All lanes have read the stage before it is loaded again.
            __syncwarp();
            tw_ask(list, tokens, rows, next, ring);
        }
#pragma unroll 1
        for (u32 n = 1; n < num; n++) {
            tw_add_slice<FULL, WEIGHTED, false>(sum, tw_next_slice(ring), units, list.e[j][n].weight);
            __syncwarp();
            tw_ask(list, tokens, rows, next, ring);
        }
        TwUnit* out = tw_own_slice(ring);
#pragma unroll
        for (u32 i = 0; i < UNITS; i++) {
            if (!FULL && lane + 32 * i >= units) continue;
            TwUnit v;
#pragma unroll
            for (int q = 0; q < QUADS; q++) v.q[q].round_all(sum[i][q]);
            out[lane + 32 * i] = v;
        }
    }
    fence_proxy_async_shared_cta();
    __syncwarp();
}

// Called by a warp: stores the sum of each token's rows at to(token). A token without rows gets 0
// if `zeros`, else nothing.
template <bool WEIGHTED, class To>
__device__ __forceinline__ void tw_add(const TwList& list, u32 tokens, const TwRows& rows, TwRing& ring, bool zeros, const To& to) {
    TwCursor next = {0, 0, 0};
    tw_skip(list, tokens, next);
    for (u32 i = 0; i < STAGES; i++) tw_ask(list, tokens, rows, next, ring);
    for (u32 j = 0; j < tokens; j++) {
        if (list.num[j] == 0 && !zeros) continue;
        for (u32 at = 0; at < rows.bytes; at += SLICE) {
            const u32 len = min((u32)SLICE, rows.bytes - at), units = len / sizeof(TwUnit);
            if (units == 32 * UNITS) tw_add_slices<true, WEIGHTED>(list, tokens, rows, ring, j, units, next);
            else tw_add_slices<false, WEIGHTED>(list, tokens, rows, ring, j, units, next);
            if (threadIdx.x % 32 == 0) bulk_store((void*)(to(j) + at), ring.at + STAGES * SLICE, len);
            bulk_commit_group();
        }
    }
}

// Called by a warp: lists the copies of `tokens` records from `first` on.
__device__ __forceinline__ void tw_list_copies(const TwEp& l, const TwHandle& h, const TwReturn& b, u64 first, u32 tokens, TwList& list) {
    const u32 lane = threadIdx.x % 32;
    u32 num[TOKENS];
    TwCopy c[TOKENS];
    int place[TOKENS];
    // Entries behind the last copy of a record are left over from another launch, and not used.
#pragma unroll
    for (u32 j = 0; j < TOKENS; j++) {
        if (j >= tokens) continue;
        num[j] = h.num[first + j];
        if (lane < l.top_k) c[j] = h.copies[(first + j) * l.top_k + lane];
        place[j] = b.expert_major ? 0 : h.place[first + j];
    }
#pragma unroll
    for (u32 j = 0; j < TOKENS; j++) {
        if (j >= tokens) continue;
        const bool mine = lane < (b.expert_major ? num[j] : min(num[j], 1u));
        const u32 row = b.expert_major ? c[j].row : place[j];
        if (mine) list.e[j][lane] = {row, b.expert_major && b.weights ? b.weights[row] : 1.0f};
        const u32 all = __popc(__ballot_sync(0xffffffffu, mine));
        if (lane == 0) list.num[j] = all;
    }
    __syncwarp();
}

// Called by a warp: claims (chunk, rank) pairs, ranks in the order me + 1, me + 2, ..., and pushes
// the sums of the pair's records.
__device__ __forceinline__ void tw_bulk_return(const TwTeam& t, const TwEp& l, const TwMeet& m, const TwHandle& h,
                                               const TwReturn& b, u64 epoch, TwRing& ring, TwList& list) {
    const u32 lane = threadIdx.x % 32;
    if (!tw_granted(t, l, m, epoch)) return;
    // Orders the credits, acquired by loads, before the bulk stores that they permit.
    fence_proxy_async();
    const TwRows rows = {(u64)b.y, b.hidden * (u32)sizeof(Out::Bits), b.hidden * (u32)sizeof(Out::Bits)};
    for (u32 i; (i = tw_claim(m.ticket + 2)) < m.chunks * l.size;) {
        const u32 c = i / l.size, s = (l.me + 1 + i % l.size) % l.size, token = c * m.chunk;
        const u32 tokens = min(m.chunk, l.max_tokens - token);
        const u64 first = (u64)s * l.max_tokens + token;
        const u64 to = l.returns + tw_step(l, s) + ((u64)l.me * l.max_tokens + token) * l.return_stride;
        tw_list_copies(l, h, b, first, tokens, list);
        const auto row = [&](u32 j) { return to + j * l.return_stride; };
        if (b.weights) tw_add<true>(list, tokens, rows, ring, false, row);
        else tw_add<false>(list, tokens, rows, ring, false, row);
        for (u32 j = 0; b.dw && j < tokens; j++) {
            float* grads = (float*)(to + (j + 1) * l.return_stride) - l.top_k;
            const TwCopy* copies = h.copies + (first + j) * l.top_k;
            for (u32 n = lane; n < h.num[first + j]; n += 32) grads[n] = b.dw[copies[n].row];
        }
        __syncwarp();
        if (lane != 0) continue;
        // Lane 0 issued the bulk stores: it waits until they are complete, and fences, before the
        // flag.
        bulk_wait_group<0>();
        fence_proxy_async();
        fence_acq_rel_sys();
        st_relaxed_sys_u64(tw_arrival(l, m, s, l.me, c), epoch);
    }
}

// Called by a warp: lists the returned rows of `tokens` tokens from `token` on, in rank order.
__device__ __forceinline__ void tw_list_ranks(const TwEp& l, const TwHandle& h, u32 token, u32 tokens, TwList& list) {
    const u32 lane = threadIdx.x % 32;
    int rank[TOKENS];
#pragma unroll
    for (u32 j = 0; j < TOKENS; j++) {
        const u64 i = (u64)(token + j) * l.top_k + lane;
        rank[j] = j < tokens && lane < l.top_k && h.rows[i] >= 0 ? h.ranks[i] : -1;
    }
#pragma unroll
    for (u32 j = 0; j < TOKENS; j++) {
        if (j >= tokens) continue;
        u32 n = 0;
        for (u32 r = 0; r < l.size; r++) {
            if (!__any_sync(0xffffffffu, rank[j] == (int)r)) continue;
            if (lane == 0) list.e[j][n] = {r * l.max_tokens + token + j, 1.0f};
            n++;
        }
        if (lane == 0) list.num[j] = n;
    }
    __syncwarp();
}

// Writes the returned gradient of each choice of a token, 0 if the choice was not kept.
__device__ __forceinline__ void tw_choice_grads(const TwEp& l, const TwHandle& h, const TwReturn& b, u32 token) {
    const u32 i = threadIdx.x % 32, k = l.top_k;
    if (i >= k) return;
    const int *ranks = h.ranks + (u64)token * k, *rows = h.rows + (u64)token * k;
    const bool sent = rows[i] >= 0;
    u32 n = 0;  // earlier choices of the same rank that were kept
    for (u32 e = 0; e < i; e++) n += ranks[e] == ranks[i] && rows[e] >= 0;
    const u64 record = l.returns + tw_step(l, l.me) + ((u64)(sent ? ranks[i] : 0) * l.max_tokens + token) * l.return_stride;
    b.dw_out[(u64)token * k + i] = sent ? ((const float*)(record + l.return_stride) - k)[n] : 0.0f;
}

// Called by a warp: claims parts of PART tokens, waits for their chunk from all ranks, and sums
// them. Parts are smaller than chunks so that warps end together.
__device__ __forceinline__ void tw_bulk_sum(const TwTeam& t, const TwEp& l, const TwMeet& m, const TwHandle& h,
                                            const TwReturn& b, u64 epoch, TwRing& ring, TwList& list) {
    if (tw_warp_is_over(t)) return;
    const TwRows rows = {l.returns + tw_step(l, l.me), (u32)l.return_stride, b.hidden * (u32)sizeof(Out::Bits)};
    const u32 parts = tw_ceil(m.chunk, PART);
    for (u32 i; (i = tw_claim(m.ticket + 3)) < tw_ceil(b.tokens, m.chunk) * parts;) {
        const u32 c = i / parts, token = c * m.chunk + i % parts * PART, end = min((c + 1) * m.chunk, b.tokens);
        if (token >= end) continue;
        const u32 tokens = min((u32)PART, end - token);
        tw_list_ranks(l, h, token, tokens, list);
        // Each lane waits for one source.
        bool good = true;
        for (u32 r = threadIdx.x % 32; good && r < l.size; r += 32) {
            const TwWait w = {TW_OP_WAIT, m.slot + 1, r, 0, 0, epoch, 0, 0, 0};
            good = tw_await(t, tw_arrival(l, m, l.me, r, c), w);
        }
        // All lanes read data that flags acquired by single lanes announce.
        __syncwarp();
        if (!__all_sync(0xffffffffu, good)) return;
        // The same for lane 0's bulk loads, which also need a proxy fence behind the flags.
        __syncwarp();
        fence_proxy_async();
        const u64 to = (u64)(b.out + (u64)token * b.hidden);
        tw_add<false>(list, tokens, rows, ring, true, [&](u32 j) { return to + (u64)j * rows.bytes; });
        for (u32 j = 0; b.dw_out && j < tokens; j++) tw_choice_grads(l, h, b, token + j);
        __syncwarp();
    }
}

// A combine; parameters, result and behaviour after a fault are those of tw_ep_return. Grid: any
// number of blocks. Block: ALL_WARPS warps. Dynamic shared memory: ALL_WARPS * ((STAGES + 1) *
// SLICE + sizeof(TwList)) bytes.
extern "C" __global__ void __launch_bounds__(ALL_WARPS * 32, 1)
tw_ep_return_bulk(const __grid_constant__ TwTeam t, const __grid_constant__ TwEp l, const __grid_constant__ TwMeet m,
                const __grid_constant__ TwHandle h, const __grid_constant__ TwReturn b, const __grid_constant__ TwPoison out) {
    __shared__ __align__(8) u64 barriers[ALL_WARPS][STAGES];
    const u64 epoch = ld_relaxed_gpu_u64(m.epoch) + 1;
    const u32 warp = threadIdx.x / 32;
    TwRing ring = {tw_smem + warp * (STAGES + 1) * SLICE, barriers[warp], 0, 0, 0};
    TwList& list = ((TwList*)(tw_smem + ALL_WARPS * (STAGES + 1) * SLICE))[warp];
    if (threadIdx.x % 32 == 0) {
        for (u32 i = 0; i < STAGES; i++) mbarrier_init(ring.full + i, 1);
        fence_mbarrier_init_release_cluster();
    }
    __syncwarp();
    if (warp < RETURN) tw_bulk_return(t, l, m, h, b, epoch, ring, list);
    tw_bulk_sum(t, l, m, h, b, epoch, ring, list);
    // The bulk stores of each lane are complete, and no bulk copy reads shared memory any more.
    bulk_wait_group<0>();
    fence_proxy_async();
    tw_end(t, l, m, epoch, out);
}
