// dk and dv by pairs of warps that share rows of keys. Of the four products for a tile of queries,
// the first warp of a pair computes two and the second warp the other two, half a tile later:
//
//   first:  s = k q^T, p = exp(scale s - lse), dv += p d_out
//   second: g = v d_out^T; for the tile before: ds = p (g - delta), dk += ds q
//
// Rows are keys. Each lane passes its p to the same lane of the other warp through shared memory.
// With both sums in one warp (TwReturn) a warp has registers for 16 keys only, and reads all of q
// and d_out twice for half of the products: the bandwidth of shared memory was then the limit. The
// two warps of a pair are on one scheduler, so that exponentials of one overlap with products of
// the other. Each sum has the order of TwReturn's, and so its bits.

#pragma once

#include "backward.cuh"

#ifndef TW_ATTN_PAIRS
#define TW_ATTN_PAIRS 0
#endif

#if TW_ATTN_PAIRS
struct TwPairs {
    static_assert(TW_DQ == TW_DV, "both warps of a pair do the same");
    static constexpr u32 X = TW_ATTN_DKV_N, Y = TW_ATTN_DKV_M, PAIRS = TW_ATTN_DKV_WARPS / 2, HALF = 32 * PAIRS;
    static constexpr u32 MT = X / (16 * PAIRS), NT = Y / 8, DT = TW_DQ16 / 8;
    // Offset of p, behind the stages.
    static constexpr u32 HANDED = TwDkv::X_BYTES + 2 * TwDkv::STAGE;
    static_assert(X % (16 * PAIRS) == 0, "whole matrix instructions");
    // Named barriers. For each pair: GIVEN, p is written; TAKEN, p has been read. For all warps:
    // BEGIN, first warps may begin a tile, because its q has arrived and d_out of the tile before
    // has been read; THERE, second warps may, because d_out has arrived, and no first warp still
    // reads q of the tile before.
    enum : u32 { GIVEN = 1, TAKEN = GIVEN + PAIRS, BEGIN = TAKEN + PAIRS, THERE };
    static_assert(THERE < 16, "a block has 16 barriers");
    typedef float Part[MT][NT][4];

    float sum[MT][DT][4];
    Part s;

    static __device__ __forceinline__ bool is_first() { return threadIdx.x < HALF; }
    static __device__ __forceinline__ u32 stage(u32 n) { return TwDkv::X_BYTES + n % 2 * TwDkv::STAGE; }
    // Offset of lse of a tile's queries; delta follows Y elements later.
    static __device__ __forceinline__ u32 numbers(u32 n) { return stage(n) + TwDkv::Y1_BYTES + TwDkv::Y2_BYTES; }
    // Where a lane's p is; part (i, j) is at index 32 (i NT + j) from there.
    static __device__ __forceinline__ float4* handed(u32 thread) {
        return (float4*)(tw_smem + HANDED) + thread / 32 % PAIRS * (MT * NT * 32) + thread % 32;
    }

    // Copies d_out and lse of tile `n` (first warps), or q and delta (second warps): each copies
    // the tiles of which it is the last reader.
    template <bool FIRST> static __device__ __forceinline__ void load(const TwAttn& a, const TwBlock& b, u32 n) {
        const TwTile& t = b.walk.tiles[n % 4];
        const u32 thread = opaque(threadIdx.x % HALF);
        const i64 ld = FIRST ? a.ld_o : a.ld_q;
        const u16* from = (const u16*)(FIRST ? a.d_out : a.q) + (i64)t.row * ld + t.head * TW_DQ;
        tw_load_tile<Y, TW_DQ, TW_DQP, HALF>(tw_smem + stage(n) + (FIRST ? TwDkv::Y1_BYTES : 0), from, ld, t.num, thread);
        const float* of = (FIRST ? a.lse : a.delta) + (i64)t.head * a.tokens_q + t.row;
        float* to = (float*)(tw_smem + numbers(n)) + (FIRST ? 0 : Y);
        for (u32 i = thread; i < Y; i += HALF) cp_async_ca_4_zfill(to + i, i < t.num ? of + i : a.lse, i < t.num ? 4 : 0);
        cp_async_commit_group();
    }

    // The work of a first warp for tile `n`.
    __device__ __forceinline__ void first(const TwAttn& a, TwBlock& b, u32 n) {
        bar_arrive(THERE, 2 * HALF);
        if (b.walk.tiles[(n + 1) % 4].num > 0) load<true>(a, b, n + 1);
        tw_products<MT, NT, TW_DQ16, TW_DQP>(s, 0, stage(n), opaque(threadIdx.x));
        const TwTile t = b.walk.tiles[n % 4];
        if (threadIdx.x == 0) b.walk.template step<Y>(a.other, b.own, n + 2);
        if (!TwDkv::whole(a, b, t)) TwDkv::mask(a, b, t, s, -TW_INF);
        if (n > 0) bar_sync(TAKEN + threadIdx.x / 32, 64);
        const float factor = a.scale * TW_LOG2E;
        const u32 thread = opaque(threadIdx.x), y = stage(n) + TwDkv::Y1_BYTES + tw_lane_a<TW_DQP>(thread);
        float4* to = handed(thread);
        // The exponentials of 16 queries overlap with the products of the 16 before.
#pragma unroll
        for (u32 k = 0; k < NT / 2; k++) {
#pragma unroll
            for (u32 j = 2 * k; j < 2 * k + 2; j++) {
                const float2 x = ((const float2*)(tw_smem + numbers(n)))[4 * j + thread % 4];
                const float lse[2] = {TwDkv::base2(x.x), TwDkv::base2(x.y)};
#pragma unroll
                for (u32 i = 0; i < MT; i++) {
#pragma unroll
                    for (u32 e = 0; e < 4; e++) s[i][j][e] = ex2_approx_ftz_f32(fmaf(s[i][j][e], factor, -lse[e % 2]));
                    to[32 * (i * NT + j)] = make_float4(s[i][j][0], s[i][j][1], s[i][j][2], s[i][j][3]);
                }
            }
            // Arrives before the last products, so that the other warp need not wait for them.
            if (k == NT / 2 - 1) bar_arrive(GIVEN + threadIdx.x / 32, 64);
            tw_accumulate16<MT, NT, DT, TW_DQP>(sum, s, y, k);
        }
    }

