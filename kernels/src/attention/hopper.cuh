// The forward pass for sm_90a: products by wgmma, loads and stores by tensor maps.
//
// A block has a multiprocessor for itself. Its tile is TW_HA_M queries of one head. The first
// TW_HA_GROUPS warpgroups, two or three, attend for 64 rows each; of the last one thread loads. A
// tile of queries is multiplied with one tile of TW_HA_N keys after the other. Three warpgroups
// hide more of the latency of the softmax, and have 160 registers a thread for an output, scores
// and probabilities, which is enough for heads of 64.
//
// Shared memory: two slots of queries, rings of TW_HA_STAGES tiles of keys and as many of values.
// Each slot and stage has two barriers:
//   full    completes when the bytes are there: one arrival, by the loader, which announces them
//           and publishes what it has written beside: which queries, which keys.
//   empty   completes when its readers, the multiplying warps, are through with it.
// A warp is through when wgmma_wait_group has returned: the reads of wgmma are complete then. Its
// output leaves through its own rows of the slot of its queries, which it gives back one tile
// later, so that nobody waits for the store.
//
// Order of a warpgroup: S of the next keys, S' = Q K'^T, is issued before the output of these, O +=
// P V, so that both are one burst of products; the softmax of S' follows beside P V. O is rescaled
// between the two, under S'. The first S of the next queries is issued with the last P V of these:
// the end of a tile has products beside it, too. The loader keeps that order.
//
// Maps are ragged (TensorMapDesc::ragged): rows behind the end of a segment read as zeros and are
// not written. So no number of another sequence comes into a sum, and 0 times it is never NaN.
//
// Queries that see no key get one tile of no keys, all of it hidden, so that every tile takes the
// same way.
//
// Sums: each element is one chain over the keys in the order of the segments, whatever the number
// of blocks, their order or the counter: the same bits.

#pragma once

#include "hopper_tiles.cuh"

#ifndef TW_HA_N
#define TW_HA_N 160
#endif
#ifndef TW_HA_STAGES
#define TW_HA_STAGES 2
#endif
// Of gates (hopper_gates.cuh).
#ifndef TW_HA_WATCH_BYTES
#define TW_HA_WATCH_BYTES 0
#endif

enum : u32 {
    TW_HA_D = TW_ATTN_DQK,
    TW_HA_DV = TW_ATTN_DV,
    TW_HA_THREADS = 128 * (TW_HA_GROUPS + 1),
    // Pieces of 64 columns, whose 128 bytes the maps' swizzle permutes.
    TW_HA_Q_PIECE = TW_HA_M * 128,
    TW_HA_K_PIECE = TW_HA_N * 128,
    TW_HA_Q_BYTES = TW_HA_D / 64 * TW_HA_Q_PIECE,
    TW_HA_K_BYTES = TW_HA_D / 64 * TW_HA_K_PIECE,
    TW_HA_V_BYTES = TW_HA_DV / 64 * TW_HA_K_PIECE,
    TW_HA_AT_K = 2 * TW_HA_Q_BYTES,
    TW_HA_AT_V = TW_HA_AT_K + TW_HA_STAGES * TW_HA_K_BYTES,
    TW_HA_AT_STATE = TW_HA_AT_V + TW_HA_STAGES * TW_HA_V_BYTES,
    TW_HA_STATE_BYTES = 1024,
    TW_HA_AT_WATCH = TW_HA_AT_STATE + TW_HA_STATE_BYTES,
    TW_HA_BYTES = TW_HA_AT_WATCH + TW_HA_WATCH_BYTES,
    // Registers of a thread that loads, and of one that multiplies. All warps together must not
    // hold more than they begin with: 384 x 168, of which 128 x 40 + 256 x 232 is that, and 512 x
    // 128, of which 128 x 32 + 384 x 160 is.
    TW_HA_LOAD_REGISTERS = TW_HA_GROUPS == 2 ? 40 : 32,
    TW_HA_MULTIPLY_REGISTERS = TW_HA_GROUPS == 2 ? 232 : 160,
    // Readers of a stage.
    TW_HA_WARPS = 4 * TW_HA_GROUPS,
    // Whether warps ask for the next tile before they need it: with heads of 64 it costs 1 %, with
    // others it gains 2 to 4 % (docs/lab/attention.md).
    TW_HA_ASKS = TW_ATTN_DQK > 64,
};
static_assert(TW_HA_D % 64 == 0 && TW_HA_DV % 64 == 0 && TW_HA_DV <= TW_HA_D, "whole pieces; the output leaves through the slot of its queries");
static_assert(TW_HA_N % 16 == 0 && TW_HA_BYTES <= 232448, "a tile of keys, and shared memory");

