// Products of groups whose sizes are in device memory, in one launch, on any GPU from sm_80 on.
//
// `splits` [groups] i64 (or i32) are the groups' numbers of rows, or the ends of the groups; packed
// tensors have `capacity` rows (g.m; g.k for wgrad), group after group.
//   tw_grouped_nt   D [capacity, n] = act(A [capacity, k] B_e^T + bias_e), B [groups][n, k], bias
//                   [groups, n]
//   tw_grouped_nn   the same with B [groups][k, n] (dgrad)
//   tw_grouped_tn   D [groups][m, n] = A_e^T B_e (+ D), A [capacity, m], B [capacity, n] (wgrad)
//   tw_grouped_f32  each of them for f32: tn with TW_A_KM, nn with TW_B_KN
// Rows behind the last group are left unchanged, or zeroed with TW_ZERO_TAIL. A group without rows
// has a zero gradient; a gradient that is accumulated keeps its bits. Invalid splits set the status
// word (1 negative, 2 more than the capacity), and nothing else is written. Valid splits leave the
// word as it is, so an error stays until the host has read it.
//
// Types: as in sm80_gemm.cu, bf16 or f16. The parameter p (TwGrouped) describes the products.
// Launch: nt and nn (capacity / TW_GEMM_M + groups) * tiles_n blocks, at least 1: an upper bound of
// the number of tiles, so that the host need not know the splits. tn: groups * tiles_m * tiles_n,
// at least 1. Threads and shared memory as in sm80_gemm.cu; tw_grouped_f32 has tiles of 64 x 64,
// like tw_gemm_f32. Algorithm: each warp of each block scans the splits itself, 32 at a time, to
// find the block's group; then the mainloop of gemm/mainloop.cuh. `tw_tile` orders the tiles of
// each group.

#include "../gemm/mainloop.cuh"
#include "splits.cuh"

struct TwGrouped {
    TwGemm g;
    const void* splits;
    u32* status;
    const u8* accumulate;  // [groups], or null: wgrad of group e adds if it is not 0
    i64 stride;            // elements from group to group: of B, for tn of D
    u32 groups, pad;
    const u64* table;  // [groups] addresses of B (for tn of D), or null: one tensor and a stride
};

// The result of a scan of the splits (`f`).
struct TwFound {
    u32 code, total;        // status, rows of all groups
    bool found;             // if there is a group for this block:
    u32 group, row0, rows;  // which, and its rows
    u32 tile;               // tiles of rows before it
};

// Finds the group that contains row tile `index` (BY_TILE), or group `index`.
template <bool BY_TILE, u32 BM = TW_BM>
__device__ __forceinline__ TwFound tw_find(const TwGrouped& p, u32 capacity, u32 index) {
    const u32 lane = threadIdx.x % 32, all = 0xffffffff;
    const TwSplits splits = {p.splits, p.groups, p.g.flags};
    TwFound f = {};
    u64 rows = 0, tiles = 0;
    for (u32 base = 0; base < p.groups; base += 32) {
        const u32 e = base + lane;
        const TwSizes s = tw_sizes(splits, base, rows, capacity);
        if (s.code) {
            f.code = s.code;
            return f;
        }
        const u64 own = (s.num + BM - 1) / BM, last = tw_sum_to_lane(own) + tiles;
        const bool here = BY_TILE ? index >= last - own && index < last : index == e && e < p.groups;
        const u32 who = __ballot_sync(all, here);
        if (who) {
            const u32 at = __ffs(who) - 1;
            f.found = true, f.group = base + at;
            f.rows = __shfl_sync(all, (u32)s.num, at), f.row0 = __shfl_sync(all, (u32)(s.end - s.num), at);
            f.tile = __shfl_sync(all, (u32)(last - own), at);
        }
        rows = __shfl_sync(all, s.end, 31), tiles = __shfl_sync(all, last, 31);
    }
    f.total = (u32)rows;
    return f;
}

__device__ __forceinline__ void tw_report(const TwGrouped& p, const TwFound& f) {
    if (f.code && blockIdx.x == 0 && threadIdx.x == 0) *p.status = f.code;
}

