// Attention in f32 arithmetic without matrix instructions, for any types and head dimensions.
//
// Shapes, tables and results: as in sm80_attention.cu. Types: q, k, v of TW_ATTN_IN; out, d_out and
// gradients of TW_ATTN_OUT: 0 bf16, 1 f16, 2 f32. No kernel has dynamic shared memory. Launch:
//   tw_attn_fwd, tw_attn_dq   tiles * Hq blocks of 128 threads, for tiles of 4 rows
//   tw_attn_dkv               tiles * Hkv blocks of 128 threads, for tiles of 4 rows
//   tw_attn_delta             a warp for each row and head, 256 threads
//   tw_attn_dbias             a thread for each element of the bias, 256 threads
//   tw_attn_dsink             Hq blocks of 256 threads
// Algorithm: a warp computes a row; each lane takes every 32nd row of the other side, then every
// 32nd column of the sum. Slow and simple; the order of sums is fixed. The bound is one block on a
// multiprocessor: without it ptxas spills to reach a higher occupancy.

#include "common.cuh"

#ifndef TW_ATTN_IN
#define TW_ATTN_IN 2
#endif
#ifndef TW_ATTN_OUT
#define TW_ATTN_OUT 2
#endif
// The type of dk and dv: f32 where they are parts of a sum.
#ifndef TW_ATTN_DKV
#define TW_ATTN_DKV TW_ATTN_OUT
#endif

enum : u32 { TW_P_ROWS = 4, TW_P_DQ = (TW_DQ + 31) / 32, TW_P_DV = (TW_DV + 31) / 32, TW_ALL = 0xffffffffu };

template <u32 TYPE> __device__ __forceinline__ float tw_get(const void* p, i64 at) {
    if (TYPE == 2) return ((const float*)p)[at];
    const u16 h = ((const u16*)p)[at];
    return TYPE == 0 ? __uint_as_float((u32)h << 16) : cvt_f32_f16(h);
}

template <u32 TYPE> __device__ __forceinline__ void tw_put_as(void* p, i64 at, float x) {
    if (TYPE == 2) ((float*)p)[at] = x;
    else ((u16*)p)[at] = (u16)(TYPE == 0 ? cvt_rn_bf16x2_f32(x, 0.0f) : cvt_rn_f16x2_f32(x, 0.0f));
}
__device__ __forceinline__ void tw_put(void* p, i64 at, float x) { tw_put_as<TW_ATTN_OUT>(p, at, x); }
__device__ __forceinline__ void tw_grad(void* p, i64 at, float x) { tw_put_as<TW_ATTN_DKV>(p, at, x); }

__device__ __forceinline__ float tw_warp_sum(float x) {
#pragma unroll
    for (u32 by = 16; by > 0; by /= 2) x += __shfl_xor_sync(TW_ALL, x, by);
    return x;
}
__device__ __forceinline__ float tw_warp_max(float x) {
#pragma unroll
    for (u32 by = 16; by > 0; by /= 2) x = fmaxf(x, __shfl_xor_sync(TW_ALL, x, by));
    return x;
}

// A query and a key: local rows, positions in their sequence, global rows, heads.
struct TwPair {
    u32 q, kv, i, j, q_global, kv_global, head, kv_head;
};

__device__ __forceinline__ float tw_p_score(const TwAttn& a, const TwPair& p, float& slope) {
    const i64 q = (i64)p.q * a.ld_q + p.head * TW_DQ, k = (i64)p.kv * a.ld_k + p.kv_head * TW_DQ;
    float sum = 0.0f;
#pragma unroll 4
    for (u32 c = 0; c < TW_DQ; c++) sum = fmaf(tw_get<TW_ATTN_IN>(a.q, q + c), tw_get<TW_ATTN_IN>(a.k, k + c), sum);
    return tw_score(a, sum, tw_bias(a, p.head, p.i, p.j), slope);
}

