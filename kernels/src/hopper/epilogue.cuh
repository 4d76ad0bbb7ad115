// What becomes of the sums of a tile: D = act(A B (+ D) + bias), and the pre-activation.
//
// TW_HG_EPI says which function a unit has: 0 stores the product; 1 adds a bias or what D holds; 2
// is ReLU, 3 GELU, 4 SwiGLU (the tile's left half are columns of the gate, its right half those of
// up that go with them; D has half of the columns); 5 and 6 multiply by the derivatives of GELU and
// SwiGLU at `aux` (SwiGLU: D has two halves of n columns). Everything is done in registers: a lane
// of warp w has elements 8 j + 2 (lane % 4), and the next, of rows 16 w + lane / 4 and 8 more.

#pragma once

#include "../gemm/activation.cuh"
#include "../ptx/bulk.cuh"
#include "../ptx/math.cuh"
#include "../ptx/tensor.cuh"
#include "../ptx/wgmma.cuh"
#include "tile.cuh"

enum : u32 { TW_PLAIN = 0, TW_LINEAR = 1, TW_HG_RELU = 2, TW_HG_GELU = 3, TW_HG_SWIGLU = 4, TW_HG_DGELU = 5, TW_HG_DSWIGLU = 6 };

// A product. The tensor maps beside it have the addresses of A and B, and for sm90_gemm.cu and
// groups of a D of 16 bits, or one of f32 that is added to with TW_D_HAS_MAP. `flags`: those of
// gemm/activation.cuh for what is added; types and function are the unit's.
struct TwHopper {
    void* d;
    const void* bias;  // [n] f32, or of D's type with TW_BIAS_OUT; or null
    void* aux;         // null, or the pre-activation: read by derivatives, else stored
    u32* counter;      // null, or two words that are zero, of this launch alone while it runs
    i64 ldd, ldaux;
    u32 m, n, k, flags;
    // The contraction is cut into `parts`, of `steps` stages each but for the last: by
    // sm90_skinny_gemm.cu, and by units that TW_HG_IN_PARTS, for which the sums of part p are the
    // matrix [m, n] number p from `d` on.
    u32 parts, steps;
};

// Whether k may be cut into parts.
enum : bool { TW_HG_IN_PARTS = TW_HG_EPI == TW_PLAIN && TW_HG_OUT == 2 };
// Whether tiles may be added to an f32 D behind a tensor map (sums.cuh), and the flag that says so
// of a launch without bias: beside those of gemm/activation.cuh and grouped_gemm/splits.cuh.
enum : bool { TW_HG_ADDS = TW_HG_EPI == TW_LINEAR && TW_HG_OUT == 2 };
enum : u32 { TW_D_HAS_MAP = 4096 };

// A pair of neighbours of D's type, as it lies in memory, and as numbers.
struct TwPair {
    u32 w[TW_HG_OUT == 2 ? 2 : 1];
};
__device__ __forceinline__ TwPair tw_load_pair(const void* p, i64 at) {
    TwPair v;
    if constexpr (TW_HG_OUT == 2) {
        const uint2 w = *(const uint2*)((const float*)p + at);
        v.w[0] = w.x, v.w[1] = w.y;
    } else {
        v.w[0] = *(const u32*)((const u16*)p + at);
    }
    return v;
}
__device__ __forceinline__ float2 tw_numbers(TwPair v) {
    if constexpr (TW_HG_OUT == 2) return make_float2(__uint_as_float(v.w[0]), __uint_as_float(v.w[1]));
    else if constexpr (TW_HG_OUT == 0) return make_float2(__uint_as_float(v.w[0] << 16), __uint_as_float(v.w[0] & 0xffff0000u));
    else return make_float2(cvt_f32_f16((u16)(v.w[0] & 0xffff)), cvt_f32_f16((u16)(v.w[0] >> 16)));
}
__device__ __forceinline__ void tw_store_pair(void* p, i64 at, float2 v) {
    if constexpr (TW_HG_OUT == 2) *(float2*)((float*)p + at) = v;
    else *(u32*)((u16*)p + at) = tw_pair(v.x, v.y, TW_HG_OUT);
}

// The place of a thread in a chunk of 64 columns of D: rows and columns of its 16 pairs, pair 2 j +
// i being that of columns 8 j on and of the row 8 i below.
struct TwPlace {
    enum : u32 { NUM = 16 };
    u32 row, col;        // of pair 0
    u32 rows, cols;      // of D, or of its half

    __device__ __forceinline__ bool has(u32 i) const {
        return row + i % 2 * 8 < rows && col + i / 2 * 8 < cols;
    }
    // The element of pair `i` in a matrix of `ld` columns.
    __device__ __forceinline__ i64 at(u32 i, i64 ld) const {
        return (i64)(row + i % 2 * 8) * ld + col + i / 2 * 8;
    }
};

// The place of a thread that has one pair.
struct TwPoint {
    enum : u32 { NUM = 1 };
    u32 row, col;
    u32 rows, cols;  // of D, or of its half

