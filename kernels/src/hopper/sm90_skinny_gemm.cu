// Matrix products of few rows on sm_90a: D = act(A op(B) (+ D) + bias), m at most 64. Their time is
// that of reading B, of which every element is read once.
//
// Orders, all row-major, by TW_HG_A_MN: 0 nt: A [m, k], B [n, k]; 1 nn: A [m, k], B [k, n]. Rows of
// all tensors begin at multiples of 16 bytes; k > 0; n (SwiGLU: n / 2) even. Tensor maps of rank 3
// (their outermost size is 1), swizzled by 128 bytes, boxes from the innermost dimension on: A (64,
// tw_skinny_rows(m)); B (64, 64). Definitions as in tile.cuh; TW_HG_N is 64.
//
// Launch: clusters of `g.parts` blocks, at most 8, one cluster for each TW_SKINNY_COLS columns of D
// (SwiGLU: half as many of each half), or fewer; TW_SKINNY_THREADS threads; TW_HG_BYTES of dynamic
// shared memory. No workspace.
//
// Algorithm: operands change places, since wgmma has 64 rows at least: D^T = op(B)^T A^T, a tile of
// which has 128 columns of D as rows, 64 for each of two warpgroups, and the rows of D, rounded to
// 16, 32 or 64, as columns. One warp loads. k is cut into `g.parts` parts of `g.steps` stages, one
// for each block of the cluster; the blocks write their sums to their shared memory, meet, add the
// sums of all in the order of the parts, each block those of some elements, and finish them
// (epilogue.cuh). So bits depend on the number of parts alone, and are those of sm90_gemm.cu and
// sm90_sum_parts.cu with as many.
//
// full[s]   completes when the bytes of stage s are there: one arrival, by the loader
// empty[s]  completes when both warpgroups are through with it
// The cluster meets twice for each tile: when all sums are written, and when they have been read.
// Behind the second, sums may be overwritten, and blocks may end. Where k is whole, the loader does
// not meet the others, and loads the next tile meanwhile.

#include "../ptx/barrier.cuh"
#include "../ptx/bulk.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/grid.cuh"
#include "../ptx/tensor.cuh"
#include "../ptx/wgmma.cuh"
#include "boxes.cuh"
#include "epilogue.cuh"
#include "pieces.cuh"
#include "stages.cuh"
#include "tile.cuh"

enum : u32 {
    TW_SKINNY_COLS = TW_HG_M,
    TW_SKINNY_WORKERS = 256,
    TW_SKINNY_THREADS = TW_SKINNY_WORKERS + 32,
    // Columns of D, or of each of its halves, in a tile.
    TW_SKINNY_WIDTH = TW_HG_EPI == TW_HG_SWIGLU ? TW_SKINNY_COLS / 2 : TW_SKINNY_COLS,
};
static_assert(TW_HG_AT_D + TW_HG_N * TW_SKINNY_COLS * 4 <= TW_HG_AT_BARRIERS, "sums lie in the buffers of D");

// Rows of A in a stage: what the products are as wide as.
__device__ __forceinline__ u32 tw_skinny_rows(u32 m) {
    return m <= 16 ? 16 : m <= 32 ? 32 : 64;
}

// Where the sum of a row and column of a tile lies: columns beside each other, shifted so that
// lanes of a warp, which have 8 columns of every other row, write to banks of their own.
__device__ __forceinline__ u32 tw_sum_at(u32 row, u32 col) {
    return row * TW_SKINNY_COLS + (col ^ row / 2 % 4 * 8);
}

// The part of the contraction that this block has, and the columns of D.
struct TwSkinny {
    const TwHopper& g;
    u32 part;

    __device__ __forceinline__ explicit TwSkinny(const TwHopper& g) : g(g), part(cluster_ctarank()) {}

    __device__ __forceinline__ u32 steps() const {
        return min((g.k + TW_HG_K - 1) / TW_HG_K - part * g.steps, g.steps);
    }
    // The first index of the contraction of its stage `i`.
    __device__ __forceinline__ u32 k(u32 i) const {
        return (part * g.steps + i) * TW_HG_K;
    }
    // How much further on than beside each other the halves of a tile lie.
    __device__ __forceinline__ u32 jump() const {
        return TW_HG_EPI == TW_HG_SWIGLU ? cols() - TW_SKINNY_WIDTH : 0;
    }
    __device__ __forceinline__ u32 cols() const {
        return TW_HG_EPI == TW_HG_SWIGLU ? g.n / 2 : g.n;
    }
    __device__ __forceinline__ u32 tiles() const {
        return (cols() + TW_SKINNY_WIDTH - 1) / TW_SKINNY_WIDTH;
    }
};

// Loads what this block multiplies for the tile that begins at column `col`: one thread.
__device__ __forceinline__ void tw_load_skinny(const TwSkinny& x, TwStages& s, const TwPlane& a, const TwPlane& b, u32 col) {
    const u32 bytes = TW_HG_A_BYTES + tw_skinny_rows(x.g.m) * TW_HG_K * 2;
    for (u32 i = 0; i < x.steps(); i++) {
        const u32 k = x.k(i);
        s.wait_empty();
        u64* full = s.full + s.stage;
        mbarrier_arrive_expect_tx(full, bytes);
        TwPieces<TW_HG_A_MN, TW_SKINNY_COLS>::load(s.a(), b, full, col, k, x.jump(), false);
        a.load(s.b(), full, k, 0);
        s.advance();
    }
}

