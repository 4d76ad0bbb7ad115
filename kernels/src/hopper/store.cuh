// How the core's warps finish and store the sums of a tile: 16 rows each, 64 columns at a time.

#pragma once

#include "../ptx/bulk.cuh"
#include "../ptx/wgmma.cuh"
#include "epilogue.cuh"
#include "tile.cuh"

// Columns of D, or of each of its halves, that a tile has.
enum : u32 {
    TW_HG_WIDTH = TW_HG_EPI == TW_HG_SWIGLU ? TW_HG_N / 2 : TW_HG_N,
    // Chunks of 64 of them.
    TW_HG_CHUNKS = (TW_HG_WIDTH + 63) / 64,
};
static_assert(TW_HG_EPI == TW_PLAIN || TW_HG_WIDTH % 64 == 0, "no column is finished twice");

// The first column of chunk `c` of a tile: where 64 does not divide it, the last one goes back.
__device__ __forceinline__ constexpr u32 tw_chunk(u32 c) {
    return 64 * c + 64 <= TW_HG_WIDTH ? 64 * c : TW_HG_WIDTH - 64;
}

// The place of a thread in the chunk that begins at column `first` of a tile at (row, col) of D.
__device__ __forceinline__ TwPlace tw_place(const TwHopper& g, u32 row, u32 col, u32 first) {
    const u32 lane = threadIdx.x % 32, cols = TW_HG_EPI == TW_HG_SWIGLU ? g.n / 2 : g.n;
    return {row + lane / 4, col + first + lane % 4 * 2, g.m, cols};
}

// The 16 pairs of that chunk, finished.
template <class Bias>
__device__ __forceinline__ TwPlace tw_finish_chunk(const float (&acc)[TW_HG_N / 2], const TwHopper& g, const Bias& bias, u32 row, u32 col, u32 first,
                                                   u32 half, float2 (&v)[16]) {
    const TwPlace at = tw_place(g, row, col, first);
    float2 up[16];
#pragma unroll
    for (u32 i = 0; i < 16; i++) {
        const u32 e = first / 2 + 2 * i;
        v[i] = make_float2(acc[e], acc[e + 1]);
        up[i] = make_float2(0.0f, 0.0f);
        if constexpr (TW_HG_EPI == TW_HG_SWIGLU) up[i] = make_float2(acc[TW_HG_N / 4 + e], acc[TW_HG_N / 4 + e + 1]);
    }
    tw_finish(g, bias, at, v, up, half);
    return at;
}

// The bias of a tile's chunks, one after the other. It comes while the chunk before is finished:
// from L2, which takes as long as that. Tiles of more than 256 columns have no registers for it,
// and load it when they need it.
enum : bool { TW_HG_BIAS_AHEAD = TW_HG_N <= 256 && (TW_HG_EPI == TW_LINEAR || TW_HG_EPI == TW_HG_RELU || TW_HG_EPI == TW_HG_GELU) };
typedef TwBiasOf<TW_HG_BIAS_AHEAD> TwChunkBias;
__device__ __forceinline__ void tw_load_bias(TwChunkBias& bias, const TwHopper& g, u32 col, u32 chunk) {
    if (chunk < TW_HG_CHUNKS) bias.load(g, tw_place(g, 0, col, tw_chunk(chunk)));
}

// Stores D of 16 bits: each warp its 16 rows from `row` on, 64 columns at a time through buffers of
// its own, so that no warp waits for another and the stores go on under the next tile. Where 64
// does not divide the tile, the last chunk writes some columns twice, the same values. `next` goes
// on from tile to tile: a buffer that is written again has been read. Chunks FROM to TO - 1;
// `bias` is that of the first one, and becomes that of chunk TO, if there is one.
template <u32 FROM, u32 TO, class Box>
__device__ __forceinline__ void tw_store_16(const float (&acc)[TW_HG_N / 2], const TwHopper& g, const Box& d, u32 row, u32 col, u32& next,
                                            TwChunkBias& bias) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u8* own = tw_smem + TW_HG_AT_D + warp * TW_HG_BUFFERS * TW_HG_BUFFER_BYTES;
#pragma unroll
    for (u32 c = FROM; c < TO; c++) {
        const TwChunkBias own_bias = bias;
        tw_load_bias(bias, g, col, c + 1);
        // Once more for the other half of DSwiGLU's D, rather than to keep both in registers.
#pragma unroll 1
        for (u32 half = 0; half < (TW_HG_EPI == TW_HG_DSWIGLU ? 2 : 1); half++) {
            const u32 first = tw_chunk(c);
            float2 v[16];
            tw_finish_chunk(acc, g, own_bias, row, col, first, half, v);
            u8* buffer = own + next * TW_HG_BUFFER_BYTES;
            next = next + 1 == TW_HG_BUFFERS ? 0 : next + 1;
            // stmatrix waits for all lanes of the warp, and so for lane 0's wait.
            if (lane == 0) bulk_wait_group_read<TW_HG_BUFFERS - 1>();
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                u32 w[4];
#pragma unroll
                for (u32 e = 0; e < 4; e++) w[e] = tw_pair(v[4 * j + e].x, v[4 * j + e].y, TW_HG_OUT);
                // Matrices: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15; their 16-byte
                // pieces lie as the map's swizzle of 128 bytes has them.
                const u32 r = lane % 16, piece = (2 * j + lane / 16) ^ (r % 8);
                stmatrix_x4_b16(buffer + r * 128 + piece * 16, w);
            }
            fence_proxy_async_shared_cta();
            __syncwarp();
            if (lane == 0) {
                d.store(buffer, col + first, row, half);
                bulk_commit_group();
            }
        }
    }
}

// Stores D of f32, or the part of it that begins at `d`, from registers: four lanes have 32 bytes
// of a row.
__device__ __forceinline__ void tw_store_32(const float (&acc)[TW_HG_N / 2], const TwHopper& g, float* d, u32 row, u32 col) {
#pragma unroll
    for (u32 c = 0; c < TW_HG_CHUNKS; c++) {
        float2 v[16];
        const TwPlace at = tw_finish_chunk(acc, g, TwNoBias{}, row, col, tw_chunk(c), 0, v);
#pragma unroll
        for (u32 i = 0; i < 16; i++)
            if (at.has(i)) *(float2*)(d + at.at(i, g.ldd)) = v[i];
    }
}