// The probability (`kept`: after dropout) of a pair, and the gradient of its score.
__device__ __forceinline__ void tw_p_grad(const TwAttn& a, const TwPair& p, u64 seed, float& kept, float& ds,
                                          float& slope) {
    const i64 at = (i64)p.head * a.tokens_q + p.q;
    const float lse = a.lse[at], z = tw_p_score(a, p, slope);
    const float prob = lse == -TW_INF ? 0.0f : expf(z - lse);
    const i64 o = (i64)p.q * a.ld_o + p.head * TW_DV, v = (i64)p.kv * a.ld_v + p.kv_head * TW_DV;
    float dp = 0.0f;
#pragma unroll 4
    for (u32 c = 0; c < TW_DV; c++) dp = fmaf(tw_get<TW_ATTN_OUT>(a.d_out, o + c), tw_get<TW_ATTN_IN>(a.v, v + c), dp);
    float keep = 1.0f;
    if (a.drop_below) keep = tw_kept(a, seed, p.head, p.q_global, p.kv_global) ? a.keep : 0.0f;
    kept = prob * keep;
    // Hidden pairs have probability 0; times an infinite dp they would give NaN.
    ds = prob == 0.0f ? 0.0f : prob * (dp * keep - a.delta[at]);
}

// The row of this warp.
struct TwMine {
    TwSeg own;
    u32 row, pos, global, head;
    bool there;
};

__device__ __forceinline__ TwMine tw_mine(const TwAttn& a, u32 heads) {
    const u32 t = blockIdx.x / heads;
    TwMine m;
    m.own = tw_own(a.own, a.num_own, t), m.head = blockIdx.x % heads;
    const u32 at = (t - m.own.tile) * TW_P_ROWS + threadIdx.x / 32;
    m.there = at < m.own.len;
    m.row = m.own.row + at, m.pos = m.own.pos + at, m.global = m.own.global + at;
    return m;
}

// Calls f(other segment, index in it, whether it is visible, number of lanes in use) for 32 rows of
// the other side at a time.
template <bool QUERIES, class F> __device__ __forceinline__ void tw_others(const TwAttn& a, const TwMine& m, F f) {
    if (m.own.shift == TW_ATTN_GAP) return;
    const int at = (int)m.pos + (QUERIES ? m.own.shift : -m.own.shift);
    const int lo = at - (QUERIES ? a.left : a.right), hi = at + (QUERIES ? a.right : a.left);
    for (u32 o = m.own.first; o < m.own.end; o++) {
        const TwSeg s = a.other[o];
        const int first = max(lo - (int)s.pos, 0), last = min(hi - (int)s.pos, (int)s.len - 1);
        for (int c = first; c <= last; c += 32) {
            const int mine = c + (int)(threadIdx.x % 32);
            f(s, (u32)min(mine, last), mine <= last, (u32)min(last - c + 1, 32));
        }
    }
}

