// Shared by the matrix products: loads of tiles to shared memory, products, epilogue.
//
// Operands are 16-bit. A k-major tile is [rows][32], with the 16-byte chunk c of row r at position
// c ^ (r / 2 % 4); any other tile is [32][cols], with chunk c of row r at c ^ (r % 8). So the eight
// rows that ldmatrix reads together are in different banks. The pipeline is that of CUTLASS's
// Ampere kernels: STAGES - 1 copies in flight, one __syncthreads for each 32 of k.
//
// Names: g the product, a and b its operands, t a tile, acc the warp's accumulators.

#pragma once

#include "../ptx/mma.cuh"
#include "activation.cuh"

#ifndef TW_GEMM_M
#define TW_GEMM_M 128
#endif
#ifndef TW_GEMM_N
#define TW_GEMM_N 128
#endif
#ifndef TW_GEMM_WARPS_M
#define TW_GEMM_WARPS_M 2
#endif
#ifndef TW_GEMM_WARPS_N
#define TW_GEMM_WARPS_N 2
#endif
#ifndef TW_GEMM_STAGES
#define TW_GEMM_STAGES 4
#endif
#ifndef TW_GEMM_F16
#define TW_GEMM_F16 0
#endif

typedef unsigned char u8;

enum : u32 {
    TW_BM = TW_GEMM_M,
    TW_BN = TW_GEMM_N,
    TW_BK = 32,
    TW_STAGES = TW_GEMM_STAGES,
    TW_WM = TW_BM / TW_GEMM_WARPS_M,
    TW_WN = TW_BN / TW_GEMM_WARPS_N,
    TW_FM = TW_WM / 16,
    TW_FN = TW_WN / 8,
    TW_THREADS = 32 * TW_GEMM_WARPS_M * TW_GEMM_WARPS_N,
    // Resident blocks on a multiprocessor: two of them hide each other's barriers and epilogues. A
    // warp tile of 64 x 64 takes most registers that 256 threads can have; smaller ones leave
    // enough for 512 threads. Without this bound ptxas spills in small tiles rather than take more
    // than 80 registers.
    TW_RESIDENT = TW_FM * TW_FN > 16 ? 256 : 512,
    TW_MIN_BLOCKS = TW_RESIDENT / TW_THREADS > 0 ? TW_RESIDENT / TW_THREADS : 1,
    TW_A_BYTES = TW_BM * TW_BK * 2,
    TW_B_BYTES = TW_BN * TW_BK * 2,
    TW_STAGE_BYTES = TW_A_BYTES + TW_B_BYTES,
    // Padding of eight elements: rows of the epilogue begin in different banks.
    TW_EPI_PAD = 8,
    TW_EPI_BYTES = TW_GEMM_WARPS_M * 16 * (TW_BN + TW_EPI_PAD) * 4,
};
static_assert(TW_BM % 64 == 0 && TW_BN % 64 == 0, "a swizzled row has at least eight chunks");
static_assert(TW_WM % 16 == 0 && TW_WN % 32 == 0, "whole matrix instructions, four beside each other");
static_assert(TW_STAGES >= 2 && TW_EPI_BYTES <= TW_STAGES * TW_STAGE_BYTES, "shared memory");

extern __shared__ __align__(128) unsigned char tw_smem[];

// One product. Rows of the tensors are `ld` elements apart. SwiGLU: D has n / 2 columns.
struct TwGemm {
    const void* a;
    const void* b;
    void* d;
    const void* bias;  // [n] f32, or of D's type with TW_BIAS_OUT; or null
    i64 lda, ldb, ldd;
    u32 m, n, k, flags;
    void* aux;  // null, or of D's type: with TW_DACT read, else the pre-activation [m, n] is stored
    i64 ldaux;
};

__device__ __forceinline__ u32 tw_act(const TwGemm& g) {
    return g.flags & TW_DACT ? 0 : g.flags >> TW_ACT_SHIFT & 3;
}
__device__ __forceinline__ u32 tw_dact(const TwGemm& g) {
    return g.flags & TW_DACT ? g.flags >> TW_ACT_SHIFT & 3 : 0;
}

// Bytes of an element of the bias.
__device__ __forceinline__ u32 tw_bias_bytes(const TwGemm& g) {
    return g.flags & TW_BIAS_OUT && (g.flags & TW_OUT) != 2 ? 2 : 4;
}

