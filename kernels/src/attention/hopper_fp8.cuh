// The forward pass of e4m3 for sm_90a: products of FP8 by wgmma, loads and stores by tensor maps.
//
// Slots, stages, barriers and the order of tiles are those of hopper.cuh. What is different:
//
// Warps. A block has 16: one loads, and three warpgroups multiply, 64 queries each, in 160
// registers a thread. They hold O and either S or P V, so a warpgroup has one product under way at
// a time, and waits for it; the two others compute meanwhile. With two warpgroups of 232 registers,
// which had S' and P V under way together, a scheduler had two warps, too few to hide the latency
// of the softmax (docs/lab/attention.md).
//
// Scales. A scale belongs to TW_H8_N rows of a tensor and a head: `value = code * scale`. A tile of
// keys lies within the rows of one scale, so that its scores have one factor for a row of queries,
// and its values one for all. Of queries, each row has its own. The loader reads the scales of keys
// two tiles ahead: a warp that multiplies would wait for memory between two products.
//
// Values. wgmma reads FP8 operands along k alone, so values must be transposed: their k are keys.
// tw_attn_fp8_values does that in front, once for all query heads, a tile of TW_H8_DV columns by
// TW_H8_N keys for each block of keys of a segment; keys of the block that are of no or of another
// segment are zeros there. The sums of S lie as A needs its elements but for their order within 16
// keys: a lane has columns 2 l, 2 l + 1, 8 + 2 l, 9 + 2 l of S, with l = lane % 4, and gives them
// to the product as its elements 4 l to 4 l + 3. The transposed values have the keys in that order.
//
// Sums. wgmma adds FP8 products with some 14 bits, the others cut off: too few for thousands of
// keys (vllm-project/flash-attention #104). So each tile's P V begins at zero and is added to O in
// f32. O is in units of the scale of the last values, so that one fma for each element adds, and
// turns what was before into these units; the end multiplies by the scale. Scores are sums of 128
// terms, and keep the error of wgmma: some 2^-13 of the sum of the terms' magnitudes.
//
// Probabilities are at most 2^TW_H8_RAISE before they are rounded to e4m3, so that those down to
// 2^-(TW_H8_RAISE + 6) of the largest have all three bits; lse knows.
//
// Order of a warpgroup, for each tile of keys: S, its softmax, P V, the sum.

#pragma once

#define TW_HA_GROUPS 3
#include "hopper_tiles.cuh"

#ifndef TW_H8_STAGES
#define TW_H8_STAGES 4
#endif

enum : u32 {
    TW_H8_D = 128,
    TW_H8_DV = 128,
    TW_H8_N = 128,
    TW_H8_THREADS = 512,
    TW_H8_Q_BYTES = TW_HA_M * TW_H8_D,
    TW_H8_K_BYTES = TW_H8_N * TW_H8_D,
    TW_H8_V_BYTES = TW_H8_DV * TW_H8_N,
    // The output, of 16 bits, takes twice the bytes of the queries.
    TW_H8_SLOT = 2 * TW_H8_Q_BYTES,
    TW_H8_AT_K = 2 * TW_H8_SLOT,
    TW_H8_AT_V = TW_H8_AT_K + TW_H8_STAGES * TW_H8_K_BYTES,
    TW_H8_AT_STATE = TW_H8_AT_V + TW_H8_STAGES * TW_H8_V_BYTES,
    TW_H8_STATE_BYTES = 1024,
    TW_H8_BYTES = TW_H8_AT_STATE + TW_H8_STATE_BYTES,
    // Of 128 for each thread of the block.
    TW_H8_LOAD_REGISTERS = 32,
    TW_H8_MULTIPLY_REGISTERS = 160,
    TW_H8_WARPS = 12,
    TW_H8_RAISE = 8,
    // A block of values that there is not: it reads as zeros.
    TW_H8_NONE = 1 << 30,
    // Threads of the kernel that transposes: 16 keys to a warp, four columns to a lane.
    TW_H8_TURN_THREADS = TW_H8_N / 16 * 32,
};
static_assert(TW_H8_BYTES <= 232448, "shared memory");

