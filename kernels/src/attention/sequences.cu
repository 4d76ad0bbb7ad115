// Tables of segments from offsets in device memory: a captured launch follows documents that
// change. The kernels of attention read these tables as those that a launch contains.
//
// Each side of a launch has some parts of the rows of the global tensors, in the order in which
// sums take them: one part, all rows, where attention is of one rank. A table has a segment for
// each part of each sequence, and of the rows behind it that belong to none; behind these come
// segments without rows. The grid of attention is fixed when its launch is queued: it has as many
// tiles as any offsets need. Each tile that these offsets do not need finds a segment without rows,
// which has its number, and with it no row to compute.
//
// Offsets that cannot be used are marked, for this launch and for the plan. Their tables have one
// segment for each part, of no sequence: nothing reads or writes outside of the tensors.
// `tw_attn_refuse` then fills the results with NaN.
//
// Launch: tw_attn_sequences has 1 block of TW_SEQUENCES_THREADS threads. tw_attn_refuse has any
// blocks of 256 threads.

#include "segments.cuh"

enum : u32 { TW_SEQUENCES_THREADS = 256, TW_PARTS = 64 };

// Rows that are neighbours in the global tensors and in those of a launch.
struct TwShard {
    u32 global, row;  // the first row in each
    u32 len;
};

// Where the rows of one side lie.
struct TwOffsets {
    const int* cu;  // [num + 1]: rows of all sequences before each, without padding
    const int* at;  // [num + 1]: first row of each, with padding; `cu` where there is none
    TwSeg* table;   // [segs]
    u32 tokens;     // rows of the global tensors
    u32 tile;       // rows of a tile
    u32 segs;       // twice as many as any offsets need
    u32 longest;    // most rows of a sequence
    u32 num_parts, pad;
    TwShard parts[TW_PARTS];  // apart from each other
};

struct TwSequences {
    TwOffsets q, kv;
    u32* refused;  // [1]: 1 if the offsets of this launch cannot be used, else 0
    u32* any;      // [1]: 1 from the first launch on whose offsets cannot be used
    u32 num;       // sequences, at least one
    u32 pad;
};

// Rows of the global tensors.
struct TwSpan {
    u32 first, end;
};

// The rows of sequence `s`.
__device__ __forceinline__ TwSpan tw_span(const TwOffsets& o, u32 s) {
    const u32 first = (u32)o.at[s];
    return {first, first + (u32)(o.cu[s + 1] - o.cu[s])};
}

// The rows behind those of sequence `s` that belong to none.
__device__ __forceinline__ TwSpan tw_behind(const TwOffsets& o, u32 s, u32 num) {
    return {tw_span(o, s).end, s + 1 < num ? (u32)o.at[s + 1] : o.tokens};
}

// Whether the offsets of sequence `s` can be used if those before it can.
__device__ __forceinline__ bool tw_usable(const TwOffsets& o, u32 s) {
    if (s == 0 && (o.cu[0] != 0 || o.at[0] != 0)) return false;
    const i64 len = (i64)o.cu[s + 1] - o.cu[s], space = (i64)o.at[s + 1] - o.at[s];
    return len >= 0 && len <= space && o.at[s + 1] <= (i64)o.tokens && len <= (i64)o.longest;
}

// Segments, and their tiles.
struct TwCount {
    u32 segs, tiles;
};

// Calls `f` with each part of the rows `span`.
template <class F> __device__ __forceinline__ void tw_parts(const TwOffsets& o, TwSpan span, F f) {
    for (u32 i = 0; i < o.num_parts; i++) {
        const TwShard part = o.parts[i];
        const u32 from = max(span.first, part.global), to = min(span.end, part.global + part.len);
        if (from < to) f(TwShard{from, part.row + (from - part.global), to - from});
    }
}

__device__ __forceinline__ void tw_add(const TwOffsets& o, u32 rows, TwCount& n) {
    n.segs++, n.tiles += rows / o.tile + (rows % o.tile != 0 ? 1 : 0);
}