// Columns of D (DSwiGLU: of its first half), and the number of them that a block computes.
__device__ __forceinline__ u32 tw_out_cols(const TwGemm& g) {
    return tw_act(g) == TW_SWIGLU ? g.n / 2 : g.n;
}
__device__ __forceinline__ u32 tw_block_cols(const TwGemm& g, u32 bn) {
    return tw_act(g) == TW_SWIGLU ? bn / 2 : bn;
}

struct TwTile {
    u32 m, n;
};

// The tile of block `b`: bands of up to 8 rows of tiles, column by column, so that blocks that run
// together share both operands in L2. Mirrored by `tile` in kernels/src/gemm/mod.rs.
__device__ __forceinline__ TwTile tw_tile(u32 b, u32 tiles_m, u32 tiles_n) {
    const u32 band = 8 * tiles_n, first = b / band * 8, at = b % band;
    const u32 rows = min(tiles_m - first, 8u);
    return {first + at % rows, at / rows};
}

// An operand, described for the copies to shared memory.
struct TwOperand {
    const u16* p;
    i64 ld;
    u32 extent;  // rows of A or columns of D
    u32 first;   // of this block
    bool pairs;  // SwiGLU: eight gate columns, then the eight up columns that go with them
    bool wide;   // 16-byte copies are aligned
};

template <bool K_MAJOR>
__device__ __forceinline__ TwOperand tw_operand(const void* p, i64 ld, u32 extent, u32 first, bool pairs) {
    // The up half begins `extent` rows or columns behind the gate half.
    const bool wide = (u64)p % 16 == 0 && ld % 8 == 0 && (K_MAJOR || !pairs || extent % 8 == 0);
    return {(const u16*)p, ld, extent, first, pairs, wide};
}

// Copies 8 elements to shared memory, of which the first `num` exist and the rest become 0.
__device__ __forceinline__ void tw_copy8(void* dst, const u16* src, const u16* base, u32 num, bool wide) {
    if (wide) {
        cp_async_cg_16_zfill(dst, num > 0 ? src : base, 2 * num);
        return;
    }
    u32 w[4] = {0, 0, 0, 0};
#pragma unroll
    for (u32 i = 0; i < 8; i++)
        if (i < num) w[i / 2] |= (u32)src[i] << 16 * (i % 2);
    *(uint4*)dst = make_uint4(w[0], w[1], w[2], w[3]);
}

// Byte offset of chunk `c` of row `r` in a tile.
template <bool K_MAJOR, u32 EXTENT>
__device__ __forceinline__ u32 tw_place(u32 r, u32 c) {
    return K_MAJOR ? r * (TW_BK * 2) + ((c ^ (r >> 1 & 3)) << 4) : r * (EXTENT * 2) + ((c ^ (r & 7)) << 4);
}

// Copies the tile of `o` at `k0` to shared memory: EXTENT of its rows or columns by 32 of k.
template <bool K_MAJOR, u32 EXTENT>
__device__ __forceinline__ void tw_load(u8* tile, const TwOperand& o, u32 k, u32 k0) {
    const u32 per_row = K_MAJOR ? TW_BK / 8 : EXTENT / 8;
#pragma unroll
    for (u32 i = threadIdx.x; i < EXTENT * TW_BK / 8; i += TW_THREADS) {
        const u32 r = i / per_row, c = i % per_row;
        const u32 local = K_MAJOR ? r : 8 * c, group = local / 8;
        const u32 x = o.first + (o.pairs ? group / 2 * 8 + local % 8 : local);
        const u32 shift = o.pairs && group % 2 ? o.extent : 0;
        const u32 kk = k0 + (K_MAJOR ? 8 * c : r);
        // `left`: elements of the chunk's row from its first one on; `there`: whether the row
        // exists.
        const u32 left = K_MAJOR ? k - min(kk, k) : o.extent - min(x, o.extent);
        const bool there = K_MAJOR ? x < o.extent : kk < k;
        const i64 at = K_MAJOR ? (i64)(x + shift) * o.ld + kk : (i64)kk * o.ld + x + shift;
        tw_copy8(tile + tw_place<K_MAJOR, EXTENT>(r, c), o.p + at, o.p, there ? min(left, 8u) : 0, o.wide);
    }
}

