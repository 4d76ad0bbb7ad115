// The wrappers of wgmma.cuh for the emulator (kernels/emu). The declarations are the same; a test
// compares them. Products read their operands and set their sums late: emu/hopper.h.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

__device__ __forceinline__ u32 warpgroup_index() {
    return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
}

__device__ __forceinline__ u64 wgmma_desc_k(const void* tile) {
    return emu_product_desc(tile) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ u64 wgmma_desc_mn(const void* tile, u32 chunk) {
    return emu_product_desc(tile) | (u64)(chunk >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ void wgmma_fence() {
    emu_whole_warp<EmuNothing, EmuNothing>("wgmma.fence", EmuNothing(), [](const auto&) { emu_product_fence(); });
}

__device__ __forceinline__ void wgmma_commit_group() {
    emu_whole_warp<EmuNothing, EmuNothing>("wgmma.commit_group", EmuNothing(), [](const auto&) { emu_product_commit(); });
}

template <int N>
__device__ __forceinline__ void wgmma_wait_group() {
    emu_point("wgmma.wait_group", nullptr, 0);
    emu_product_meet(N);
    emu_whole_warp<EmuNothing, EmuNothing>("wgmma.wait_group", EmuNothing(), [](const auto&) { emu_product_wait(N); });
}

template <int N>
__device__ __forceinline__ void wgmma_hold(float (&d)[N]) {
    (void)d;
}

template <int N>
__device__ __forceinline__ void wgmma_hold(u32 (&a)[N]) {
    (void)a;
}

struct EmuProduct {
    float* d;
    u64 a, b;
    u32 accumulate;
};

// A product of N columns by all lanes of a warp.
template <int N, u32 FLAGS>
inline void emu_warp_product(const EmuProduct& in) {
    emu_whole_warp<EmuProduct, EmuNothing>("wgmma.mma_async", in, [](const EmuWarp<EmuProduct, EmuNothing>& w) {
        float* all[32];
        for (u32 lane = 0; lane < 32; lane++) {
            const EmuProduct &one = w.in(lane), &first = w.in(0);
            if (one.a != first.a || one.b != first.b || (one.accumulate != 0) != (first.accumulate != 0))
                emu_fail("a product whose lanes give different operands");
            all[lane] = one.d;
        }
        emu_product(all, N, w.in(0).a, w.in(0).b, w.in(0).accumulate != 0, FLAGS);
    });
}

template <int N, bool F16, int A_MN, int B_MN>
__device__ __forceinline__ void wgmma_m64k16_f32(float (&d)[N / 2], u64 a_desc, u64 b_desc, u32 accumulate) {
    emu_warp_product<N, (F16 ? EMU_WG_F16 : 0) | (A_MN ? EMU_WG_A_MN : 0) | (B_MN ? EMU_WG_B_MN : 0)>({d, a_desc, b_desc, accumulate});
}

struct EmuRegisterProduct {
    float* d;
    const u32* a;
    u64 b;
    u32 accumulate;
};

// The same with A in registers.
template <int N, u32 FLAGS>
inline void emu_warp_product_of_registers(const EmuRegisterProduct& in) {
    emu_whole_warp<EmuRegisterProduct, EmuNothing>("wgmma.mma_async", in, [](const EmuWarp<EmuRegisterProduct, EmuNothing>& w) {
        float* all[32];
        const u32* registers[32];
        for (u32 lane = 0; lane < 32; lane++) {
            const EmuRegisterProduct &one = w.in(lane), &first = w.in(0);
            if (one.b != first.b || (one.accumulate != 0) != (first.accumulate != 0)) emu_fail("a product whose lanes give different operands");
            all[lane] = one.d, registers[lane] = one.a;
        }
        emu_product_of_registers(all, N, registers, w.in(0).b, w.in(0).accumulate != 0, FLAGS);
    });
}

template <int N, bool F16, int B_MN>
__device__ __forceinline__ void wgmma_m64k16_f32_registers(float (&d)[N / 2], const u32* a, u64 b_desc, u32 accumulate) {
    emu_warp_product_of_registers<N, (F16 ? EMU_WG_F16 : 0) | (B_MN ? EMU_WG_B_MN : 0)>({d, a, b_desc, accumulate});
}

template <int N>
__device__ __forceinline__ void wgmma_m64k32_f32_e4m3(float (&d)[N / 2], u64 a_desc, u64 b_desc, u32 accumulate) {
    emu_warp_product<N, EMU_WG_E4M3>({d, a_desc, b_desc, accumulate});
}

template <int N>
__device__ __forceinline__ void wgmma_m64k32_f32_e4m3_registers(float (&d)[N / 2], const u32* a, u64 b_desc, u32 accumulate) {
    emu_warp_product_of_registers<N, EMU_WG_E4M3>({d, a, b_desc, accumulate});
}

__device__ __forceinline__ u32 cvt_rn_satfinite_e4m3x4_f32(float a, float b, float c, float d) {
    return emu_e4m3(a) | emu_e4m3(b) << 8 | emu_e4m3(c) << 16 | emu_e4m3(d) << 24;
}

struct EmuMatrices {
    void* row;
    u32 v[4];
};

__device__ __forceinline__ void stmatrix_x4_b16(void* row, const u32 (&v)[4]) {
    const EmuMatrices in = {row, {v[0], v[1], v[2], v[3]}};
    emu_whole_warp<EmuMatrices, EmuNothing>("stmatrix.x4", in, [](const EmuWarp<EmuMatrices, EmuNothing>& w) {
        for (u32 lane = 0; lane < 32; lane++) {
            if ((u64)w.in(lane).row % 16 != 0) emu_fail("an address of stmatrix is no multiple of 16");
            for (u32 i = 0; i < 4; i++) ((u32*)w.in(8 * i + lane / 4).row)[lane % 4] = w.in(lane).v[i];
        }
    });
}

__device__ __forceinline__ void stmatrix_x4_trans_b16(void* row, const u32 (&v)[4]) {
    const EmuMatrices in = {row, {v[0], v[1], v[2], v[3]}};
    emu_whole_warp<EmuMatrices, EmuNothing>("stmatrix.x4.trans", in, [](const EmuWarp<EmuMatrices, EmuNothing>& w) {
        for (u32 lane = 0; lane < 32; lane++) {
            if ((u64)w.in(lane).row % 16 != 0) emu_fail("an address of stmatrix is no multiple of 16");
            for (u32 i = 0; i < 4; i++)
                for (u32 e = 0; e < 2; e++)
                    ((unsigned short*)w.in(8 * i + lane % 4 * 2 + e).row)[lane / 4] = (unsigned short)(w.in(lane).v[i] >> 16 * e);
        }
    });
}
