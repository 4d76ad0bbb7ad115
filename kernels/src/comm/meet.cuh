// Shared by kernels that synchronise with other ranks inside: work that warps claim, and copies of
// any alignment.

#pragma once

#include "await.cuh"
#include "../common/last.cuh"

// Called by one block: fills each output with its poison byte, by words where addresses allow.
__device__ __noinline__ void tw_spoil(const TwPoison& p) {
    for (u32 o = 0; o < 8; o++) {
        const u32 byte = p.byte[o], word = byte << 24 | byte << 16 | byte << 8 | byte;
        const u64 words = p.out[o] % 4 == 0 ? p.len[o] / 4 : 0;
        for (u64 i = threadIdx.x; i < words; i += blockDim.x) ((u32*)p.out[o])[i] = word;
        for (u64 i = 4 * words + threadIdx.x; i < p.len[o]; i += blockDim.x) ((u8*)p.out[o])[i] = (u8)byte;
    }
}

struct __align__(16) TwPiece {
    u32 w[4];
};

// Called by a warp: claims the next index that no warp of this rank has claimed.
__device__ __forceinline__ u32 tw_claim(u32* taken) {
    u32 i = 0;
    if (threadIdx.x % 32 == 0) i = atomicAdd(taken, 1u);
    return __shfl_sync(0xffffffffu, i, 0);
}

// Slice `j` of `slices` of `num` items: [begin, end).
__device__ __forceinline__ void tw_slice(u64 num, u32 j, u32 slices, u64* begin, u64* end) {
    const u64 per = (num + slices - 1) / slices;
    *begin = min(j * per, num);
    *end = min(*begin + per, num);
}

// Called by a warp: copies slice `j` of a row to one or two destinations (0: none), with four loads
// of a lane in flight.
template <class Piece>
__device__ __forceinline__ void tw_lay_pieces(u64 from, u64 len, const u64 (&to)[2], u32 j, u32 slices) {
    u64 begin, end;
    tw_slice(len / sizeof(Piece), j, slices, &begin, &end);
    for (u64 i = begin + threadIdx.x % 32; i < end; i += 128) {
        Piece v[4];
#pragma unroll
        for (u32 n = 0; n < 4; n++)
            if (i + 32 * n < end) v[n] = ((const Piece*)from)[i + 32 * n];
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
            if (i + 32 * n >= end) break;
            ((Piece*)to[0])[i + 32 * n] = v[n];
            if (to[1]) ((Piece*)to[1])[i + 32 * n] = v[n];
        }
    }
}

// The same, in the largest pieces that all addresses and the length allow.
__device__ __forceinline__ void tw_lay(u64 from, u64 len, const u64 (&to)[2], u32 j, u32 slices) {
    const u64 bits = from | to[0] | to[1] | len;
    if (bits % 16 == 0) tw_lay_pieces<TwPiece>(from, len, to, j, slices);
    else if (bits % 4 == 0) tw_lay_pieces<u32>(from, len, to, j, slices);
    else if (bits % 2 == 0) tw_lay_pieces<u16>(from, len, to, j, slices);
    else tw_lay_pieces<u8>(from, len, to, j, slices);
}
