// Shared by all attention kernels: arguments, tables of segments, the walk over keys, ends of rows.

#pragma once

#include "../ptx/mma.cuh"
#include "../ptx/math.cuh"

#ifndef TW_ATTN_TYPE
#define TW_ATTN_TYPE 0  // 0 bf16, 1 f16
#endif
#ifndef TW_ATTN_DQK
#define TW_ATTN_DQK 128
#endif
#ifndef TW_ATTN_DV
#define TW_ATTN_DV 128
#endif

// A segment: contiguous rows of the tensors that belong to one sequence. A kernel works on tiles of
// "own" segments; each own segment names the range of "other" segments that its rows may attend to,
// in the order of summation.
struct TwSeg {
    u32 row, len;    // rows of the local tensor
    u32 pos;         // of its first row in the sequence
    u32 global;      // of its first row in the global tensors
    u32 tile;        // own: tiles of the own segments before it
    u32 first, end;  // own: the others' indices
    // Own: `skv - sq` of the sequence (query i is at key position i + shift), or TW_ATTN_GAP if the
    // rows belong to no sequence.
    int shift;
};
enum : int { TW_ATTN_GAP = -0x7fffffff - 1 };

// One attention. Rows are `ld_*` elements apart; heads are adjacent within a row.
struct TwAttn {
    const void *q, *k, *v;
    void* out;           // [.., Hq, dv]; the backward pass reads it
    float* lse;          // [Hq, tokens_q], natural logarithm; the backward pass reads it
    const float* bias;   // [heads, sq, skv], or null
    const float* sink;   // [Hq], or null
    const TwSeg* own;    // of queries (forward, dq) or keys (dk, dv)
    const TwSeg* other;  // of the other side
    // The backward pass only.
    const void* d_out;
    float* delta;  // [Hq, tokens_q]
    void *dq, *dk, *dv;
    float *dbias, *dsink;
    i64 ld_q, ld_k, ld_v, ld_o;
    u64 drop_seed;   // of `tilewire_core::Rng`
    u64 drop_below;  // a pair is dropped if 53 bits of its number are below; 0 is no dropout
    u32 num_own, tiles, tokens_q, heads_q, heads_kv;
    u32 first_head;            // global number of the first query head
    u32 bias_heads, bias_sq, bias_skv;
    int left, right;           // of the window, at most 2^30
    float scale, softcap;      // softcap 0 is none
    float keep;                // factor of what dropout keeps
    u32 out_type;              // of `out` in the forward pass: 0 bf16, 1 f16, 2 f32
    u32 dqk, dv_dim, in_type;  // plain kernels only
};

#define TW_LOG2E 1.4426950408889634f
#define TW_LN2 0.6931471805599453f
#define TW_INF __uint_as_float(0x7f800000u)

// The index of the one of `num` own segments that tile `t` is of, by bisection.
__device__ __forceinline__ u32 tw_own_index(const TwSeg* own, u32 num, u32 t) {
    u32 lo = 0, hi = num;
    while (hi - lo > 1) {
        const u32 mid = (lo + hi) / 2;
        if (own[mid].tile <= t) lo = mid;
        else hi = mid;
    }
    return lo;
}
__device__ __forceinline__ TwSeg tw_own(const TwSeg* own, u32 num, u32 t) {
    return own[tw_own_index(own, num, t)];
}

// A tile of rows of the other side.
struct TwTile {
    u32 row, num;  // rows of the local tensor; none behind the last tile
    u32 global;
    int pos;
    u32 head;
};

// Iterates over the other side's tiles with positions in lo..end. The state is in shared memory to
// save registers. Thread 0 calls step(); at least one barrier separates that from reads of the
// tile. Tile n is at index n % 4: while tile n is in use and n + 1 is being loaded, n + 2 is made.
struct TwWalk {
    TwTile tiles[4];
    u32 seg, rest, heads;
    int lo, end;

    template <u32 ROWS> __device__ __forceinline__ void step(const TwSeg* other, const TwSeg& own, u32 n) {
        TwTile t = tiles[(n - 1) % 4];
        t.row += ROWS, t.global += ROWS, t.pos += ROWS;
        u32 left = rest - min(rest, ROWS);
        while (left == 0) {
            if (seg == own.end) {
                if (heads == 0) break;
                heads--, t.head++, seg = own.first;
                continue;
            }
            const TwSeg s = other[seg++];
            const int first = max(lo - (int)s.pos, 0), last = min(end - (int)s.pos, (int)s.len);
            if (first >= last) continue;
            // Tiles begin at the same rows, whatever the mask hides, so that sums keep their order.
            const u32 skip = (u32)first / ROWS * ROWS;
            left = (u32)last - skip, t.row = s.row + skip, t.global = s.global + skip;
            t.pos = (int)(s.pos + skip);
        }
        rest = left, t.num = min(left, ROWS);
        tiles[n % 4] = t;
    }

    // Makes the first two tiles of `num` heads from `head` on, one head after the other.
    template <u32 ROWS>
    __device__ __forceinline__ void begin(const TwSeg* other, const TwSeg& own, int from, int to, u32 head, u32 num) {
        seg = own.first, rest = 0, lo = from, end = to, heads = num - 1;
        tiles[3] = {0, 0, 0, 0, head};
        step<ROWS>(other, own, 4);
        step<ROWS>(other, own, 5);
    }
};

__device__ __forceinline__ u32 tw_pair(float low, float high, u32 type) {
    return type == 0 ? cvt_rn_bf16x2_f32(low, high) : cvt_rn_f16x2_f32(low, high);
}

// Sum and maximum over the four lanes that share a row of an accumulator.
__device__ __forceinline__ float tw_quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float tw_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// What a row ends with: the factor of its sums of values, and lse.
struct TwFinished {
    float factor, lse;
};

// `mine`: the row's largest score in base 2, or -inf; `sum`: of the exponentials relative to it;
// `sink`: in base 2, or -inf.
__device__ __forceinline__ TwFinished tw_finish_row(float mine, float sum, float sink) {
    const float top = fmaxf(mine, sink);
    // A NaN score does not show in the maximum, but in the sum.
    const bool empty = top == -TW_INF && sum == 0.0f;
    const float base = top == -TW_INF ? 0.0f : top;
    const float part = mine == -TW_INF && sum == 0.0f ? 0.0f : exp2f((mine == -TW_INF ? 0.0f : mine) - base);
    const float total = sum * part + exp2f(sink - base);
    return {empty ? 0.0f : part / total, empty ? -TW_INF : (base + log2f(total)) * TW_LN2};
}

// Segments as a kernel argument, so that a launch contains its tables: they are queued and captured
// with it, and never copied from the host's memory.
enum : u32 { TW_TABLE = 96 };
struct TwTable {
    TwSeg* to;
    u32 num, pad;
    TwSeg segs[TW_TABLE];
};

// Copies up to 96 segments to a table in device memory. Grid: 1 block of 96 threads.
extern "C" __global__ void __launch_bounds__(96) tw_attn_table(const __grid_constant__ TwTable t) {
    if (threadIdx.x < t.num) t.to[threadIdx.x] = t.segs[threadIdx.x];
}
