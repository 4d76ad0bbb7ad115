// Products of groups whose sizes lie in device memory, in one launch, on any GPU from sm_80 on.
//
// Shapes: splits [groups] i64 counts of rows, row ranges one after the other, `capacity` = g.m
// (g.k for wgrad) rows in all packed tensors.
//   tw_grouped_nt: D [capacity, n] = act(A [capacity, k] B_e^T + bias_e), B [groups][n, k], bias [groups, n]
//   tw_grouped_nn: the same with B [groups][k, n] (dgrad)
//   tw_grouped_tn: D [groups][m, n] = A_e^T B_e (+ D), A [capacity, m], B [capacity, n] (wgrad)
// Rows behind the last group keep what they hold, or are zeroed by TW_ZERO_TAIL. A group without
// rows has a zero gradient, or keeps its bits when it is added to. Splits that cannot be used set
// the status word (1 negative, 2 more than the capacity) and nothing else is written; good ones
// leave it as it is, so that what was found stays until the host has looked.
// Types: as sm80_gemm.cu, bf16 or f16.
// Launch: for nt and nn (capacity / TW_GEMM_M + groups) * tiles_n blocks, at least 1: an upper
//   bound of the tiles, so that the host need not know the splits. For tn groups * tiles_m *
//   tiles_n, at least 1. Threads and shared memory as sm80_gemm.cu.
// Algorithm: each warp of each block scans the splits for itself, 32 at a time; then the mainloop
//   of gemm/mainloop.cuh. `tw_tile` orders the tiles of each group.

enum : u32 {
    TW_ZERO_TAIL = 128,
};

struct TwGrouped {
    TwGemm g;
    const i64* splits;
    u32* status;
    const u8* accumulate;  // [groups], or null: wgrad of group e adds if it is not 0
    i64 stride;            // elements from group to group: of B, for tn of D
    u32 groups, pad;
};

// What a block needs to know of the splits.
struct TwFound {
    u32 code, total;        // status, rows of all groups
    bool found;             // if there is a group for this block:
    u32 group, row0, rows;  // which, and its rows
    u32 tile;               // tiles of rows before it
};

// Looks for the group that holds tile of rows `index`, or for group `index`.
template <bool BY_TILE>
__device__ __forceinline__ TwFound tw_find(const TwGrouped& p, u32 capacity, u32 index) {
    const u32 lane = threadIdx.x % 32, all = 0xffffffff;
    TwFound f = {};
    u64 rows = 0, tiles = 0;
    for (u32 base = 0; base < p.groups; base += 32) {
        const u32 e = base + lane;
        const i64 v = e < p.groups ? p.splits[e] : 0;
        // Clamped, so that no sum overflows.
        const u64 num = v < 0 ? 0 : min((u64)v, (u64)capacity + 1), own = (num + TW_BM - 1) / TW_BM;
        u64 end = num, last = own;
        for (u32 by = 1; by < 32; by *= 2) {
            const u64 r = __shfl_up_sync(all, end, by), t = __shfl_up_sync(all, last, by);
            if (lane >= by) end += r, last += t;
        }
        end += rows, last += tiles;
        const u32 code = v < 0 ? 1 : end > capacity ? 2 : 0;
        const u32 bad = __ballot_sync(all, code != 0);
        if (bad) {
            f.code = __shfl_sync(all, code, __ffs(bad) - 1);
            return f;
        }
        const bool here = BY_TILE ? index >= last - own && index < last : index == e && e < p.groups;
        const u32 who = __ballot_sync(all, here);
        if (who) {
            const u32 at = __ffs(who) - 1;
            f.found = true, f.group = base + at;
            f.rows = __shfl_sync(all, (u32)num, at), f.row0 = __shfl_sync(all, (u32)(end - num), at);
            f.tile = __shfl_sync(all, (u32)(last - own), at);
        }
        rows = __shfl_sync(all, end, 31), tiles = __shfl_sync(all, last, 31);
    }
    f.total = (u32)rows;
    return f;
}

__device__ __forceinline__ void tw_report(const TwGrouped& p, const TwFound& f) {
    if (f.code && blockIdx.x == 0 && threadIdx.x == 0) *p.status = f.code;
}

// Rows of D from `first` on, by all blocks.
__device__ __forceinline__ void tw_zero_tail(const TwGemm& g, u32 first) {
    for (u32 row = first + blockIdx.x; row < g.m; row += gridDim.x) {
        const i64 at = (i64)row * g.ldd;
        for (u32 col = threadIdx.x; col < tw_out_cols(g); col += TW_THREADS) {
            if ((g.flags & TW_OUT) == 2) ((float*)g.d)[at + col] = 0;
            else ((u16*)g.d)[at + col] = 0;
        }
    }
}

template <bool B_NK>
__device__ __forceinline__ void tw_grouped_rows(const TwGrouped& p) {
    TwGemm g = p.g;
    const u32 cols = tw_block_cols(g, TW_BN), tiles_n = max((tw_out_cols(g) + cols - 1) / cols, 1u);
    const TwFound f = tw_find<true>(p, g.m, blockIdx.x / tiles_n);
    tw_report(p, f);
    if (f.code) return;
    if (g.flags & TW_ZERO_TAIL) tw_zero_tail(g, f.total);
    if (!f.found) return;
    const TwTile t = tw_tile(blockIdx.x - f.tile * tiles_n, (f.rows + TW_BM - 1) / TW_BM, tiles_n);
    const u32 row0 = f.row0 + t.m * TW_BM, end = f.row0 + f.rows;
    if (g.bias) g.bias += (i64)f.group * g.n;
    const TwOperand a = tw_operand<true>(g.a, g.lda, end, row0, false);
    const TwOperand b = tw_operand<B_NK>((const u16*)g.b + f.group * p.stride, g.ldb, tw_out_cols(g), t.n * cols,
                                         tw_act(g) == TW_SWIGLU);
    TwAcc acc;
    tw_mainloop<true, B_NK>(acc, tw_smem, a, b, g.k);
    tw_epilogue(g, acc, tw_smem, row0, end, t.n * cols);
}

extern "C" __global__ void __launch_bounds__(TW_THREADS) tw_grouped_nt(const __grid_constant__ TwGrouped p) {
    tw_grouped_rows<true>(p);
}

extern "C" __global__ void __launch_bounds__(TW_THREADS) tw_grouped_nn(const __grid_constant__ TwGrouped p) {
    tw_grouped_rows<false>(p);
}

extern "C" __global__ void __launch_bounds__(TW_THREADS) tw_grouped_tn(const __grid_constant__ TwGrouped p) {
    TwGemm g = p.g;
    const u32 tiles_m = (g.m + TW_BM - 1) / TW_BM, tiles_n = (g.n + TW_BN - 1) / TW_BN;
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
    g.d = (u8*)g.d + f.group * p.stride * bytes;
    const TwOperand a = tw_operand<false>((const u16*)g.a + f.row0 * g.lda, g.lda, g.m, t.m * TW_BM, false);
    const TwOperand b = tw_operand<false>((const u16*)g.b + f.row0 * g.ldb, g.ldb, g.n, t.n * TW_BN, false);
    TwAcc acc;
    tw_mainloop<false, false>(acc, tw_smem, a, b, f.rows);
    tw_epilogue(g, acc, tw_smem, t.m * TW_BM, g.m, t.n * TW_BN);
}
