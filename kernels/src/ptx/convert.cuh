// Conversions for which some architectures have an instruction. Other architectures use the integer
// arithmetic of common/convert.cuh, which includes this file.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

__device__ __forceinline__ u32 tw_f32_to_bf16(float v);
__device__ __forceinline__ u32 tw_f32_to_f16(float v);
__device__ __forceinline__ u32 tw_f32_to_e4m3(float v);
__device__ __forceinline__ u32 tw_f32_to_e5m2(float v);
__device__ __forceinline__ u32 tw_fp8_code(u32 code, float v);

// Two FP8 codes, that of `lo` in the low byte: round to nearest even, saturate; every NaN is 0x7F.
__device__ __forceinline__ u32 cvt_rn_satfinite_e4m3x2_f32(float hi, float lo) {
#if __CUDA_ARCH__ >= 890
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(hi), "f"(lo));
    return codes;
#else
    return tw_fp8_code(tw_f32_to_e4m3(hi), hi) << 8 | tw_fp8_code(tw_f32_to_e4m3(lo), lo);
#endif
}

// Two bf16 codes, that of `lo` in the low half: round to nearest even. For results of arithmetic,
// whose only NaN is 0x7fffffff.
__device__ __forceinline__ u32 cvt_rn_bf16x2_f32(float hi, float lo) {
    u32 codes;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(codes) : "f"(hi), "f"(lo));
    return codes;
}

// The same for f16.
__device__ __forceinline__ u32 cvt_rn_f16x2_f32(float hi, float lo) {
    u32 codes;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(codes) : "f"(hi), "f"(lo));
    return codes;
}

__device__ __forceinline__ u32 cvt_rn_satfinite_e5m2x2_f32(float hi, float lo) {
#if __CUDA_ARCH__ >= 890
    u16 codes;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(hi), "f"(lo));
    return codes;
#else
    return tw_fp8_code(tw_f32_to_e5m2(hi), hi) << 8 | tw_fp8_code(tw_f32_to_e5m2(lo), lo);
#endif
}
