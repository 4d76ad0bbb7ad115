// Conversions between f32 and types of 8 and 16 bits, with the bits of tilewire-core's dtype.rs:
// round to nearest even; bf16 and f16 overflow to infinity, FP8 saturates; a NaN keeps its sign and
// what fits of its payload, and becomes quiet. Only integer arithmetic and IEEE additions are used,
// so every architecture (and the CPU) gives the same bits. Subnormals are kept: kernels are
// compiled without flush to zero.
//
// A template parameter names a type by its number of mantissa bits: 23 f32, 10 f16, 7 bf16, 3 e4m3,
// 2 e5m2.

#pragma once

#include "../ptx/convert.cuh"

__device__ __forceinline__ bool tw_is_nan(float v) {
    return (__float_as_uint(v) & 0x7fffffff) > 0x7f800000;
}

// Rounds the magnitude `x` (bits of a finite f32 below the overflow) to a type with `mantissa` bits
// and exponent bias `bias`, for types with fewer exponent bits than f32. Without branches: a sum
// with 2^(e + 23 - mantissa) has the ulp of the small type at exponent e, so the addition does the
// rounding.
__device__ __forceinline__ u32 tw_round_magnitude(u32 x, u32 mantissa, u32 bias) {
    u32 least = 128 - bias;  // exponent field of the smallest normal; subnormals have its unit
    u32 field = x >> 23 > least ? x >> 23 : least;
    u32 magic = (field + 23 - mantissa) << 23;
    u32 units = __float_as_uint(__fadd_rn(__uint_as_float(x), __uint_as_float(magic))) - magic;
    return units + ((field - least) << mantissa);
}

__device__ __forceinline__ u32 tw_f32_to_bf16(float v) {
    u32 x = __float_as_uint(v);
    if (tw_is_nan(v)) return x >> 16 | 0x40;
    return (x + 0x7fff + (x >> 16 & 1)) >> 16;
}

__device__ __forceinline__ u32 tw_f32_to_f16(float v) {
    u32 x = __float_as_uint(v) & 0x7fffffff, sign = __float_as_uint(v) >> 16 & 0x8000;
    if (x > 0x7f800000) return sign | 0x7e00 | (x >> 13 & 0x3ff);
    if (x >= 0x477ff000) return sign | 0x7c00;  // 65520: half way to what would come next
    return sign | tw_round_magnitude(x, 10, 15);
}

__device__ __forceinline__ u32 tw_f32_to_e4m3(float v) {
    u32 x = __float_as_uint(v) & 0x7fffffff, sign = __float_as_uint(v) >> 24 & 0x80;
    u32 code = tw_round_magnitude(x < 0x43e00000 ? x : 0x43e00000, 3, 7);  // 448
    return sign | (x > 0x7f800000 ? 0x7f : code);
}

__device__ __forceinline__ u32 tw_f32_to_e5m2(float v) {
    u32 x = __float_as_uint(v) & 0x7fffffff, sign = __float_as_uint(v) >> 24 & 0x80;
    u32 code = tw_round_magnitude(x < 0x47600000 ? x : 0x47600000, 2, 15);  // 57344
    return sign | (x > 0x7f800000 ? 0x7e | (x >> 21 & 1) : code);
}

// The code that a quantisation stores: 0x7f for every NaN, like the conversion instruction.
__device__ __forceinline__ u32 tw_fp8_code(u32 code, float v) {
    return tw_is_nan(v) ? 0x7f : code;
}

// Smallest E8M0 byte whose value is at least `v`; 255 for NaN and negative values.
__device__ __forceinline__ u32 tw_f32_to_e8m0(float v) {
    u32 x = __float_as_uint(v);
    if (tw_is_nan(v) || (x >> 31 && x != 0x80000000)) return 255;
    u32 field = x >> 23 & 0xff, rest = x & 0x7fffff;
    u32 up = field == 0 ? rest > 1u << 22 : field + (rest != 0);
    return up < 254 ? up : 254;
}

__device__ __forceinline__ float tw_bf16_to_f32(u32 b) {
    bool nan = (b & 0x7fff) > 0x7f80;
    return __uint_as_float((b | (nan ? 0x40 : 0)) << 16);
}

// Widens a magnitude `x` whose exponent field of a smaller type is at f32's place, by a product
// with 2^(127 - bias): exact, also for subnormals. The result has `bits` set.
__device__ __forceinline__ float tw_widen_magnitude(u32 bits, u32 x, u32 bias) {
    float v = __fmul_rn(__uint_as_float(x), __uint_as_float((254 - bias) << 23));
    return __uint_as_float(__float_as_uint(v) | bits);
}

