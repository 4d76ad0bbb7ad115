// Attention, forward and backward, for 16-bit types on any GPU from sm_80 on.
//
// Shapes: q [tokens_q, Hq, DQK], k [tokens_kv, Hkv, DQK], v [tokens_kv, Hkv, DV], out [tokens_q,
// Hq, DV], lse [Hq, tokens_q]; rows `ld` elements apart, at multiples of 16 bytes. DQK and DV are
// definitions, multiples of 8 up to 256. Query head h uses key head h / (Hq / Hkv). Two tables of
// segments (`TwSeg`) say which rows attend to which: they describe packed sequences, the chunks of
// a rank of context parallelism, and rows between sequences.
//
// Types: q, k, v bf16 or f16 (TW_ATTN_TYPE); products, softmax and sums f32; out bf16, f16 or f32
// (a merge of parts needs f32 and lse); lse f32, natural logarithm.
//
// Launch: tw_attn_fwd has tiles * Hq blocks, a block for each tile of TW_ATTN_M queries of an own
// segment; 32 * TW_ATTN_WARPS threads; TW_F_Q_BYTES + 2 * TW_F_STAGE bytes of dynamic shared
// memory.
//
// Algorithm: FlashAttention-2 (Dao, 2023) with cp.async, ldmatrix and mma.sync. Each warp owns rows
// of the block's tile. The order of every sum depends on shapes alone: there are no atomics, and
// equal inputs give equal bits.

#include "forward.cuh"
#include "backward.cuh"
#include "pairs.cuh"

// The forward pass: out and lse.
extern "C" __global__ void __launch_bounds__(TW_F_THREADS) tw_attn_fwd(const __grid_constant__ TwAttn a) {
    tw_forward(a);
}

// delta = <d_out, out>, for the other backward kernels: as delta.cuh says, 256 threads.
extern "C" __global__ void __launch_bounds__(256) tw_attn_delta(const __grid_constant__ TwAttn a) {
    tw_delta_16<TW_DV>(a);
}

// With extras the bound is one block: without it ptxas spills to reach a higher occupancy.
#if TW_ATTN_EXTRA
#define TW_DQ_BOUNDS __launch_bounds__(TwDq::THREADS, 1)
#else
#define TW_DQ_BOUNDS __launch_bounds__(TwDq::THREADS)
#endif
extern "C" __global__ void TW_DQ_BOUNDS tw_attn_dq(const __grid_constant__ TwAttn a) {
    __shared__ TwBlock b;
    tw_backward<TwDq, TW_SUM1>(a, b);
}

#if TW_ATTN_SPLIT
extern "C" __global__ void __launch_bounds__(TwDkv::THREADS) tw_attn_dk(const __grid_constant__ TwAttn a) {
    __shared__ TwBlock b;
    tw_backward<TwDkv, TW_SUM1>(a, b);
}
// dv alone (TW_ATTN_SPLIT); grid as tw_attn_dk.
extern "C" __global__ void __launch_bounds__(TwDkv::THREADS) tw_attn_dv(const __grid_constant__ TwAttn a) {
    __shared__ TwBlock b;
    tw_backward<TwDkv, TW_SUM2>(a, b);
}
#else
extern "C" __global__ void __launch_bounds__(TwDkv::THREADS) tw_attn_dkv(const __grid_constant__ TwAttn a) {
    __shared__ TwBlock b;
#if TW_ATTN_PAIRS
    tw_pairs(a, b);
#else
    tw_backward<TwDkv, TW_SUM1 | TW_SUM2>(a, b);
#endif
}
#endif