// A tile of keys and values.
struct TwKeys {
    int pos;
    u32 num;
    u32 last;  // 1: of these queries
};

// What the loader loads for a tile of queries.
struct TwPlan {
    TwQueryTile queries;
    TwSeg own;
    TwWalk walk;
};

struct TwShared {
    u64 q_full[2], q_empty[2];
    u64 k_full[TW_HA_STAGES], k_empty[TW_HA_STAGES];
    u64 v_full[TW_HA_STAGES], v_empty[TW_HA_STAGES];
    TwQueryTile queries[2];
    TwKeys keys[TW_HA_STAGES];
    // Of the loader: the tile that it loads, and the next one.
    TwPlan plans[2];
    // With extras: of queries, and the global rows of keys.
    TwPlace places[2];
    u32 globals[TW_HA_STAGES];
};
static_assert(sizeof(TwShared) <= TW_HA_STATE_BYTES, "what the host asks for");

__device__ __forceinline__ TwShared& tw_shared() {
    return *(TwShared*)(tw_smem + TW_HA_AT_STATE);
}

typedef TwRing<2> TwSlots;
typedef TwRing<TW_HA_STAGES> TwStages;

// Rows of a tensor, and the map of it.
struct TwFrom {
    const TwTensorMap* map;
    u32 row;
};

// Where a loader finds the rows of keys that segments name: in one tensor, all of them from the
// beginning. Others are in hopper_gates.cuh.
struct TwOneTensor {
    const TwTensorMap *k, *v;

    __device__ __forceinline__ void begin() const { tensor_prefetch(k), tensor_prefetch(v); }
    __device__ __forceinline__ void watch() const {}
    __device__ __forceinline__ TwFrom keys(const TwTile& t) const { return {k, t.row}; }
    __device__ __forceinline__ TwFrom values(const TwTile& t) const { return {v, t.row}; }
};

// ---- The loader: one thread.

// Describes tile `i`, and begins the walk over its keys.
__device__ __forceinline__ void tw_ha_begin(const TwAttn& a, const TwAttnOrder& order, u32 i, TwPlan& p) {
    const TwSeg own = tw_ha_describe(a, order, i, p.queries);
    p.own = own;
    const int at = p.queries.at;
    const u32 num = p.queries.num, head = p.queries.head;
    p.walk.begin<TW_HA_N>(order.few ? order.other : a.other, own, at - a.left, at + (int)num + a.right, head, 1);
}

template <class Source>
__device__ __forceinline__ void tw_ha_load_tiles(const TwAttn& a, const TwAttnOrder& order, const TwTensorMap* mq, Source& source) {
    TwShared& s = tw_shared();
    TwSlots qs;
    TwStages ks, vs;
    const u32 num = a.tiles * a.heads_q, group = a.heads_q / a.heads_kv;
    const auto load_values = [&](const TwTile& t, u32 head) {
        vs.wait_empty(s.v_empty);
        mbarrier_arrive_expect_tx(s.v_full + vs.at, TW_HA_V_BYTES);
        const TwFrom from = source.values(t);
        tw_ha_load<TW_HA_DV, TW_HA_N>(tw_smem + TW_HA_AT_V + vs.at * TW_HA_V_BYTES, from.map, s.v_full + vs.at, head, from.row, t.num);
        vs.advance();
    };
    u32 i = blockIdx.x;
    if (i < num) tw_ha_begin(a, order, i, s.plans[0]);
    for (u32 turn = 0; i < num; turn ^= 1) {
        TwPlan& p = s.plans[turn];
        const u32 head = p.queries.head / group;
        qs.wait_empty(s.q_empty);
        s.queries[qs.at] = p.queries;
        if (TW_ATTN_EXTRA) {
            const u32 first = p.queries.row - p.own.row;
            s.places[qs.at] = {p.own.pos + first, p.own.global + first};
        }
        mbarrier_arrive_expect_tx(s.q_full + qs.at, TW_HA_Q_BYTES);
        tw_ha_load<TW_HA_D, TW_HA_M>(tw_smem + qs.at * TW_HA_Q_BYTES, mq, s.q_full + qs.at, p.queries.head, p.queries.row, p.queries.num);
        qs.advance();
        // Drawing and describing the next tile takes longer than loads may wait: that is done
        // before the last keys are due, or, of one tile of keys, when all is loaded.
        u32 n = 0, next = 0;
        const auto plan_next = [&] {
            next = tw_ha_next(order, i, num);
            if (next < num) tw_ha_begin(a, order, next, s.plans[turn ^ 1]);
        };
        for (u32 last = 0; last == 0; n++) {
            const TwTile& t = p.walk.tiles[n % 4];
            last = p.walk.tiles[(n + 1) % 4].num == 0 ? 1 : 0;
            ks.wait_empty(s.k_empty);
            s.keys[ks.at] = {t.pos, t.num, last};
            if (TW_ATTN_EXTRA) s.globals[ks.at] = t.global;
            mbarrier_arrive_expect_tx(s.k_full + ks.at, TW_HA_K_BYTES);
            const TwFrom from = source.keys(t);
            tw_ha_load<TW_HA_D, TW_HA_N>(tw_smem + TW_HA_AT_K + ks.at * TW_HA_K_BYTES, from.map, s.k_full + ks.at, head, from.row, t.num);
            ks.advance();
            if (n > 0) load_values(p.walk.tiles[(n - 1) % 4], head);
            if (last != 0) continue;
            p.walk.step<TW_HA_N>(order.few ? order.other : a.other, p.own, n + 2);
            if (p.walk.tiles[(n + 2) % 4].num == 0) plan_next();
        }
        load_values(p.walk.tiles[(n - 1) % 4], head);
        if (n == 1) plan_next();
        i = next;
    }
    qs.wait_empty(s.q_empty);
    s.queries[qs.at].more = 0;
    mbarrier_arrive(s.q_full + qs.at);
}