// Multiplies the stages of this block's part, and writes the sums to shared memory: warpgroup
// `group`, which has 64 columns of the tile. ROWS as tw_skinny_rows(m).
template <u32 ROWS> __device__ __forceinline__ void tw_sum_skinny(const TwSkinny& x, TwStages& s, float* sums, u32 group) {
    float acc[ROWS / 2];
    const u32 steps = x.steps();
    // The stage whose products may be in flight.
    TwStages before = s;
    const auto release = [&before] {
        if (threadIdx.x % 128 == 0) mbarrier_arrive(before.empty + before.stage);
        before.advance();
    };
#pragma unroll 1
    for (u32 i = 0; i < steps; i++) {
        const u8* half = s.a() + group * (TW_HG_A_BYTES / 2);
        const u64 da = TW_HG_A_MN ? wgmma_desc_mn(half, 0) : wgmma_desc_k(half), db = wgmma_desc_k(s.b());
        s.wait_full();
        wgmma_fence();
#pragma unroll
        for (u32 z = 0; z < TW_HG_K / 16; z++)
            wgmma_m64k16_f32<ROWS, TW_HG_F16, TW_HG_A_MN, 0>(acc, da + z * (TW_HG_A_MN ? 128 : 2), db + z * 2, i + z > 0);
        wgmma_commit_group();
        wgmma_wait_group<1>();
        if (i > 0) release();
        s.advance();
    }
    wgmma_wait_group<0>();
    release();
    wgmma_hold(acc);
    const u32 lane = threadIdx.x % 32, row = lane % 4 * 2, col = threadIdx.x / 32 * 16 + lane / 4;
    // Eight rows further on the shift is the same.
    float* const at[2] = {sums + tw_sum_at(row, col), sums + tw_sum_at(row, col + 8)};
#pragma unroll
    for (u32 i = 0; i < ROWS / 2; i++) {
        const u32 down = i / 4 * 8 + i % 2;
        if (row + down < x.g.m) at[i % 4 / 2][down * TW_SKINNY_COLS] = acc[i];
    }
}

// The sums of part `p` at `at`, four columns. The way to blocks of the cluster is narrow, also that
// to one's own: 14 bytes a clock.
__device__ __forceinline__ float4 tw_sums_of(const TwSkinny& x, const float* at, u32 p) {
    return p == x.part ? *(const float4*)at : ld_shared_cluster_f32x4(at, p);
}

// Adds the sums of all parts at `at`, in their order.
__device__ __forceinline__ float4 tw_add_parts(const TwSkinny& x, const float* at) {
    float4 sum = tw_sums_of(x, at, 0);
    // Several loads are on their way at once.
#pragma unroll 4
    for (u32 p = 1; p < x.g.parts; p++) {
        const float4 v = tw_sums_of(x, at, p);
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    return sum;
}

// Adds and finishes this block's share of the tile that begins at column `col`.
__device__ __forceinline__ void tw_finish_skinny(const TwSkinny& x, const float* sums, u32 col) {
    enum : u32 { ACROSS = TW_SKINNY_WIDTH / 4 };
    const u32 parts = x.g.parts, num = x.g.m * ACROSS;
    for (u32 i = x.part * TW_SKINNY_WORKERS + threadIdx.x; i < num; i += parts * TW_SKINNY_WORKERS) {
        const u32 row = i / ACROSS, in = i % ACROSS * 4;
        const float4 sum = tw_add_parts(x, sums + tw_sum_at(row, in));
        float4 up = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if constexpr (TW_HG_EPI == TW_HG_SWIGLU) up = tw_add_parts(x, sums + tw_sum_at(row, in + TW_SKINNY_WIDTH));
        const TwPoint left = {row, col + in, x.g.m, x.cols()}, right = {row, col + in + 2, x.g.m, x.cols()};
        if (left.has(0)) tw_finish_and_store(x.g, left, make_float2(sum.x, sum.y), make_float2(up.x, up.y));
        if (right.has(0)) tw_finish_and_store(x.g, right, make_float2(sum.z, sum.w), make_float2(up.z, up.w));
    }
}

// Meets the blocks that have other parts; where there are none the workers meet alone, and the
// loader goes on.
__device__ __forceinline__ void tw_meet(const TwSkinny& x, u32 group) {
    if (x.g.parts > 1) cluster_sync();
    else if (group < 2) bar_sync(1, TW_SKINNY_WORKERS);
}

extern "C" __global__ void __launch_bounds__(TW_SKINNY_THREADS, 1)
tw_hopper_skinny(const __grid_constant__ TwHopper g, const __grid_constant__ TwTensorMap a, const __grid_constant__ TwTensorMap b) {
    const TwSkinny x(g);
    TwStages s;
    float* const sums = (float*)(tw_smem + TW_HG_AT_D);
    if (threadIdx.x == 0) {
        tensor_prefetch(&a), tensor_prefetch(&b);
        for (u32 i = 0; i < TW_HG_STAGES; i++) mbarrier_init(s.full + i, 1), mbarrier_init(s.empty + i, 2);
        fence_mbarrier_init_release_cluster();
    }
    __syncthreads();
    const u32 group = warpgroup_index(), rows = tw_skinny_rows(g.m);
    // The launch may begin while the kernel before it ends.
    griddepcontrol_wait();
    for (u32 t = clusterid_x(); t < x.tiles(); t += nclusterid_x()) {
        const u32 col = t * TW_SKINNY_WIDTH;
        if (group == 2) {
            if (threadIdx.x % 32 == 0) tw_load_skinny(x, s, {&a, 0}, {&b, 0}, col);
            __syncwarp();
        } else if (rows == 16) tw_sum_skinny<16>(x, s, sums, group);
        else if (rows == 32) tw_sum_skinny<32>(x, s, sums, group);
        else tw_sum_skinny<64>(x, s, sums, group);
        tw_meet(x, group);
        if (group < 2) tw_finish_skinny(x, sums, col);
        tw_meet(x, group);
    }
}
