// D = act(op(A) op(B) (+ D) + bias), on any GPU from sm_80 on.
//
// Shapes: D [m, n] ([m, n/2] for SwiGLU, whose gate is the first half of the columns).
//   tw_gemm_nt: A [m, k], B [n, k];  tw_gemm_nn: A [m, k], B [k, n];  tw_gemm_tn: A [k, m], B [k, n].
//   tw_gemm_tt: A [k, m], B [n, k].
//   tw_gemm_f32: each of them, by TW_A_KM and TW_B_KN.
// All row-major, rows `ld` elements apart. Any m, n, k, and 0 of each. Where a row of A or B does
// not begin at a multiple of 16 bytes, elements are read one by one.
// Types: A and B bf16 (f16 with TW_GEMM_F16=1), or f32; sums f32; D bf16, f16 or f32; bias f32.
// Launch: grid tiles_m * tiles_n blocks (at least 1) with tiles of TW_GEMM_M x TW_GEMM_N of the
//   product, 32 * TW_GEMM_WARPS_M * TW_GEMM_WARPS_N threads, TW_GEMM_STAGES * (TW_GEMM_M +
//   TW_GEMM_N) * 64 bytes of dynamic shared memory (64 KiB by default: above 48 KiB the host must
//   allow it). tw_gemm_f32: tiles of 64x64, 256 threads, 18432 bytes.
// Algorithm: the multi-stage pipeline of CUTLASS 2.x for sm_80 (cp.async, ldmatrix, mma.sync);
//   each sum is one chain in the order of k, so results do not depend on the grid.

// The tile of this block, or false if there is none.
__device__ __forceinline__ bool tw_my_tile(const TwGemm& g, u32 bm, u32 bn, TwTile& t) {
    const u32 cols = tw_block_cols(g, bn);
    const u32 tiles_m = (g.m + bm - 1) / bm, tiles_n = (tw_out_cols(g) + cols - 1) / cols;
    if ((u64)blockIdx.x >= (u64)tiles_m * tiles_n) return false;
    t = tw_tile(blockIdx.x, tiles_m, tiles_n);
    t.m *= bm, t.n *= cols;
    return true;
}

template <bool A_MK, bool B_NK>
__device__ __forceinline__ void tw_gemm(const TwGemm& g) {
    TwTile t;
    if (!tw_my_tile(g, TW_BM, TW_BN, t)) return;
    const TwOperand a = tw_operand<A_MK>(g.a, g.lda, g.m, t.m, false);
    const TwOperand b = tw_operand<B_NK>(g.b, g.ldb, tw_out_cols(g), t.n, tw_act(g) == TW_SWIGLU);
    TwAcc acc;
    tw_mainloop<A_MK, B_NK>(acc, tw_smem, a, b, g.k);
    tw_epilogue(g, acc, tw_smem, t.m, g.m, t.n);
}

extern "C" __global__ void __launch_bounds__(TW_THREADS) tw_gemm_nt(const __grid_constant__ TwGemm g) {
    tw_gemm<true, true>(g);
}

extern "C" __global__ void __launch_bounds__(TW_THREADS) tw_gemm_nn(const __grid_constant__ TwGemm g) {
    tw_gemm<true, false>(g);
}

extern "C" __global__ void __launch_bounds__(TW_THREADS) tw_gemm_tn(const __grid_constant__ TwGemm g) {
    tw_gemm<false, false>(g);
}

extern "C" __global__ void __launch_bounds__(TW_THREADS) tw_gemm_tt(const __grid_constant__ TwGemm g) {
    tw_gemm<false, true>(g);
}

// 64 x 16 elements of a f32 operand to shared memory, as [16][64].
__device__ __forceinline__ void tw_load_f32(float* tile, const float* p, i64 ld, bool k_major, u32 extent, u32 first,
                                            bool pairs, u32 k, u32 k0) {
#pragma unroll
    for (u32 i = threadIdx.x; i < 64 * 16; i += 256) {
        const u32 r = k_major ? i / 16 : i % 64, kk = k_major ? i % 16 : i / 64;
        const u32 x = first + (pairs ? r / 16 * 8 + r % 8 : r), z = k0 + kk;
        const u64 at = x + (pairs && r / 8 % 2 ? extent : 0);
        const bool there = x < extent && z < k;
        tile[kk * 64 + r] = there ? p[k_major ? (i64)at * ld + z : (i64)z * ld + (i64)at] : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(256) tw_gemm_f32(const __grid_constant__ TwGemm g) {
    TwTile t;
    if (!tw_my_tile(g, 64, 64, t)) return;
    float *a = (float*)tw_smem, *b = a + 16 * 64;
    const u32 y = threadIdx.x / 16 * 4, x = threadIdx.x % 16 * 4;
    float acc[4][4] = {};
#pragma unroll 1
    for (u32 k0 = 0; k0 < g.k; k0 += 16) {
        tw_load_f32(a, (const float*)g.a, g.lda, !(g.flags & TW_A_KM), g.m, t.m, false, g.k, k0);
        tw_load_f32(b, (const float*)g.b, g.ldb, !(g.flags & TW_B_KN), tw_out_cols(g), t.n, tw_act(g) == TW_SWIGLU,
                    g.k, k0);
        __syncthreads();
#pragma unroll
        for (u32 kk = 0; kk < 16; kk++)
#pragma unroll
            for (u32 i = 0; i < 16; i++)
                acc[i / 4][i % 4] = fmaf(a[kk * 64 + y + i / 4], b[kk * 64 + x + i % 4], acc[i / 4][i % 4]);
        __syncthreads();
    }
#pragma unroll
    for (u32 i = 0; i < 16; i++) a[(y + i / 4) * (64 + TW_EPI_PAD) + x + i % 4] = acc[i / 4][i % 4];
    __syncthreads();
    tw_finish<64, 256>(g, a, 64, t.m, 16, g.m, t.n);
}