// ---- A multiplying warpgroup.

// A lane's sums: of rows 16 w + lane / 4 (half 0) and 8 more (half 1) of warp w, columns
// 8 j + 2 (lane % 4) and the next, which are elements 4 j + 2 half and the next.
typedef float TwHaScores[TW_HA_N / 2];
typedef float TwHaOut[TW_HA_DV / 2];
typedef u32 TwHaProbs[TW_HA_N / 4];

// The softmax of a lane's two rows: the largest product so far, the sum of this lane's exponentials
// relative to it, and the factor that is due to what was summed before.
struct TwHaRows {
    float max[2], sum[2], shrink[2];

    __device__ __forceinline__ void clear() {
        max[0] = max[1] = -TW_INF, sum[0] = sum[1] = 0.0f;
    }
};

// Issues S = Q K^T of the queries of warpgroup `group`.
__device__ __forceinline__ void tw_ha_issue_scores(TwHaScores& s, const u8* queries, u32 group, const u8* keys) {
    const u64 q = wgmma_desc_k(queries + group * (64 * 128)), k = wgmma_desc_k(keys);
    wgmma_fence();
#pragma unroll
    for (u32 z = 0; z < TW_HA_D / 16; z++)
        wgmma_m64k16_f32<TW_HA_N, TW_ATTN_TYPE == 1, 0, 0>(s, q + z / 4 * (TW_HA_Q_PIECE / 16) + z % 4 * 2,
                                                           k + z / 4 * (TW_HA_K_PIECE / 16) + z % 4 * 2, z > 0);
    wgmma_commit_group();
}

// Issues O += P V.
__device__ __forceinline__ void tw_ha_issue_out(TwHaOut& o, const TwHaProbs& p, const u8* values) {
    const u64 v = wgmma_desc_mn(values, TW_HA_K_PIECE);
    wgmma_fence();
#pragma unroll
    for (u32 z = 0; z < TW_HA_N / 16; z++) wgmma_m64k16_f32_registers<TW_HA_DV, TW_ATTN_TYPE == 1, 1>(o, p + 4 * z, v + z * 128, 1);
    wgmma_commit_group();
}

// With extras: turns products into scores in base 2.
__device__ __forceinline__ void tw_ha_scores(const TwAttn& a, TwHaScores& s, const TwPairTile& at) {
    tw_ha_pairs<true>(a, at).scores(s, [](u32, float) {});
}

// Zeroes probabilities that dropout drops. The factor of those that it keeps comes at the end.
__device__ __forceinline__ void tw_ha_drop(const TwAttn& a, TwHaScores& p, const TwPairTile& at) {
    tw_ha_pairs<true>(a, at).drop<TW_HA_N / 2>([&](u32 e, bool kept) { p[e] = kept ? p[e] : 0.0f; });
}

