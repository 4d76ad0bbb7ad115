// The stages of shared memory that go round between the loader and the multipliers (core.cuh says
// who waits for what).

#pragma once

#include "../ptx/bulk.cuh"
#include "../ptx/cluster.cuh"
#include "tile.cuh"

// The stages, and which of them comes next.
struct TwStages {
    u64 *full, *empty;
    u32 stage, parity;

    __device__ __forceinline__ TwStages()
        : full((u64*)(tw_smem + TW_HG_AT_BARRIERS)), empty(full + TW_HG_STAGES), stage(0), parity(0) {}

    __device__ __forceinline__ u8* a() const {
        return tw_smem + stage * TW_HG_A_BYTES;
    }
    __device__ __forceinline__ u8* b() const {
        return tw_smem + TW_HG_AT_B + stage * TW_HG_B_BYTES;
    }
    __device__ __forceinline__ void advance() {
        if (++stage == TW_HG_STAGES) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ void wait_full() const {
        while (!mbarrier_try_wait_parity(full + stage, parity)) {
        }
    }
    __device__ __forceinline__ void wait_empty() const {
        while (!mbarrier_try_wait_parity(empty + stage, parity ^ 1)) {
        }
    }
    // The box number `i` of a warp, where a stage holds what is added to: 16 rows x 32 columns of
    // f32.
    __device__ __forceinline__ u8* sums(u32 i, u32 warp) const {
        return (i == 0 ? a() : b() + (i - 1) * (8 * TW_HG_SUMS_BYTES)) + warp * TW_HG_SUMS_BYTES;
    }
    // Gives back a stage whose stores have been read: one lane of each warp.
    __device__ __forceinline__ void release_stored(u32 of) const {
#pragma unroll
        for (u32 rank = 0; rank < 2; rank++) mbarrier_arrive_relaxed_cluster(empty + of, rank);
    }
};
