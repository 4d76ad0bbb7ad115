// D = A B by a warpgroup with A in registers, and mistakes with it. TW_PW_N, TW_PW_F16, TW_PW_MN:
// width, type, and how B lies.

enum : u32 { TW_PW_K = 32 };

// `wrong`: 1 registers change before the wait, 2 no fence, 3 no wait, 4 the wait leaves the latest
// group, 5 sums change behind the fence, 6 A changes behind the fence. A [64][32], B [N][32] of
// 16-bit elements, D [64][N].
extern "C" __global__ void __launch_bounds__(128) p_wgmma(const u16* a, const u16* b, float* out, u32 wrong) {
    for (u32 i = threadIdx.x; i < TW_PW_N * TW_PW_K; i += 128) {
        const u32 n = i / TW_PW_K, k = i % TW_PW_K;
        const u32 at = TW_PW_MN ? n / 64 * (TW_PW_K * 128) + k * 128 + n % 64 * 2 : n * 128 + k * 2;
        *(u16*)(tw_smem + (at ^ (at >> 7 & 7) << 4)) = b[i];
    }
    fence_proxy_async_shared_cta();
    __syncthreads();
    const u32 row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    u32 held[TW_PW_K / 4];
    for (u32 z = 0; z < TW_PW_K / 16; z++)
        for (u32 e = 0; e < 4; e++) {
            const u32 at = (row + e % 2 * 8) * TW_PW_K + 16 * z + e / 2 * 8 + 2 * pair;
            held[4 * z + e] = a[at] | (u32)a[at + 1] << 16;
        }
    float d[TW_PW_N / 2];
    for (u32 i = 0; i < TW_PW_N / 2; i++) d[i] = 1.0f;
    const u64 desc = TW_PW_MN ? wgmma_desc_mn(tw_smem, TW_PW_K * 128) : wgmma_desc_k(tw_smem);
    if (wrong != 2) wgmma_fence();
    for (u32 z = 0; z < TW_PW_K / 16; z++)
        wgmma_m64k16_f32_registers<TW_PW_N, TW_PW_F16, TW_PW_MN>(d, held + 4 * z, desc + z * (TW_PW_MN ? 128 : 2), z > 0);
    wgmma_commit_group();
    if (wrong == 1 && threadIdx.x == 77) held[5] ^= 1;
    if (wrong == 4) wgmma_wait_group<1>();
    else if (wrong != 3) wgmma_wait_group<0>();
    else return;
    wgmma_hold(d), wgmma_hold(held);
    for (u32 i = 0; i < TW_PW_N / 2; i++)
        out[(row + i / 2 % 2 * 8) * TW_PW_N + i / 4 * 8 + 2 * pair + i % 2] = d[i];
    if (wrong == 4) wgmma_wait_group<0>();
    wgmma_fence();
    if (wrong == 5 && threadIdx.x == 77) d[5] += 1.0f;
    if (wrong == 6 && threadIdx.x == 77) held[3] ^= 1;
    wgmma_m64k16_f32_registers<TW_PW_N, TW_PW_F16, TW_PW_MN>(d, held, desc, 1);
    wgmma_commit_group();
    wgmma_wait_group<0>();
}