    __device__ __forceinline__ bool has(u32) const {
        return row < rows && col < cols;
    }
    __device__ __forceinline__ i64 at(u32, i64 ld) const {
        return (i64)row * ld + col;
    }
};

// True if the bias is f32.
__device__ __forceinline__ bool tw_bias_is_wide(const TwHopper& g) {
    return TW_HG_OUT == 2 || !(g.flags & TW_BIAS_OUT);
}
// The bias of a thread's columns of a chunk where it is loaded AHEAD; else nothing.
template <bool AHEAD> struct TwBiasOf {
    __device__ __forceinline__ void load(const TwHopper&, const TwPlace&) {}
};
template <> struct TwBiasOf<true> {
    float2 of[8];

    // Loads what belongs to the columns of `at`.
    __device__ __forceinline__ void load(const TwHopper& g, const TwPlace& at) {
        const bool wide = tw_bias_is_wide(g);
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            const u32 col = at.col + 8 * j;
            of[j] = make_float2(0.0f, 0.0f);
            if (g.bias && wide && col < at.cols) of[j] = *(const float2*)((const float*)g.bias + col);
            if (g.bias && !wide && col < at.cols) of[j] = tw_numbers(tw_load_pair(g.bias, col));
        }
    }
};
typedef TwBiasOf<false> TwNoBias;

// Adds the bias of the columns of `at`, or of those of SwiGLU's other half.
__device__ __forceinline__ void tw_add_bias(const TwHopper&, const TwBiasOf<true>& bias, const TwPlace&, u32, float2 (&v)[16]) {
#pragma unroll
    for (u32 i = 0; i < 16; i++) v[i].x += bias.of[i / 2].x, v[i].y += bias.of[i / 2].y;
}
// The same, four pairs of columns at a time.
__device__ __forceinline__ void tw_add_bias(const TwHopper& g, const TwNoBias&, const TwPlace& at, u32 half, float2 (&v)[16]) {
    const bool wide = tw_bias_is_wide(g);
    const u32 shift = half * at.cols;
#pragma unroll
    for (u32 part = 0; part < 8; part += 4) {
        float2 b[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const u32 col = at.col + 8 * (part + j);
            b[j] = make_float2(0.0f, 0.0f);
            if (wide && col < at.cols) b[j] = *(const float2*)((const float*)g.bias + shift + col);
            if (!wide && col < at.cols) b[j] = tw_numbers(tw_load_pair(g.bias, shift + col));
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) v[2 * part + i].x += b[i / 2].x, v[2 * part + i].y += b[i / 2].y;
    }
}
// The same of the one pair of a place that D has.
__device__ __forceinline__ void tw_add_bias(const TwHopper& g, const TwNoBias&, const TwPoint& at, u32 half, float2 (&v)[1]) {
    const bool wide = tw_bias_is_wide(g);
    const u32 shift = half * at.cols;
    const float2 b = wide ? *(const float2*)((const float*)g.bias + shift + at.col) : tw_numbers(tw_load_pair(g.bias, shift + at.col));
    v[0].x += b.x, v[0].y += b.y;
}

// Numbers at the pairs' places of a matrix, `shift` columns further on: one behind the other,
// without a branch, so that all are on their way at once.
template <class Place>
__device__ __forceinline__ void tw_load_pairs(const void* p, i64 ld, u32 shift, const Place& at, TwPair (&w)[Place::NUM]) {
#pragma unroll
    for (u32 i = 0; i < Place::NUM; i++) w[i] = at.has(i) ? tw_load_pair(p, at.at(i, ld) + shift) : TwPair{};
}
template <class Place>
__device__ __forceinline__ void tw_save_pairs(const TwHopper& g, u32 shift, const Place& at, const float2 (&v)[Place::NUM]) {
#pragma unroll
    for (u32 i = 0; i < Place::NUM; i++)
        if (at.has(i)) tw_store_pair(g.aux, at.at(i, g.ldaux) + shift, v[i]);
}

// tanh(x) = 1 - 2 / (1 + e^2x), with an error of a few 2^-23 of 1.
__device__ __forceinline__ float tw_tanh(float x) {
    return 1.0f - 2.0f * rcp_approx_ftz_f32(1.0f + ex2_approx_ftz_f32(2.8853901f * x));
}
// 1 / (1 + e^-x).
__device__ __forceinline__ float tw_sigmoid(float x) {
    return rcp_approx_ftz_f32(1.0f + ex2_approx_ftz_f32(-1.4426950f * x));
}
// 1 / (1 + 2^x), 1 / (1 + 2^y), by one reciprocal: these functions take as long as the products
// that they run under. Above 60, where the product of both could become infinite, they are that of
// 60, 2^-60; so is that of NaN, which must not reach the other one.
__device__ __forceinline__ float2 tw_logistic(float x, float y) {
    const float a = 1.0f + ex2_approx_ftz_f32(fminf(x, 60.0f)), b = 1.0f + ex2_approx_ftz_f32(fminf(y, 60.0f));
    const float r = rcp_approx_ftz_f32(a * b);
    return make_float2(b * r, a * r);
}
// x sigmoid(x) of both.
__device__ __forceinline__ float2 tw_silu(float2 x) {
    const float2 s = tw_logistic(-1.4426950f * x.x, -1.4426950f * x.y);
    return make_float2(x.x * s.x, x.y * s.y);
}
// (1 + tanh(u)) / 2 is the sigmoid of 2 u: without a difference of nearly equal numbers.
__device__ __forceinline__ float2 tw_fast_gelu(float2 x) {
    const float2 s = tw_logistic(x.x * (-2.3022082f - 0.1029432f * x.x * x.x), x.y * (-2.3022082f - 0.1029432f * x.y * x.y));
    return make_float2(x.x * s.x, x.y * s.y);
}
__device__ __forceinline__ float tw_fast_dgelu(float x) {
    const float t = tw_tanh(0.7978846f * (x + 0.044715f * x * x * x));
    const float dt = 0.7978846f * (1.0f + 3.0f * 0.044715f * x * x);
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * dt;
}
// The gradient of SwiGLU's gate, or of its up.
__device__ __forceinline__ float tw_fast_dswiglu(float d, float gate, float up, bool of_up) {
    const float s = tw_sigmoid(gate);
    return of_up ? d * gate * s : d * up * s * (1.0f + gate * (1.0f - s));
}