// The copies of one thread for each tile of an operand with aligned rows, computed once: chunks
// that are `jump` elements apart in memory and STEP_BYTES apart in the tile, a constant because
// ROWS is a multiple of 8.
template <bool K_MAJOR, u32 EXTENT> struct TwLoader {
    enum : u32 {
        PER_ROW = K_MAJOR ? TW_BK / 8 : EXTENT / 8,
        NUM = EXTENT * TW_BK / 8 / TW_THREADS,
        ROWS = TW_THREADS / PER_ROW,
        STEP_BYTES = ROWS * (K_MAJOR ? TW_BK : EXTENT) * 2,
    };
    static_assert(EXTENT * TW_BK / 8 % TW_THREADS == 0 && ROWS % (K_MAJOR ? 16 : 8) == 0 && NUM <= 6, "whole rounds");
    const u16* p;
    i64 step, jump;  // elements to the next tile, to the next chunk
    u32 place;
    u32 there;  // bytes of each chunk, five bits apart

    __device__ __forceinline__ explicit TwLoader(const TwOperand& o) {
        const u32 r = threadIdx.x / PER_ROW, c = threadIdx.x % PER_ROW;
        const u32 local = K_MAJOR ? r : 8 * c, group = local / 8;
        const u32 x = o.first + (o.pairs ? group / 2 * 8 + local % 8 : local);
        const u32 shift = o.pairs && group % 2 ? o.extent : 0;
        const u32 rows = K_MAJOR && o.pairs ? ROWS / 2 : ROWS;
        p = o.p + (K_MAJOR ? (i64)(x + shift) * o.ld + 8 * c : (i64)r * o.ld + x + shift);
        step = K_MAJOR ? (i64)TW_BK : TW_BK * o.ld;
        jump = rows * o.ld;
        place = tw_place<K_MAJOR, EXTENT>(r, c);
        there = 0;
#pragma unroll
        for (u32 i = 0; i < NUM; i++) {
            const u32 at = K_MAJOR ? x + i * rows : x;
            const u32 num = K_MAJOR ? (at < o.extent ? 8 : 0) : min(o.extent - min(at, o.extent), 8u);
            there |= 2 * num << 5 * i;
        }
    }

    // Copies tile `s`, all 32 of k of which exist.
    __device__ __forceinline__ void copy(u8* tile, const TwOperand& o, u32 s) const {
        const u16* from = p + s * step;
#pragma unroll
        for (u32 i = 0; i < NUM; i++) {
            const u32 bytes = there >> 5 * i & 31;
            cp_async_cg_16_zfill(tile + place + i * STEP_BYTES, bytes > 0 ? from + i * jump : o.p, bytes);
        }
    }
};

__device__ __forceinline__ void tw_mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if TW_GEMM_F16
    mma_m16n8k16_f32_f16(d, a, b);
#else
    mma_m16n8k16_f32_bf16(d, a, b);
#endif
}

typedef float TwAcc[TW_FM][TW_FN][4];

// acc += the product of one stage.
template <bool A_MK, bool B_NK>
__device__ __forceinline__ void tw_multiply(TwAcc& acc, const u8* a, const u8* b) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = lane / 8, row8 = lane % 8;
    const u32 m0 = warp / TW_GEMM_WARPS_N * TW_WM, n0 = warp % TW_GEMM_WARPS_N * TW_WN;
