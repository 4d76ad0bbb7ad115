// Attention backward on sm_90a by wgmma and TMA in one kernel: dq, dk and dv by five products.
//
// Shapes, segments, masks and conventions are those of sm90_attention_bwd.cu, for heads of 128
// without extras. Tables of own segments have tiles of TW_HA_M rows, those of queries too: the
// others of the kernel of gradients are the own segments of queries, with their numbers of tiles.
// delta is there (`tw_attn_delta`).
//
// Tensor maps, ragged, swizzled by 128 bytes, of rows of all heads: of k and v with boxes of 64
// columns and TW_HA_M rows, of q and d_out with TW_HB_FUSED_M rows, of dk and dv, unless they are
// f32, with 16. Rows of all tensors begin at multiples of 16 bytes.
//
// Launch, one behind the other:
//   tw_hopper_attn_grads  any number of blocks of TW_HB_THREADS threads, at most one for each
//                         multiprocessor, and TwFused::TOTAL bytes of dynamic shared memory.
//                         `together`: so many key heads, at least one, are done before others
//   tw_attn_dq_of_sums    a block of 256 threads for each own tile of queries and head
//
// Algorithm: FlashAttention-3 (Shah et al., 2024), whose sums of dq have an order by turns, or none
// (TW_HB_UNORDERED).
// hopper_fused.cuh says how.

#include "hopper_fused.cuh"

extern "C" __global__ void __launch_bounds__(TW_HB_THREADS, 1) tw_hopper_attn_grads(
    const __grid_constant__ TwAttn a, const __grid_constant__ TwDqSums to, u32 together, const __grid_constant__ TwTensorMap k,
    const __grid_constant__ TwTensorMap v, const __grid_constant__ TwTensorMap q, const __grid_constant__ TwTensorMap d_out,
    const __grid_constant__ TwTensorMap dk, const __grid_constant__ TwTensorMap dv) {
    TwFused::run(a, to, together, {&k, &v, &q, &d_out, &dk, &dv});
}

extern "C" __global__ void __launch_bounds__(256) tw_attn_dq_of_sums(const __grid_constant__ TwAttn a, const __grid_constant__ TwDqSums to) {
    tw_dq_of_sums(a, to);
}