// Finishes a thread's pairs: v are sums, `up` those of SwiGLU's other half. `half`: which half of D
// DSwiGLU computes.
template <class Place, class Bias>
__device__ __forceinline__ void tw_finish(const TwHopper& g, const Bias& bias, const Place& at, float2 (&v)[Place::NUM], float2 (&up)[Place::NUM], u32 half) {
    enum : u32 { NUM = Place::NUM };
    if constexpr (TW_HG_EPI == TW_PLAIN) return;
    if constexpr (TW_HG_EPI == TW_LINEAR) {
        if (g.flags & TW_ACCUMULATE) {
            TwPair w[NUM];
            tw_load_pairs(g.d, g.ldd, 0, at, w);
#pragma unroll
            for (u32 i = 0; i < NUM; i++) {
                const float2 old = tw_numbers(w[i]);
                v[i].x += old.x, v[i].y += old.y;
            }
        }
    }
    if (g.bias) tw_add_bias(g, bias, at, 0, v);
    if constexpr (TW_HG_EPI == TW_HG_DGELU) {
        TwPair w[NUM];
        tw_load_pairs(g.aux, g.ldaux, 0, at, w);
#pragma unroll
        for (u32 i = 0; i < NUM; i++) {
            const float2 a = tw_numbers(w[i]);
            v[i].x *= tw_fast_dgelu(a.x), v[i].y *= tw_fast_dgelu(a.y);
        }
        return;
    }
    if constexpr (TW_HG_EPI == TW_HG_DSWIGLU) {
        TwPair w[NUM], u[NUM];
        tw_load_pairs(g.aux, g.ldaux, 0, at, w);
        tw_load_pairs(g.aux, g.ldaux, g.n, at, u);
#pragma unroll
        for (u32 i = 0; i < NUM; i++) {
            const float2 a = tw_numbers(w[i]), b = tw_numbers(u[i]);
            v[i].x = tw_fast_dswiglu(v[i].x, a.x, b.x, half != 0);
            v[i].y = tw_fast_dswiglu(v[i].y, a.y, b.y, half != 0);
        }
        return;
    }
    if constexpr (TW_HG_EPI == TW_HG_SWIGLU) {
        if (g.bias) tw_add_bias(g, bias, at, 1, up);
    }
    if constexpr (TW_HG_EPI != TW_LINEAR) {
        if (g.aux) {
            tw_save_pairs(g, 0, at, v);
            if constexpr (TW_HG_EPI == TW_HG_SWIGLU) tw_save_pairs(g, at.cols, at, up);
        }
    }
#pragma unroll
    for (u32 i = 0; i < NUM; i++) {
        // No fmaxf, which turns NaN into 0.
        if constexpr (TW_HG_EPI == TW_HG_RELU) v[i].x = v[i].x < 0.0f ? 0.0f : v[i].x, v[i].y = v[i].y < 0.0f ? 0.0f : v[i].y;
        if constexpr (TW_HG_EPI == TW_HG_GELU) v[i] = tw_fast_gelu(v[i]);
        if constexpr (TW_HG_EPI == TW_HG_SWIGLU) {
            v[i] = tw_silu(v[i]);
            v[i].x *= up[i].x, v[i].y *= up[i].y;
        }
    }
}

// Finishes the pair `at`, and stores it: `sum`, and that of SwiGLU's other half. DSwiGLU's halves
// of D lie side by side in a row.
__device__ __forceinline__ void tw_finish_and_store(const TwHopper& g, const TwPoint& at, float2 sum, float2 other) {
#pragma unroll
    for (u32 half = 0; half < (TW_HG_EPI == TW_HG_DSWIGLU ? 2 : 1); half++) {
        float2 v[1] = {sum}, up[1] = {other};
        tw_finish(g, TwNoBias{}, at, v, up, half);
        tw_store_pair(g.d, at.at(0, g.ldd) + half * g.n, v[0]);
    }
}
