// Loads, stores and additions of four elements at a time, for sums at any alignment.

#pragma once

#include "../common/convert.cuh"

// Elements 4n to 4n + 3 of `num` elements at `p`; elements from `num` on are 0.
template <class Quad> __device__ __forceinline__ Quad tw_quad(u64 p, u64 n, u64 num) {
    typedef typename Quad::Elem::Bits Bits;
    if (p % sizeof(Quad) == 0 && 4 * n + 4 <= num) return ((const Quad*)p)[n];
    Quad q;
    q.clear();
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (4 * n + j < num) q.set(j, ((const Bits*)p)[4 * n + j]);
    return q;
}

// Stores elements 4n to 4n + 3; elements from `num` on are not written.
template <class Quad> __device__ __forceinline__ void tw_put_quad(u64 p, u64 n, u64 num, const Quad& q) {
    typedef typename Quad::Elem::Bits Bits;
    if (p % sizeof(Quad) == 0 && 4 * n + 4 <= num) {
        ((Quad*)p)[n] = q;
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (4 * n + j < num) ((Bits*)p)[4 * n + j] = (Bits)q.bits(j);
}

__device__ __forceinline__ void tw_add(float (&sum)[4], float a, float b, float c, float d, bool first) {
    sum[0] = first ? a : __fadd_rn(sum[0], a);
    sum[1] = first ? b : __fadd_rn(sum[1], b);
    sum[2] = first ? c : __fadd_rn(sum[2], c);
    sum[3] = first ? d : __fadd_rn(sum[3], d);
}
