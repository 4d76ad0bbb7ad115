// delta = <d_out, out>, which the kernels of the backward pass read, of 16-bit types.

#pragma once

#include "segments.cuh"

// Lanes that compute one row of DV elements, eight of them each: a power of two.
template <u32 DV> __device__ __forceinline__ constexpr u32 tw_delta_lanes() {
    return DV <= 8 ? 1 : DV <= 16 ? 2 : DV <= 32 ? 4 : DV <= 64 ? 8 : DV <= 128 ? 16 : 32;
}

// delta of as many rows and heads as a block has groups of lanes. Elements of TW_ATTN_TYPE; DV is a
// multiple of 8, and rows of heads begin at multiples of 16 bytes. Heads of a row follow each
// other, so that a warp reads whole lines.
template <u32 DV> __device__ __forceinline__ void tw_delta_16(const TwAttn& a) {
    constexpr u32 LANES = tw_delta_lanes<DV>();
    const u32 lane = threadIdx.x % LANES;
    const u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    const bool there = i < (u64)a.tokens_q * a.heads_q;
    const u32 row = (u32)(i / a.heads_q), head = (u32)(i % a.heads_q);
    const auto value = [](u32 pair, u32 high) {
        const u16 h = (u16)(pair >> 16 * high);
        return TW_ATTN_TYPE == 0 ? __uint_as_float((u32)h << 16) : cvt_f32_f16(h);
    };
    float sum = 0.0f;
    if (there && lane < DV / 8) {
        const i64 at = (i64)row * a.ld_o + head * DV + 8 * lane;
        const uint4 o = *(const uint4*)((const u16*)a.out + at), d = *(const uint4*)((const u16*)a.d_out + at);
        const u32 os[4] = {o.x, o.y, o.z, o.w}, ds[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
        for (u32 e = 0; e < 8; e++) sum = fmaf(value(os[e / 2], e % 2), value(ds[e / 2], e % 2), sum);
    }
#pragma unroll
    for (u32 by = LANES / 2; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    if (there && lane == 0) a.delta[(i64)head * a.tokens_q + row] = sum;
}
