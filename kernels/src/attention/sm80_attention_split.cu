// Attention of few queries over many keys, forward (decoding), for 16-bit types on any GPU from
// sm_80 on.
//
// Shapes and types as in sm80_attention.cu: q [tokens_q, Hq, DQK], k [tokens_kv, Hkv, DQK], v
// [tokens_kv, Hkv, DV], out [tokens_q, Hq, DV] in bf16, f16 or f32, lse [Hq, tokens_q]. Masks,
// sinks, packed rows and rows between sequences; a positive scale, no softcap, bias or dropout. All
// keys of a sequence are one segment.
//
// Algorithm: the query heads of a key head are packed into the rows of a tile, row r being query r
// / (Hq / Hkv) of head r % (Hq / Hkv), so that keys are read once for all of them. Where tiles are
// few, the keys that a tile sees are cut into pieces of whole tiles of 64 keys, a block each, and a
// second kernel merges their results (FlashDecoding: Dao, Haziza, Massa, Sizov, 2023). In a block
// each of four warps attends to 16 of the 64 keys, with a softmax of its own, since there are too
// few queries to divide among them; at the end their sums are added. With 64 rows a warp has 16 of
// these, and all keys. Keys and values come by cp.async, TW_SPLIT_STAGES - 1 tiles ahead: the
// kernel is bound by reading them.
//
// The numbers of pieces are the table's: own segment i has tiles `tile` to the next segment's
// `tile`, its row tiles times its pieces, with the row tiles of a piece beside each other. Segments
// with several pieces come first: `TwSplit::tiles` of the tiles are theirs.
//
// Order of sums: keys of a warp ascend; then warps 0 to 3. Pieces: of a tile with at most as many
// rows as pieces, p, p + 4, .. for p from 0 to 3, and then these four; else all of them ascending.
// It depends on shapes and on the number of pieces alone.
//
// Launch: 128 threads; TW_S_Q_BYTES + TW_SPLIT_STAGES * TW_S_STAGE bytes of dynamic shared memory.
//   tw_attn_split        TwAttn::tiles * Hkv blocks
//   tw_attn_split_merge  TwSplit::tiles * Hkv blocks, without dynamic shared memory; it may begin
//                        while the first kernel ends (griddepcontrol)

#include "../ptx/grid.cuh"
#include "common.cuh"

#ifndef TW_SPLIT_ROWS
#define TW_SPLIT_ROWS 16
#endif
#ifndef TW_SPLIT_STAGES
#define TW_SPLIT_STAGES 3
#endif

enum : u32 {
    TW_SM = TW_SPLIT_ROWS,
    TW_SN = 64,
    TW_S_WARPS = 4,
    // Warps have rows of their own; else keys of their own, and each has sums of all rows.
    TW_S_BY_ROWS = TW_SM == 16 * TW_S_WARPS,
    TW_S_SLICES = TW_S_BY_ROWS ? 1 : TW_S_WARPS,
    // Matrix instructions of a warp: over rows, and over keys of a tile.
    TW_S_MT = TW_S_BY_ROWS ? 1 : TW_SM / 16,
    TW_S_NT = TW_S_BY_ROWS ? TW_SN / 8 : 2,
    TW_S_THREADS = 32 * TW_S_WARPS,
    TW_S_DT = TW_DV16 / 8,
    TW_S_Q_BYTES = TW_SM * TW_DQP * 2,
    TW_S_K_BYTES = TW_SN * TW_DQP * 2,
    TW_S_STAGE = TW_S_K_BYTES + TW_SN * TW_DVP * 2,
    TW_SPLIT_FEW = 48,
    // Blocks that shared memory has space for: the compiler is not to save registers for more.
    TW_S_BLOCKS = TW_DQP + TW_DVP <= 128 ? 3 : TW_DQP + TW_DVP <= 256 ? 2 : 1,
};
static_assert(TW_SM % 16 == 0 && TW_SN == 16 * TW_S_WARPS, "a warp has 16 keys");
static_assert(TW_S_SLICES * TW_SM * TW_DV * 4 <= TW_SPLIT_STAGES * TW_S_STAGE, "sums of warps take the place of keys");
static_assert(TW_DQ % 8 == 0 && TW_DV % 8 == 0, "rows are whole chunks of 16 bytes");

