// Attention forward on sm_90a over keys that other ranks send while it runs: out and lse.
//
// Algorithm, shapes and launch are those of sm90_attention.cu, with TW_HA_WATCH_BYTES more of
// shared memory. The keys of all ranks are rows of `k` and `v`, side by side, but for those of this
// rank, which are in `own_k` and `own_v`. Segments name rows among all keys, and none reaches over
// the end of a rank's rows. hopper_gates.cuh says how it waits.
//
// The softmax goes on over the keys of all ranks in registers, so that nothing is merged. Flux
// (Chang et al., 2024) gates tiles of a matrix product by arrival.

#include "hopper_gates.cuh"

extern "C" __global__ void __launch_bounds__(TW_HA_THREADS, 1)
tw_hopper_attn_gated(const __grid_constant__ TwAttn a, const __grid_constant__ TwAttnOrder order, const __grid_constant__ TwTensorMap q,
                     const __grid_constant__ TwTensorMap k, const __grid_constant__ TwTensorMap v, const __grid_constant__ TwTensorMap out,
                     const __grid_constant__ TwTensorMap own_k, const __grid_constant__ TwTensorMap own_v, const __grid_constant__ TwGates gates) {
    tw_ha_forward(a, order, &q, TwGatedKeys{gates, &k, &v, &own_k, &own_v, 0, 0, 0}, &out);
}
