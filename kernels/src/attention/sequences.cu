// Tables of segments from offsets in device memory: a captured launch follows documents that
// change. The kernels of attention read these tables as those that a launch contains.
//
// A table has two segments for each sequence, its rows and the rows behind it that belong to none,
// and `extra` ones without rows. The grid of attention is fixed when its launch is queued: it has
// as many tiles as any offsets need. Each tile that these offsets do not need finds an extra
// segment, which has its number, and with it no row to compute.
//
// Offsets that cannot be used are marked, for this launch and for the plan. Their tables have one
// segment, all rows, of no sequence: nothing reads or writes outside of the tensors.
// `tw_attn_refuse` then fills the results with NaN.
//
// Launch: tw_attn_sequences has 1 block of TW_SEQUENCES_THREADS threads. tw_attn_refuse has any
// blocks of 256 threads.

#include "segments.cuh"

enum : u32 { TW_SEQUENCES_THREADS = 256 };

// Where the rows of one side lie.
struct TwOffsets {
    const int* cu;  // [num + 1]: rows of all sequences before each, without padding
    const int* at;  // [num + 1]: first row of each, with padding; `cu` where there is none
    TwSeg* table;   // [2 num + extra]
    u32 tokens;     // rows of the tensors
    u32 tile;       // rows of a tile
    u32 extra;      // segments without rows
    u32 longest;    // most rows of a sequence
};

struct TwSequences {
    TwOffsets q, kv;
    u32* refused;  // [1]: 1 if the offsets of this launch cannot be used, else 0
    u32* any;      // [1]: 1 from the first launch on whose offsets cannot be used
    u32 num;       // sequences, at least one
    u32 pad;
};

// The rows of sequence `s`, and of those behind it that belong to none.
struct TwSpan {
    u32 row, len, behind;
};

__device__ __forceinline__ TwSpan tw_span(const TwOffsets& o, u32 s, u32 num) {
    const int row = o.at[s], len = o.cu[s + 1] - o.cu[s], next = s + 1 < num ? o.at[s + 1] : (int)o.tokens;
    return {(u32)row, (u32)len, (u32)(next - row - len)};
}

// Whether the offsets of sequence `s` can be used if those before it can.
__device__ __forceinline__ bool tw_usable(const TwOffsets& o, u32 s) {
    if (s == 0 && (o.cu[0] != 0 || o.at[0] != 0)) return false;
    const i64 len = (i64)o.cu[s + 1] - o.cu[s], space = (i64)o.at[s + 1] - o.at[s];
    return len >= 0 && len <= space && o.at[s + 1] <= (i64)o.tokens && len <= (i64)o.longest;
}

__device__ __forceinline__ u32 tw_tiles(u32 rows, u32 tile) {
    return rows / tile + (rows % tile != 0 ? 1 : 0);
}

// Writes the segments of sequences from..to; `tile` tiles are before them. Sequence s of the other
// side is segment 2 s of its table.
__device__ __forceinline__ void tw_write(const TwSequences& p, const TwOffsets& o, u32 from, u32 to, u32 tile) {
    for (u32 s = from; s < to; s++) {
        const TwSpan x = tw_span(o, s, p.num);
        const int shift = (int)tw_span(p.kv, s, p.num).len - (int)tw_span(p.q, s, p.num).len;
        o.table[2 * s] = {x.row, x.len, 0, x.row, tile, 2 * s, 2 * s + 1, shift};
        tile += tw_tiles(x.len, o.tile);
        const u32 end = x.row + x.len;
        o.table[2 * s + 1] = {end, x.behind, 0, end, tile, 0, 0, TW_ATTN_GAP};
        tile += tw_tiles(x.behind, o.tile);
    }
}

extern "C" __global__ void __launch_bounds__(TW_SEQUENCES_THREADS) tw_attn_sequences(const __grid_constant__ TwSequences p) {
    __shared__ u32 sums[2][TW_SEQUENCES_THREADS];
    __shared__ u32 refused;
    const u32 i = threadIdx.x;
    if (i == 0) refused = 0;
    __syncthreads();
    // Each thread has sequences that follow one another.
    const u32 each = (p.num + TW_SEQUENCES_THREADS - 1) / TW_SEQUENCES_THREADS;
    const u32 from = min(i * each, p.num), to = min(from + each, p.num);
    for (u32 s = from; s < to; s++)
        if (!tw_usable(p.q, s) || !tw_usable(p.kv, s)) atomicOr(&refused, 1u);
    __syncthreads();
    const u32 bad = refused;
    if (i == 0) {
        *p.refused = bad;
        if (bad != 0) *p.any = 1;
    }
    for (u32 side = 0; side < 2; side++) {
        const TwOffsets& o = side == 0 ? p.q : p.kv;
        u32 tiles = 0;
        for (u32 s = from; s < to && bad == 0; s++) {
            const TwSpan x = tw_span(o, s, p.num);
            tiles += tw_tiles(x.len, o.tile) + tw_tiles(x.behind, o.tile);
        }
        sums[side][i] = tiles;
    }
    __syncthreads();
    // Sums over all threads up to each.
    for (u32 by = 1; by < TW_SEQUENCES_THREADS; by *= 2) {
        const u32 q = i >= by ? sums[0][i - by] : 0, kv = i >= by ? sums[1][i - by] : 0;
        __syncthreads();
        sums[0][i] += q, sums[1][i] += kv;
        __syncthreads();
    }
    for (u32 side = 0; side < 2; side++) {
        const TwOffsets& o = side == 0 ? p.q : p.kv;
        const u32 all = bad != 0 ? tw_tiles(o.tokens, o.tile) : sums[side][TW_SEQUENCES_THREADS - 1];
        if (bad == 0) {
            tw_write(p, o, from, to, i == 0 ? 0 : sums[side][i - 1]);
        } else {
            for (u32 n = i; n < 2 * p.num; n += TW_SEQUENCES_THREADS)
                o.table[n] = {0, n == 0 ? o.tokens : 0, 0, 0, n == 0 ? 0 : all, 0, 0, TW_ATTN_GAP};
        }
        for (u32 n = i; n < o.extra; n += TW_SEQUENCES_THREADS)
            o.table[2 * p.num + n] = {0, 0, 0, 0, all + n, 0, 0, TW_ATTN_GAP};
    }
}

// Results of a launch.
enum : u32 { TW_REFUSED = 5 };
struct TwRefuse {
    const u32* refused;  // of tw_attn_sequences
    unsigned short* to[TW_REFUSED];
    u64 num[TW_REFUSED];  // 16-bit words of each
};

// Fills the results with NaN if the launch's offsets cannot be used.
extern "C" __global__ void __launch_bounds__(256) tw_attn_refuse(const __grid_constant__ TwRefuse p) {
    if (*p.refused == 0) return;
    const u64 first = (u64)blockIdx.x * 256 + threadIdx.x, step = (u64)gridDim.x * 256;
    for (u32 r = 0; r < TW_REFUSED; r++)
        for (u64 i = first; i < p.num[r]; i += step) p.to[r][i] = 0xffff;
}