// Beside TwAttn, whose q, k and v are codes.
struct TwFp8 {
    const float *q_scales, *k_scales, *v_scales;  // [tokens / TW_H8_N, rounded up, heads]
    unsigned char* values;  // [blocks, Hkv, TW_H8_DV, TW_H8_N], transposed
    u32 num_other, pad;     // segments of keys; `tile` of one is the number of blocks before it
};

// A tile of keys and values, rows `row` on of the local tensor, within those of one scale.
struct TwH8Keys {
    int pos;
    u32 row, num;
    u32 last;   // 1: of these queries
    u32 block;  // of transposed values, or TW_H8_NONE
    float k_scale;
    float v_scale, v_ratio;  // of the values, and what turns units of those before into theirs
};

// A scale of queries or keys: a negative one is NaN, since the largest product would not be the
// largest score; zero is next to nothing, since zero times -inf, which hides a pair, would be NaN.
__device__ __forceinline__ float tw_h8_scale(float x) {
    return x >= 0.0f ? fmaxf(x, 0x1p-60f) : __uint_as_float(0x7fffffffu);
}

// A scale of values: others are divided by it, so zero is next to nothing.
__device__ __forceinline__ float tw_h8_value_scale(float x) {
    return fabsf(x) < 0x1p-60f ? 0x1p-60f : x;
}

// The scales of a head of keys.
struct TwH8Scales {
    const float *k, *v;
    u32 heads;  // floats from one to the next
};

// Iterates over tiles of keys with positions in lo..end. Tile n is at index n % 4, as in TwWalk.
struct TwH8Walk {
    TwH8Keys tiles[4];
    TwH8Scales scales;
    u32 seg, row, stop, block;
    int pos, lo, end;
    float v_scale;  // of the last tile

    __device__ __forceinline__ void step(const TwSeg* other, const TwSeg& own, u32 n) {
        while (row == stop && seg < own.end) {
            const TwSeg s = other[seg++];
            const int first = max(lo - (int)s.pos, 0), last = min(end - (int)s.pos, (int)s.len);
            if (first >= last) continue;
            // Tiles begin at the same rows, whatever the mask hides, so that sums keep their order.
            row = max((s.row + first) / TW_H8_N * TW_H8_N, s.row), stop = s.row + last;
            pos = (int)(s.pos + (row - s.row)), block = s.tile + row / TW_H8_N - s.row / TW_H8_N;
        }
        const u32 num = min(stop - row, TW_H8_N - row % TW_H8_N);
        // No keys have no scale.
        const u32 at = row / TW_H8_N * scales.heads;
        const float k = num == 0 ? 1.0f : tw_h8_scale(scales.k[at]), v = num == 0 ? 1.0f : tw_h8_value_scale(scales.v[at]);
        // Nothing is before the first tile.
        tiles[n % 4] = {pos, row, num, 0, num == 0 ? TW_H8_NONE : block, k, v, n == 0 ? 1.0f : v_scale / v};
        v_scale = v;
        row += num, pos += (int)num, block++;
    }

    __device__ __forceinline__ void begin(const TwH8Scales& head, const TwSeg* other, const TwSeg& own, int from, int to) {
        scales = head, seg = own.first, row = stop = block = 0, pos = 0, lo = from, end = to;
        step(other, own, 0);
        step(other, own, 1);
    }
};

// What the loader loads for a tile of queries.
struct TwH8Plan {
    TwQueryTile queries;
    TwSeg own;
    TwH8Walk walk;
};

struct TwH8Shared {
    u64 q_full[2], q_empty[2];
    u64 k_full[TW_H8_STAGES], k_empty[TW_H8_STAGES];
    u64 v_full[TW_H8_STAGES], v_empty[TW_H8_STAGES];
    TwQueryTile queries[2];
    TwH8Keys keys[TW_H8_STAGES];
    // Of the loader: the tile that it loads, and the next one.
    TwH8Plan plans[2];
};
static_assert(sizeof(TwH8Shared) <= TW_H8_STATE_BYTES, "what the host asks for");

__device__ __forceinline__ TwH8Shared& tw_h8_shared() {
    return *(TwH8Shared*)(tw_smem + TW_H8_AT_STATE);
}

typedef TwRing<2> TwH8Slots;
typedef TwRing<TW_H8_STAGES> TwH8Stages;

