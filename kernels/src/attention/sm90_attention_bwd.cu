// Attention backward on sm_90a by wgmma and TMA: dq, and dk with dv, of 16-bit types.
//
// Shapes, segments, masks, extras and conventions are those of sm80_attention.cu; lse is there.
// TW_ATTN_DQK and TW_ATTN_DV are multiples of 64, DV at most DQK, as far as registers go. `out` and
// d_out have the inputs' type; gradients that of TwAttn::out_type. Tables of own segments have
// tiles of TW_HA_M rows.
//
// Tensor maps, ragged, swizzled by 128 bytes, of rows of all heads: of own rows, which are loaded,
// with boxes of 64 columns and TW_HA_M rows; of the other side's with TW_HB_DQ_N (k, v) or
// TW_HB_DKV_M rows (q, d_out); of gradients, unless they are f32, with 16. Rows of all tensors
// begin at multiples of 16 bytes.
//
// Launch, of each kernel: at most a block for each multiprocessor, and for each tile of each head,
// of queries for dq and of keys for dk and dv; TW_HB_THREADS threads; TwHopperDq::BYTES or
// TwHopperDkv::BYTES (of two kernels the larger) of dynamic shared memory. No workspace beside
// delta.
//
// Algorithm: FlashAttention-3 (Shah et al., 2024), but that dq is a kernel of its own, so that no
// sum needs turns or atomics: seven products in place of five. hopper_grad.cuh says how.

#include "delta.cuh"
#include "hopper_grad.cuh"

// delta = <d_out, out>, for the other kernels: as delta.cuh says, 256 threads.
extern "C" __global__ void __launch_bounds__(256) tw_attn_delta(const __grid_constant__ TwAttn a) {
    tw_delta_16<TW_ATTN_DV>(a);
}

extern "C" __global__ void __launch_bounds__(TW_HB_THREADS, 1) tw_hopper_attn_dq(
    const __grid_constant__ TwAttn a, const __grid_constant__ TwAttnOrder order, const __grid_constant__ TwTensorMap q,
    const __grid_constant__ TwTensorMap d_out, const __grid_constant__ TwTensorMap k, const __grid_constant__ TwTensorMap v,
    const __grid_constant__ TwTensorMap dq) {
    TwHopperDq::run(a, order, {&q, &d_out, &k, &v, &dq, &dq});
}

// Kernels that make dk, dv or both take the same.
#if TW_HB_SPLIT
extern "C" __global__ void __launch_bounds__(TW_HB_THREADS, 1) tw_hopper_attn_dk(
    const __grid_constant__ TwAttn a, const __grid_constant__ TwAttnOrder order, const __grid_constant__ TwTensorMap k,
    const __grid_constant__ TwTensorMap v, const __grid_constant__ TwTensorMap q, const __grid_constant__ TwTensorMap d_out,
    const __grid_constant__ TwTensorMap dk, const __grid_constant__ TwTensorMap dv) {
    TwHopperDk::run(a, order, {&k, &v, &q, &d_out, &dk, &dv});
}

extern "C" __global__ void __launch_bounds__(TW_HB_THREADS, 1) tw_hopper_attn_dv(
    const __grid_constant__ TwAttn a, const __grid_constant__ TwAttnOrder order, const __grid_constant__ TwTensorMap k,
    const __grid_constant__ TwTensorMap v, const __grid_constant__ TwTensorMap q, const __grid_constant__ TwTensorMap d_out,
    const __grid_constant__ TwTensorMap dk, const __grid_constant__ TwTensorMap dv) {
    TwHopperDv::run(a, order, {&k, &v, &q, &d_out, &dk, &dv});
}
#else
extern "C" __global__ void __launch_bounds__(TW_HB_THREADS, 1) tw_hopper_attn_dkv(
    const __grid_constant__ TwAttn a, const __grid_constant__ TwAttnOrder order, const __grid_constant__ TwTensorMap k,
    const __grid_constant__ TwTensorMap v, const __grid_constant__ TwTensorMap q, const __grid_constant__ TwTensorMap d_out,
    const __grid_constant__ TwTensorMap dk, const __grid_constant__ TwTensorMap dv) {
    TwHopperDkv::run(a, order, {&k, &v, &q, &d_out, &dk, &dv});
}
#endif