// The forward pass: out and lse of one query row a warp.
extern "C" __global__ void __launch_bounds__(128, 1) tw_attn_fwd(const __grid_constant__ TwAttn a) {
    const TwMine m = tw_mine(a, a.heads_q);
    if (!m.there) return;
    const u32 lane = threadIdx.x % 32, kv_head = m.head / (a.heads_q / a.heads_kv);
    const u64 seed = tw_drop_seed(a);
    float top = -TW_INF, sum = 0.0f, acc[TW_P_DV] = {};
    tw_others<true>(a, m, [&](const TwSeg& s, u32 at, bool visible, u32 num) {
        const TwPair pair = {m.row, s.row + at, m.pos, s.pos + at, m.global, s.global + at, m.head, kv_head};
        float slope, z = tw_p_score(a, pair, slope);
        if (!visible) z = -TW_INF;
        const float old = top;
        top = fmaxf(top, tw_warp_max(z));
        // No key is visible yet: -inf minus -inf would be NaN.
        const float base = top == -TW_INF ? 0.0f : top, shrink = expf(old - base);
        float p = expf(z - base);
        sum = fmaf(sum, shrink, tw_warp_sum(p));
        if (a.drop_below && !tw_kept(a, seed, m.head, m.global, pair.kv_global)) p = 0.0f;
#pragma unroll
        for (u32 i = 0; i < TW_P_DV; i++) acc[i] *= shrink;
        for (u32 l = 0; l < num; l++) {
            const float w = __shfl_sync(TW_ALL, p, l);
            const u32 row = __shfl_sync(TW_ALL, pair.kv, l);
            const i64 v = (i64)row * a.ld_v + kv_head * TW_DV + lane;
#pragma unroll
            for (u32 i = 0; i < TW_P_DV; i++)
                if (lane + 32 * i < TW_DV) acc[i] = fmaf(w, tw_get<TW_ATTN_IN>(a.v, v + 32 * i), acc[i]);
        }
    });
    const bool sink = a.sink && m.own.shift != TW_ATTN_GAP;
    const float extra = sink ? a.sink[a.first_head + m.head] : -TW_INF, most = fmaxf(top, extra);
    // A NaN score does not show in the maximum, but in the sum.
    const bool none = top == -TW_INF && sum == 0.0f, empty = none && !sink;
    const float base = most == -TW_INF ? 0.0f : most;
    const float part = none ? 0.0f : expf((top == -TW_INF ? 0.0f : top) - base);
    const float total = sum * part + (sink ? expf(extra - base) : 0.0f);
    const bool nothing = empty || (most == -TW_INF && sum == 0.0f);
    if (lane == 0) a.lse[(i64)m.head * a.tokens_q + m.row] = nothing ? -TW_INF : base + logf(total);
    const float f = nothing ? 0.0f : part / total * a.keep;
#pragma unroll
    for (u32 i = 0; i < TW_P_DV; i++)
        if (lane + 32 * i < TW_DV) tw_put(a.out, (i64)m.row * a.ld_o + m.head * TW_DV + lane + 32 * i, acc[i] * f);
}

// The gradient of one query row a warp.
extern "C" __global__ void __launch_bounds__(128, 1) tw_attn_dq(const __grid_constant__ TwAttn a) {
    const TwMine m = tw_mine(a, a.heads_q);
    if (!m.there) return;
    const u32 lane = threadIdx.x % 32, kv_head = m.head / (a.heads_q / a.heads_kv);
    const u64 seed = tw_drop_seed(a);
    float acc[TW_P_DQ] = {};
    tw_others<true>(a, m, [&](const TwSeg& s, u32 at, bool visible, u32 num) {
        const TwPair pair = {m.row, s.row + at, m.pos, s.pos + at, m.global, s.global + at, m.head, kv_head};
        float kept, ds, slope;
        tw_p_grad(a, pair, seed, kept, ds, slope);
        ds = visible ? ds * slope : 0.0f;
        for (u32 l = 0; l < num; l++) {
            const float w = __shfl_sync(TW_ALL, ds, l);
            const u32 row = __shfl_sync(TW_ALL, pair.kv, l);
            const i64 k = (i64)row * a.ld_k + kv_head * TW_DQ + lane;
#pragma unroll
            for (u32 i = 0; i < TW_P_DQ; i++)
                if (lane + 32 * i < TW_DQ) acc[i] = fmaf(w, tw_get<TW_ATTN_IN>(a.k, k + 32 * i), acc[i]);
        }
    });
#pragma unroll
    for (u32 i = 0; i < TW_P_DQ; i++)
        if (lane + 32 * i < TW_DQ) tw_put(a.dq, (i64)m.row * a.ld_q + m.head * TW_DQ + lane + 32 * i, acc[i] * a.scale);
}

