// The wrappers of mma.cuh for the emulator (kernels/emu). The declarations are the same; a test
// compares them.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct EmuRow {
    const void* p;
};
struct EmuWords {
    u32 v[4];
};
inline void emu_aligned(const char* what, const void* p) {
    if ((u64)p % 16 != 0) emu_fail(what);
}

__device__ __forceinline__ void ldmatrix_x4_b16(u32 (&d)[4], const void* row) {
    const EmuWords out = emu_whole_warp<EmuRow, EmuWords>("ldmatrix.x4", {row}, [](const EmuWarp<EmuRow, EmuWords>& w) {
        for (u32 lane = 0; lane < 32; lane++) {
            emu_aligned("an address of ldmatrix is no multiple of 16", w.in(lane).p);
            for (u32 i = 0; i < 4; i++) w.out(lane).v[i] = ((const u32*)w.in(8 * i + lane / 4).p)[lane % 4];
        }
    });
    for (int i = 0; i < 4; i++) d[i] = out.v[i];
}

__device__ __forceinline__ void ldmatrix_x4_trans_b16(u32 (&d)[4], const void* row) {
    const EmuWords out = emu_whole_warp<EmuRow, EmuWords>("ldmatrix.x4.trans", {row}, [](const EmuWarp<EmuRow, EmuWords>& w) {
        for (u32 lane = 0; lane < 32; lane++) {
            emu_aligned("an address of ldmatrix is no multiple of 16", w.in(lane).p);
            for (u32 i = 0; i < 4; i++) {
                const auto at = [&](u32 r) { return (u32)((const unsigned short*)w.in(8 * i + r).p)[lane / 4]; };
                w.out(lane).v[i] = at(lane % 4 * 2) | at(lane % 4 * 2 + 1) << 16;
            }
        }
    });
    for (int i = 0; i < 4; i++) d[i] = out.v[i];
}

inline float emu_f32_of_bf16(u32 bits) {
    return __uint_as_float(bits << 16);
}
inline float emu_f32_of_f16(u32 h) {
    const u32 exp = h >> 10 & 31, frac = h & 1023;
    // Subnormals are exact as integers; the others keep their fraction.
    const float v = exp == 0 ? (float)frac * 0x1p-24f
                             : __uint_as_float((exp == 31 ? 255 : exp + 112) << 23 | frac << 13);
    return h >> 15 & 1 ? -v : v;
}

struct EmuMma {
    u32 a[4], b[2];
    float c[4];
};
struct EmuTile {
    float d[4];
};
// The products of one element in the order of k, added in f32.
template <float (*F)(u32)> inline void emu_mma(const EmuWarp<EmuMma, EmuTile>& w) {
    float a[16][16], b[8][16];
    for (u32 lane = 0; lane < 32; lane++) {
        const EmuMma& in = w.in(lane);
        const u32 row = lane / 4, pair = lane % 4 * 2;
        for (u32 half = 0; half < 2; half++) {
            const u32 by = 16 * half;
            for (u32 i = 0; i < 4; i++) a[row + i % 2 * 8][pair + half + i / 2 * 8] = F(in.a[i] >> by & 0xffff);
            for (u32 i = 0; i < 2; i++) b[row][pair + half + i * 8] = F(in.b[i] >> by & 0xffff);
        }
    }
    for (u32 row = 0; row < 16; row++) {
        for (u32 col = 0; col < 8; col++) {
            const u32 to = row % 8 * 4 + col / 2, at = row / 8 * 2 + col % 2;
            float sum = w.in(to).c[at];
            for (u32 k = 0; k < 16; k++) sum += a[row][k] * b[col][k];
            w.out(to).d[at] = sum;
        }
    }
}

__device__ __forceinline__ void mma_m16n8k16_f32_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    const EmuMma in = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {d[0], d[1], d[2], d[3]}};
    const EmuTile out = emu_whole_warp<EmuMma, EmuTile>(
        "mma.m16n8k16.f32.bf16", in, [](const EmuWarp<EmuMma, EmuTile>& w) { emu_mma<emu_f32_of_bf16>(w); });
    for (int i = 0; i < 4; i++) d[i] = out.d[i];
}

__device__ __forceinline__ void mma_m16n8k16_f32_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    const EmuMma in = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {d[0], d[1], d[2], d[3]}};
    const EmuTile out = emu_whole_warp<EmuMma, EmuTile>(
        "mma.m16n8k16.f32.f16", in, [](const EmuWarp<EmuMma, EmuTile>& w) { emu_mma<emu_f32_of_f16>(w); });
    for (int i = 0; i < 4; i++) d[i] = out.d[i];
}

__device__ __forceinline__ void cp_async_cg_16_zfill(void* dst, const void* src, u32 bytes) {
    emu_aligned("cp.async to no multiple of 16", dst);
    emu_aligned("cp.async from no multiple of 16", src);
    if (bytes > 16) emu_fail("cp.async of more than 16 bytes");
    emu_copy_async(dst, src, bytes, 16 - bytes);
}

__device__ __forceinline__ void cp_async_commit_group() {
    emu_copy_commit();
}

template <int N>
__device__ __forceinline__ void cp_async_wait_group() {
    emu_copy_wait(N);
}

inline u32 emu_bf16_of_f32(float v) {
    const u32 u = __float_as_uint(v);
    if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff;  // what the device gives for NaN
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline u32 emu_f16_of_f32(float v) {
    const u32 u = __float_as_uint(v), sign = u >> 16 & 0x8000, mag = u & 0x7fffffff;
    if (mag > 0x7f800000) return 0x7fff;
    if (mag >= 0x477ff000) return sign | 0x7c00;  // from 65520 on: infinity
    // Below 2^-14 the step is 2^-24: the sum rounds to it.
    if (mag < 0x38800000) return sign | (__float_as_uint(__uint_as_float(mag) + 0.5f) - 0x3f000000);
    return sign | ((mag + 0xfff + (mag >> 13 & 1)) - 0x38000000) >> 13;
}

__device__ __forceinline__ u32 cvt_rn_bf16x2_f32(float low, float high) {
    return emu_bf16_of_f32(low) | emu_bf16_of_f32(high) << 16;
}

__device__ __forceinline__ u32 cvt_rn_f16x2_f32(float low, float high) {
    return emu_f16_of_f32(low) | emu_f16_of_f32(high) << 16;
}

__device__ __forceinline__ float cvt_f32_f16(unsigned short h) {
    return emu_f32_of_f16(h);
}
