// Pieces of shared memory that a warp's rows go through: read once by a bulk load, stored to each
// place by one instruction. Stands behind bulk.cuh; lengths and addresses are multiples of 16.

#pragma once

#include "../ptx/bulk.cuh"

// A warp's pieces of shared memory, their barriers, and how many loads were asked for and used:
// with more than one, the next one comes while one is stored.
template <u32 PIECE, u32 PIECES>
struct TwStage {
    unsigned char* piece;
    u64* full;
    u32 asked, used;
};

// `memory` and `barriers` are those of the block's first warp.
template <u32 PIECE, u32 PIECES>
__device__ __forceinline__ TwStage<PIECE, PIECES> tw_stage(unsigned char* memory, u64* barriers) {
    const u32 warp = threadIdx.x / 32;
    const TwStage<PIECE, PIECES> s = {memory + warp * PIECES * PIECE, barriers + PIECES * warp, 0, 0};
    if (threadIdx.x % 32 == 0) {
        for (u32 i = 0; i < PIECES; i++) mbarrier_init(s.full + i, 1);
        fence_mbarrier_init_release_cluster();
    }
    __syncwarp();
    return s;
}

template <u32 PIECE, u32 PIECES>
__device__ __forceinline__ unsigned char* tw_piece(const TwStage<PIECE, PIECES>& s, u32 turn) {
    return s.piece + turn % PIECES * PIECE;
}

// By a warp: the piece of a row at `from`, of which `bytes` are left, on its way to a free piece.
template <u32 PIECE, u32 PIECES>
__device__ __forceinline__ void tw_bulk_fetch(TwStage<PIECE, PIECES>& s, u64 from, u64 bytes) {
    if (threadIdx.x % 32 == 0) {
        const u32 len = (u32)min((u64)PIECE, bytes);
        u64* full = s.full + s.asked % PIECES;
        mbarrier_arrive_expect_tx(full, len);
        bulk_load(tw_piece(s, s.asked), (const void*)from, len, full);
    }
    s.asked++;
}

// By a warp: the next piece has arrived. The bytes of our own load always do.
template <u32 PIECE, u32 PIECES>
__device__ __forceinline__ const unsigned char* tw_bulk_await(TwStage<PIECE, PIECES>& s) {
    while (!mbarrier_try_wait_parity(s.full + s.used % PIECES, s.used / PIECES & 1)) {
    }
    return tw_piece(s, s.used++);
}

// By a warp: its stores of a piece are a group, and the piece that comes next is free again.
template <u32 PIECE, u32 PIECES>
__device__ __forceinline__ void tw_bulk_stored(const TwStage<PIECE, PIECES>&) {
    bulk_commit_group();
    bulk_wait_group_read<PIECES - 1>();
    __syncwarp();
}
