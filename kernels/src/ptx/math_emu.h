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

__device__ __forceinline__ void cp_async_ca_4_zfill(void* dst, const void* src, u32 bytes) {
    if ((u64)dst % 4 != 0 || (u64)src % 4 != 0) emu_fail("cp.async of 4 bytes at no multiple of 4");
    if (bytes > 4) emu_fail("cp.async of more than 4 bytes");
    emu_copy_async(dst, src, bytes, 4 - bytes);
}
