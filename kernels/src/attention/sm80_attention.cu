// Attention, forward and backward, on any GPU from sm_80 on; 16-bit types.
//
// Shapes: q [tokens_q, Hq, DQK], k [tokens_kv, Hkv, DQK], v [tokens_kv, Hkv, DV], out [tokens_q, Hq,
//   DV], lse [Hq, tokens_q]; rows `ld` elements apart, at multiples of 16 bytes. DQK and DV are
//   definitions, multiples of 8 up to 256. Query head h uses key head h / (Hq / Hkv).
//   Which rows meet is said by two tables of segments (`TwSeg`): packed sequences, the chunks of a
//   rank of context parallelism, and rows between sequences alike.
// Types: q, k, v bf16 or f16 (TW_ATTN_TYPE); products, softmax and sums f32; out bf16, f16 or f32
//   (f32 with its lse is what a merge of parts takes); lse f32, natural logarithm.
// Launch: tw_attn_fwd: grid tiles * Hq blocks with tiles of TW_ATTN_M queries of each own segment,
//   32 * TW_ATTN_WARPS threads, TW_F_Q_BYTES + 2 * TW_F_STAGE bytes of dynamic shared memory.
// Algorithm: FlashAttention-2 (Dao, 2023) with cp.async, ldmatrix and mma.sync. Every sum has one
//   order, which depends on shapes alone: no atomics, equal inputs give equal bits.

extern "C" __global__ void __launch_bounds__(TW_F_THREADS) tw_attn_fwd(const __grid_constant__ TwAttn a) {
    tw_forward(a);
}
