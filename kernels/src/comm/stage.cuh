// A warp's stages in shared memory: rows pass through them in pieces, which one bulk load reads and
// one instruction stores to each destination. Lengths and addresses are multiples of 16.

#pragma once

#include "../ptx/bulk.cuh"

// A warp's pieces of shared memory, their barriers, and the numbers of loads issued and used. With
// several pieces, the next one is loaded while one is being stored.
template <u32 PIECE, u32 PIECES>
struct TwStage {
    unsigned char* piece;
    u64* full;
    u32 asked, used;
};

// `memory` and `barriers` are those of the block's first warp; the result is this warp's.
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

// Called by a warp: issues the load of the next piece of a row at `from`, of which `bytes` are
// left. The piece must be free.
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

// Called by a warp: waits for the next piece. No deadline: the warp's own load always completes.
template <u32 PIECE, u32 PIECES>
__device__ __forceinline__ const unsigned char* tw_bulk_await(TwStage<PIECE, PIECES>& s) {
    while (!mbarrier_try_wait_parity(s.full + s.used % PIECES, s.used / PIECES & 1)) {
    }
    return tw_piece(s, s.used++);
}

// Called by a warp: closes the group of stores of a piece, and waits until the piece that the next
// load takes has been read.
template <u32 PIECE, u32 PIECES>
__device__ __forceinline__ void tw_bulk_stored(const TwStage<PIECE, PIECES>&) {
    bulk_commit_group();
    bulk_wait_group_read<PIECES - 1>();
    __syncwarp();
}
