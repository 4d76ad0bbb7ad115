// Optional features of all attention kernels: softcap, bias, dropout, scales that are not positive.

#pragma once

#include "../ptx/math.cuh"
#include "segments.cuh"

// 1: code for them is compiled in ("extras").
#ifndef TW_ATTN_EXTRA
#define TW_ATTN_EXTRA 0
#endif

// The score of a pair from its product, and the derivative of the score by product times scale.
__device__ __forceinline__ float tw_score(const TwAttn& a, float product, const float* bias, float& slope) {
    float z = product * a.scale;
    slope = 1.0f;
    if (a.softcap > 0) {
        const float t = tanhf(z / a.softcap);
        z = a.softcap * t, slope = 1.0f - t * t;
    }
    return bias ? z + *bias : z;
}

// The same for products of 16-bit operands: a softcap of which tanh has an error of a few 2^-23,
// and scores in base 2. Kernels ask once for a tile whether there is one, and not for each element:
// with a branch there, no element's loads and chains overlap with those of another.
struct TwSoftcap {
    float in, out;

    __device__ __forceinline__ explicit TwSoftcap(const TwAttn& a) : in(a.scale / a.softcap * (2.0f * TW_LOG2E)), out(a.softcap * TW_LOG2E) {}

    // tanh(x) = 1 - 2 / (1 + e^2x).
    __device__ __forceinline__ float score(float product, float& slope) const {
        const float t = 1.0f - 2.0f * rcp_approx_ftz_f32(1.0f + ex2_approx_ftz_f32(in * product));
        slope = fmaf(-t, t, 1.0f);
        return out * t;
    }
};

// SplitMix64 finaliser, as in `tilewire_core::Rng`.
__device__ __forceinline__ u64 tw_mix(u64 z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

// What dropout mixes of a pair of global rows, and whether it keeps them; `seed` is mixed.
#define TW_GOLDEN 0x9e3779b97f4a7c15ull
__device__ __forceinline__ u64 tw_drop_word(const TwAttn& a, u64 seed, u32 head, u32 q_row, u32 kv_row) {
    const u64 at = (u64)(a.first_head + head) << 48 | (u64)q_row << 24 | kv_row;
    return seed + at * TW_GOLDEN + 1;
}
__device__ __forceinline__ bool tw_keeps(const TwAttn& a, u64 word) {
    return tw_mix(word) >> 11 >= a.drop_below;
}
__device__ __forceinline__ bool tw_kept(const TwAttn& a, u64 seed, u32 head, u32 q_row, u32 kv_row) {
    return tw_keeps(a, tw_drop_word(a, seed, head, q_row, kv_row));
}
__device__ __forceinline__ u64 tw_drop_seed(const TwAttn& a) {
    return tw_mix(a.drop_seed ^ TW_GOLDEN);
}

// The bias of a pair of positions, or null.
__device__ __forceinline__ const float* tw_bias(const TwAttn& a, u32 head, u32 i, u32 j) {
    const u32 h = a.bias_heads == 1 ? 0 : a.first_head + head;
    return a.bias ? a.bias + ((i64)h * a.bias_sq + i) * a.bias_skv + j : nullptr;
}

// A tile of pairs of queries and keys, with extras.
struct TwPairTile {
    u32 head;
    // Of the first query and the first key: positions in the sequence, rows of the global tensors.
    u32 pos_q, pos_kv, global_q, global_kv;
    // So many are there.
    u32 num_q, num_kv;
};

// A lane's elements of a tile of pairs, as wgmma has its sums: element e is of row `row` +
// down(e) and of column `col` + right(e). Rows are QUERIES, columns keys, or the other way round.
template <bool QUERIES> struct TwLanePairs {
    const TwAttn& a;
    const TwPairTile& at;
    u32 row, col;

    static __device__ __forceinline__ u32 down(u32 e) { return e / 2 % 2 * 8; }
    static __device__ __forceinline__ u32 right(u32 e) { return e / 4 * 8 + e % 2; }

    // Of element e: its query and its key, counted from the lane's first ones.
    static __device__ __forceinline__ u32 query(u32 e) { return QUERIES ? down(e) : right(e); }
    static __device__ __forceinline__ u32 key(u32 e) { return QUERIES ? right(e) : down(e); }
    __device__ __forceinline__ u32 first_query() const { return QUERIES ? row : col; }
    __device__ __forceinline__ u32 first_key() const { return QUERIES ? col : row; }

    // Turns products into scores in base 2; `slope(e, d)` gets the derivative of the score by
    // product times scale.
    template <u32 NUM, class Slope> __device__ __forceinline__ void scores(float (&s)[NUM], const Slope& slope) const {
        if (a.softcap > 0) {
            const TwSoftcap cap(a);
#pragma unroll
            for (u32 e = 0; e < NUM; e++) {
                float d;
                s[e] = cap.score(s[e], d);
                slope(e, d);
            }
        } else {
            const float factor = a.scale * TW_LOG2E;
#pragma unroll
            for (u32 e = 0; e < NUM; e++) slope(e, 1.0f), s[e] *= factor;
        }
        if (a.bias) add_bias(s);
    }

    template <u32 NUM> __device__ __forceinline__ void add_bias(float (&s)[NUM]) const {
        const u32 q = first_query(), k = first_key();
        const float* from = tw_bias(a, at.head, at.pos_q + q, at.pos_kv + k);
#pragma unroll
        for (u32 e = 0; e < NUM; e++) {
            const bool there = q + query(e) < at.num_q && k + key(e) < at.num_kv;
            s[e] = fmaf(there ? from[(i64)query(e) * a.bias_skv + key(e)] : 0.0f, TW_LOG2E, s[e]);
        }
    }

    // Says of each element whether dropout keeps it: `says(e, kept)`. What is mixed of one pair and
    // of another differs by a multiple of their distance.
    template <u32 NUM, class Says> __device__ __forceinline__ void drop(const Says& says) const {
        const u64 first = tw_drop_word(a, tw_drop_seed(a), at.head, at.global_q + first_query(), at.global_kv + first_key());
#pragma unroll
        for (u32 e = 0; e < NUM; e++) says(e, tw_keeps(a, first + (query(e) * (TW_GOLDEN << 24) + key(e) * TW_GOLDEN)));
    }
};