#pragma unroll
    for (u32 kk = 0; kk < TW_BK; kk += 16) {
        u32 fa[TW_FM][4], fb[TW_FN][2];
        // Quarters of a fragment of A: rows 0-7 and 8-15 at k 0-7, then the same at k 8-15.
#pragma unroll
        for (u32 i = 0; i < TW_FM; i++) {
            const u32 m = m0 + 16 * i + part % 2 * 8, k = kk + part / 2 * 8;
            if (A_MK) ldmatrix_x4_b16(fa[i], a + tw_place<true, TW_BM>(m + row8, k / 8));
            else ldmatrix_x4_trans_b16(fa[i], a + tw_place<false, TW_BM>(k + row8, m / 8));
        }
        // Quarters of two fragments of B: k 0-7 and 8-15 of columns 0-7, then the same of columns
        // 8-15.
#pragma unroll
        for (u32 j = 0; j < TW_FN; j += 2) {
            const u32 n = n0 + 8 * j + part / 2 * 8, k = kk + part % 2 * 8;
            u32 f[4];
            if (B_NK) ldmatrix_x4_b16(f, b + tw_place<true, TW_BN>(n + row8, k / 8));
            else ldmatrix_x4_trans_b16(f, b + tw_place<false, TW_BN>(k + row8, n / 8));
            fb[j][0] = f[0], fb[j][1] = f[1];
            fb[j + 1][0] = f[2], fb[j + 1][1] = f[3];
        }
#pragma unroll
        for (u32 i = 0; i < TW_FM; i++)
#pragma unroll
            for (u32 j = 0; j < TW_FN; j++) tw_mma(acc[i][j], fa[i], fb[j]);
    }
}

// acc = the product of the rows of `a` and the columns of `b`, over all of k.
template <bool A_MK, bool B_NK>
__device__ __forceinline__ void tw_mainloop(TwAcc& acc, u8* smem, const TwOperand& a, const TwOperand& b, u32 k) {
    const u32 steps = (k + TW_BK - 1) / TW_BK;
#pragma unroll
    for (u32 i = 0; i < TW_FM; i++)
#pragma unroll
        for (u32 j = 0; j < TW_FN; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) acc[i][j][e] = 0;
    const TwLoader<A_MK, TW_BM> fast_a(a);
    const TwLoader<B_NK, TW_BN> fast_b(b);
    // Number of tiles that every thread may copy without checking k.
    const u32 whole = a.wide && b.wide ? k / TW_BK : 0;
    const auto copy = [&](u32 step) {
        u8* stage = smem + step % TW_STAGES * TW_STAGE_BYTES;
        if (step < whole) {
            fast_a.copy(stage, a, step);
            fast_b.copy(stage + TW_A_BYTES, b, step);
        } else if (step < steps) {
            tw_load<A_MK, TW_BM>(stage, a, k, step * TW_BK);
            tw_load<B_NK, TW_BN>(stage + TW_A_BYTES, b, k, step * TW_BK);
        }
        // Committed even if empty: the wait below counts groups.
        cp_async_commit_group();
    };
#pragma unroll 1
    for (u32 s = 0; s < TW_STAGES - 1; s++) copy(s);
#pragma unroll 1
    for (u32 s = 0; s < steps; s++) {
        cp_async_wait_group<TW_STAGES - 2>();
        // Everybody's copies of this stage are there, and nobody reads the one that is next filled.
        __syncthreads();
        copy(s + TW_STAGES - 1);
        const u8* stage = smem + s % TW_STAGES * TW_STAGE_BYTES;
        tw_multiply<A_MK, B_NK>(acc, stage, stage + TW_A_BYTES);
    }
    cp_async_wait_group<0>();
    __syncthreads();
}

// ---- Epilogue.

// Stores `num` <= 8 numbers at D[at..].
__device__ __forceinline__ void tw_store8(void* d, i64 at, u32 type, const float (&x)[8], u32 num) {
    if (type == 2) {
        float* to = (float*)d + at;
        if (num == 8 && (u64)to % 16 == 0) {
            *(float4*)to = make_float4(x[0], x[1], x[2], x[3]);
            *(float4*)(to + 4) = make_float4(x[4], x[5], x[6], x[7]);
            return;
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++)
            if (i < num) to[i] = x[i];
        return;
    }
    u32 w[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) w[i] = tw_pair(x[2 * i], x[2 * i + 1], type);
    u16* to = (u16*)d + at;
    if (num == 8 && (u64)to % 16 == 0) {
        *(uint4*)to = make_uint4(w[0], w[1], w[2], w[3]);
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++)
        if (i < num) to[i] = (u16)(w[i / 2] >> 16 * (i % 2));
}

// Reads eight products from shared memory, 16 bytes at a time.
__device__ __forceinline__ void tw_read8(float (&y)[8], const float* x) {
    const float4 a = *(const float4*)x, b = *(const float4*)(x + 4);
    y[0] = a.x, y[1] = a.y, y[2] = a.z, y[3] = a.w;
    y[4] = b.x, y[5] = b.y, y[6] = b.z, y[7] = b.w;
}

