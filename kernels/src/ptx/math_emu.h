// The wrappers of math.cuh for the emulator (kernels/emu). The declarations are the same; a test
// compares them.
typedef unsigned short u16;
typedef unsigned char u8;

__device__ __forceinline__ float ex2_approx_ftz_f32(float x) {
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
}

__device__ __forceinline__ float rcp_approx_ftz_f32(float x) {
    return 1.0f / x;
}
