// Shared by the attention kernels of mma.sync and the plain ones: tiles in shared memory.
//
// A tile in shared memory is [rows][TW_DQP or TW_DVP] 16-bit elements, with the 16-byte chunk c of
// row r at position c ^ (r % 8), so that the eight rows that ldmatrix reads together are in
// different banks.
//
// Names: a the attention (TwAttn), b the block's state (TwBlock), t a tile, s scores.

#pragma once

#include "delta.cuh"
#include "extras.cuh"
#include "segments.cuh"
#include "../ptx/barrier.cuh"

enum : u32 {
    TW_DQ = TW_ATTN_DQK,
    TW_DV = TW_ATTN_DV,
    // Rounded up to whole matrix instructions, and to whole rows of eight chunks.
    TW_DQ16 = (TW_DQ + 15) / 16 * 16,
    TW_DV16 = (TW_DV + 15) / 16 * 16,
    TW_DQP = (TW_DQ + 63) / 64 * 64,
    TW_DVP = (TW_DV + 63) / 64 * 64,
};

extern __shared__ __align__(128) unsigned char tw_smem[];

// Byte offset of chunk `c` of row `r` in a tile with rows of DP elements.
template <u32 DP>
__device__ __forceinline__ u32 tw_at(u32 r, u32 c) {
    return r * (DP * 2) + ((c ^ (r & 7)) << 4);
}

// Copies rows of a head to a tile of ROWS by THREADS threads of the block. Rows from `num` on, and
// columns from D on, are zeros.
template <u32 ROWS, u32 D, u32 DP, u32 THREADS>
__device__ __forceinline__ void tw_load_tile(u8* tile, const u16* base, i64 ld, u32 num, u32 thread = threadIdx.x) {
    const u32 chunks = (D + 15) / 16 * 2;
    if constexpr (THREADS % chunks == 0 && THREADS / chunks % 8 == 0 && ROWS % (THREADS / chunks) == 0) {
        // Each thread keeps one column and one row modulo 8.
        const u32 c = thread % chunks, r0 = thread / chunks, step = THREADS / chunks;
        const u16* from = base + (i64)r0 * ld + 8 * c;
        u8* to = tile + tw_at<DP>(r0, c);
        if (D % 16 == 0 && num >= ROWS) {
            // The common case: all rows exist, so none is checked.
#pragma unroll
            for (u32 r = 0; r < ROWS; r += step, from += (i64)step * ld) cp_async_cg_16_zfill(to + r * (DP * 2), from, 16);
            return;
        }
#pragma unroll 2
        for (u32 r = 0; r < ROWS; r += step, from += (i64)step * ld) {
            const bool there = r + r0 < num && (D % 16 == 0 || c < D / 8);
            cp_async_cg_16_zfill(to + r * (DP * 2), there ? from : base, there ? 16 : 0);
        }
    } else {
#pragma unroll 1
        for (u32 i = thread; i < ROWS * chunks; i += THREADS) {
            const u32 r = i / chunks, c = i % chunks;
            const bool there = r < num && c < D / 8;
            cp_async_cg_16_zfill(tile + tw_at<DP>(r, c), there ? base + (i64)r * ld + 8 * c : base, there ? 16 : 0);
        }
    }
}

__device__ __forceinline__ void tw_mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if TW_ATTN_TYPE == 1
    mma_m16n8k16_f32_f16(d, a, b);
#else
    mma_m16n8k16_f32_bf16(d, a, b);
#endif
}

// A lane's offset within a tile: tw_lane_a for fragments of A and of transposed B, tw_lane_b for
// fragments of B and of transposed A.
template <u32 DP> __device__ __forceinline__ u32 tw_lane_a(u32 thread = threadIdx.x) {
    return tw_at<DP>(thread % 16, thread % 32 / 16);
}
template <u32 DP> __device__ __forceinline__ u32 tw_lane_b(u32 thread = threadIdx.x) {
    return tw_at<DP>(thread % 32 / 16 * 8 + thread % 8, thread % 16 / 8);
}