// Stores one number at D[at].
__device__ __forceinline__ void tw_store1(void* d, i64 at, u32 type, float x) {
    if (type == 2) ((float*)d)[at] = x;
    else ((u16*)d)[at] = (u16)tw_pair(x, 0.0f, type);
}

// Multiplies eight columns of a row by the derivative of the activation at `aux`; v receives the up
// half of DSwiGLU.
__device__ __forceinline__ void tw_derive8(const TwGemm& g, i64 at, float (&y)[8], float (&v)[8], u32 num) {
    const u32 type = g.flags & TW_OUT, dact = tw_dact(g);
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        if (i >= num) continue;
        const float x = tw_load_out(g.aux, at + i, type);
        if (dact == TW_GELU) y[i] *= tw_dgelu(x);
        if (dact == TW_SWIGLU) tw_dswiglu(y[i], x, tw_load_out(g.aux, at + g.n + i, type), y[i], v[i]);
    }
}

// Computes and stores eight columns of a row of D from `col` on: x is the product, `up` the up half
// of SwiGLU's product.
__device__ __forceinline__ void tw_finish8(const TwGemm& g, u32 row, u32 col, const float* x, const float* up) {
    const u32 cols = tw_out_cols(g), act = tw_act(g), type = g.flags & TW_OUT;
    const u32 bias = g.flags & TW_BIAS_OUT ? type : 2;
    const u32 num = min(cols - col, 8u);
    const i64 at = (i64)row * g.ldd + col;
    float y[8], v[8] = {};
    tw_read8(y, x);
    if (act == TW_SWIGLU) tw_read8(v, up);
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        if (i >= num) continue;
        if (g.flags & TW_ACCUMULATE) y[i] += tw_load_out(g.d, at + i, type);
        if (g.bias) y[i] += tw_load_out(g.bias, col + i, bias);
        if (g.bias && act == TW_SWIGLU) v[i] += tw_load_out(g.bias, cols + col + i, bias);
    }
    if (g.aux) {
        const i64 aux_at = (i64)row * g.ldaux + col;
        if (g.flags & TW_DACT) tw_derive8(g, aux_at, y, v, num);
        else tw_store8(g.aux, aux_at, type, y, num);
        if (act == TW_SWIGLU) tw_store8(g.aux, aux_at + cols, type, v, num);
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        if (i >= num) continue;
        // No fmaxf, which turns NaN into 0.
        if (act == TW_RELU) y[i] = y[i] < 0.0f ? 0.0f : y[i];
        if (act == TW_GELU) y[i] = tw_gelu(y[i]);
        if (act == TW_SWIGLU) y[i] = y[i] / (1.0f + expf(-y[i])) * v[i];
    }
    tw_store8(g.d, at, type, y, num);
    if (tw_dact(g) == TW_SWIGLU) tw_store8(g.d, at + cols, type, v, num);
}

// Finishes `rows` x BN products in shared memory, and stores them to D. Row r of them is row row0 +
// r / 16 * jump + r % 16 of D; only rows below `end` exist.
template <u32 BN, u32 THREADS>
__device__ __forceinline__ void tw_finish(const TwGemm& g, const float* smem, u32 rows, u32 row0, u32 jump, u32 end,
                                          u32 col0) {
    const bool pairs = tw_act(g) == TW_SWIGLU;
    const u32 groups = (pairs ? BN / 2 : BN) / 8;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < rows * groups; i += THREADS) {
        const u32 r = i / groups, q = i % groups;
        const u32 row = row0 + r / 16 * jump + r % 16, col = col0 + 8 * q;
        if (row >= end || col >= tw_out_cols(g)) continue;
        const float* x = smem + r * (BN + TW_EPI_PAD) + (pairs ? 16 : 8) * q;
        tw_finish8(g, row, col, x, x + 8);
    }
}

// Whether D is the bare product (f32: or is added to) and consists of whole vectors of a thread's
// stores.
__device__ __forceinline__ bool tw_direct(const TwGemm& g) {
    if (g.bias || g.aux || tw_act(g)) return false;
    if ((g.flags & TW_OUT) == 2) return (u64)g.d % 8 == 0 && (g.n | g.ldd) % 2 == 0;
    return !(g.flags & TW_ACCUMULATE) && (u64)g.d % 16 == 0 && (g.n | g.ldd) % 8 == 0;
}

