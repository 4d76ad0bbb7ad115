// Matrix products on sm_90a by wgmma and TMA: D = act(op(A) op(B) (+ D) + bias).
//
// Orders, all row-major, by TW_HG_A_MN and TW_HG_B_MN; any m; rows of all tensors begin at
// multiples of 16 bytes; k > 0; n (SwiGLU: n / 2) even:
//   0, 0   nt: A [m, k], B [n, k]
//   0, 1   nn: A [m, k], B [k, n]
//   1, 1   tn: A [k, m], B [k, n]
// Tensor maps of rank 3 (their outermost size is 1), swizzled by 128 bytes, boxes from the
// innermost dimension on: A (64, 64); B (64, TW_HG_N / 2) if it is [n, k], else (64, 64); D (64,
// 16), unless it is f32: with TW_D_HAS_MAP it has that of TwSumRows (boxes.cuh), else none. The D
// of DSwiGLU is [2, m, n], whose halves lie side by side in a row.
//
// With TW_HG_IN_PARTS the contraction may be cut: D is `parts` matrices [m, n] then, the sums of
// each part, which sm90_sum_parts.cu adds and finishes. Their `ldd` is n.
//
// Launch: an even number of blocks, at most one for each multiprocessor, in clusters of two; 384
// threads; TW_HG_BYTES of dynamic shared memory. No workspace.
//
// Algorithm: core.cuh.

#include "../ptx/grid.cuh"
#include "core.cuh"
#include "dense.cuh"

extern "C" __global__ void __launch_bounds__(TW_HG_THREADS, 1)
tw_hopper_gemm(const __grid_constant__ TwHopper g, const __grid_constant__ TwTensorMap a, const __grid_constant__ TwTensorMap b,
               const __grid_constant__ TwTensorMap d) {
    if (threadIdx.x == 0) tensor_prefetch(&a), tensor_prefetch(&b), tensor_prefetch(&d);
    TwDense tiles(g, &a, &b, &d);
    tw_begin();
    // The launch may begin while the kernel before it ends.
    griddepcontrol_wait();
    // All blocks run. What adds the parts waits for their end, beside them.
    if (TW_HG_IN_PARTS && g.parts > 1) griddepcontrol_launch_dependents();
    tw_hopper_product(g, tiles);
}
