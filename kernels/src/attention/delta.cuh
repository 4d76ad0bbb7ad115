// delta = <d_out, out>, which all kernels of the backward pass read.

#pragma once

#include "segments.cuh"

// delta of one row and head, computed by one warp.
template <class F> __device__ __forceinline__ void tw_delta(const TwAttn& a, u32 dv, F at) {
    const u64 i = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (i >= (u64)a.tokens_q * a.heads_q) return;
    const u32 row = (u32)(i / a.heads_q), head = (u32)(i % a.heads_q);
    float sum = 0.0f;
    for (u32 c = threadIdx.x % 32; c < dv; c += 32) {
        const i64 e = (i64)row * a.ld_o + head * dv + c;
        sum = fmaf(at(a.out, e), at(a.d_out, e), sum);
    }
#pragma unroll
    for (u32 by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    if (threadIdx.x % 32 == 0) a.delta[(i64)head * a.tokens_q + row] = sum;
}

// The same of elements of TW_ATTN_TYPE.
__device__ __forceinline__ void tw_delta_16(const TwAttn& a, u32 dv) {
    tw_delta(a, dv, [](const void* p, i64 e) {
        const u16 h = ((const u16*)p)[e];
        return TW_ATTN_TYPE == 0 ? __uint_as_float((u32)h << 16) : cvt_f32_f16(h);
    });
}
