// D = act(op(A) op(B) (+ D) + bias), on any GPU from sm_80 on.
//
// Kernels and shapes, all row-major, rows `ld` elements apart, any m, n and k including 0:
//   tw_gemm_nt   A [m, k], B [n, k]
//   tw_gemm_nn   A [m, k], B [k, n]
//   tw_gemm_tn   A [k, m], B [k, n]
//   tw_gemm_tt   A [k, m], B [n, k]
//   tw_gemm_f32  f32 operands in any of these orders, by TW_A_KM and TW_B_KN
// D is [m, n]; [m, n / 2] for SwiGLU, whose gate is the first half of the product's columns. If a
// row of A or B does not begin at a multiple of 16 bytes, elements are read one by one.
//
// Types: A and B bf16 (f16 with TW_GEMM_F16=1), or f32; sums f32; D bf16, f16 or f32; bias f32, or
// of D's type with TW_BIAS_OUT. The parameter g (TwGemm) describes one product.
//
// Launch: tiles_m * tiles_n blocks (at least 1), one for each tile of TW_GEMM_M x TW_GEMM_N of the
// product; 32 * TW_GEMM_WARPS_M * TW_GEMM_WARPS_N threads; TW_GEMM_STAGES * (TW_GEMM_M + TW_GEMM_N)
// * 64 bytes of dynamic shared memory (64 KiB by default: above 48 KiB the host must opt in).
// tw_gemm_f32: tiles of 64 x 64, 256 threads, 18432 bytes. tw_gemm_row_sums: ceil(m / 32) blocks,
// 256 threads, 1024 bytes.
//
// Algorithm: the multi-stage pipeline of CUTLASS 2.x for sm_80 (cp.async, ldmatrix, mma.sync). All
// warps load, multiply and store. Each sum is one chain in the order of k, so results do not depend
// on the grid.

#include "mainloop.cuh"

// Sets the tile of this block; false if the block has none.
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

extern "C" __global__ void __launch_bounds__(TW_THREADS, TW_MIN_BLOCKS)
tw_gemm_nt(const __grid_constant__ TwGemm g) {
    tw_gemm<true, true>(g);
}

extern "C" __global__ void __launch_bounds__(TW_THREADS, TW_MIN_BLOCKS)
tw_gemm_nn(const __grid_constant__ TwGemm g) {
    tw_gemm<true, false>(g);
}

extern "C" __global__ void __launch_bounds__(TW_THREADS, TW_MIN_BLOCKS)
tw_gemm_tn(const __grid_constant__ TwGemm g) {
    tw_gemm<false, false>(g);
}

// No layer needs this order often: one resident block gives registers enough to avoid spills.
extern "C" __global__ void __launch_bounds__(TW_THREADS, 1)
tw_gemm_tt(const __grid_constant__ TwGemm g) {
    tw_gemm<false, true>(g);
}

extern "C" __global__ void __launch_bounds__(256) tw_gemm_f32(const __grid_constant__ TwGemm g) {
    TwTile t;
    if (!tw_my_tile(g, TW_F32_TILE, TW_F32_TILE, t)) return;
    const TwWide a = {(const float*)g.a, g.lda, !(g.flags & TW_A_KM), g.m, t.m, false};
    const TwWide b = {(const float*)g.b, g.ldb, !(g.flags & TW_B_KN), tw_out_cols(g), t.n, tw_act(g) == TW_SWIGLU};
    tw_product_f32(g, a, b, g.k, t.m, g.m, t.n);
}

// out[i] = the sum of row i of op(A), i < m: A [m, k], or [k, m] with TW_A_KM in `flags`, whose
// type bits (TW_OUT) are those of A. The order of additions is fixed.
extern "C" __global__ void __launch_bounds__(256)
tw_gemm_row_sums(const void* a, i64 lda, u32 m, u32 k, u32 flags, float* out) {
    const u32 type = flags & TW_OUT;
    if (flags & TW_A_KM) {
        tw_column_sums(a, lda, type, k, m, blockIdx.x * 32, out);
        return;
    }
    const u32 lane = threadIdx.x % 32, first = blockIdx.x * 32 + threadIdx.x / 32 * 4;
    for (u32 row = first; row < min(first + 4, m); row++) {
        float sum = 0;
        for (u32 z = lane; z < k; z += 32) sum += tw_load_out(a, (i64)row * lda + z, type);
#pragma unroll
        for (u32 by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
        if (lane == 0) out[row] = sum;
    }
}
