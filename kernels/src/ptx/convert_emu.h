// The wrappers of convert.cuh for the emulator: the branch of architectures without the
// instruction, which is integer arithmetic. The declarations are the same; a test compares them.
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

// Two FP8 codes, that of `lo` in the low byte: nearest even, saturated, 0x7F for every NaN.
__device__ __forceinline__ u32 cvt_rn_satfinite_e4m3x2_f32(float hi, float lo) {
    return tw_fp8_code(tw_f32_to_e4m3(hi), hi) << 8 | tw_fp8_code(tw_f32_to_e4m3(lo), lo);
}

// Two bf16 of results of arithmetic, whose only NaN is 0x7fffffff, that of `lo` in the low half:
// nearest even.
__device__ __forceinline__ u32 cvt_rn_bf16x2_f32(float hi, float lo) {
    return tw_f32_to_bf16(hi) << 16 | tw_f32_to_bf16(lo);
}

// The same for f16.
__device__ __forceinline__ u32 cvt_rn_f16x2_f32(float hi, float lo) {
    return tw_f32_to_f16(hi) << 16 | tw_f32_to_f16(lo);
}

__device__ __forceinline__ u32 cvt_rn_satfinite_e5m2x2_f32(float hi, float lo) {
    return tw_fp8_code(tw_f32_to_e5m2(hi), hi) << 8 | tw_fp8_code(tw_f32_to_e5m2(lo), lo);
}