// Results of pieces, and the segments if they are few: else other kernels would write them first.
struct TwSplit {
    float* parts;  // [TwSplit::tiles * Hkv, TW_SPLIT_ROWS, DV], not normalised
    float2* ends;  // [TwSplit::tiles * Hkv, TW_SPLIT_ROWS]: largest score in base 2, sum
    u32 tiles;     // those of segments with several pieces
    u32 few;       // 1: the segments are these, and those of TwAttn are not read
    TwSeg own[TW_SPLIT_FEW], other[TW_SPLIT_FEW];
};

// What a block works on, in shared memory.
struct TwPiece {
    TwSeg own;
    u32 kv_head, group;
    // The tile's first packed row in its segment, and its number of rows.
    u32 first, num;
    // This piece of so many; the number of the first one among all results, and from one to the
    // next.
    u32 piece, pieces, slot, stride;
    // Its first key: row in the tensor, position in the sequence; its keys.
    u32 row, keys;
    int pos;
};

// Position among keys of packed row `r` of the tile.
__device__ __forceinline__ int tw_s_at(const TwPiece& b, u32 r) {
    return (int)(b.own.pos + (b.first + r) / b.group) + (b.own.shift == TW_ATTN_GAP ? 0 : b.own.shift);
}

// Sets this block's tile and piece. A barrier must follow.
__device__ __forceinline__ void tw_s_begin(const TwAttn& a, const TwSplit& s, TwPiece& b) {
    if (threadIdx.x != 0) return;
    const TwSeg *all = s.few ? s.own : a.own, *others = s.few ? s.other : a.other;
    const u32 t = blockIdx.x / a.heads_kv, i = tw_own_index(all, a.num_own, t);
    const TwSeg own = all[i];
    b.own = own, b.kv_head = blockIdx.x % a.heads_kv, b.group = a.heads_q / a.heads_kv;
    const u32 end = i + 1 < a.num_own ? all[i + 1].tile : a.tiles;
    const u32 rows = own.len * b.group, row_tiles = (rows + TW_SM - 1) / TW_SM, mine = (t - own.tile) % row_tiles;
    b.piece = (t - own.tile) / row_tiles, b.pieces = (end - own.tile) / row_tiles;
    b.slot = (own.tile + mine) * a.heads_kv + b.kv_head, b.stride = row_tiles * a.heads_kv;
    b.first = mine * TW_SM, b.num = min(rows - b.first, (u32)TW_SM);
    b.keys = 0;
    if (own.first == own.end) return;
    const TwSeg keys = others[own.first];
    const int lo = max(tw_s_at(b, 0) - a.left - (int)keys.pos, 0);
    const int hi = min(tw_s_at(b, b.num - 1) + a.right + 1 - (int)keys.pos, (int)keys.len);
    if (lo >= hi) return;
    // Tiles begin at the same rows, whatever the mask hides.
    const u32 skip = (u32)lo / TW_SN, all_tiles = ((u32)hi + TW_SN - 1) / TW_SN - skip;
    // The first pieces have a tile more than the others.
    const u32 some = all_tiles / b.pieces, more = all_tiles % b.pieces;
    const u32 from = (skip + b.piece * some + min(b.piece, more)) * TW_SN;
    const u32 to = from + (some + (b.piece < more ? 1 : 0)) * TW_SN;
    if (from >= to) return;
    b.row = keys.row + from, b.pos = (int)(keys.pos + from), b.keys = min(to, (u32)hi) - from;
}

// Copies the tile's queries.
__device__ __forceinline__ void tw_s_load_queries(const TwAttn& a, const TwPiece& b) {
    const u32 chunks = TW_DQ16 / 8;
    const u16* q = (const u16*)a.q;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < TW_SM * chunks; i += TW_S_THREADS) {
        const u32 r = i / chunks, c = i % chunks, p = b.first + r;
        const bool there = r < b.num && c < TW_DQ / 8;
        const u16* from = q + (i64)(b.own.row + p / b.group) * a.ld_q + (b.kv_head * b.group + p % b.group) * TW_DQ + 8 * c;
        cp_async_cg_16_zfill(tw_smem + tw_at<TW_DQP>(r, c), there ? from : q, there ? 16 : 0);
    }
}

