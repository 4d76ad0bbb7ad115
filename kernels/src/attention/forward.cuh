// The forward pass: a tile of queries against tiles of keys, with a running maximum and sum.

#pragma once

#include "common.cuh"

#ifndef TW_ATTN_M
#define TW_ATTN_M 128
#endif
#ifndef TW_ATTN_N
#define TW_ATTN_N 64
#endif
#ifndef TW_ATTN_WARPS
#define TW_ATTN_WARPS 4
#endif

enum : u32 {
    TW_FM = TW_ATTN_M,
    TW_FN = TW_ATTN_N,
    TW_F_THREADS = 32 * TW_ATTN_WARPS,
    // Rows of a warp, in units of 16.
    TW_F_MT = TW_FM / (16 * TW_ATTN_WARPS),
    TW_F_NT = TW_FN / 8,
    TW_F_DT = TW_DV16 / 8,
    TW_F_K_BYTES = TW_FN * TW_DQP * 2,
    TW_F_V_BYTES = TW_FN * TW_DVP * 2,
    TW_F_STAGE = TW_F_K_BYTES + TW_F_V_BYTES,
    // Queries first, later the output.
    TW_F_Q_BYTES = TW_FM * (TW_DQP > TW_DVP ? TW_DQP : TW_DVP) * 2,
};
static_assert(TW_FM % (16 * TW_ATTN_WARPS) == 0 && TW_FN % 16 == 0, "whole matrix instructions");
static_assert(TW_DQ % 8 == 0 && TW_DV % 8 == 0, "rows are whole chunks of 16 bytes");

typedef float TwScores[TW_F_MT][TW_F_NT][4];
typedef float TwOut[TW_F_MT][TW_F_DT][4];

// The softmax state of a thread's 2 * TW_F_MT rows.
struct TwRows {
    // In shared memory, because products take all registers. `max` of the scores so far: to be
    // multiplied by `scale` or, with extras, in base 2. `sum`: this lane's part.
    float (&max)[TW_F_MT][2];
    float (&sum)[TW_F_MT][2];
};

template <class Of> __device__ __forceinline__ void tw_f_each(TwScores& s, const Of& of) {
#pragma unroll
    for (u32 i = 0; i < TW_F_MT; i++)
#pragma unroll
        for (u32 j = 0; j < TW_F_NT; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) s[i][j][e] = of(s[i][j][e]);
}

// Turns products into scores in base 2: scale, softcap and bias. `pos` is that of the tiles' first
// rows.
__device__ __forceinline__ void tw_f_extra(const TwAttn& a, TwScores& s, u32 head, u32 q_pos, u32 num_q, u32 kv_pos,
                                           u32 num_kv) {
    if (a.softcap > 0) {
        const TwSoftcap cap(a);
        float slope;
        tw_f_each(s, [&](float product) { return cap.score(product, slope); });
    } else {
        tw_f_each(s, [&](float product) { return product * (a.scale * TW_LOG2E); });
    }
    if (!a.bias) return;
#pragma unroll
    for (u32 i = 0; i < TW_F_MT; i++)
#pragma unroll
        for (u32 j = 0; j < TW_F_NT; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                const u32 row = tw_row<TW_F_MT>(i, e), col = 8 * j + threadIdx.x % 4 * 2 + e % 2;
                const bool there = row < num_q && col < num_kv;
                const float bias = there ? *tw_bias(a, head, q_pos + row, kv_pos + col) : 0.0f;
                s[i][j][e] = fmaf(bias, TW_LOG2E, s[i][j][e]);
            }
}

// Sets scores to -inf where the mask hides the pair or the key is behind the tile's `num` keys.
// `shift` is the key position of the first query minus that of the first key.
__device__ __forceinline__ void tw_f_mask(const TwAttn& a, TwScores& s, int shift, u32 num) {
#pragma unroll
    for (u32 i = 0; i < TW_F_MT; i++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            // Relative to this lane's first column, so that columns are constants.
            const int lane = (int)(threadIdx.x % 4 * 2), own = (int)tw_row<TW_F_MT>(i, 2 * half) + shift;
            const int first = own - a.left - lane, last = min(own + a.right, (int)num - 1) - lane;
#pragma unroll
            for (u32 j = 0; j < TW_F_NT; j++)
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    const int col = (int)(8 * j + e);
                    if (col < first || col > last) s[i][j][2 * half + e] = -TW_INF;
                }
        }
}

// Zeroes dropped pairs. The factor of kept pairs is applied at the end.
__device__ __forceinline__ void tw_f_drop(const TwAttn& a, TwScores& p, u32 head, u32 q_global, u32 kv_global) {
    const u64 seed = tw_drop_seed(a);
#pragma unroll
    for (u32 i = 0; i < TW_F_MT; i++)
#pragma unroll
        for (u32 j = 0; j < TW_F_NT; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                const u32 col = 8 * j + threadIdx.x % 4 * 2 + e % 2;
                if (!tw_kept(a, seed, head, q_global + tw_row<TW_F_MT>(i, e), kv_global + col)) p[i][j][e] = 0.0f;
            }
}

// Computes the normalising factor of each row of `o`, and stores lse.
__device__ __forceinline__ void tw_f_finish(const TwAttn& a, TwRows& r, const TwSeg& own, u32 first, u32 num, u32 head,
                                            float factor) {
    const bool sink = a.sink && own.shift != TW_ATTN_GAP;
    const float extra = sink ? a.sink[a.first_head + head] * TW_LOG2E : -TW_INF;
#pragma unroll
    for (u32 i = 0; i < TW_F_MT; i++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const float mine = r.max[i][half] == -TW_INF ? -TW_INF : r.max[i][half] * factor;
            const u32 row = tw_row<TW_F_MT>(i, 2 * half);
            const TwFinished end = tw_finish_row(mine, tw_quad_sum(r.sum[i][half]), extra);
            if (threadIdx.x % 4 == 0 && row < num) a.lse[(i64)head * a.tokens_q + own.row + first + row] = end.lse;
            float f = end.factor;
            if (TW_ATTN_EXTRA) f *= a.keep;
            r.sum[i][half] = f;
        }
}