// The gradients of one key and value row a warp, summed over the query heads of its group.
extern "C" __global__ void __launch_bounds__(128, 1) tw_attn_dkv(const __grid_constant__ TwAttn a) {
    const TwMine m = tw_mine(a, a.heads_kv);
    if (!m.there) return;
    const u32 lane = threadIdx.x % 32, group = a.heads_q / a.heads_kv;
    const u64 seed = tw_drop_seed(a);
    float dk[TW_P_DQ] = {}, dv[TW_P_DV] = {};
#pragma unroll 1
    for (u32 head = m.head * group; head < (m.head + 1) * group; head++) {
        tw_others<false>(a, m, [&](const TwSeg& s, u32 at, bool visible, u32 num) {
            const TwPair pair = {s.row + at, m.row, s.pos + at, m.pos, s.global + at, m.global, head, m.head};
            float kept, ds, slope;
            tw_p_grad(a, pair, seed, kept, ds, slope);
            ds = visible ? ds * slope : 0.0f, kept = visible ? kept : 0.0f;
            for (u32 l = 0; l < num; l++) {
                const float wk = __shfl_sync(TW_ALL, ds, l), wv = __shfl_sync(TW_ALL, kept, l);
                const u32 row = __shfl_sync(TW_ALL, pair.q, l);
                const i64 q = (i64)row * a.ld_q + head * TW_DQ + lane, o = (i64)row * a.ld_o + head * TW_DV + lane;
#pragma unroll
                for (u32 i = 0; i < TW_P_DQ; i++)
                    if (lane + 32 * i < TW_DQ) dk[i] = fmaf(wk, tw_get<TW_ATTN_IN>(a.q, q + 32 * i), dk[i]);
#pragma unroll
                for (u32 i = 0; i < TW_P_DV; i++)
                    if (lane + 32 * i < TW_DV) dv[i] = fmaf(wv, tw_get<TW_ATTN_OUT>(a.d_out, o + 32 * i), dv[i]);
            }
        });
    }
#pragma unroll
    for (u32 i = 0; i < TW_P_DQ; i++)
        if (lane + 32 * i < TW_DQ) tw_grad(a.dk, (i64)m.row * a.ld_k + m.head * TW_DQ + lane + 32 * i, dk[i] * a.scale);
#pragma unroll
    for (u32 i = 0; i < TW_P_DV; i++)
        if (lane + 32 * i < TW_DV) tw_grad(a.dv, (i64)m.row * a.ld_v + m.head * TW_DV + lane + 32 * i, dv[i]);
}