// ---- The loader: one thread.

// Describes tile `i`, and begins the walk over its keys.
__device__ __forceinline__ void tw_h8_begin(const TwAttn& a, const TwFp8& f, const TwAttnOrder& order, u32 i, TwH8Plan& p) {
    const TwSeg own = tw_ha_describe(a, order, i, p.queries);
    p.own = own;
    const int at = p.queries.at;
    const u32 head = p.queries.head / (a.heads_q / a.heads_kv);
    p.walk.begin({f.k_scales + head, f.v_scales + head, a.heads_kv}, order.few ? order.other : a.other, own, at - a.left,
                 at + (int)p.queries.num + a.right);
}

// Loads `num` rows of head `head`, from `row` on; what is behind them reads as zeros.
__device__ __forceinline__ void tw_h8_load(u8* to, const TwTensorMap* map, u64* bar, u32 head, u32 row, u32 num) {
    tensor_load_4d(to, map, bar, (int)(head * TW_H8_D), (int)(TW_HA_RAGGED - num), (int)(row + num), (int)TW_HA_RAGGED);
}

__device__ __forceinline__ void tw_h8_load_tiles(const TwAttn& a, const TwFp8& f, const TwAttnOrder& order, const TwTensorMap* mq,
                                                 const TwTensorMap* mk, const TwTensorMap* mv) {
    TwH8Shared& s = tw_h8_shared();
    TwH8Slots qs;
    TwH8Stages ks, vs;
    const u32 num = a.tiles * a.heads_q, group = a.heads_q / a.heads_kv;
    const TwSeg* other = order.few ? order.other : a.other;
    const auto load_values = [&](const TwH8Keys& t, u32 head) {
        vs.wait_empty(s.v_empty);
        mbarrier_arrive_expect_tx(s.v_full + vs.at, TW_H8_V_BYTES);
        tensor_load_3d(tw_smem + TW_H8_AT_V + vs.at * TW_H8_V_BYTES, mv, s.v_full + vs.at, 0, (int)(head * TW_H8_DV), (int)t.block);
        vs.advance();
    };
    u32 i = blockIdx.x;
    if (i < num) tw_h8_begin(a, f, order, i, s.plans[0]);
    for (u32 turn = 0; i < num; turn ^= 1) {
        TwH8Plan& p = s.plans[turn];
        const u32 head = p.queries.head / group;
        qs.wait_empty(s.q_empty);
        s.queries[qs.at] = p.queries;
        mbarrier_arrive_expect_tx(s.q_full + qs.at, TW_H8_Q_BYTES);
        tw_h8_load(tw_smem + qs.at * TW_H8_SLOT, mq, s.q_full + qs.at, p.queries.head, p.queries.row, p.queries.num);
        qs.advance();
        // When the next tile is drawn and described: as in hopper.cuh.
        u32 n = 0, next = 0;
        const auto plan_next = [&] {
            next = tw_ha_next(order, i, num);
            if (next < num) tw_h8_begin(a, f, order, next, s.plans[turn ^ 1]);
        };
        for (u32 last = 0; last == 0; n++) {
            const TwH8Keys& t = p.walk.tiles[n % 4];
            last = p.walk.tiles[(n + 1) % 4].num == 0 ? 1 : 0;
            ks.wait_empty(s.k_empty);
            s.keys[ks.at] = {t.pos, t.row, t.num, last, t.block, t.k_scale, t.v_scale, t.v_ratio};
            mbarrier_arrive_expect_tx(s.k_full + ks.at, TW_H8_K_BYTES);
            tw_h8_load(tw_smem + TW_H8_AT_K + ks.at * TW_H8_K_BYTES, mk, s.k_full + ks.at, head, t.row, t.num);
            ks.advance();
            if (n > 0) load_values(p.walk.tiles[(n - 1) % 4], head);
            if (last != 0) continue;
            p.walk.step(other, p.own, n + 2);
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

// Sums of a lane lie as in hopper.cuh.
typedef float TwH8Scores[TW_H8_N / 2];
typedef float TwH8Out[TW_H8_DV / 2];
typedef u32 TwH8Probs[TW_H8_N / 8];

// The softmax of a lane's two rows. Products are those of codes times the scale of the keys.
struct TwH8Rows {
    float factor[2];  // what turns a product into a score of base 2
    float max[2];     // the largest product so far
    float sum[2];     // of this lane's exponentials, relative to it
    float shrink[2];  // the factor that is due to what was summed before
    float base[2];    // what the next exponentials are relative to, in base 2

    // Of rows `row` and eight more of a tile of queries.
    __device__ __forceinline__ void begin(const TwAttn& a, const TwFp8& f, const TwQueryTile& q) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            // Rows behind the last one are not stored.
            const u32 row = q.row + min(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half, q.num - 1);
            // Rows of no sequence see nothing, whatever lies where their scales would.
            const float scale = q.gap ? 1.0f : tw_h8_scale(f.q_scales[row / TW_H8_N * a.heads_q + q.head]);
            factor[half] = scale * (a.scale * TW_LOG2E);
            max[half] = -TW_INF, sum[half] = 0.0f;
        }
    }
};

// Issues S = Q K^T of the queries of warpgroup `group`.
__device__ __forceinline__ void tw_h8_issue_scores(TwH8Scores& s, const u8* queries, u32 group, const u8* keys) {
    const u64 q = wgmma_desc_k(queries + group * (64 * 128)), k = wgmma_desc_k(keys);
    wgmma_fence();
#pragma unroll
    for (u32 z = 0; z < TW_H8_D / 32; z++) wgmma_m64k32_f32_e4m3<TW_H8_N>(s, q + z * 2, k + z * 2, z > 0);
    wgmma_commit_group();
}

// Issues P V.
__device__ __forceinline__ void tw_h8_issue_part(TwH8Out& o, const TwH8Probs& p, const u8* values) {
    const u64 v = wgmma_desc_k(values);
    wgmma_fence();
#pragma unroll
    for (u32 z = 0; z < TW_H8_N / 32; z++) wgmma_m64k32_f32_e4m3_registers<TW_H8_DV>(o, p + 4 * z, v + z * 2, z > 0);
    wgmma_commit_group();
}

// The maxima of products of keys with the scale `scale`.
__device__ __forceinline__ void tw_h8_maxima(const TwH8Scores& s, TwH8Rows& r, float scale) {
    const bool not_negative = tw_ha_not_negative(r.max);
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const float old = r.max[half];
        float top = tw_ha_top<TW_H8_N>(s, half, not_negative ? 0.0f : -TW_INF, not_negative);
        top = fmaxf(old, tw_quad_max(top) * scale);
        // No key is visible yet: -inf minus -inf would be NaN.
        const float base = top == -TW_INF ? 0.0f : top * r.factor[half];
        // Not fused: it is 1 where the maximum stays, at every one of many tiles.
        r.shrink[half] = ex2_approx_ftz_f32(__fmul_rn(old, r.factor[half]) - base);
        r.max[half] = top, r.base[half] = base - (float)TW_H8_RAISE;
    }
}

