// The backward pass. One class computes all gradients: its rows are queries (dq) or keys (dk, dv).
//
//   s = x1 y1^T, p = exp(scale s - lse), g = x2 y2^T, ds = p (g - delta)
//   dq: x is (q, d_out), y is (k, v): sum1 = ds k.
//   dk, dv: x is (k, v), y is (q, d_out): sum1 = ds^T q, sum2 = p^T d_out, where s and p are
//     transposed: their rows are keys. One block adds the queries of all heads of a group, head
//     after head.
//
// Accumulators of p and ds serve directly as the next product's first operand, without a pass
// through shared memory.

#pragma once

#include "common.cuh"

#ifndef TW_ATTN_DQ_M
#define TW_ATTN_DQ_M 128
#endif
#ifndef TW_ATTN_DQ_N
#define TW_ATTN_DQ_N 32
#endif
#ifndef TW_ATTN_DQ_WARPS
#define TW_ATTN_DQ_WARPS 4
#endif
#ifndef TW_ATTN_DKV_M
#define TW_ATTN_DKV_M 64
#endif
#ifndef TW_ATTN_DKV_N
#define TW_ATTN_DKV_N 128
#endif
#ifndef TW_ATTN_DKV_WARPS
#define TW_ATTN_DKV_WARPS 8
#endif
// 1: separate kernels compute dk and dv, because both do not fit in the registers.
#ifndef TW_ATTN_SPLIT
#define TW_ATTN_SPLIT 0
#endif

enum : u32 { TW_SUM1 = 1, TW_SUM2 = 2 };