// Copies tile `n` of keys and values to its stage, if there is one, as a group of its own.
__device__ __forceinline__ void tw_s_load(const TwAttn& a, const TwPiece& b, u32 n) {
    if (n * TW_SN < b.keys) {
        u8* to = tw_smem + TW_S_Q_BYTES + n % TW_SPLIT_STAGES * TW_S_STAGE;
        const u32 num = min(b.keys - n * TW_SN, (u32)TW_SN);
        const i64 row = (i64)b.row + n * TW_SN;
        const u16* k = (const u16*)a.k + row * a.ld_k + b.kv_head * TW_DQ;
        const u16* v = (const u16*)a.v + row * a.ld_v + b.kv_head * TW_DV;
        tw_load_tile<TW_SN, TW_DQ, TW_DQP, TW_S_THREADS>(to, k, a.ld_k, num);
        tw_load_tile<TW_SN, TW_DV, TW_DVP, TW_S_THREADS>(to + TW_S_K_BYTES, v, a.ld_v, num);
    }
    cp_async_commit_group();
}

typedef float TwSplitScores[TW_S_MT][TW_S_NT][4];
typedef float TwSplitOut[TW_S_MT][TW_S_DT][4];

// The softmax state of a thread's rows. `at`: their positions; `max`: of scores, to be multiplied
// by scale; `sum`: this lane's part.
struct TwSplitRows {
    int at[TW_S_MT][2];
    float max[TW_S_MT][2], sum[TW_S_MT][2];
};

// Sets scores to -inf where the mask hides the pair or the key is behind the tile's `num` keys.
// `pos`: of this lane's first key, which is `col` of the tile.
__device__ __forceinline__ void tw_s_mask(const TwAttn& a, TwSplitScores& s, const TwSplitRows& r, int pos, u32 col, u32 num) {
#pragma unroll
    for (u32 i = 0; i < TW_S_MT; i++)
#pragma unroll
        for (u32 j = 0; j < TW_S_NT; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                const int behind = pos + (int)(8 * j + e % 2) - r.at[i][e / 2];
                if (col + 8 * j + e % 2 >= num || behind < -a.left || behind > a.right) s[i][j][e] = -TW_INF;
            }
}

// Stores four elements of the result of packed row `r` from column `c` on, and lse.
__device__ __forceinline__ void tw_s_put(const TwAttn& a, const TwPiece& b, u32 r, u32 c, float4 x, float top, float sum) {
    const u32 p = b.first + r, head = b.kv_head * b.group + p % b.group, row = b.own.row + p / b.group;
    const bool sink = a.sink && b.own.shift != TW_ATTN_GAP;
    const TwFinished end = tw_finish_row(top, sum, sink ? a.sink[a.first_head + head] * TW_LOG2E : -TW_INF);
    if (c == 0) a.lse[(i64)head * a.tokens_q + row] = end.lse;
    x.x *= end.factor, x.y *= end.factor, x.z *= end.factor, x.w *= end.factor;
    const i64 at = (i64)row * a.ld_o + head * TW_DV + c;
    if (a.out_type == 2) *(float4*)((float*)a.out + at) = x;
    else *(uint2*)((u16*)a.out + at) = make_uint2(tw_pair(x.x, x.y, a.out_type), tw_pair(x.z, x.w, a.out_type));
}

// A row's largest score in base 2, from that which is to be multiplied by `factor`.
__device__ __forceinline__ float tw_s_top(float max, float factor) {
    return max == -TW_INF ? -TW_INF : max * factor;
}
// The weight of sums relative to `top` among those relative to `base`; both in base 2.
__device__ __forceinline__ float tw_s_weight(float top, float base) {
    return ex2_approx_ftz_f32(top - (base == -TW_INF ? 0.0f : base));
}

// Adds what the warps have, whose sums relative to `ends` lie in the place of keys, and stores it:
// the result, or that of this piece.
__device__ __forceinline__ void tw_s_finish(const TwAttn& a, const TwSplit& s, const TwPiece& b,
                                            const float2 (&ends)[TW_S_SLICES][TW_SM]) {
    const float* sums = (const float*)(tw_smem + TW_S_Q_BYTES);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < b.num * (TW_DV / 4); i += TW_S_THREADS) {
        const u32 r = i / (TW_DV / 4), c = i % (TW_DV / 4) * 4;
        float top = -TW_INF, total = 0.0f;
#pragma unroll
        for (u32 w = 0; w < TW_S_SLICES; w++) top = fmaxf(top, ends[w][r].x);
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (u32 w = 0; w < TW_S_SLICES; w++) {
            const float weight = tw_s_weight(ends[w][r].x, top);
            const float4 y = *(const float4*)(sums + (w * TW_SM + r) * TW_DV + c);
            total = fmaf(weight, ends[w][r].y, total);
            x.x = fmaf(weight, y.x, x.x), x.y = fmaf(weight, y.y, x.y);
            x.z = fmaf(weight, y.z, x.z), x.w = fmaf(weight, y.w, x.w);
        }
        if (b.pieces == 1) {
            tw_s_put(a, b, r, c, x, top, total);
            continue;
        }
        const u64 row = (u64)(b.slot + b.piece * b.stride) * TW_SM + r;
        *(float4*)(s.parts + row * TW_DV + c) = x;
        if (c == 0) s.ends[row] = make_float2(top, total);
    }
}