// Turns products into probabilities, not normalised.
__device__ __forceinline__ void tw_h8_exponentials(TwH8Scores& s, TwH8Rows& r, float scale) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float factor = r.factor[half] * scale;
        // Zero times -inf, which hides a pair, would be NaN. NaN stays.
        if (factor < 0x1p-126f) factor = 0x1p-126f;
        float even = 0.0f, odd = 0.0f;
#pragma unroll
        for (u32 j = 2 * half; j < TW_H8_N / 2; j += 4) {
            s[j] = ex2_approx_ftz_f32(fmaf(s[j], factor, -r.base[half])), s[j + 1] = ex2_approx_ftz_f32(fmaf(s[j + 1], factor, -r.base[half]));
            even += s[j], odd += s[j + 1];
        }
        r.sum[half] = fmaf(r.sum[half], r.shrink[half], even + odd);
    }
}

// Probabilities, rounded, as A of a product: four registers of 32 keys, of which the second and the
// fourth are of the lane's second row.
__device__ __forceinline__ void tw_h8_round(TwH8Probs& p, const TwH8Scores& s) {
#pragma unroll
    for (u32 i = 0; i < TW_H8_N / 8; i++) {
        const float* at = s + i / 2 * 8 + i % 2 * 2;
        p[i] = cvt_rn_satfinite_e4m3x4_f32(at[0], at[1], at[4], at[5]);
    }
}

