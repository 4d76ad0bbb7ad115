// D of f32 that is added to: D += A B, by tensor map.
//
// Of most columns what D holds comes through the stages behind those of the tile's product, so that
// it is on its way under the last products, and the next tile's stages follow it. Each warp adds
// its 16 rows in place, 32 columns at a time, and stores them from there. The stage is free when
// all stores of both blocks' warps have read it: one lane of each warp arrives at both blocks,
// where of a multiplied stage one warpgroup's thread arrives for four warps. A warp gives a stage
// back when it has added the next one, or the first box that is L2's (below).
//
// To the other columns L2 adds the sums, which go there through two buffers of the warp, so that
// the tile has fewer stages to wait for. L2 adds 1.2 TB/s, a third of what it loads and stores: of
// short products these are two boxes of a warp, which fill the buffers and are added under the next
// tile (four in tiles of 320 columns); of long ones, which leave more time, all that one stage has
// no space for. It rounds as the multiprocessors do, and keeps numbers below the least normal one
// (tiny_results_are_added_to).

#pragma once

#include "../ptx/bulk.cuh"
#include "epilogue.cuh"
#include "stages.cuh"

// Arrivals of a warpgroup at each block's `empty`, for every stage.
enum : u32 { TW_HG_RELEASES = TW_HG_ADDS ? 4 : 1 };
static_assert(!TW_HG_ADDS || (TW_HG_N % 32 == 0 && TW_HG_N / 32 >= 2 * TW_HG_SUMS + 2), "whole boxes, two of them at least for L2");

// The stages through which what D holds comes, for a tile whose product has `steps`.
__device__ __forceinline__ u32 tw_sums_stages(u32 steps) {
    return steps < TW_HG_LONG ? 2 : 1;
}

// Loads what D holds of the tile at (row, col): the loader. `Rows`: TwSumRows.
template <class Rows>
__device__ __forceinline__ void tw_load_sums(const Rows& d, TwStages& s, u32 steps, u32 rows, u32 row, u32 col) {
    const u32 warps = min((rows - row) / 16, 8u);
#pragma unroll 1
    for (u32 c = 0; c < tw_sums_stages(steps); c++) {
        s.wait_empty();
        u64* full = s.full + s.stage;
        mbarrier_arrive_expect_tx(full, TW_HG_SUMS * warps * TW_HG_SUMS_BYTES);
        for (u32 i = 0; i < TW_HG_SUMS; i++)
            for (u32 w = 0; w < warps; w++) d.load(s.sums(i, w), full, col + 32 * (c * TW_HG_SUMS + i), row + 16 * w);
        s.advance();
    }
}

// Adds a warp's sums to what D holds, and stores them: rows from `row` on. `next`: its next buffer.
template <class Rows>
__device__ __forceinline__ void tw_add_sums(const float (&acc)[TW_HG_N / 2], const Rows& d, TwStages& s, u32 steps, u32 rows, u32 row, u32 col,
                                            u32& next) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, stages = tw_sums_stages(steps);
    // Where TwSumRows puts two columns of rows lane / 4 and 8 more: of box `at` the pair `q`.
    const u32 place = lane / 4 % 4 * 2 + lane / 16;
    const auto pair = [&](u8* at, u32 q) {
        return (float2*)(at + place * 128 + lane % 2 * 8 + q % 2 * (8 * 128) + (q / 2 * 2 + lane % 4 / 2 ^ place) * 16);
    };
    // The stage that this warp has not given back.
    u32 owed = s.stage;
#pragma unroll
    for (u32 c = 0; c < 2; c++) {
        if (c == stages) break;
        s.wait_full();
#pragma unroll
        for (u32 i = 0; i < TW_HG_SUMS; i++) {
            const u32 box = c * TW_HG_SUMS + i;
            if (row >= rows) break;
            float2 v[8];
#pragma unroll
            for (u32 q = 0; q < 8; q++) v[q] = *pair(s.sums(i, warp), q);
#pragma unroll
            for (u32 q = 0; q < 8; q++)
                *pair(s.sums(i, warp), q) = make_float2(acc[16 * box + 2 * q] + v[q].x, acc[16 * box + 2 * q + 1] + v[q].y);
            fence_proxy_async_shared_cta();
            __syncwarp();
            if (lane == 0) d.store(s.sums(i, warp), col + 32 * box, row);
        }
        if (lane == 0) {
            bulk_commit_group();
            if (c == 1) bulk_wait_group_read<1>(), s.release_stored(owed);
        }
        owed = s.stage;
        s.advance();
    }
    if (row >= rows && lane == 0) s.release_stored(owed);
#pragma unroll
    for (u32 box = TW_HG_SUMS; box < TW_HG_N / 32; box++) {
        if (box < stages * TW_HG_SUMS || row >= rows) continue;
        u8* buffer = tw_smem + TW_HG_AT_D + (warp * TW_HG_BUFFERS + next) * TW_HG_BUFFER_BYTES;
        next = next + 1 == TW_HG_BUFFERS ? 0 : next + 1;
        if (lane == 0) {
            bulk_wait_group_read<1>();
            // Only the first of these boxes may not have been read, and no store of a stage.
            if (box == stages * TW_HG_SUMS + 1) s.release_stored(owed);
        }
        __syncwarp();
#pragma unroll
        for (u32 q = 0; q < 8; q++) *pair(buffer, q) = make_float2(acc[16 * box + 2 * q], acc[16 * box + 2 * q + 1]);
        fence_proxy_async_shared_cta();
        __syncwarp();
        if (lane == 0) {
            d.add(buffer, col + 32 * box, row);
            bulk_commit_group();
        }
    }
}