// Zeroes rows of D (and of the pre-activation) from `first` on; all blocks share the work.
__device__ __forceinline__ void tw_zero_tail(const TwGemm& g, u32 first) {
    const u32 type = g.flags & TW_OUT;
    for (u32 row = first + blockIdx.x; row < g.m; row += gridDim.x) {
        for (u32 col = threadIdx.x; col < tw_out_cols(g); col += blockDim.x)
            tw_store1(g.d, (i64)row * g.ldd + col, type, 0.0f);
        for (u32 col = threadIdx.x; g.aux && col < g.n; col += blockDim.x)
            tw_store1(g.aux, (i64)row * g.ldaux + col, type, 0.0f);
    }
}

// Addresses of tensors, passed by value so that a captured launch contains them.
struct TwAddresses {
    u64 at[64];
};

// table[i] = a.at[i], i < num <= 64. Grid: 1 block of 64 threads.
extern "C" __global__ void __launch_bounds__(64)
tw_grouped_table(const __grid_constant__ TwAddresses a, u32 num, u64* table) {
    if (threadIdx.x < num) table[threadIdx.x] = a.at[threadIdx.x];
}

// Products by rows (nt, nn): 16-bit operands with B in the order of B_NK, or f32 in that of
// TW_B_KN.
template <bool F32, bool B_NK>
__device__ __forceinline__ void tw_grouped_rows(const TwGrouped& p) {
    const u32 BM = F32 ? TW_F32_TILE : TW_BM, BN = F32 ? TW_F32_TILE : TW_BN;
    TwGemm g = p.g;
    const u32 cols = tw_block_cols(g, BN), tiles_n = max((tw_out_cols(g) + cols - 1) / cols, 1u);
    const TwFound f = tw_find<true, BM>(p, g.m, blockIdx.x / tiles_n);
    tw_report(p, f);
    if (f.code) return;
    if (g.flags & TW_ZERO_TAIL) tw_zero_tail(g, f.total);
    if (!f.found) return;
    const TwTile t = tw_tile(blockIdx.x - f.tile * tiles_n, (f.rows + BM - 1) / BM, tiles_n);
    const u32 row0 = f.row0 + t.m * BM, end = f.row0 + f.rows;
    if (g.bias) g.bias = (const u8*)g.bias + (i64)f.group * g.n * tw_bias_bytes(g);
    const u64 bytes = F32 ? 4 : 2;
    const u8* weights = p.table ? (const u8*)p.table[f.group] : (const u8*)g.b + f.group * p.stride * bytes;
    if (F32) {
        const TwWide a = {(const float*)g.a, g.lda, true, end, row0, false};
        const TwWide b = {(const float*)weights, g.ldb, !(g.flags & TW_B_KN), tw_out_cols(g), t.n * cols,
                          tw_act(g) == TW_SWIGLU};
        tw_product_f32(g, a, b, g.k, row0, end, t.n * cols);
        return;
    }
    const TwOperand a = tw_operand<true>(g.a, g.lda, end, row0, false);
    const TwOperand b = tw_operand<B_NK>(weights, g.ldb, tw_out_cols(g), t.n * cols,
                                         tw_act(g) == TW_SWIGLU);
    TwAcc acc;
    tw_mainloop<true, B_NK>(acc, tw_smem, a, b, g.k);
    tw_epilogue(g, acc, tw_smem, row0, end, t.n * cols);
}

extern "C" __global__ void __launch_bounds__(TW_THREADS, TW_MIN_BLOCKS)
tw_grouped_nt(const __grid_constant__ TwGrouped p) {
    tw_grouped_rows<false, true>(p);
}

extern "C" __global__ void __launch_bounds__(TW_THREADS, TW_MIN_BLOCKS)
tw_grouped_nn(const __grid_constant__ TwGrouped p) {
    tw_grouped_rows<false, false>(p);
}