    // The rest of a second warp's work for tile `n`, once p is written; `more`: another tile
    // follows.
    __device__ __forceinline__ void finish(u32 n, bool more) {
        const u32 thread = opaque(threadIdx.x);
        bar_sync(GIVEN + thread / 32 % PAIRS, 64);
        const float2* deltas = (const float2*)(tw_smem + numbers(n)) + Y / 2 + thread % 4;
        const float4* from = handed(thread);
#pragma unroll
        for (u32 j = 0; j < NT; j++) {
            const float2 delta = deltas[4 * j];
#pragma unroll
            for (u32 i = 0; i < MT; i++) {
                const float4 p = from[32 * (i * NT + j)];
                s[i][j][0] = p.x * (s[i][j][0] - delta.x), s[i][j][1] = p.y * (s[i][j][1] - delta.y);
                s[i][j][2] = p.z * (s[i][j][2] - delta.x), s[i][j][3] = p.w * (s[i][j][3] - delta.y);
            }
        }
        if (more) bar_arrive(TAKEN + thread / 32 % PAIRS, 64);
#if __CUDA_ARCH__ >= 1000
        // Without this ptxas moves products up, and spills.
        __syncwarp();
#endif
        const u32 y = stage(n) + tw_lane_a<TW_DQP>(thread);
#pragma unroll
        for (u32 k = 0; k < NT / 2; k++) tw_accumulate16<MT, NT, DT, TW_DQP>(sum, s, y, k);
    }

    // Finishes tile `n - 1` and, if there is one, begins tile `n`.
    __device__ __forceinline__ void second(const TwAttn& a, TwBlock& b, u32 n, bool more) {
        if (n > 0) finish(n - 1, more);
        if (!more) return;
        bar_sync(THERE, 2 * HALF);
        if (b.walk.tiles[(n + 1) % 4].num > 0) load<false>(a, b, n + 1);
        // Keys and values are adjacent in shared memory, so rows of second warps are values.
        tw_products<MT, NT, TW_DQ16, TW_DQP>(s, 0, stage(n) + TwDkv::Y1_BYTES, opaque(threadIdx.x));
    }

    template <bool FIRST> __device__ __forceinline__ void store(const TwAttn& a, const TwBlock& b) {
        float f[MT][2];
#pragma unroll
        for (u32 i = 0; i < MT; i++) f[i][0] = f[i][1] = FIRST ? 1.0f : a.scale;
        // Rows are counted from the first warp's: those of second warps are X later. A warp
        // overwrites only rows that no other warp read.
        const i64 ld = FIRST ? a.ld_v : a.ld_k, row = (i64)(b.own.row + b.first) - (FIRST ? 0 : (i64)X);
        tw_store<MT, DT, TW_DQ, TW_DQP>(FIRST ? a.dv : a.dk, a.out_type, row * ld + b.head * TW_DQ, ld,
                                        b.num + (FIRST ? 0 : X), sum, f, 0);
    }
};

// The loop of a first or a second warp; each has its own instance, to save registers.
template <bool FIRST> __device__ __forceinline__ void tw_pair_loop(const TwAttn& a, TwBlock& b) {
    TwPairs me;
#pragma unroll
    for (u32 i = 0; i < TwPairs::MT; i++)
#pragma unroll
        for (u32 j = 0; j < TwPairs::DT; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) me.sum[i][j][e] = 0.0f;
    if (b.walk.tiles[0].num > 0) {
        TwDkv::load_own(a, b);
        TwPairs::load<FIRST>(a, b, 0);
    }
#pragma unroll 1
    for (u32 n = 0;; n++) {
        // This thread's copies of tile n have arrived. Barriers extend that to all threads: BEGIN
        // for first warps, THERE for second ones. A second warp arrives at BEGIN when it has read
        // d_out of the tile before, and does not wait.
        cp_async_wait_group<0>();
        if (FIRST) bar_sync(TwPairs::BEGIN, 2 * TwPairs::HALF);
        else bar_arrive(TwPairs::BEGIN, 2 * TwPairs::HALF);
        const bool more = b.walk.tiles[n % 4].num > 0;
        if (!FIRST) me.second(a, b, n, more);
        if (!more) break;
        if (FIRST) me.first(a, b, n);
    }
    me.store<FIRST>(a, b);
}

__device__ __forceinline__ void tw_pairs(const TwAttn& a, TwBlock& b) {
    TwDkv::begin(a, b);
    __syncthreads();
    if (TwPairs::is_first()) tw_pair_loop<true>(a, b);
    else tw_pair_loop<false>(a, b);
}
#endif