// delta = <d_out, out> of each row and head.
extern "C" __global__ void __launch_bounds__(256) tw_attn_delta(const __grid_constant__ TwAttn a) {
    const u64 i = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (i >= (u64)a.tokens_q * a.heads_q) return;
    const u32 row = (u32)(i / a.heads_q), head = (u32)(i % a.heads_q);
    float sum = 0.0f;
    for (u32 c = threadIdx.x % 32; c < TW_DV; c += 32) {
        const i64 e = (i64)row * a.ld_o + head * TW_DV + c;
        sum = fmaf(tw_get<TW_ATTN_OUT>(a.out, e), tw_get<TW_ATTN_OUT>(a.d_out, e), sum);
    }
#pragma unroll
    for (u32 by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    if (threadIdx.x % 32 == 0) a.delta[(i64)head * a.tokens_q + row] = sum;
}

// The gradient of the bias: sums over all pairs (of all sequences, and of all heads if they share
// the bias) that used an element.
extern "C" __global__ void __launch_bounds__(256) tw_attn_dbias(const __grid_constant__ TwAttn a) {
    const u64 e = (u64)blockIdx.x * 256 + threadIdx.x, per_head = (u64)a.bias_sq * a.bias_skv;
    if (e >= a.bias_heads * per_head) return;
    const u32 of = (u32)(e / per_head), i = (u32)(e % per_head / a.bias_skv), j = (u32)(e % a.bias_skv);
    const u64 seed = tw_drop_seed(a);
    float sum = 0.0f;
    for (u32 n = 0; n < a.num_own; n++) {
        const TwSeg own = a.own[n];
        if (own.shift == TW_ATTN_GAP || i < own.pos || i - own.pos >= own.len) continue;
        const int behind = (int)j - (int)i - own.shift;
        if (behind < -a.left || behind > a.right) continue;
        for (u32 o = own.first; o < own.end; o++) {
            const TwSeg s = a.other[o];
            if (j < s.pos || j - s.pos >= s.len) continue;
            for (u32 head = 0; head < a.heads_q; head++) {
                if (a.bias_heads != 1 && a.first_head + head != of) continue;
                const u32 q = i - own.pos, k = j - s.pos, kv_head = head / (a.heads_q / a.heads_kv);
                float kept, ds, slope;
                tw_p_grad(a, {own.row + q, s.row + k, i, j, own.global + q, s.global + k, head, kv_head}, seed, kept,
                          ds, slope);
                sum += ds;
            }
        }
    }
    a.dbias[e] = sum;
}

// The gradient of the sink of one head.
extern "C" __global__ void __launch_bounds__(256) tw_attn_dsink(const __grid_constant__ TwAttn a) {
    __shared__ float sums[256];
    const u32 head = blockIdx.x;
    const float sink = a.sink[a.first_head + head];
    float sum = 0.0f;
    for (u32 r = threadIdx.x; r < a.tokens_q; r += 256) {
        const i64 at = (i64)head * a.tokens_q + r;
        if (a.lse[at] > -TW_INF) sum = fmaf(expf(sink - a.lse[at]), a.delta[at], sum);
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (u32 n = 128; n > 0; n /= 2) {
        if (threadIdx.x < n) sums[threadIdx.x] += sums[threadIdx.x + n];
        __syncthreads();
    }
    if (threadIdx.x == 0) a.dsink[a.first_head + head] = -sums[0];
}

// Merges attention results over disjoint parts of the keys, in f32 and normalised: lse = ln(sum_p
// exp(lse_p)), out = sum_p exp(lse_p - lse) out_p, in the order of parts. A sink must be included
// in one part only. Launch: a warp for each row and head, 256 threads.
struct TwMerge {
    const float* parts;  // [num, tokens_q, Hq, dv]
    const float* lses;   // [num, Hq, tokens_q]
    void* out;           // [tokens_q, Hq, dv]
    float* lse;          // [Hq, tokens_q]
    u32 num, tokens_q, heads_q, pad;
};

extern "C" __global__ void __launch_bounds__(256) tw_attn_merge(const __grid_constant__ TwMerge a) {
    const u64 i = (u64)blockIdx.x * 8 + threadIdx.x / 32, rows = (u64)a.tokens_q * a.heads_q;
    if (i >= rows) return;
    const u64 at = i % a.heads_q * a.tokens_q + i / a.heads_q;
    float top = -TW_INF, total = 0.0f;
    for (u32 p = 0; p < a.num; p++) top = fmaxf(top, a.lses[p * rows + at]);
    const float base = top == -TW_INF ? 0.0f : top;
    for (u32 p = 0; p < a.num; p++) total += expf(a.lses[p * rows + at] - base);
    const float lse = total == 0.0f ? -TW_INF : base + logf(total);
    if (threadIdx.x % 32 == 0) a.lse[at] = lse;
    for (u32 c = threadIdx.x % 32; c < TW_DV; c += 32) {
        float sum = 0.0f;
        for (u32 p = 0; p < a.num; p++) {
            const float weight = expf(a.lses[p * rows + at] - base);
            sum = fmaf(weight, a.parts[(p * rows + i) * TW_DV + c], sum);
        }
        tw_put(a.out, (i64)i * TW_DV + c, total == 0.0f ? 0.0f : sum / total);
    }
}