// Address of row `r` (a multiple of 8) and chunks 2k and 2k + 1 of a tile, from a lane's address.
// Four exclusive ors serve all k; the rest of the address is an immediate of the instruction.
template <u32 DP> __device__ __forceinline__ const u8* tw_place(u32 at, u32 r, u32 k) {
    return tw_smem + (at ^ k % 4 << 5) + (r * (DP * 2) + k / 4 * 128);
}

// Loads fragments of a tile. `at` is the tile's offset in shared memory plus tw_lane_a or
// tw_lane_b.
// A (tw_lane_a): rows r..r+16 and columns 16k..16k+16.
// Two of B (tw_lane_b): B's columns are rows r..r+8 and r+8..r+16, for k in 16k..16k+16.
template <u32 DP> __device__ __forceinline__ void tw_frag(u32 (&f)[4], u32 at, u32 r, u32 k) {
    ldmatrix_x4_b16(f, tw_place<DP>(at, r, k));
}
// Two of B (tw_lane_a): B's columns are columns 16k.. of the tile, for k in rows r..r+16.
// A of the transposed tile (tw_lane_b): A's rows are its columns 16k.., A's columns rows r..r+16.
template <u32 DP> __device__ __forceinline__ void tw_frag_t(u32 (&f)[4], u32 at, u32 r, u32 k) {
    ldmatrix_x4_trans_b16(f, tw_place<DP>(at, r, k));
}

// s = x y^T: this warp's rows of tile `x` times all of tile `y`, of D columns.
template <u32 MT, u32 NT, u32 D, u32 DP>
__device__ __forceinline__ void tw_products(float (&s)[MT][NT][4], u32 x, u32 y, u32 thread = threadIdx.x) {
#pragma unroll
    for (u32 i = 0; i < MT; i++)
#pragma unroll
        for (u32 j = 0; j < NT; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) s[i][j][e] = 0;
    x += thread / 32 * (16 * MT) * (DP * 2) + tw_lane_a<DP>(thread);
    y += tw_lane_b<DP>(thread);
#pragma unroll
    for (u32 k = 0; k < D / 16; k++) {
        u32 fx[MT][4];
#pragma unroll
        for (u32 i = 0; i < MT; i++) tw_frag<DP>(fx[i], x, 16 * i, k);
#pragma unroll
        for (u32 j = 0; j < NT; j += 2) {
            u32 f[4];
            tw_frag<DP>(f, y, 8 * j, k);
            const u32 f0[2] = {f[0], f[1]}, f1[2] = {f[2], f[3]};
#pragma unroll
            for (u32 i = 0; i < MT; i++) tw_mma(s[i][j], fx[i], f0), tw_mma(s[i][j + 1], fx[i], f1);
        }
    }
}

// o += p y over rows 16k..16k+16 of y, with p rounded to the type of y. `y` is the tile's offset
// plus tw_lane_a.
template <u32 MT, u32 NT, u32 DT, u32 DP>
__device__ __forceinline__ void tw_accumulate16(float (&o)[MT][DT][4], const float (&p)[MT][NT][4], u32 y, u32 k) {
    u32 fp[MT][4];
#pragma unroll
    for (u32 i = 0; i < MT; i++)
#pragma unroll
        for (u32 e = 0; e < 4; e++)
            fp[i][e] = tw_pair(p[i][2 * k + e / 2][e % 2 * 2], p[i][2 * k + e / 2][e % 2 * 2 + 1], TW_ATTN_TYPE);
#pragma unroll
    for (u32 j = 0; j < DT; j += 2) {
        u32 f[4];
        tw_frag_t<DP>(f, y, 16 * k, j / 2);
        const u32 f0[2] = {f[0], f[1]}, f1[2] = {f[2], f[3]};
#pragma unroll
        for (u32 i = 0; i < MT; i++) tw_mma(o[i][j], fp[i], f0), tw_mma(o[i][j + 1], fp[i], f1);
    }
}

// The same over all rows of y; `y` is the tile's offset.
template <u32 MT, u32 NT, u32 DT, u32 DP>
__device__ __forceinline__ void tw_accumulate(float (&o)[MT][DT][4], const float (&p)[MT][NT][4], u32 y) {
#pragma unroll
    for (u32 k = 0; k < NT / 2; k++) tw_accumulate16<MT, NT, DT, DP>(o, p, y + tw_lane_a<DP>(), k);
}