// Stores the accumulators to f32 D directly from registers: the four lanes of a row store 32 bytes,
// a whole L2 sector. There is no barrier, so other warps go on with their products.
__device__ __forceinline__ void tw_direct_f32(const TwGemm& g, const TwAcc& acc, u32 row, u32 end, u32 col) {
    const bool add = g.flags & TW_ACCUMULATE;
#pragma unroll
    for (u32 i = 0; i < 2 * TW_FM; i++) {
        if (row + 8 * i >= end) break;
        float2* to = (float2*)((float*)g.d + (i64)(row + 8 * i) * g.ldd + col);
        float2 y[TW_FN];
#pragma unroll
        for (u32 j = 0; j < TW_FN; j++) {
            y[j] = make_float2(acc[i / 2][j][i % 2 * 2], acc[i / 2][j][i % 2 * 2 + 1]);
            if (!add || col + 8 * j >= g.n) continue;
            const float2 old = to[4 * j];
            y[j].x += old.x, y[j].y += old.y;
        }
#pragma unroll
        for (u32 j = 0; j < TW_FN; j++)
            if (col + 8 * j < g.n) to[4 * j] = y[j];
    }
}

// The same for 16-bit D. The four lanes of a row hold two columns of each eight; they exchange them
// so that each has all of every fourth eight, and stores 16 bytes at a time.
__device__ __forceinline__ void tw_direct_16(const TwGemm& g, const TwAcc& acc, u32 row, u32 end, u32 col) {
    const u32 lane = threadIdx.x % 4, all = 0xffffffff, type = g.flags & TW_OUT;
    const bool odd = lane & 1, high = lane & 2;
    u16* to = (u16*)g.d + (i64)row * g.ldd + col + 8 * lane;
#pragma unroll
    for (u32 i = 0; i < 2 * TW_FM; i++) {
#pragma unroll
        for (u32 j = 0; j < TW_FN; j += 4) {
            u32 w[4];
#pragma unroll
            for (u32 x = 0; x < 4; x++) {
                const float* y = &acc[i / 2][j + x][i % 2 * 2];
                w[x] = tw_pair(y[0], y[1], type);
            }
            // A 4 x 4 transposition: w[x] of lane y becomes w[y] of lane x, in two steps of
            // exchanged pairs.
            const u32 a = __shfl_xor_sync(all, odd ? w[0] : w[1], 1), b = __shfl_xor_sync(all, odd ? w[2] : w[3], 1);
            if (odd) w[0] = a, w[2] = b;
            else w[1] = a, w[3] = b;
            const u32 c = __shfl_xor_sync(all, high ? w[0] : w[2], 2), d = __shfl_xor_sync(all, high ? w[1] : w[3], 2);
            if (high) w[0] = c, w[1] = d;
            else w[2] = c, w[3] = d;
            if (row + 8 * i < end && col + 8 * (j + lane) < g.n)
                *(uint4*)(to + (i64)(8 * i) * g.ldd + 8 * j) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

// Stores the accumulators to D. Unless the direct stores apply, they pass through shared memory, 16
// rows of each warp at a time, so that threads store contiguous 16 bytes and SwiGLU has both
// halves.
__device__ __forceinline__ void tw_epilogue(const TwGemm& g, const TwAcc& acc, u8* smem, u32 row0, u32 end, u32 col0) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 warp_m = warp / TW_GEMM_WARPS_N, warp_n = warp % TW_GEMM_WARPS_N;
    if (tw_direct(g)) {
        const u32 row = row0 + warp_m * TW_WM + lane / 4, col = col0 + warp_n * TW_WN;
        if ((g.flags & TW_OUT) == 2) tw_direct_f32(g, acc, row, end, col + lane % 4 * 2);
        else tw_direct_16(g, acc, row, end, col);
        return;
    }
    float* out = (float*)smem;
    float* mine = out + (warp_m * 16 + lane / 4) * (TW_BN + TW_EPI_PAD) + warp_n * TW_WN + lane % 4 * 2;
    // The rest of the body once: unrolled, it is most of the kernel's code and of the time to
    // compile it. Registers cannot be indexed, hence the chain of stores.
#pragma unroll 1
    for (u32 i = 0; i < TW_FM; i++) {
#pragma unroll
        for (u32 f = 0; f < TW_FM; f++) {
            if (f != i) continue;
#pragma unroll
            for (u32 j = 0; j < TW_FN; j++)
#pragma unroll
                for (u32 e = 0; e < 4; e++)
                    mine[e / 2 * 8 * (TW_BN + TW_EPI_PAD) + 8 * j + e % 2] = acc[f][j][e];
        }
        __syncthreads();
        tw_finish<TW_BN, TW_THREADS>(g, out, TW_GEMM_WARPS_M * 16, row0 + 16 * i, TW_WM, end, col0);
        __syncthreads();
    }
}

// ---- Products of f32: tiles of 64 x 64, 256 threads, 18432 bytes.

enum : u32 { TW_F32_TILE = 64 };

// An f32 operand of a block's tile, with the fields of TwOperand.
struct TwWide {
    const float* p;
    i64 ld;
    bool k_major;
    u32 extent, first;
    bool pairs;
};

// Copies 64 x 16 elements to shared memory, as [16][64].
__device__ __forceinline__ void tw_load_f32(float* tile, const TwWide& o, u32 k, u32 k0) {
#pragma unroll
    for (u32 i = threadIdx.x; i < TW_F32_TILE * 16; i += 256) {
        const u32 r = o.k_major ? i / 16 : i % 64, kk = o.k_major ? i % 16 : i / 64;
        const u32 x = o.first + (o.pairs ? r / 16 * 8 + r % 8 : r), z = k0 + kk;
        const u64 at = x + (o.pairs && r / 8 % 2 ? o.extent : 0);
        const bool there = x < o.extent && z < k;
        tile[kk * 64 + r] = there ? o.p[o.k_major ? (i64)at * o.ld + z : (i64)z * o.ld + (i64)at] : 0.0f;
    }
}

// Computes the product of a tile and its epilogue: rows of D from row0 on and below `end`, columns
// from col0.
__device__ __forceinline__ void tw_product_f32(const TwGemm& g, const TwWide& a, const TwWide& b, u32 k, u32 row0,
                                               u32 end, u32 col0) {
    float *ta = (float*)tw_smem, *tb = ta + 16 * TW_F32_TILE;
    const u32 y = threadIdx.x / 16 * 4, x = threadIdx.x % 16 * 4;
    float acc[4][4] = {};
#pragma unroll 1
    for (u32 k0 = 0; k0 < k; k0 += 16) {
        tw_load_f32(ta, a, k, k0);
        tw_load_f32(tb, b, k, k0);
        __syncthreads();
#pragma unroll
        for (u32 kk = 0; kk < 16; kk++)
#pragma unroll
            for (u32 i = 0; i < 16; i++)
                acc[i / 4][i % 4] = fmaf(ta[kk * 64 + y + i / 4], tb[kk * 64 + x + i % 4], acc[i / 4][i % 4]);
        __syncthreads();
    }
#pragma unroll
    for (u32 i = 0; i < 16; i++) ta[(y + i / 4) * (TW_F32_TILE + TW_EPI_PAD) + x + i % 4] = acc[i / 4][i % 4];
    __syncthreads();
    tw_finish<TW_F32_TILE, 256>(g, ta, TW_F32_TILE, row0, 16, end, col0);
}

// ---- Sums of columns, for gradients of biases.

// out[c] = the sum of `rows` rows of column c, for 32 columns from `col0` on; 256 threads. Each
// warp adds every eighth row, and the warps' sums are added in warp order, so bits are
// reproducible.
__device__ __forceinline__ void tw_column_sums(const void* a, i64 ld, u32 type, u32 rows, u32 cols, u32 col0,
                                               float* out) {
    float* sums = (float*)tw_smem;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, col = col0 + lane;
    float sum = 0;
    if (col < cols)
        for (u32 r = warp; r < rows; r += 8) sum += tw_load_out(a, (i64)r * ld + col, type);
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (warp != 0 || col >= cols) return;
    for (u32 w = 1; w < 8; w++) sum += sums[32 * w + lane];
    out[col] = sum;
}
