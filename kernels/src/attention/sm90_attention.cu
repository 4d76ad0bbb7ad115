// Attention forward on sm_90a by wgmma and TMA: out and lse of 16-bit types.
//
// Shapes, segments, masks, sinks, extras and conventions are those of sm80_attention.cu.
// TW_ATTN_DQK and TW_ATTN_DV are multiples of 64, DV at most DQK. Tables of own segments have tiles
// of TW_HA_M rows.
//
// Tensor maps, ragged, swizzled by 128 bytes, of rows of all heads: q with boxes of 64 columns and
// TW_HA_M rows, k and v with TW_HA_N rows, out, unless it is f32, with 16. Rows of all tensors
// begin at multiples of 16 bytes.
//
// Launch: at most a block for each multiprocessor, and for each tile of each head; TW_HA_THREADS
// threads; TW_HA_BYTES of dynamic shared memory. One kernel, no workspace.
//
// Algorithm: FlashAttention-3 (Shah et al., 2024): a warp that loads beside warpgroups that
// multiply, the products of two steps as one burst, the softmax beside them. hopper.cuh says how.

#include "hopper.cuh"

extern "C" __global__ void __launch_bounds__(TW_HA_THREADS, 1)
tw_hopper_attn_fwd(const __grid_constant__ TwAttn a, const __grid_constant__ TwAttnOrder order, const __grid_constant__ TwTensorMap q,
                   const __grid_constant__ TwTensorMap k, const __grid_constant__ TwTensorMap v, const __grid_constant__ TwTensorMap out) {
    tw_ha_forward(a, order, &q, TwOneTensor{&k, &v}, &out);
}