// The row of a block's tile to which element e of part i of an accumulator belongs.
template <u32 MT> __device__ __forceinline__ u32 tw_row(u32 i, u32 e, u32 thread = threadIdx.x) {
    return thread / 32 * (16 * MT) + 16 * i + thread % 32 / 4 + e / 2 * 8;
}

// Turns scores into unnormalised probabilities, and rescales `sum` (this lane's part) and `o` to
// the new maximum. `max` and scores are to be multiplied by `factor`, which gives them in base 2.
template <u32 MT, u32 NT, u32 DT>
__device__ __forceinline__ void tw_softmax(float (&s)[MT][NT][4], float (&max)[MT][2], float (&sum)[MT][2], float (&o)[MT][DT][4],
                                           float factor) {
#pragma unroll
    for (u32 i = 0; i < MT; i++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const float old = max[i][half];
            float top = old;
#pragma unroll
            for (u32 j = 0; j < NT; j++) top = fmaxf(top, fmaxf(s[i][j][2 * half], s[i][j][2 * half + 1]));
            top = tw_quad_max(top);
            // No key is visible yet: -inf minus -inf would be NaN.
            const float base = top == -TW_INF ? 0.0f : top * factor;
            // Not fused: it is 1 where the maximum stays, at every one of many tiles.
            const float shrink = ex2_approx_ftz_f32(__fmul_rn(old, factor) - base);
            max[i][half] = top;
            float more = 0.0f;
#pragma unroll
            for (u32 j = 0; j < NT; j++)
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    float& x = s[i][j][2 * half + e];
                    x = ex2_approx_ftz_f32(fmaf(x, factor, -base));
                    more += x;
                }
            sum[i][half] = fmaf(sum[i][half], shrink, more);
#pragma unroll
            for (u32 j = 0; j < DT; j++) o[i][j][2 * half] *= shrink, o[i][j][2 * half + 1] *= shrink;
        }
}

// Stores `num` rows of `o`, each times its factor, from element `at` on. 16-bit types pass through
// this warp's rows of a tile at `stage`, which no other warp uses.
template <u32 MT, u32 DT, u32 D, u32 DP>
__device__ __forceinline__ void tw_store(void* out, u32 type, i64 at, i64 ld, u32 num, const float (&o)[MT][DT][4],
                                         const float (&factor)[MT][2], u32 stage) {
    const u32 thread = opaque(threadIdx.x), lane = thread % 32;
    if (type == 2) {
#pragma unroll
        for (u32 i = 0; i < MT; i++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u32 row = tw_row<MT>(i, 2 * half, thread);
                const float f = factor[i][half];
                float* to = (float*)out + at + (i64)row * ld + lane % 4 * 2;
#pragma unroll
                for (u32 j = 0; j < DT; j++)
                    if (row < num && (D % 16 == 0 || 8 * j < D))
                        *(float2*)(to + 8 * j) = make_float2(o[i][j][2 * half] * f, o[i][j][2 * half + 1] * f);
            }
        return;
    }
#pragma unroll
    for (u32 i = 0; i < MT; i++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 row = tw_row<MT>(i, 2 * half, thread);
            const float f = factor[i][half];
#pragma unroll
            for (u32 j = 0; j < DT; j++)
                *(u32*)(tw_smem + stage + tw_at<DP>(row, j) + lane % 4 * 4) =
                    tw_pair(o[i][j][2 * half] * f, o[i][j][2 * half + 1] * f, type);
        }
    __syncwarp();
    const u32 chunks = D / 8, rows = 16 * MT, row0 = thread / 32 * rows;
#pragma unroll 4
    for (u32 i = lane; i < rows * chunks; i += 32) {
        const u32 row = row0 + i / chunks, c = i % chunks;
        if (row < num)
            *(uint4*)((u16*)out + at + (i64)row * ld + 8 * c) = *(const uint4*)(tw_smem + stage + tw_at<DP>(row, c));
    }
}

// State shared by all threads of a block, in shared memory.
struct TwBlock {
    TwSeg own;
    u32 head, kv_head;
    // The tile's first row in its segment, and its number of rows.
    u32 first, num;
    // Positions of the first and the last row in the other side's sequence.
    int at, at_last;
    TwWalk walk;
};
