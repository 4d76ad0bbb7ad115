// Products of groups on sm_90a by wgmma and TMA, in one launch whatever the sizes of the groups.
//
// `splits` [groups] are the groups' numbers of rows, or the ends of the groups, in device memory;
// packed tensors have `capacity` rows, group after group. Definitions as in sm90_gemm.cu:
//   A_MN, B_MN 0, 0  D [capacity, n] = act(A [capacity, k] B_e^T + bias_e), B [groups][n, k], bias
//                    [groups, n]
//              0, 1  the same with B [groups][k, n] (dgrad)
//              1, 1  D [groups][m, n] = A_e^T B_e (+ D), A [capacity, m], B [capacity, n] (wgrad)
// Rows behind the last group are left unchanged, or zeroed with TW_ZERO_TAIL. A group without rows
// has a zero gradient; one that is accumulated keeps its bits. Invalid splits set the status word
// (1 negative, 2 more than the capacity), and nothing else is written.
//
// Rows of all tensors begin at multiples of 16 bytes; k > 0 by rows; n (SwiGLU: n / 2) a multiple
// of 8. Tensor maps, swizzled by 128 bytes, boxes from the innermost dimension on: packed tensors
// have ragged maps (TensorMapDesc::ragged), A with boxes (64, 64), B of wgrad (64, 64), D (64, 16);
// others maps of rank 3, whose outermost index is the group: B (64, TW_HG_N / 2), or (64, 64) if it
// is [k, n]; D of wgrad (64, 16). A D of f32 needs no map, but for gradients that are added to with
// TW_D_HAS_MAP: that of TwSumRows (boxes.cuh), of the rows of all groups. Where each group has a
// tensor of its own, `maps` has one of its weights, or of its gradient, of one group, and
// `addresses` says where the gradients are.
//
// Launch: an even number of blocks, at most one for each multiprocessor, in clusters of two; 384
// threads; TW_HG_GROUPED_BYTES of dynamic shared memory.
//
// Algorithm: groups.cuh for the tiles, core.cuh for the products.

#include "core.cuh"
#include "groups.cuh"

extern "C" __global__ void __launch_bounds__(TW_HG_THREADS, 1)
tw_hopper_grouped(const __grid_constant__ TwHopperGrouped p, const __grid_constant__ TwTensorMap a, const __grid_constant__ TwTensorMap b,
                  const __grid_constant__ TwTensorMap d) {
    if (threadIdx.x == 0) tensor_prefetch(&a), tensor_prefetch(&b), tensor_prefetch(&d);
    TwGroups tiles(p, &a, &b, &d);
    tiles.begin();
    tw_begin();
    tw_hopper_product(p.g, tiles);
}