// Sets this block's tile and head. A barrier must follow.
__device__ __forceinline__ void tw_f_begin(const TwAttn& a, TwBlock& b) {
    if (threadIdx.x != 0) return;
    // Under a causal mask the last tiles have most keys: they start first.
    const u32 head = blockIdx.x % a.heads_q, t = a.tiles - 1 - blockIdx.x / a.heads_q;
    const TwSeg own = tw_own(a.own, a.num_own, t);
    b.own = own, b.head = head, b.kv_head = head / (a.heads_q / a.heads_kv);
    b.first = (t - own.tile) * TW_FM, b.num = min(own.len - b.first, (u32)TW_FM);
    b.at = (int)(own.pos + b.first) + (own.shift == TW_ATTN_GAP ? 0 : own.shift), b.at_last = b.at + (int)b.num - 1;
    b.walk.begin<TW_FN>(a.other, b.own, b.at - a.left, b.at_last + a.right + 1, head, 1);
}

// Copies tile `n` of keys and values to its stage.
__device__ __forceinline__ void tw_f_load(const TwAttn& a, const TwBlock& b, u32 n) {
    u8* to = tw_smem + TW_F_Q_BYTES + n % 2 * TW_F_STAGE;
    const TwTile& t = b.walk.tiles[n % 4];
    const u16* k = (const u16*)a.k + (i64)t.row * a.ld_k + b.kv_head * TW_DQ;
    const u16* v = (const u16*)a.v + (i64)t.row * a.ld_v + b.kv_head * TW_DV;
    tw_load_tile<TW_FN, TW_DQ, TW_DQP, TW_F_THREADS>(to, k, a.ld_k, t.num);
    tw_load_tile<TW_FN, TW_DV, TW_DVP, TW_F_THREADS>(to + TW_F_K_BYTES, v, a.ld_v, t.num);
    cp_async_commit_group();
}

__device__ __forceinline__ void tw_forward(const TwAttn& a) {
    __shared__ TwBlock b;
    __shared__ __align__(16) float tops[TW_F_THREADS][TW_F_MT][2];
    __shared__ __align__(16) float sums[TW_F_THREADS][TW_F_MT][2];
    tw_f_begin(a, b);
    __syncthreads();
    TwOut o;
    TwRows r = {tops[threadIdx.x], sums[threadIdx.x]};
#pragma unroll
    for (u32 i = 0; i < TW_F_MT; i++) {
        r.max[i][0] = r.max[i][1] = -TW_INF, r.sum[i][0] = r.sum[i][1] = 0.0f;
#pragma unroll
        for (u32 j = 0; j < TW_F_DT; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) o[i][j][e] = 0.0f;
    }
    const float factor = TW_ATTN_EXTRA ? 1.0f : a.scale * TW_LOG2E;
    if (b.walk.tiles[0].num > 0) {
        const u16* from = (const u16*)a.q + (i64)(b.own.row + b.first) * a.ld_q + b.head * TW_DQ;
        tw_load_tile<TW_FM, TW_DQ, TW_DQP, TW_F_THREADS>(tw_smem, from, a.ld_q, b.num);
        tw_f_load(a, b, 0);
    }
#pragma unroll 1
    for (u32 n = 0; b.walk.tiles[n % 4].num > 0; n++) {
        cp_async_wait_group<0>();
        // Everybody's copies are there, and nobody reads the stage that is next filled.
        __syncthreads();
        if (b.walk.tiles[(n + 1) % 4].num > 0) tw_f_load(a, b, n + 1);
        const u32 k = TW_F_Q_BYTES + n % 2 * TW_F_STAGE;
        TwScores s;
        tw_products<TW_F_MT, TW_F_NT, TW_DQ16, TW_DQP>(s, 0, k);
        const TwTile t = b.walk.tiles[n % 4];
        if (TW_ATTN_EXTRA) tw_f_extra(a, s, b.head, b.own.pos + b.first, b.num, (u32)t.pos, t.num);
        const bool whole = t.num == TW_FN && t.pos >= b.at_last - a.left && t.pos + (int)TW_FN - 1 <= b.at + a.right;
        if (!whole) tw_f_mask(a, s, b.at - t.pos, t.num);
        tw_softmax(s, r.max, r.sum, o, factor);
        if (TW_ATTN_EXTRA && a.drop_below) tw_f_drop(a, s, b.head, b.own.global + b.first, t.global);
        // Placed here because the branch keeps the compiler from loading values earlier, which
        // would spill.
        if (threadIdx.x == 0) b.walk.step<TW_FN>(a.other, b.own, n + 2);
        tw_accumulate<TW_F_MT, TW_F_NT, TW_F_DT, TW_DVP>(o, s, k + TW_F_K_BYTES);
    }
    tw_f_finish(a, r, b.own, b.first, b.num, b.head, factor);
    // A warp reads and overwrites only its own rows of the query tile, unless query and value rows
    // differ in length.
    if (TW_DQP != TW_DVP) __syncthreads();
    const i64 at = (i64)(b.own.row + b.first) * a.ld_o + b.head * TW_DV;
    tw_store<TW_F_MT, TW_F_DT, TW_DV, TW_DVP>(a.out, a.out_type, at, a.ld_o, b.num, o, r.sum, 0);
}