// Turns products into unnormalised probabilities.
__device__ __forceinline__ void tw_ha_softmax(TwHaScores& s, TwHaRows& r, float factor) {
    const bool not_negative = tw_ha_not_negative(r.max);
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const float old = r.max[half];
        const float top = tw_quad_max(tw_ha_top<TW_HA_N>(s, half, old, not_negative));
        // No key is visible yet: -inf minus -inf would be NaN.
        const float base = top == -TW_INF ? 0.0f : top * factor;
        // Not fused: it is 1 where the maximum stays, at every one of many tiles.
        r.shrink[half] = ex2_approx_ftz_f32(__fmul_rn(old, factor) - base);
        r.max[half] = top;
        float even = 0.0f, odd = 0.0f;
#pragma unroll
        for (u32 j = 2 * half; j < TW_HA_N / 2; j += 4) {
            s[j] = ex2_approx_ftz_f32(fmaf(s[j], factor, -base)), s[j + 1] = ex2_approx_ftz_f32(fmaf(s[j + 1], factor, -base));
            even += s[j], odd += s[j + 1];
        }
        r.sum[half] = fmaf(r.sum[half], r.shrink[half], even + odd);
    }
}

// Probabilities, rounded, as A of a product: where S has its sums, A has its elements.
__device__ __forceinline__ void tw_ha_round(TwHaProbs& p, const TwHaScores& s) {
#pragma unroll
    for (u32 i = 0; i < TW_HA_N / 4; i++) p[i] = tw_pair(s[2 * i], s[2 * i + 1], TW_ATTN_TYPE);
}

__device__ __forceinline__ void tw_ha_rescale(TwHaOut& o, const TwHaRows& r) {
#pragma unroll
    for (u32 i = 0; i < TW_HA_DV / 2; i++) o[i] *= r.shrink[i / 2 % 2];
}

// Ends a tile: its lse and its output.
__device__ __forceinline__ void tw_ha_finish(const TwAttn& a, const TwHaOut& o, const TwHaRows& r, const TwQueryTile& q, const TwTensorMap* out, u8* slot,
                                             float factor) {
    const float sink = a.sink && q.gap == 0 ? a.sink[a.first_head + q.head] * TW_LOG2E : -TW_INF;
    float f[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u32 row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
        const float mine = r.max[half] == -TW_INF ? -TW_INF : r.max[half] * factor;
        const TwFinished end = tw_finish_row(mine, tw_quad_sum(r.sum[half]), sink);
        if (threadIdx.x % 4 == 0 && row < q.num) a.lse[(i64)q.head * a.tokens_q + q.row + row] = end.lse;
        f[half] = TW_ATTN_EXTRA ? end.factor * a.keep : end.factor;
    }
    const TwRows to = {q.row, q.num, q.head};
    if (a.out_type == 2) tw_ha_store_32<TW_HA_DV>(o, f, to, (float*)a.out, a.ld_o);
    else tw_ha_store_16<TW_HA_DV>(o, f, to, a.out_type, out, slot);
}

// One warp is through with a stage.
__device__ __forceinline__ void tw_ha_release(u64* empty, TwStages& ring) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + ring.at);
    ring.advance();
}

