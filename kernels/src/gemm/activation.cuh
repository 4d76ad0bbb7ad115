// Codes of the flags of a product, and functions of its epilogue, for all kernels of products.

#pragma once

#include "../ptx/mma.cuh"

typedef unsigned short u16;

enum : u32 {
    TW_OUT = 3,          // type of D: 0 bf16, 1 f16, 2 f32
    TW_ACT_SHIFT = 2,    // 0 none, 1 ReLU, 2 GELU, 3 SwiGLU
    TW_ACCUMULATE = 16,  // D = A B + D (+ bias)
    TW_A_KM = 32,        // the f32 kernel only: A is [k, m]
    TW_B_KN = 64,        // the f32 kernel only: B is [k, n]
    // The product is multiplied by the derivative of the activation at `aux` (GELU: DGELU; SwiGLU:
    // DSwiGLU, whose D has 2 n columns). The grouped kernels use 128.
    TW_DACT = 256,
    TW_BIAS_OUT = 2048,  // the bias is of D's type, not f32; 512 and 1024 are used by the grouped kernels
    TW_RELU = 1,
    TW_GELU = 2,
    TW_SWIGLU = 3,
};

__device__ __forceinline__ float tw_gelu(float x) {
    return 0.5f * x * (1.0f + tanhf(0.7978846f * (x + 0.044715f * x * x * x)));
}

__device__ __forceinline__ float tw_dgelu(float x) {
    const float t = tanhf(0.7978846f * (x + 0.044715f * x * x * x));
    const float dt = 0.7978846f * (1.0f + 3.0f * 0.044715f * x * x);
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * dt;
}

__device__ __forceinline__ float tw_load_out(const void* d, i64 at, u32 type) {
    if (type == 2) return ((const float*)d)[at];
    const u16 h = ((const u16*)d)[at];
    return type == 0 ? __uint_as_float((u32)h << 16) : cvt_f32_f16(h);
}

__device__ __forceinline__ u32 tw_pair(float low, float high, u32 type) {
    return type == 0 ? cvt_rn_bf16x2_f32(low, high) : cvt_rn_f16x2_f32(low, high);
}

// The gradients of SwiGLU's gate and up, from that of its result.
__device__ __forceinline__ void tw_dswiglu(float d, float gate, float up, float& d_gate, float& d_up) {
    const float s = 1.0f / (1.0f + expf(-gate));
    d_gate = d * up * s * (1.0f + gate * (1.0f - s));
    d_up = d * gate * s;
}