// Adds P V; `ratio` turns a row of O into its units.
__device__ __forceinline__ void tw_h8_add(TwH8Out& o, const TwH8Out& part, const float (&ratio)[2]) {
#pragma unroll
    for (u32 i = 0; i < TW_H8_DV / 2; i++) o[i] = fmaf(o[i], ratio[i / 2 % 2], part[i]);
}

// Ends a tile: its lse, and its output, which is in units of `scale`.
__device__ __forceinline__ void tw_h8_finish(const TwAttn& a, const TwH8Out& o, const TwH8Rows& r, const TwQueryTile& q, float scale,
                                             const TwTensorMap* out, u8* slot) {
    const float sink = a.sink && q.gap == 0 ? a.sink[a.first_head + q.head] * TW_LOG2E : -TW_INF;
    float f[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u32 row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
        // What the sum is relative to.
        const float mine = r.max[half] == -TW_INF ? -TW_INF : r.max[half] * r.factor[half] - (float)TW_H8_RAISE;
        const TwFinished end = tw_finish_row(mine, tw_quad_sum(r.sum[half]), sink);
        if (threadIdx.x % 4 == 0 && row < q.num) a.lse[(i64)q.head * a.tokens_q + q.row + row] = end.lse;
        f[half] = end.factor * scale;
    }
    const TwRows to = {q.row, q.num, q.head};
    if (a.out_type == 2) tw_ha_store_32<TW_H8_DV>(o, f, to, (float*)a.out, a.ld_o);
    else tw_ha_store_16<TW_H8_DV>(o, f, to, a.out_type, out, slot);
}

// One warp is through with a stage.
__device__ __forceinline__ void tw_h8_release(u64* empty, TwH8Stages& ring) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + ring.at);
    ring.advance();
}

__device__ __forceinline__ void tw_h8_attend(const TwAttn& a, const TwFp8& f, const TwTensorMap* out) {
    TwH8Shared& s = tw_h8_shared();
    TwH8Slots qs;
    TwH8Stages ks, vs;
    TwH8Scores scores;
    TwH8Out o;
    TwH8Rows r;
    TwH8Keys k;
    // Whether the next keys, and the values of these, were there when it was asked.
    bool k_there = false, v_there = false;
    qs.wait_full(s.q_full);
    if (s.queries[qs.at].more == 0) return;
    const u32 group = warpgroup_index();
    const auto issue_scores = [&] {
        ks.wait_full(s.k_full, k_there);
        k = s.keys[ks.at];
        tw_h8_issue_scores(scores, tw_smem + qs.at * TW_H8_SLOT, group, tw_smem + TW_H8_AT_K + ks.at * TW_H8_K_BYTES);
    };
    const auto wait_scores = [&] {
        // Asked beside the product, which hides the latency of the answer.
        v_there = vs.is_full(s.v_full);
        wgmma_wait_group<0>();
        wgmma_hold(scores);
        tw_h8_release(s.k_empty, ks);
    };
    issue_scores();
    wait_scores();
    for (u32 i = 0;; i++) {
        const u32 slot = qs.at;
        const TwQueryTile q = s.queries[slot];
        r.begin(a, f, q);
#pragma unroll
        for (u32 e = 0; e < TW_H8_DV / 2; e++) o[e] = 0.0f;
        // The last tile's store has read its slot by now, or soon.
        if (i > 0 && threadIdx.x % 32 == 0) {
            bulk_wait_group_read<0>();
            mbarrier_arrive(s.q_empty + (slot ^ 1));
        }
#pragma unroll 1
        for (;;) {
            TwH8Out part;
            TwH8Probs p;
            tw_ha_mask<TW_H8_N>(a, scores, q.at, k.pos, k.num);
            tw_h8_maxima(scores, r, k.k_scale);
            tw_h8_exponentials(scores, r, k.k_scale);
            tw_h8_round(p, scores);
            const float ratio[2] = {r.shrink[0] * k.v_ratio, r.shrink[1] * k.v_ratio};
            vs.wait_full(s.v_full, v_there);
            tw_h8_issue_part(part, p, tw_smem + TW_H8_AT_V + vs.at * TW_H8_V_BYTES);
            k_there = ks.is_full(s.k_full);
            wgmma_wait_group<0>();
            wgmma_hold(part), wgmma_hold(p);
            tw_h8_release(s.v_empty, vs);
            tw_h8_add(o, part, ratio);
            if (k.last != 0) break;
            issue_scores();
            wait_scores();
        }
        const float v_scale = k.v_scale;
        qs.advance();
        qs.wait_full(s.q_full);
        const bool more = s.queries[qs.at].more != 0;
        u8* own = tw_smem + slot * TW_H8_SLOT;
        if (!more) {
            tw_h8_finish(a, o, r, q, v_scale, out, own);
            break;
        }
        // The first S of the next queries is beside the end of these.
        issue_scores();
        tw_h8_finish(a, o, r, q, v_scale, out, own);
        wait_scores();
    }
    if (threadIdx.x % 32 == 0) bulk_wait_group<0>();
}