// A piece of the keys of a tile of packed queries: the result if there is one piece, else its part.
extern "C" __global__ void __launch_bounds__(TW_S_THREADS, TW_S_BLOCKS)
tw_attn_split(const __grid_constant__ TwAttn a, const __grid_constant__ TwSplit s) {
    __shared__ TwPiece b;
    __shared__ __align__(16) float2 ends[TW_S_SLICES][TW_SM];
    // Blocks that merge begin when all of these have begun, as far as they fit, and wait.
    griddepcontrol_launch_dependents();
    tw_s_begin(a, s, b);
    __syncthreads();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The thread as one of those that share its rows, and its warp's first key of a tile.
    const u32 thread = TW_S_BY_ROWS ? threadIdx.x : lane, first_key = TW_S_BY_ROWS ? 0 : 16 * warp;
    // With the first tile of keys.
    tw_s_load_queries(a, b);
    for (u32 n = 0; n + 1 < TW_SPLIT_STAGES; n++) tw_s_load(a, b, n);
    TwSplitOut o;
    TwSplitRows r;
#pragma unroll
    for (u32 i = 0; i < TW_S_MT; i++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            // Rows behind the last one are not stored.
            r.at[i][half] = tw_s_at(b, min(tw_row<TW_S_MT>(i, 2 * half, thread), b.num - 1));
            r.max[i][half] = -TW_INF, r.sum[i][half] = 0.0f;
        }
#pragma unroll
        for (u32 j = 0; j < TW_S_DT; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) o[i][j][e] = 0.0f;
    }
    const float factor = a.scale * TW_LOG2E;
    const int first_at = tw_s_at(b, 0), last_at = tw_s_at(b, b.num - 1);
#pragma unroll 1
    for (u32 n = 0; n * TW_SN < b.keys; n++) {
        cp_async_wait_group<TW_SPLIT_STAGES - 2>();
        // Everybody's copies are there, and nobody reads the stage that is next filled.
        __syncthreads();
        tw_s_load(a, b, n + TW_SPLIT_STAGES - 1);
        // This warp's keys of the tile.
        const u32 k = TW_S_Q_BYTES + n % TW_SPLIT_STAGES * TW_S_STAGE;
        const u32 num = min(b.keys - n * TW_SN, (u32)TW_SN);
        const int pos = b.pos + (int)(n * TW_SN);
        TwSplitScores p;
        tw_products<TW_S_MT, TW_S_NT, TW_DQ16, TW_DQP>(p, 0, k + first_key * (TW_DQP * 2), thread);
        const bool whole = num == TW_SN && pos >= last_at - a.left && pos + (int)TW_SN - 1 <= first_at + a.right;
        const u32 col = first_key + lane % 4 * 2;
        if (!whole) tw_s_mask(a, p, r, pos + (int)col, col, num);
        tw_softmax(p, r.max, r.sum, o, factor);
        tw_accumulate<TW_S_MT, TW_S_NT, TW_S_DT, TW_DVP>(o, p, k + TW_S_K_BYTES + first_key * (TW_DVP * 2));
    }
    cp_async_wait_group<0>();
    // Nobody reads keys any more.
    __syncthreads();
    const u32 slice = TW_S_BY_ROWS ? 0 : warp;
    float* sums = (float*)(tw_smem + TW_S_Q_BYTES) + slice * (TW_SM * TW_DV);
