// Thin wrappers of approximate functions and of 4-byte asynchronous copies; types of 8 and 16 bits.

#pragma once

typedef unsigned short u16;
typedef unsigned char u8;

// 2^x with an error of at most 2 ulp; results below 2^-126 are 0.
__device__ __forceinline__ float ex2_approx_ftz_f32(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x with an error of at most 1 ulp.
__device__ __forceinline__ float rcp_approx_ftz_f32(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Copies 4 bytes from global to shared memory: `bytes` is 4, or 0 for zeros without a read.
__device__ __forceinline__ void cp_async_ca_4_zfill(void* dst, const void* src, u32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"((u32)__cvta_generic_to_shared(dst)),
                 "l"(src), "r"(bytes)
                 : "memory");
}