__device__ __forceinline__ void tw_h8_forward(const TwAttn& a, const TwFp8& f, const TwAttnOrder& order, const TwTensorMap* q, const TwTensorMap* k,
                                              const TwTensorMap* v, const TwTensorMap* out) {
    if (threadIdx.x == 0) {
        tensor_prefetch(q), tensor_prefetch(k), tensor_prefetch(v);
        if (a.out_type != 2) tensor_prefetch(out);
        TwH8Shared& s = tw_h8_shared();
        for (u32 i = 0; i < 2; i++) mbarrier_init(s.q_full + i, 1), mbarrier_init(s.q_empty + i, TW_H8_WARPS);
        for (u32 i = 0; i < TW_H8_STAGES; i++) {
            mbarrier_init(s.k_full + i, 1), mbarrier_init(s.k_empty + i, TW_H8_WARPS);
            mbarrier_init(s.v_full + i, 1), mbarrier_init(s.v_empty + i, TW_H8_WARPS);
        }
        fence_mbarrier_init_release_cluster();
    }
    __syncthreads();
    if (threadIdx.x / 128 == 3) {
        setmaxnreg_dec<TW_H8_LOAD_REGISTERS>();
        if (threadIdx.x / 32 == 12 && elect_sync()) tw_h8_load_tiles(a, f, order, q, k, v);
        return;
    }
    setmaxnreg_inc<TW_H8_MULTIPLY_REGISTERS>();
    tw_h8_attend(a, f, out);
}

// Transposes the values of one block of keys of one head: see above for the order of keys.
__device__ __forceinline__ void tw_h8_turn(const TwAttn& a, const TwFp8& f, const TwAttnOrder& order) {
    const u32 block = blockIdx.x / a.heads_kv, head = blockIdx.x % a.heads_kv;
    const TwSeg s = tw_own(order.few ? order.other : a.other, f.num_other, block);
    // Its rows, of those of the segment.
    const u32 whole = (s.row / TW_H8_N + block - s.tile) * TW_H8_N;
    const u32 row = max(whole, s.row), end = min(whole + TW_H8_N, s.row + s.len);
    const u32 first = row + threadIdx.x / 32 * 16, col = threadIdx.x % 32 * 4;
    const u8* from = (const u8*)a.v + head * TW_H8_DV + col;
    u32 x[16];
#pragma unroll
    for (u32 i = 0; i < 16; i++) x[i] = first + i < end ? *(const u32*)(from + (i64)(first + i) * a.ld_v) : 0;
    u8* to = f.values + ((i64)blockIdx.x * TW_H8_DV + col) * TW_H8_N + threadIdx.x / 32 * 16;
#pragma unroll
    for (u32 c = 0; c < 4; c++) {
        u32 w[4];
#pragma unroll
        for (u32 l = 0; l < 4; l++) {
            const u32 keys[4] = {x[2 * l], x[2 * l + 1], x[2 * l + 8], x[2 * l + 9]};
            w[l] = 0;
#pragma unroll
            for (u32 e = 0; e < 4; e++) w[l] |= (keys[e] >> 8 * c & 255) << 8 * e;
        }
        *(uint4*)(to + c * TW_H8_N) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}
