// D of f32 that is added to: D += A B, by tensor map.
//
// What D holds comes through the stages behind those of the tile's product, so that it is on its
// way under the last products, and the next tile's stages follow it. Each warp adds its 16 rows in
// place, 32 columns at a time, and stores them from there. The stage is free when all stores of
// both blocks' warps have read it: one lane of each warp arrives at both blocks, where of a
// multiplied stage one warpgroup's thread arrives for four warps.
//
// A warp gives a stage back when it has added the next one, and the last one of a tile under the
// first products of the next tile: until then the loader has at least one other stage that is free,
// since a tile's product has a stage of its own.

#pragma once

#include "../ptx/bulk.cuh"
#include "epilogue.cuh"
#include "stages.cuh"

// Arrivals of a warpgroup at each block's `empty`, for every stage.
enum : u32 { TW_HG_RELEASES = TW_HG_ADDS ? 4 : 1 };
static_assert(!TW_HG_ADDS || (TW_HG_N % 32 == 0 && TW_HG_STAGES > 1), "whole boxes; a stage beside the owed one");

// Loads what D holds of the tile at (row, col): the loader. `Rows`: TwSumRows.
template <class Rows>
__device__ __forceinline__ void tw_load_sums(const Rows& d, TwStages& s, u32 rows, u32 row, u32 col) {
    const u32 warps = min((rows - row) / 16, 8u);
#pragma unroll 1
    for (u32 c = 0; c < TW_HG_SUMS_STAGES; c++) {
        const u32 boxes = min((u32)TW_HG_SUMS, (u32)TW_HG_N / 32 - c * (u32)TW_HG_SUMS);
        s.wait_empty();
        u64* full = s.full + s.stage;
        mbarrier_arrive_expect_tx(full, boxes * warps * TW_HG_SUMS_BYTES);
        for (u32 i = 0; i < boxes; i++)
            for (u32 w = 0; w < warps; w++) d.load(s.sums(i, w), full, col + 32 * (c * TW_HG_SUMS + i), row + 16 * w);
        s.advance();
    }
}

// Adds what D holds to a warp's sums, and stores them: rows from `row` on. `owed`: the stage that
// this warp has not given back, TW_HG_STAGES if none.
template <class Rows>
__device__ __forceinline__ void tw_add_sums(const float (&acc)[TW_HG_N / 2], const Rows& d, TwStages& s, u32 rows, u32 row, u32 col, u32& owed) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Of rows lane / 4 and 8 more: where TwSumRows puts them.
    const u32 place = lane / 4 % 4 * 2 + lane / 16;
#pragma unroll
    for (u32 c = 0; c < TW_HG_SUMS_STAGES; c++) {
        s.wait_full();
#pragma unroll
        for (u32 i = 0; i < TW_HG_SUMS; i++) {
            const u32 first = 32 * (c * TW_HG_SUMS + i);
            if (first >= TW_HG_N || row >= rows) break;
            u8* own = s.sums(i, warp) + place * 128 + lane % 2 * 8;
            float2* at[8];
            float2 v[8];
#pragma unroll
            for (u32 q = 0; q < 8; q++) {
                at[q] = (float2*)(own + q % 2 * (8 * 128) + (q / 2 * 2 + lane % 4 / 2 ^ place) * 16);
                v[q] = *at[q];
            }
#pragma unroll
            for (u32 q = 0; q < 8; q++) *at[q] = make_float2(acc[first / 2 + 2 * q] + v[q].x, acc[first / 2 + 2 * q + 1] + v[q].y);
            fence_proxy_async_shared_cta();
            __syncwarp();
            if (lane == 0) d.store(s.sums(i, warp), col + first, row);
        }
        if (lane == 0) {
            bulk_commit_group();
            bulk_wait_group_read<1>();
            if (owed < TW_HG_STAGES) s.release_stored(owed);
        }
        owed = s.stage;
        s.advance();
    }
}

// Gives back the stage that a warp owes, if any.
__device__ __forceinline__ void tw_release_owed(const TwStages& s, u32& owed) {
    if (owed < TW_HG_STAGES && threadIdx.x % 32 == 0) {
        bulk_wait_group_read<0>();
        s.release_stored(owed);
    }
    owed = TW_HG_STAGES;
}