// Counts the segments of the rows `span`.
__device__ __forceinline__ void tw_count(const TwOffsets& o, TwSpan span, TwCount& n) {
    tw_parts(o, span, [&](const TwShard& part) { tw_add(o, part.len, n); });
}

// Writes the segments of the rows `span` behind `n` others. Those of a sequence meet the segments
// `other` of the other side.
__device__ __forceinline__ void tw_write(const TwOffsets& o, TwSpan span, TwCount& n, TwSpan other, int shift) {
    tw_parts(o, span, [&](const TwShard& part) {
        const u32 pos = shift == TW_ATTN_GAP ? 0 : part.global - span.first;
        o.table[n.segs] = {part.row, part.len, pos, part.global, n.tiles, other.first, other.end, shift};
        tw_add(o, part.len, n);
    });
}

// Writes the segments of sequence `s` of both sides, and of the rows behind it.
__device__ __forceinline__ void tw_sequence(const TwSequences& p, u32 s, TwCount& q, TwCount& kv) {
    const TwSpan of_q = tw_span(p.q, s), of_kv = tw_span(p.kv, s);
    const int shift = (int)(of_kv.end - of_kv.first) - (int)(of_q.end - of_q.first);
    TwCount q_end = q, kv_end = kv;
    tw_count(p.q, of_q, q_end);
    tw_count(p.kv, of_kv, kv_end);
    const TwSpan qs = {q.segs, q_end.segs}, kvs = {kv.segs, kv_end.segs};
    tw_write(p.q, of_q, q, kvs, shift);
    tw_write(p.kv, of_kv, kv, qs, shift);
    tw_write(p.q, tw_behind(p.q, s, p.num), q, {0, 0}, TW_ATTN_GAP);
    tw_write(p.kv, tw_behind(p.kv, s, p.num), kv, {0, 0}, TW_ATTN_GAP);
}

extern "C" __global__ void __launch_bounds__(TW_SEQUENCES_THREADS) tw_attn_sequences(const __grid_constant__ TwSequences p) {
    // Segments and tiles of queries, then those of keys.
    __shared__ u32 sums[4][TW_SEQUENCES_THREADS];
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
    TwCount all[2];
    for (u32 side = 0; side < 2; side++) {
        const TwOffsets& o = side == 0 ? p.q : p.kv;
        TwCount n = {0, 0};
        for (u32 s = from; s < to && bad == 0; s++) {
            tw_count(o, tw_span(o, s), n);
            tw_count(o, tw_behind(o, s, p.num), n);
        }
        sums[2 * side][i] = n.segs, sums[2 * side + 1][i] = n.tiles;
        all[side] = {0, 0};
        if (bad != 0 && i == 0) tw_write(o, {0, o.tokens}, all[side], {0, 0}, TW_ATTN_GAP);
        else if (bad != 0) tw_count(o, {0, o.tokens}, all[side]);
    }
    __syncthreads();
    // Sums over all threads up to each.
    for (u32 by = 1; by < TW_SEQUENCES_THREADS; by *= 2) {
        u32 before[4];
        for (u32 n = 0; n < 4; n++) before[n] = i >= by ? sums[n][i - by] : 0;
        __syncthreads();
        for (u32 n = 0; n < 4; n++) sums[n][i] += before[n];
        __syncthreads();
    }
    if (bad == 0) {
        TwCount q = {0, 0}, kv = {0, 0};
        if (i != 0) q = {sums[0][i - 1], sums[1][i - 1]}, kv = {sums[2][i - 1], sums[3][i - 1]};
        for (u32 s = from; s < to; s++) tw_sequence(p, s, q, kv);
        const u32 last = TW_SEQUENCES_THREADS - 1;
        all[0] = {sums[0][last], sums[1][last]}, all[1] = {sums[2][last], sums[3][last]};
    }
    for (u32 side = 0; side < 2; side++) {
        const TwOffsets& o = side == 0 ? p.q : p.kv;
        for (u32 n = all[side].segs + i; n < o.segs; n += TW_SEQUENCES_THREADS)
            o.table[n] = {0, 0, 0, 0, all[side].tiles + (n - all[side].segs), 0, 0, TW_ATTN_GAP};
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