// A block of WARPS warps: `X` rows of its own side, tiles of `Y` rows of the other side.
template <bool QUERIES, u32 X, u32 Y, u32 WARPS> struct TwReturn {
    static constexpr u32 THREADS = 32 * WARPS, MT = X / (16 * WARPS), NT = Y / 8;
    static constexpr u32 X1_BYTES = X * TW_DQP * 2, X_BYTES = X1_BYTES + X * TW_DVP * 2;
    static constexpr u32 Y1_BYTES = Y * TW_DQP * 2, Y2_BYTES = Y * TW_DVP * 2;
    // With keys as rows, lse and delta of the tile's queries follow the tiles of a stage.
    static constexpr u32 STAGE = Y1_BYTES + Y2_BYTES + (QUERIES ? 0 : 8 * Y);
    static_assert(X % (16 * WARPS) == 0 && Y % 16 == 0, "whole matrix instructions");

    float sum1[MT][TW_DQ16 / 8][4];
    float sum2[MT][TW_DV16 / 8][4];
    // Of this thread's rows, if rows are queries. lse in base 2; +inf for rows without visible
    // keys.
    float lse[MT][2], delta[MT][2];

    static __device__ __forceinline__ void begin(const TwAttn& a, TwBlock& b) {
        if (threadIdx.x != 0) return;
        const u32 group = a.heads_q / a.heads_kv, heads = QUERIES ? a.heads_q : a.heads_kv;
        // Under a causal mask the last queries and the first keys have most work: they start first.
        const u32 head = blockIdx.x % heads, at = blockIdx.x / heads, t = QUERIES ? a.tiles - 1 - at : at;
        const TwSeg own = tw_own(a.own, a.num_own, t);
        b.own = own, b.head = head, b.kv_head = QUERIES ? head / group : head;
        b.first = (t - own.tile) * X, b.num = min(own.len - b.first, X);
        const int shift = own.shift == TW_ATTN_GAP ? 0 : QUERIES ? own.shift : -own.shift;
        b.at = (int)(own.pos + b.first) + shift, b.at_last = b.at + (int)b.num - 1;
        b.walk.template begin<Y>(a.other, b.own, b.at - before(a), b.at_last + behind(a) + 1, QUERIES ? head : head * group,
                                 QUERIES ? 1 : group);
    }

    // How far rows of the other side may be before and behind the own position.
    static __device__ __forceinline__ int before(const TwAttn& a) { return QUERIES ? a.left : a.right; }
    static __device__ __forceinline__ int behind(const TwAttn& a) { return QUERIES ? a.right : a.left; }

    // The query head of tile `t`.
    static __device__ __forceinline__ u32 q_head(const TwBlock& b, const TwTile& t) { return QUERIES ? b.head : t.head; }

    static __device__ __forceinline__ void load_own(const TwAttn& a, const TwBlock& b) {
        const i64 row = b.own.row + b.first;
        const u16* x1 = QUERIES ? (const u16*)a.q + row * a.ld_q : (const u16*)a.k + row * a.ld_k;
        const u16* x2 = QUERIES ? (const u16*)a.d_out + row * a.ld_o : (const u16*)a.v + row * a.ld_v;
        tw_load_tile<X, TW_DQ, TW_DQP, THREADS>(tw_smem, x1 + b.head * TW_DQ, QUERIES ? a.ld_q : a.ld_k, b.num);
        tw_load_tile<X, TW_DV, TW_DVP, THREADS>(tw_smem + X1_BYTES, x2 + b.head * TW_DV, QUERIES ? a.ld_o : a.ld_v,
                                                b.num);
    }

    static __device__ __forceinline__ void load(const TwAttn& a, const TwBlock& b, u32 n) {
        u8* to = tw_smem + X_BYTES + n % 2 * STAGE;
        const TwTile& t = b.walk.tiles[n % 4];
        const u32 head = QUERIES ? b.kv_head : t.head;
        const u16* y1 = QUERIES ? (const u16*)a.k + (i64)t.row * a.ld_k : (const u16*)a.q + (i64)t.row * a.ld_q;
        const u16* y2 = QUERIES ? (const u16*)a.v + (i64)t.row * a.ld_v : (const u16*)a.d_out + (i64)t.row * a.ld_o;
        tw_load_tile<Y, TW_DQ, TW_DQP, THREADS>(to, y1 + head * TW_DQ, QUERIES ? a.ld_k : a.ld_q, t.num);
        tw_load_tile<Y, TW_DV, TW_DVP, THREADS>(to + Y1_BYTES, y2 + head * TW_DV, QUERIES ? a.ld_v : a.ld_o, t.num);
        if (!QUERIES) {
            const i64 at = (i64)head * a.tokens_q + t.row;
            float* numbers = (float*)(to + Y1_BYTES + Y2_BYTES);
            for (u32 i = threadIdx.x; i < Y; i += THREADS) {
                const u32 bytes = i < t.num ? 4 : 0;
                cp_async_ca_4_zfill(numbers + i, a.lse + (i < t.num ? at + i : 0), bytes);
                cp_async_ca_4_zfill(numbers + Y + i, a.delta + (i < t.num ? at + i : 0), bytes);
            }
        }
        cp_async_commit_group();
    }

    static __device__ __forceinline__ float base2(float lse) { return lse == -TW_INF ? TW_INF : lse * TW_LOG2E; }

    __device__ __forceinline__ void clear(const TwAttn& a, const TwBlock& b) {
#pragma unroll
        for (u32 i = 0; i < MT; i++) {
#pragma unroll
            for (u32 j = 0; j < TW_DQ16 / 8; j++)
#pragma unroll
                for (u32 e = 0; e < 4; e++) sum1[i][j][e] = 0.0f;
#pragma unroll
            for (u32 j = 0; j < TW_DV16 / 8; j++)
#pragma unroll
                for (u32 e = 0; e < 4; e++) sum2[i][j][e] = 0.0f;
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u32 row = tw_row<MT>(i, 2 * half);
                const i64 at = (i64)b.head * a.tokens_q + b.own.row + b.first + row;
                lse[i][half] = QUERIES && row < b.num ? base2(a.lse[at]) : TW_INF;
                delta[i][half] = QUERIES && row < b.num ? a.delta[at] : 0.0f;
            }
        }
    }

    // lse (in base 2) and delta of the queries of elements 2h and 2h + 1 of part (i, j); with keys
    // as rows, read from the tile's numbers at offset `y`.
    __device__ __forceinline__ float2 lse_of(u32 y, u32 i, u32 j, u32 h) const {
        if (QUERIES) return make_float2(lse[i][h], lse[i][h]);
        const float2 x = ((const float2*)(tw_smem + y))[4 * j + threadIdx.x % 4];
        return make_float2(base2(x.x), base2(x.y));
    }
    __device__ __forceinline__ float2 delta_of(u32 y, u32 i, u32 j, u32 h) const {
        if (QUERIES) return make_float2(delta[i][h], delta[i][h]);
        return ((const float2*)(tw_smem + y))[Y / 2 + 4 * j + threadIdx.x % 4];
    }

    // Writes `hidden` where the mask hides a pair, and behind the tile's rows.
    template <u32 M>
    static __device__ __forceinline__ void mask(const TwAttn& a, const TwBlock& b, const TwTile& t, float (&p)[M][NT][4],
                                                float hidden, u32 thread = threadIdx.x) {
#pragma unroll
        for (u32 i = 0; i < M; i++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                // Relative to this lane's first column, so that columns are constants.
                const int lane = (int)(thread % 4 * 2), own = (int)tw_row<M>(i, 2 * half, thread) + b.at - t.pos;
                const int first = own - before(a) - lane, last = min(own + behind(a), (int)t.num - 1) - lane;
#pragma unroll
                for (u32 j = 0; j < NT; j++)
#pragma unroll
                    for (u32 e = 0; e < 2; e++) {
                        const int col = (int)(8 * j + e);
                        if (col < first || col > last) p[i][j][2 * half + e] = hidden;
                    }
            }
    }

    // Whether all pairs of a tile are visible.
    static __device__ __forceinline__ bool whole(const TwAttn& a, const TwBlock& b, const TwTile& t) {
        return t.num == Y && t.pos >= b.at_last - before(a) && t.pos + (int)Y - 1 <= b.at + behind(a);
    }

    // The bias of the pair (row, col) of the tile, or null.
    static __device__ __forceinline__ const float* bias(const TwAttn& a, const TwBlock& b, const TwTile& t, u32 row,
                                                        u32 col) {
        if (row >= b.num || col >= t.num) return nullptr;
        const u32 own = b.own.pos + b.first + row, other = (u32)t.pos + col;
        return tw_bias(a, q_head(b, t), QUERIES ? own : other, QUERIES ? other : own);
    }

    template <class Of>
    static __device__ __forceinline__ void each(float (&s)[MT][NT][4], float (&slope)[MT][NT][4], const Of& of) {
#pragma unroll
        for (u32 i = 0; i < MT; i++)
#pragma unroll
            for (u32 j = 0; j < NT; j++)
#pragma unroll
                for (u32 e = 0; e < 4; e++) s[i][j][e] = of(s[i][j][e], slope[i][j][e]);
    }

    // With extras: turns products into scores in base 2, with the slope by which ds is multiplied.
    static __device__ __forceinline__ void scores(const TwAttn& a, const TwBlock& b, const TwTile& t, float (&s)[MT][NT][4],
                                                  float (&slope)[MT][NT][4]) {
        if (a.softcap > 0) {
            const TwSoftcap cap(a);
            each(s, slope, [&](float product, float& d) { return cap.score(product, d); });
        } else {
            each(s, slope, [&](float product, float& d) { return d = 1.0f, product * (a.scale * TW_LOG2E); });
        }
        if (!a.bias) return;
#pragma unroll
        for (u32 i = 0; i < MT; i++)
#pragma unroll
            for (u32 j = 0; j < NT; j++)
#pragma unroll
                for (u32 e = 0; e < 4; e++) {
                    const float* from = bias(a, b, t, tw_row<MT>(i, e), 8 * j + threadIdx.x % 4 * 2 + e % 2);
                    s[i][j][e] = fmaf(from ? *from : 0.0f, TW_LOG2E, s[i][j][e]);
                }
    }

    // Probabilities from products, or with extras from scores in base 2.
    __device__ __forceinline__ void probabilities(const TwAttn& a, u32 y, float (&s)[MT][NT][4]) const {
        const float factor = TW_ATTN_EXTRA ? 1.0f : a.scale * TW_LOG2E;
#pragma unroll
        for (u32 i = 0; i < MT; i++)
#pragma unroll
            for (u32 j = 0; j < NT; j++)
#pragma unroll
                for (u32 e = 0; e < 4; e++) {
                    const float2 both = lse_of(y, i, j, e / 2);
                    s[i][j][e] = ex2_approx_ftz_f32(fmaf(s[i][j][e], factor, -(e % 2 ? both.y : both.x)));
                }
    }

    // Whether dropout keeps element (i, j, e).
    static __device__ __forceinline__ bool kept(const TwAttn& a, const TwBlock& b, const TwTile& t, u64 seed, u32 i,
                                                u32 j, u32 e) {
        const u32 own = b.own.global + b.first + tw_row<MT>(i, e);
        const u32 other = t.global + 8 * j + threadIdx.x % 4 * 2 + e % 2;
        return tw_kept(a, seed, q_head(b, t), QUERIES ? own : other, QUERIES ? other : own);
    }

    // Adds the contribution of tile `n` to the sums.
    template <u32 WHAT> __device__ __forceinline__ void add(const TwAttn& a, TwBlock& b, u32 n) {
        const u32 y = X_BYTES + n % 2 * STAGE, numbers = y + Y1_BYTES + Y2_BYTES;
        float p[MT][NT][4], slope[TW_ATTN_EXTRA ? MT : 1][NT][4];
        tw_products<MT, NT, TW_DQ16, TW_DQP>(p, 0, y);
        const TwTile t = b.walk.tiles[n % 4];
        // Hidden pairs get a score of -inf before the exponentials, so that these overlap with the
        // next products. Extras may turn that into a finite score; there, p is set to 0 afterwards.
        if (!TW_ATTN_EXTRA && !whole(a, b, t)) mask(a, b, t, p, -TW_INF);
        if (threadIdx.x == 0) b.walk.template step<Y>(a.other, b.own, n + 2);
        if (TW_ATTN_EXTRA) scores(a, b, t, p, (float (&)[MT][NT][4])slope);
        probabilities(a, numbers, p);
        if (TW_ATTN_EXTRA && !whole(a, b, t)) mask(a, b, t, p, 0.0f);
        const bool drop = TW_ATTN_EXTRA && a.drop_below;
        const u64 seed = drop ? tw_drop_seed(a) : 0;
        if (WHAT & TW_SUM2) {
            if (drop) {
                float kept_p[MT][NT][4];
#pragma unroll
                for (u32 i = 0; i < MT; i++)
#pragma unroll
                    for (u32 j = 0; j < NT; j++)
#pragma unroll
                        for (u32 e = 0; e < 4; e++) kept_p[i][j][e] = kept(a, b, t, seed, i, j, e) ? p[i][j][e] : 0.0f;
                tw_accumulate<MT, NT, TW_DV16 / 8, TW_DVP>(sum2, kept_p, y + Y1_BYTES);
            } else {
                tw_accumulate<MT, NT, TW_DV16 / 8, TW_DVP>(sum2, p, y + Y1_BYTES);
            }
        }
        if (WHAT & TW_SUM1) {
            float g[MT][NT][4];
            tw_products<MT, NT, TW_DV16, TW_DVP>(g, X1_BYTES, y + Y1_BYTES);
#pragma unroll
            for (u32 i = 0; i < MT; i++)
#pragma unroll
                for (u32 j = 0; j < NT; j++)
#pragma unroll
                    for (u32 e = 0; e < 4; e++) {
                        float d = g[i][j][e];
                        if (drop) d = kept(a, b, t, seed, i, j, e) ? d * a.keep : 0.0f;
                        const float2 delta = delta_of(numbers, i, j, e / 2);
                        g[i][j][e] = p[i][j][e] * (d - (e % 2 ? delta.y : delta.x));
                        if (TW_ATTN_EXTRA) g[i][j][e] *= slope[i][j][e];
                    }
            tw_accumulate<MT, NT, TW_DQ16 / 8, TW_DQP>(sum1, g, y);
        }
    }

    // Stores the gradients of the own rows.
    template <u32 WHAT> __device__ __forceinline__ void store(const TwAttn& a, const TwBlock& b) {
        float f1[MT][2], f2[MT][2];
#pragma unroll
        for (u32 i = 0; i < MT; i++) f1[i][0] = f1[i][1] = a.scale, f2[i][0] = f2[i][1] = TW_ATTN_EXTRA ? a.keep : 1.0f;
        // A warp read only its own rows of the own tiles, and now overwrites the same rows.
        const i64 row = b.own.row + b.first, ld1 = QUERIES ? a.ld_q : a.ld_k;
        if (WHAT & TW_SUM1)
            tw_store<MT, TW_DQ16 / 8, TW_DQ, TW_DQP>(QUERIES ? a.dq : a.dk, a.out_type, row * ld1 + b.head * TW_DQ, ld1,
                                                     b.num, sum1, f1, 0);
        if (WHAT & TW_SUM2)
            tw_store<MT, TW_DV16 / 8, TW_DV, TW_DVP>(a.dv, a.out_type, row * a.ld_v + b.head * TW_DV, a.ld_v, b.num,
                                                     sum2, f2, X1_BYTES);
    }
};

template <class T, u32 WHAT> __device__ __forceinline__ void tw_backward(const TwAttn& a, TwBlock& b) {
    T::begin(a, b);
    __syncthreads();
    T me;
    me.clear(a, b);
    if (b.walk.tiles[0].num > 0) {
        T::load_own(a, b);
        T::load(a, b, 0);
    }
#pragma unroll 1
    for (u32 n = 0; b.walk.tiles[n % 4].num > 0; n++) {
        cp_async_wait_group<0>();
        // Everybody's copies are there, and nobody reads the stage that is next filled.
        __syncthreads();
        if (b.walk.tiles[(n + 1) % 4].num > 0) T::load(a, b, n + 1);
        me.template add<WHAT>(a, b, n);
    }
    me.template store<WHAT>(a, b);
}

typedef TwReturn<true, TW_ATTN_DQ_M, TW_ATTN_DQ_N, TW_ATTN_DQ_WARPS> TwDq;
typedef TwReturn<false, TW_ATTN_DKV_N, TW_ATTN_DKV_M, TW_ATTN_DKV_WARPS> TwDkv;
