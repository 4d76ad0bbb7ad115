// Attention forward of e4m3 on sm_90a by wgmma and TMA: out and lse.
//
// Shapes, segments, masks, sinks and conventions are those of sm80_attention.cu, without softcap,
// bias and dropout, with a positive scale; heads of 128. q, k and v have a scale for TW_H8_N rows
// of the local tensor and a head (TwFp8). `tile` of a segment of keys is the number of blocks of
// values before it: a segment has one for each scale that its rows have. Tables of own segments
// have tiles of TW_HA_M rows.
//
// Tensor maps, swizzled by 128 bytes: of q and k ragged ones of bytes, of rows of all heads, with
// boxes of 128 columns and TW_HA_M and TW_H8_N rows; of the transposed values [blocks, Hkv *
// TW_H8_DV, TW_H8_N] bytes, with boxes of TW_H8_DV rows; of out, unless it is f32, as in
// sm90_attention.cu. Rows of all tensors begin at multiples of 16 bytes.
//
// Launch, one behind the other:
//   tw_attn_fp8_values      a block for each block of keys and key head; TW_H8_TURN_THREADS threads
//   tw_hopper_attn_fp8_fwd  at most a block for each multiprocessor, and for each tile of a head;
//                           TW_H8_THREADS threads; TW_H8_BYTES of dynamic shared memory
//
// Algorithm: FlashAttention-3 (Shah et al., 2024), with scales of blocks and sums in f32.
// hopper_fp8.cuh says how.

#include "hopper_fp8.cuh"

// The values of all blocks of keys, transposed.
extern "C" __global__ void __launch_bounds__(TW_H8_TURN_THREADS)
tw_attn_fp8_values(const __grid_constant__ TwAttn a, const __grid_constant__ TwFp8 f, const __grid_constant__ TwAttnOrder order) {
    tw_h8_turn(a, f, order);
}

extern "C" __global__ void __launch_bounds__(TW_H8_THREADS, 1)
tw_hopper_attn_fp8_fwd(const __grid_constant__ TwAttn a, const __grid_constant__ TwFp8 f, const __grid_constant__ TwAttnOrder order,
                       const __grid_constant__ TwTensorMap q, const __grid_constant__ TwTensorMap k, const __grid_constant__ TwTensorMap v,
                       const __grid_constant__ TwTensorMap out) {
    tw_h8_forward(a, f, order, &q, &k, &v, &out);
}