__device__ __forceinline__ float tw_f16_to_f32(u32 h) {
    u32 x = h & 0x7fff, sign = (h & 0x8000) << 16;
    // Infinity and NaN keep their mantissa, with f32's largest exponent.
    u32 more = x < 0x7c00 ? 0 : x == 0x7c00 ? 0x7f800000 : 0x7fc00000;
    return tw_widen_magnitude(sign | more, x << 13, 15);
}

// An FP8 NaN loses its sign.
__device__ __forceinline__ float tw_e4m3_to_f32(u32 b) {
    u32 x = b & 0x7f, sign = (b & 0x80) << 24;
    if (x == 0x7f) return __uint_as_float(0x7fffe000);
    return tw_widen_magnitude(sign, x << 20, 7);
}

__device__ __forceinline__ float tw_e5m2_to_f32(u32 b) {
    u32 x = b & 0x7f, sign = (b & 0x80) << 24;
    if (x > 0x7c) return __uint_as_float(0x7fffe000);
    if (x == 0x7c) return __uint_as_float(sign | 0x7f800000);
    return tw_widen_magnitude(sign, x << 21, 15);
}

__device__ __forceinline__ float tw_e8m0_to_f32(u32 b) {
    if (b == 255) return __uint_as_float(0x7fc00000);
    return __uint_as_float(b == 0 ? 1u << 22 : b << 23);
}

// An element type by its mantissa bits.
template <int MANTISSA> struct TwElem;
template <> struct TwElem<23> {
    typedef u32 Bits;
    static __device__ __forceinline__ float widen(u32 b) { return __uint_as_float(b); }
    static __device__ __forceinline__ u32 round(float v) { return __float_as_uint(v); }
};
template <> struct TwElem<10> {
    typedef u16 Bits;
    static __device__ __forceinline__ float widen(u32 b) { return tw_f16_to_f32(b); }
    static __device__ __forceinline__ u32 round(float v) { return tw_f32_to_f16(v); }
};
template <> struct TwElem<7> {
    typedef u16 Bits;
    static __device__ __forceinline__ float widen(u32 b) { return tw_bf16_to_f32(b); }
    static __device__ __forceinline__ u32 round(float v) { return tw_f32_to_bf16(v); }
};

// Four consecutive elements, with their layout in memory.
template <int MANTISSA> struct __align__(4 * sizeof(typename TwElem<MANTISSA>::Bits)) TwQuads {
    typedef TwElem<MANTISSA> Elem;
    u32 w[sizeof(typename Elem::Bits)];
    __device__ __forceinline__ float at(int j) const {
        if (sizeof(typename Elem::Bits) == 4) return Elem::widen(w[j]);
        return Elem::widen(w[j / 2] >> 16 * (j % 2) & 0xffff);
    }
    // Like at(), for use in sums and products only: arithmetic makes a NaN quiet, so this need not.
    __device__ __forceinline__ float term(int j) const {
        if (MANTISSA == 7) return __uint_as_float(j % 2 == 0 ? w[j / 2] << 16 : w[j / 2] & 0xffff0000);
        return at(j);
    }
    // Stores four results of arithmetic, rounded.
    __device__ __forceinline__ void round_all(const float (&v)[4]) {
        if (MANTISSA == 7) {
            w[0] = cvt_rn_bf16x2_f32(v[1], v[0]);
            w[1] = cvt_rn_bf16x2_f32(v[3], v[2]);
            return;
        }
        if (MANTISSA == 10) {
            w[0] = cvt_rn_f16x2_f32(v[1], v[0]);
            w[1] = cvt_rn_f16x2_f32(v[3], v[2]);
            return;
        }
        clear();
#pragma unroll
        for (int j = 0; j < 4; j++) set(j, Elem::round(v[j]));
    }
    __device__ __forceinline__ u32 bits(int j) const {
        if (sizeof(typename Elem::Bits) == 4) return w[j];
        return w[j / 2] >> 16 * (j % 2) & 0xffff;
    }
    // Sets element `j` of a quad in which it is zero.
    __device__ __forceinline__ void set(int j, u32 bits) {
        if (sizeof(typename Elem::Bits) == 4) w[j] = bits;
        else w[j / 2] |= bits << 16 * (j % 2);
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int j = 0; j < (int)sizeof(typename Elem::Bits); j++) w[j] = 0;
    }
};

__device__ __forceinline__ u32 tw_ceil(u32 a, u32 b) {
    return a / b + (a % b != 0);
}

__device__ __forceinline__ bool tw_aligned(const void* p, u32 bytes) {
    return (u64)p % bytes == 0;
}
