// Optional features of all attention kernels: softcap, bias, dropout, scales that are not positive.

#pragma once

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

// SplitMix64 finaliser, as in `tilewire_core::Rng`.
__device__ __forceinline__ u64 tw_mix(u64 z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

// Whether dropout keeps a pair of global rows; `seed` is mixed.
__device__ __forceinline__ bool tw_kept(const TwAttn& a, u64 seed, u32 head, u32 q_row, u32 kv_row) {
    const u64 at = (u64)(a.first_head + head) << 48 | (u64)q_row << 24 | kv_row;
    return tw_mix(seed + at * 0x9e3779b97f4a7c15ull + 1) >> 11 >= a.drop_below;
}
__device__ __forceinline__ u64 tw_drop_seed(const TwAttn& a) {
    return tw_mix(a.drop_seed ^ 0x9e3779b97f4a7c15ull);
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

    // The score, in base 2, of query i and key j from its product, and its derivative by product
    // times scale.
    __device__ __forceinline__ float score(const TwAttn& a, float product, u32 i, u32 j, float& slope) const {
        const bool there = i < num_q && j < num_kv;
        return tw_score(a, product, there ? tw_bias(a, head, pos_q + i, pos_kv + j) : nullptr, slope) * TW_LOG2E;
    }
    // Whether dropout keeps them; `seed` is mixed.
    __device__ __forceinline__ bool kept(const TwAttn& a, u64 seed, u32 i, u32 j) const {
        return tw_kept(a, seed, head, global_q + i, global_kv + j);
    }
};