#pragma unroll
    for (u32 i = 0; i < TW_S_MT; i++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 at = tw_row<TW_S_MT>(i, 2 * half, thread);
            const float sum = tw_quad_sum(r.sum[i][half]);
            if (lane % 4 == 0) ends[slice][at] = make_float2(tw_s_top(r.max[i][half], factor), sum);
#pragma unroll
            for (u32 j = 0; j < TW_S_DT; j++)
                if (TW_DV % 16 == 0 || 8 * j < TW_DV)
                    *(float2*)(sums + at * TW_DV + 8 * j + lane % 4 * 2) = make_float2(o[i][j][2 * half], o[i][j][2 * half + 1]);
        }
    __syncthreads();
    tw_s_finish(a, s, b, ends);
}

// The largest score of all pieces of a row, and their sum relative to it. `first`: the row of the
// first piece among the results, `step`: from one piece to the next. Called by whole warps.
__device__ __forceinline__ float2 tw_s_end(const TwSplit& s, u32 pieces, u64 first, u64 step) {
    const u32 lane = threadIdx.x % 32;
    float top = -TW_INF, total = 0.0f;
    for (u32 p = lane; p < pieces; p += 32) top = fmaxf(top, s.ends[first + p * step].x);
#pragma unroll
    for (u32 by = 16; by > 0; by /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, by));
    for (u32 p = lane; p < pieces; p += 32) {
        const float2 end = s.ends[first + p * step];
        total = fmaf(tw_s_weight(end.x, top), end.y, total);
    }
#pragma unroll
    for (u32 by = 16; by > 0; by /= 2) total += __shfl_xor_sync(0xffffffffu, total, by);
    return make_float2(top, total);
}

// Four elements of the sum of pieces `p`, p + `every`, .. of a row, from column `c` on.
__device__ __forceinline__ float4 tw_s_add(const TwSplit& s, u32 p, u32 every, u32 pieces, u64 first, u64 step, u32 c, float top) {
    float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (; p < pieces; p += every) {
        const u64 row = first + p * step;
        const float weight = tw_s_weight(s.ends[row].x, top);
        const float4 y = *(const float4*)(s.parts + row * TW_DV + c);
        x.x = fmaf(weight, y.x, x.x), x.y = fmaf(weight, y.y, x.y);
        x.z = fmaf(weight, y.z, x.z), x.w = fmaf(weight, y.w, x.w);
    }
    return x;
}

// The result of every tile with several pieces: the block of a piece merges some of its rows, one
// by one, or a warp each where there are more rows than pieces.
extern "C" __global__ void __launch_bounds__(TW_S_THREADS)
tw_attn_split_merge(const __grid_constant__ TwAttn a, const __grid_constant__ TwSplit s) {
    __shared__ TwPiece b;
    __shared__ __align__(16) float4 sums[TW_S_WARPS][TW_DV / 4];
    // A launch that contains its segments finds the block's tile while the first kernel ends: that
    // reads no memory.
    if (!s.few) griddepcontrol_wait();
    tw_s_begin(a, s, b);
    if (s.few) griddepcontrol_wait();
    __syncthreads();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u64 step = (u64)b.stride * TW_SM;
    if (b.num > b.pieces) {
#pragma unroll 1
        for (u32 r = b.piece * TW_S_WARPS + warp; r < b.num; r += b.pieces * TW_S_WARPS) {
            const u64 first = (u64)b.slot * TW_SM + r;
            const float2 end = tw_s_end(s, b.pieces, first, step);
#pragma unroll 1
            for (u32 c = lane; c < TW_DV / 4; c += 32)
                tw_s_put(a, b, r, 4 * c, tw_s_add(s, 0, 1, b.pieces, first, step, 4 * c, end.x), end.x, end.y);
        }
        return;
    }
    // At most one row.
    if (b.piece >= b.num) return;
    const u64 first = (u64)b.slot * TW_SM + b.piece;
    const float2 end = tw_s_end(s, b.pieces, first, step);
#pragma unroll 1
    for (u32 c = lane; c < TW_DV / 4; c += 32) sums[warp][c] = tw_s_add(s, warp, TW_S_WARPS, b.pieces, first, step, 4 * c, end.x);
    __syncthreads();
    for (u32 c = threadIdx.x; c < TW_DV / 4; c += TW_S_THREADS) {
        float4 x = sums[0][c];
#pragma unroll
        for (u32 w = 1; w < TW_S_WARPS; w++) {
            const float4 y = sums[w][c];
            x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
        }
        tw_s_put(a, b, b.piece, 4 * c, x, end.x, end.y);
    }
}
