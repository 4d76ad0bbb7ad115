// D = act(the sums of parts, one behind the other (+ D) + bias): what is left of a product whose
// contraction was cut into parts, which sm90_gemm.cu has stored as f32.
//
// `g.d`, bias, `aux`, `ldd`, `ldaux`, m, n, flags and parts as in sm90_gemm.cu; `sums` are
// `g.parts` matrices [m, n]. The halves of DSwiGLU's D are n columns apart.
//
// Launch: any number of blocks of TW_HG_SUM_THREADS threads, each of which has two neighbours of a
// row of D at a time. No shared memory, no workspace. It may begin while the products end, which
// write `sums` then: its loads are not those of memory that nobody writes.
//
// Algorithm: the parts of an element are added in their order, so that its bits depend on their
// number alone; the epilogue is the one of the core (epilogue.cuh).

#include "../ptx/grid.cuh"
#include "epilogue.cuh"

enum : u32 { TW_HG_SUM_THREADS = 128, TW_HG_SUM_COLS = 2 * TW_HG_SUM_THREADS };

// The sum of the pair at `p` over `parts` matrices of `size` elements.
__device__ __forceinline__ float2 tw_sum_of_parts(const float* p, u64 size, u32 parts) {
    float2 sum = *(const float2*)p;
    // Several loads are on their way at once.
#pragma unroll 4
    for (u32 i = 1; i < parts; i++) {
        const float2 v = *(const float2*)(p + i * size);
        sum.x += v.x, sum.y += v.y;
    }
    return sum;
}

// Finishes the pair at `at`.
__device__ __forceinline__ void tw_sum_and_finish(const TwHopper& g, const float* sums, const TwPoint& at) {
    const u64 size = (u64)g.m * g.n;
    const float* const p = sums + at.at(0, g.n);
    const float2 sum = tw_sum_of_parts(p, size, g.parts);
    float2 up = make_float2(0.0f, 0.0f);
    if constexpr (TW_HG_EPI == TW_HG_SWIGLU) up = tw_sum_of_parts(p + at.cols, size, g.parts);
    tw_finish_and_store(g, at, sum, up);
}

extern "C" __global__ void __launch_bounds__(TW_HG_SUM_THREADS)
tw_hopper_sum_parts(const __grid_constant__ TwHopper g, const float* sums) {
    griddepcontrol_wait();
    const u32 cols = TW_HG_EPI == TW_HG_SWIGLU ? g.n / 2 : g.n;
    const u32 across = (cols + TW_HG_SUM_COLS - 1) / TW_HG_SUM_COLS;
    for (u64 i = blockIdx.x; i < (u64)g.m * across; i += gridDim.x) {
        const u32 row = (u32)(i / across), first = (u32)(i % across) * TW_HG_SUM_COLS;
        const TwPoint at = {row, first + 2 * threadIdx.x, g.m, cols};
        if (at.has(0)) tw_sum_and_finish(g, sums, at);
    }
}