template <bool F32>
__device__ __forceinline__ void tw_grouped_columns(const TwGrouped& p) {
    const u32 BM = F32 ? TW_F32_TILE : TW_BM, BN = F32 ? TW_F32_TILE : TW_BN;
    TwGemm g = p.g;
    const u32 tiles_m = (g.m + BM - 1) / BM, tiles_n = (g.n + BN - 1) / BN;
    const u32 tiles = max(tiles_m * tiles_n, 1u);
    const TwFound f = tw_find<false>(p, g.k, blockIdx.x / tiles);
    tw_report(p, f);
    if (f.code || !f.found || tiles_m * tiles_n == 0) return;
    const TwTile t = tw_tile(blockIdx.x % tiles, tiles_m, tiles_n);
    const bool add = p.accumulate && p.accumulate[f.group];
    // Adding zeros would turn -0 into 0.
    if (add && f.rows == 0) return;
    if (add) g.flags |= TW_ACCUMULATE;
    const u64 bytes = (g.flags & TW_OUT) == 2 ? 4 : 2;
    g.d = p.table ? (void*)p.table[f.group] : (u8*)g.d + f.group * p.stride * bytes;
    if (F32) {
        const TwWide a = {(const float*)g.a + f.row0 * g.lda, g.lda, false, g.m, t.m * BM, false};
        const TwWide b = {(const float*)g.b + f.row0 * g.ldb, g.ldb, false, g.n, t.n * BN, false};
        tw_product_f32(g, a, b, f.rows, t.m * BM, g.m, t.n * BN);
        return;
    }
    const TwOperand a = tw_operand<false>((const u16*)g.a + f.row0 * g.lda, g.lda, g.m, t.m * TW_BM, false);
    const TwOperand b = tw_operand<false>((const u16*)g.b + f.row0 * g.ldb, g.ldb, g.n, t.n * TW_BN, false);
    TwAcc acc;
    tw_mainloop<false, false>(acc, tw_smem, a, b, f.rows);
    tw_epilogue(g, acc, tw_smem, t.m * TW_BM, g.m, t.n * TW_BN);
}

extern "C" __global__ void __launch_bounds__(TW_THREADS, TW_MIN_BLOCKS)
tw_grouped_tn(const __grid_constant__ TwGrouped p) {
    tw_grouped_columns<false>(p);
}

// Two blocks on a multiprocessor: without this bound ptxas takes 64 registers for sm_100a, and
// spills.
extern "C" __global__ void __launch_bounds__(256, 2) tw_grouped_f32(const __grid_constant__ TwGrouped p) {
    if (p.g.flags & TW_A_KM) tw_grouped_columns<true>(p);
    else tw_grouped_rows<true, true>(p);
}

// bias [groups, n] f32 = sums of the rows of each group of A [capacity, n] (type of TW_OUT,
// capacity g.k). Launch: groups * ceil(n / 32) blocks, at least 1, of 256 threads with 1024 bytes.
extern "C" __global__ void __launch_bounds__(256) tw_grouped_dbias(const __grid_constant__ TwGrouped p) {
    const TwGemm& g = p.g;
    const u32 blocks = max((g.n + 31) / 32, 1u);
    const TwFound f = tw_find<false>(p, g.k, blockIdx.x / blocks);
    tw_report(p, f);
    if (f.code || !f.found) return;
    const u32 type = g.flags & TW_OUT;
    const u8* rows = (const u8*)g.a + (u64)f.row0 * g.lda * (type == 2 ? 4 : 2);
    tw_column_sums(rows, g.lda, type, f.rows, g.n, blockIdx.x % blocks * 32, (float*)g.d + (u64)f.group * g.n);
}

// D = A * act'(aux) for the rows of all groups: A [capacity, n]; D and aux the same, or with twice
// the columns for SwiGLU. Any grid of TW_THREADS.
extern "C" __global__ void __launch_bounds__(TW_THREADS) tw_grouped_dact(const __grid_constant__ TwGrouped p) {
    const TwGemm& g = p.g;
    const u32 type = g.flags & TW_OUT, act = g.flags >> TW_ACT_SHIFT & 3;
    const TwFound f = tw_find<false>(p, g.m, 0);
    tw_report(p, f);
    if (f.code) return;
    for (u32 row = blockIdx.x; row < g.m; row += gridDim.x) {
        const bool tail = row >= f.total;
        if (tail && !(g.flags & TW_ZERO_TAIL)) return;
        const i64 from = (i64)row * g.lda, at = (i64)row * g.ldd, aux = (i64)row * g.ldaux;
        for (u32 col = threadIdx.x; col < g.n; col += TW_THREADS) {
            const float d = tail ? 0.0f : tw_load_out(g.a, from + col, type);
            const float x = tail ? 0.0f : tw_load_out(g.aux, aux + col, type);
            float y = d, up = 0;
            if (act == TW_RELU) y = x > 0.0f ? d : 0.0f;
            if (act == TW_GELU) y = d * tw_dgelu(x);
            if (act == TW_SWIGLU && !tail) tw_dswiglu(d, x, tw_load_out(g.aux, aux + g.n + col, type), y, up);
            tw_store1(g.d, at + col, type, tail ? 0.0f : y);
            if (act == TW_SWIGLU) tw_store1(g.d, at + g.n + col, type, up);
        }
    }
}