__device__ __forceinline__ void tw_ha_attend(const TwAttn& a, const TwTensorMap* out) {
    TwShared& s = tw_shared();
    TwSlots qs;
    TwStages ks, vs;
    // What turns a score into one of base 2.
    const float factor = TW_ATTN_EXTRA ? 1.0f : a.scale * TW_LOG2E;
    TwHaScores scores;
    TwHaOut o;
    TwHaProbs p;
    TwHaRows r;
    TwKeys k;
    u32 global = 0;
    // Whether the next keys, and the values of `p`, were there when it was asked.
    bool k_there = false, v_there = false;
    qs.wait_full(s.q_full);
    if (s.queries[qs.at].more == 0) return;
    const u32 group = warpgroup_index();
    const auto issue_scores = [&] {
        ks.wait_full(s.k_full, k_there);
        k = s.keys[ks.at];
        if (TW_ATTN_EXTRA) global = s.globals[ks.at];
        tw_ha_issue_scores(scores, tw_smem + qs.at * TW_HA_Q_BYTES, group, tw_smem + TW_HA_AT_K + ks.at * TW_HA_K_BYTES);
    };
    const auto issue_out = [&] {
        vs.wait_full(s.v_full, v_there);
        tw_ha_issue_out(o, p, tw_smem + TW_HA_AT_V + vs.at * TW_HA_V_BYTES);
    };
    issue_scores();
    wgmma_wait_group<0>();
    wgmma_hold(scores);
    tw_ha_release(s.k_empty, ks);
    for (u32 i = 0;; i++) {
        const u32 slot = qs.at;
        const TwQueryTile q = s.queries[slot];
        // The softmax of the scores of `k`, and probabilities.
        const auto softmax = [&] {
            const TwPlace& at = s.places[slot];
            const TwPairTile pairs = {q.head, at.pos, (u32)k.pos, at.global, global, q.num, k.num};
            if (TW_ATTN_EXTRA) tw_ha_scores(a, scores, pairs);
            tw_ha_mask<TW_HA_N>(a, scores, q.at, k.pos, k.num);
            tw_ha_softmax(scores, r, factor);
            if (TW_ATTN_EXTRA && a.drop_below) tw_ha_drop(a, scores, pairs);
        };
        r.clear();
        softmax();
        tw_ha_round(p, scores);
#pragma unroll
        for (u32 e = 0; e < TW_HA_DV / 2; e++) o[e] = 0.0f;
        // The last tile's store has read its slot by now, or soon.
        if (i > 0 && threadIdx.x % 32 == 0) {
            bulk_wait_group_read<0>();
            mbarrier_arrive(s.q_empty + (slot ^ 1));
        }
        // Here P is of the last tile of keys, O of all before it, short of the factor that is due.
#pragma unroll 1
        while (k.last == 0) {
            issue_scores();
            tw_ha_rescale(o, r);
            issue_out();
            wgmma_wait_group<1>();
            wgmma_hold(scores);
            tw_ha_release(s.k_empty, ks);
            if (TW_HA_ASKS) k_there = ks.is_full(s.k_full);
            softmax();
            wgmma_wait_group<0>();
            wgmma_hold(o), wgmma_hold(p);
            tw_ha_release(s.v_empty, vs);
            if (TW_HA_ASKS) v_there = vs.is_full(s.v_full);
            tw_ha_round(p, scores);
        }
        tw_ha_rescale(o, r);
        qs.advance();
        qs.wait_full(s.q_full);
        const bool more = s.queries[qs.at].more != 0;
        u8* own = tw_smem + slot * TW_HA_Q_BYTES;
        if (!more) {
            issue_out();
            wgmma_wait_group<0>();
            wgmma_hold(o), wgmma_hold(p);
            tw_ha_release(s.v_empty, vs);
            tw_ha_finish(a, o, r, q, out, own, factor);
            break;
        }
        issue_out();
        issue_scores();
        k_there = v_there = false;
        wgmma_wait_group<1>();
        wgmma_hold(o), wgmma_hold(p);
        tw_ha_release(s.v_empty, vs);
        tw_ha_finish(a, o, r, q, out, own, factor);
        wgmma_wait_group<0>();
        wgmma_hold(scores);
        tw_ha_release(s.k_empty, ks);
    }
    if (threadIdx.x % 32 == 0) bulk_wait_group<0>();
}

template <class Source>
__device__ __forceinline__ void tw_ha_forward(const TwAttn& a, const TwAttnOrder& order, const TwTensorMap* q, Source source,
                                              const TwTensorMap* out) {
    if (threadIdx.x == 0) {
        tensor_prefetch(q);
        source.begin();
        if (a.out_type != 2) tensor_prefetch(out);
        TwShared& s = tw_shared();
        for (u32 i = 0; i < 2; i++) mbarrier_init(s.q_full + i, 1), mbarrier_init(s.q_empty + i, TW_HA_WARPS);
        for (u32 i = 0; i < TW_HA_STAGES; i++) {
            mbarrier_init(s.k_full + i, 1), mbarrier_init(s.k_empty + i, TW_HA_WARPS);
            mbarrier_init(s.v_full + i, 1), mbarrier_init(s.v_empty + i, TW_HA_WARPS);
        }
        fence_mbarrier_init_release_cluster();
    }
    __syncthreads();
    if (threadIdx.x / 128 == TW_HA_GROUPS) {
        setmaxnreg_dec<TW_HA_LOAD_REGISTERS>();
        if (threadIdx.x / 32 == TW_HA_WARPS + 1) source.watch();
        else if (threadIdx.x / 32 == TW_HA_WARPS && elect_sync()) tw_ha_load_tiles(a, order, q, source);
        return;
    }
    setmaxnreg_inc<TW_HA_MULTIPLY_REGISTERS>();
    tw_ha_attend(a, out);
}
