// Quantises a matrix to FP8 with scales: crates/ops/src/quant on the device, with the same bits.
//
// Source: scales and codes as in crates/ops/src/quant/recipe.rs and host/; scale layouts of
// crates/core/src/qtensor.rs (blocks of DeepSeek-V3 1x128 and 128x128, OCP MXFP8 1x32, with the
// 512-byte tiles that tensor cores of sm_100 read).
//
// x: [rows, cols] row-major, TW_SRC_MANTISSA bits of mantissa (23 f32, 10 f16, 7 bf16). row: [rows,
// cols] FP8 of TW_DST_MANTISSA bits (3 e4m3, 2 e5m2); column: [cols, rows], the transposed matrix
// with blocks along its own columns. Each has its own scales; a null output is not computed.
//
// Launch, blocks of TW_QUANT_THREADS, no dynamic shared memory:
//   tw_quant_*   ceil(rows / TILE) * ceil(cols / TILE) blocks, row-major. A block holds a TILE x
//                TILE piece in registers. Every group of elements that shares a scale is inside one
//                piece, in both directions, so x is read once and blocks are independent.
//   tw_amax      any grid; each block writes one partial maximum
//   tw_scale, tw_scale_delayed   one block
// A maximum does not depend on the order of its operands, and no memory has to be zeroed before.

#include "../common/convert.cuh"

struct TwQuant {
    const void* x;
    u8* row;
    void* row_scales;
    u8* column;
    void* column_scales;
    const float* scale;  // tw_quant_tensor: the scale
    u32 rows, cols;
    u32 pow2;      // scales are powers of two
    u32 swizzled;  // tw_quant_mx: scales in tiles
};

typedef TwElem<TW_SRC_MANTISSA> Src;
typedef TwQuads<TW_SRC_MANTISSA> TwQuad;

enum { TILE = TW_QUANT_TILE, WARPS = TW_QUANT_THREADS / 32, ROWS = TILE / WARPS };
// A thread has ROWS rows of 4 columns; its transposed codes are one 16-byte word for each column.
static_assert(TILE == 32 * 4 && ROWS == 16, "the shape of a tile");
enum { TW_TENSOR, TW_1X128, TW_128X128, TW_MX };

// Largest finite FP8 value: 1.75 * 2^TW_TOP.
#if TW_DST_MANTISSA == 3
#define TW_MAX 448.0f
#define TW_TOP 8
#else
#define TW_MAX 57344.0f
#define TW_TOP 15
#endif

// The elements of a thread: 4 columns from `c`, ROWS rows from `r`.
struct TwPlace {
    u32 r, c, warp, lane;
};

// The largest magnitude so far; NaN is ignored.
__device__ __forceinline__ float tw_top(float top, float v) {
    return fmaxf(top, fabsf(v));
}

__device__ __forceinline__ float tw_top(float top, const TwQuad& q) {
    return tw_top(tw_top(tw_top(tw_top(top, q.at(0)), q.at(1)), q.at(2)), q.at(3));
}

// The maximum over the warp. Magnitudes have the order of their bits.
__device__ __forceinline__ float tw_warp_top(float top) {
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(top)));
}

// The scale of elements whose largest magnitude is `amax`. E8M0 reaches down to 2^-127, f32 scales
// to 2^-126.
__device__ __forceinline__ float tw_scale_of(float amax, bool pow2, bool e8m0) {
    u32 bits = __float_as_uint(amax);
    if (bits == 0 || bits == 0x7f800000) return 1.0f;
    if (!pow2) return fmaxf(__fdiv_rn(amax, TW_MAX), __uint_as_float(1u << 23));
    // The smallest e with amax / 2^e <= TW_MAX. Two candidates; the mantissa against 1.75 decides.
    int field = (int)(bits >> 23) - TW_TOP + ((bits & 0x7fffff) > 0x600000);
    if (field <= 0) return __uint_as_float(e8m0 ? 1u << 22 : 1u << 23);
    return __uint_as_float((u32)field << 23);
}

// Division by a scale. A power of two has an exact inverse in f32, so one multiplication gives the
// same bits as a division.
struct TwDivisor {
    float scale, inverse;
    bool pow2;
    __device__ __forceinline__ TwDivisor(float s, bool is_pow2) : scale(s), pow2(is_pow2) {
        // Scales that are powers of two range from 2^-127, whose field is 0, to 2^120.
        inverse = __uint_as_float((254 - (__float_as_uint(s) >> 23)) << 23);
    }
    // The codes of four elements, the first in the low byte.
    __device__ __forceinline__ u32 codes(float a, float b, float c, float d) const {
        return pack(quotient(a), quotient(b), quotient(c), quotient(d));
    }
    __device__ __forceinline__ float quotient(float v) const {
        return pow2 ? __fmul_rn(v, inverse) : __fdiv_rn(v, scale);
    }
    static __device__ __forceinline__ u32 pack(float a, float b, float c, float d) {
#if TW_DST_MANTISSA == 3
        return cvt_rn_satfinite_e4m3x2_f32(d, c) << 16 | cvt_rn_satfinite_e4m3x2_f32(b, a);
#else
        return cvt_rn_satfinite_e5m2x2_f32(d, c) << 16 | cvt_rn_satfinite_e5m2x2_f32(b, a);
#endif
    }
};

// Stores the scale of the group that begins at (r, c) of a rows x cols matrix.
template <int LAYOUT>
__device__ __forceinline__ void tw_put_scale(void* scales, float scale, u32 rows, u32 cols, u32 r, u32 c, bool swizzled) {
    bool inside = r < rows && c < cols;
    if (LAYOUT == TW_1X128 && inside) ((float*)scales)[(u64)r * tw_ceil(cols, 128) + c / 128] = scale;
    if (LAYOUT == TW_128X128 && inside) ((float*)scales)[(u64)(r / 128) * tw_ceil(cols, 128) + c / 128] = scale;
    if (LAYOUT != TW_MX) return;
    u8 byte = (u8)(__float_as_uint(scale) >> 23);
    u32 block = c / 32;
    if (!swizzled) {
        if (inside) ((u8*)scales)[(u64)r * tw_ceil(cols, 32) + block] = byte;
        return;
    }
    // The tile of these 128 rows and 4 blocks is written completely: 0 where there is no element.
    u64 tile = (u64)(r / 128) * tw_ceil(cols, 128) + block / 4;
    ((u8*)scales)[tile * 512 + r % 32 * 16 + r % 128 / 32 * 4 + block % 4] = inside ? byte : 0;
}

__device__ __forceinline__ void tw_load(const TwQuant& q, const TwPlace& at, TwQuad (&v)[ROWS]) {
    const Src::Bits* x = (const Src::Bits*)q.x;
    bool whole = q.cols % 4 == 0 && tw_aligned(x, sizeof(TwQuad));
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        // Missing elements are 0: they change no maximum, and their codes are not stored.
        v[i].clear();
        if (at.r + i >= q.rows) continue;
        const Src::Bits* p = x + (u64)(at.r + i) * q.cols + at.c;
        if (whole) {
            if (at.c < q.cols) v[i] = *(const TwQuad*)p;
            continue;
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (at.c + j < q.cols) v[i].set(j, p[j]);
    }
}

// Stores row-wise codes, and the scales of rows.
template <int LAYOUT>
__device__ __forceinline__ void tw_rows(const TwQuant& q, const TwPlace& at, const TwQuad (&v)[ROWS], float tile_scale) {
    const bool pow2 = LAYOUT == TW_MX || q.pow2;
    bool whole = q.cols % 4 == 0 && tw_aligned(q.row, 4);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float scale = tile_scale;
        u32 r = at.r + i;
        if (LAYOUT == TW_1X128) {
            scale = tw_scale_of(tw_warp_top(tw_top(0, v[i])), pow2, false);
            if (at.lane == 0) tw_put_scale<LAYOUT>(q.row_scales, scale, q.rows, q.cols, r, at.c, false);
        }
        if (LAYOUT == TW_MX) {
            // Eight lanes share a block of 32.
            float top = tw_top(0, v[i]);
#pragma unroll
            for (int by = 1; by < 8; by *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, by));
            scale = tw_scale_of(top, true, true);
            if (at.lane % 8 == 0) tw_put_scale<LAYOUT>(q.row_scales, scale, q.rows, q.cols, r, at.c, q.swizzled);
        }
        u32 codes = TwDivisor(scale, pow2).codes(v[i].at(0), v[i].at(1), v[i].at(2), v[i].at(3));
        if (r >= q.rows) continue;
        u8* p = q.row + (u64)r * q.cols + at.c;
        if (whole) {
            if (at.c < q.cols) *(u32*)p = codes;
            continue;
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (at.c + j < q.cols) p[j] = (u8)(codes >> 8 * j);
    }
}

// Scales of a thread's four columns. The maxima of WARPS warps (MX: of the two with a block of 32
// rows) are combined in shared memory.
template <int LAYOUT>
__device__ __forceinline__ void
tw_column_scales(const TwQuant& q, const TwPlace& at, const TwQuad (&v)[ROWS], float (&scale)[4]) {
    __shared__ float tops[WARPS][TILE];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float top = 0;
#pragma unroll
        for (int i = 0; i < ROWS; i++) top = tw_top(top, v[i].at(j));
        tops[at.warp][4 * at.lane + j] = top;
    }
    __syncthreads();
    const u32 group = LAYOUT == TW_MX ? 32 / ROWS : (u32)WARPS;
    const u32 first = at.warp / group * group;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float top = 0;
#pragma unroll
        for (u32 w = 0; w < group; w++) top = fmaxf(top, tops[first + w][4 * at.lane + j]);
        scale[j] = tw_scale_of(top, LAYOUT == TW_MX || q.pow2, LAYOUT == TW_MX);
        if (at.warp == first) tw_put_scale<LAYOUT>(q.column_scales, scale[j], q.cols, q.rows, at.c + j, at.r, q.swizzled);
    }
}

// Stores the codes of the transposed tile, through shared memory. The 16-byte words of a row are
// permuted (word ^ row / 4), so that neither writes nor reads have bank conflicts.
template <int LAYOUT>
__device__ __forceinline__ void tw_columns(const TwQuant& q, const TwPlace& at, const TwQuad (&v)[ROWS], float tile_scale) {
    __shared__ uint4 turned[TILE][TILE / 16];
    float scale[4] = {tile_scale, tile_scale, tile_scale, tile_scale};
    if (LAYOUT == TW_1X128 || LAYOUT == TW_MX) tw_column_scales<LAYOUT>(q, at, v, scale);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        TwDivisor d(scale[j], LAYOUT == TW_MX || q.pow2);
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = d.codes(v[4 * i].at(j), v[4 * i + 1].at(j), v[4 * i + 2].at(j), v[4 * i + 3].at(j));
        turned[4 * at.lane + j][at.warp ^ at.lane % 8] = make_uint4(w[0], w[1], w[2], w[3]);
    }
    __syncthreads();
    u32 r0 = at.r - ROWS * at.warp, c0 = at.c - 4 * at.lane;
    bool whole = q.rows % 16 == 0 && tw_aligned(q.column, 16);
    // Groups of 8 threads each write a row of the transposed tile.
    for (u32 n = threadIdx.x; n < TILE * TILE / 16; n += TW_QUANT_THREADS) {
        u32 c = n / (TILE / 16), word = n % (TILE / 16), r = r0 + 16 * word;
        if (c0 + c >= q.cols || r >= q.rows) continue;
        const uint4* from = &turned[c][word ^ c / 4 % 8];
        u8* p = q.column + (u64)(c0 + c) * q.rows + r;
        if (whole) {
            *(uint4*)p = *from;
            continue;
        }
        for (u32 i = 0; i < 16 && r + i < q.rows; i++) p[i] = ((const u8*)from)[i];
    }
}

// The scale of a whole tile.
__device__ __forceinline__ float tw_tile_scale(const TwQuant& q, const TwPlace& at, const TwQuad (&v)[ROWS]) {
    __shared__ float tops[WARPS];
    float top = 0;
#pragma unroll
    for (int i = 0; i < ROWS; i++) top = tw_top(top, v[i]);
    top = tw_warp_top(top);
    if (at.lane == 0) tops[at.warp] = top;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w]);
    float scale = tw_scale_of(top, q.pow2, false);
    if (threadIdx.x == 0) {
        if (q.row) tw_put_scale<TW_128X128>(q.row_scales, scale, q.rows, q.cols, at.r, at.c, false);
        if (q.column) tw_put_scale<TW_128X128>(q.column_scales, scale, q.cols, q.rows, at.c, at.r, false);
    }
    return scale;
}

template <int LAYOUT> __device__ __forceinline__ void tw_quant(const TwQuant& q) {
    u32 tiles = tw_ceil(q.cols, TILE), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 r = blockIdx.x / tiles * TILE + ROWS * warp, c = blockIdx.x % tiles * TILE + 4 * lane;
    TwPlace at = {r, c, warp, lane};
    TwQuad v[ROWS];
    tw_load(q, at, v);
    float scale = 0;
    if (LAYOUT == TW_TENSOR) scale = *q.scale;
    if (LAYOUT == TW_128X128) scale = tw_tile_scale(q, at, v);
    if (q.row) tw_rows<LAYOUT>(q, at, v, scale);
    if (q.column) tw_columns<LAYOUT>(q, at, v, scale);
}

// The scale is given; tw_scale has already stored it where the results need it.
extern "C" __global__ void __launch_bounds__(TW_QUANT_THREADS, 2) tw_quant_tensor(TwQuant q) {
    tw_quant<TW_TENSOR>(q);
}

extern "C" __global__ void __launch_bounds__(TW_QUANT_THREADS, 2) tw_quant_1x128(TwQuant q) {
    tw_quant<TW_1X128>(q);
}

// Without a bound of two blocks: f16 on sm_90a would spill.
extern "C" __global__ void __launch_bounds__(TW_QUANT_THREADS) tw_quant_128x128(TwQuant q) {
    tw_quant<TW_128X128>(q);
}

extern "C" __global__ void __launch_bounds__(TW_QUANT_THREADS, 2) tw_quant_mx(TwQuant q) {
    tw_quant<TW_MX>(q);
}

// The maximum of all threads' `top`, valid in thread 0.
__device__ __forceinline__ float tw_block_top(float top) {
    __shared__ float tops[WARPS];
    top = tw_warp_top(top);
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int w = 1; w < WARPS; w++) top = fmaxf(top, tops[w]);
    return top;
}

// parts[block] = the largest magnitude of the block's share of n elements.
extern "C" __global__ void __launch_bounds__(TW_QUANT_THREADS) tw_amax(const Src::Bits* x, u64 n, float* parts) {
    u64 first = (u64)blockIdx.x * TW_QUANT_THREADS + threadIdx.x, step = (u64)gridDim.x * TW_QUANT_THREADS;
    u64 quads = tw_aligned(x, sizeof(TwQuad)) ? n / 4 : 0;
    float top = 0;
    for (u64 i = first; i < quads; i += step) top = tw_top(top, ((const TwQuad*)x)[i]);
    for (u64 i = 4 * quads + first; i < n; i += step) top = tw_top(top, Src::widen(x[i]));
    top = tw_block_top(top);
    if (threadIdx.x == 0) parts[blockIdx.x] = top;
}

// Stores the maximum of `num` partial maxima in `amax`, and its scale in `scale` and `second`;
// null: not wanted. With num 0 (an empty matrix) they are 0 and 1.
extern "C" __global__ void __launch_bounds__(TW_QUANT_THREADS)
tw_scale(const float* parts, u32 num, u32 pow2, float* amax, float* scale, float* second) {
    float top = 0;
    for (u32 i = threadIdx.x; i < num; i += TW_QUANT_THREADS) top = fmaxf(top, parts[i]);
    top = tw_block_top(top);
    if (threadIdx.x != 0) return;
    float s = tw_scale_of(top, pow2, false);
    if (amax) *amax = top;
    if (scale) *scale = s;
    if (second) *second = s;
}

// A step of delayed scaling: stores the current scale in `scale` and `second`; then the maximum of
// `num` partial maxima replaces the oldest of the history, and `state` becomes the (finite) scale
// of the next step. If the maximum of the window is 0 or infinite, the scale stays.
extern "C" __global__ void __launch_bounds__(TW_QUANT_THREADS)
tw_scale_delayed(const float* parts, u32 num, float* history, u32 window, i64* steps, float* state, int margin,
                 float* scale, float* second) {
    float top = 0;
    for (u32 i = threadIdx.x; i < num; i += TW_QUANT_THREADS) top = fmaxf(top, parts[i]);
    top = tw_block_top(top);
    if (threadIdx.x != 0) return;
    if (scale) *scale = *state;
    if (second) *second = *state;
    history[*steps % window] = top;
    *steps += 1;
    for (u32 i = 0; i < window; i++) top = fmaxf(top, history[i]);
    if (top == 0 || __float_as_uint(top) == 0x7f800000) return;
    double next = (double)top / TW_MAX * __longlong_as_double((i64)(1023 + margin) << 52);
    *state = fminf(fmaxf((float)next, __uint_as_float(1u << 23)), __uint_as_float(0x7f7fffff));
}

// ---- Dequantisation: codes times scales.

struct TwDequant {
    const u8* x;         // [rows, cols]
    const void* scales;  // as `layout` says
    void* out;           // [rows, cols] of TW_SRC_MANTISSA bits
    u32 rows, cols;
    u32 layout;  // TW_TENSOR to TW_MX, TW_MX_TILES, or TW_ROWS: one f32 a row
    u32 chunks;  // blocks of a row
};
enum { TW_MX_TILES = TW_MX + 1, TW_ROWS };

// The scale of element (r, c).
__device__ __forceinline__ float tw_scale_at(const TwDequant& q, u32 r, u32 c) {
    const float* f = (const float*)q.scales;
    const u8* e8m0 = (const u8*)q.scales;
    const u32 block = c / 32;
    if (q.layout == TW_TENSOR) return *f;
    if (q.layout == TW_ROWS) return f[r];
    if (q.layout == TW_1X128) return f[(u64)r * tw_ceil(q.cols, 128) + c / 128];
    if (q.layout == TW_128X128) return f[(u64)(r / 128) * tw_ceil(q.cols, 128) + c / 128];
    if (q.layout == TW_MX) return tw_e8m0_to_f32(e8m0[(u64)r * tw_ceil(q.cols, 32) + block]);
    const u64 tile = (u64)(r / 128) * tw_ceil(q.cols, 128) + block / 4;
    return tw_e8m0_to_f32(e8m0[tile * 512 + r % 32 * 16 + r % 128 / 32 * 4 + block % 4]);
}

// The product like the host's: the NaN of a code is kept.
__device__ __forceinline__ u32 tw_dequantised(u32 code, float scale) {
#if TW_DST_MANTISSA == 3
    const float v = tw_e4m3_to_f32(code);
#else
    const float v = tw_e5m2_to_f32(code);
#endif
    return Src::round(tw_is_nan(v) ? v : __fmul_rn(v, scale));
}

// out = x * scale, rounded once. A thread has four elements of a row, which share a scale. Grid:
// rows * chunks blocks, chunks = ceil(cols / (4 * TW_QUANT_THREADS)).
extern "C" __global__ void __launch_bounds__(TW_QUANT_THREADS) tw_dequant(TwDequant q) {
    const u32 r = blockIdx.x / q.chunks, c = (blockIdx.x % q.chunks * TW_QUANT_THREADS + threadIdx.x) * 4;
    if (c >= q.cols) return;
    const u64 at = (u64)r * q.cols + c;
    const float scale = tw_scale_at(q, r, c);
    Src::Bits* out = (Src::Bits*)q.out + at;
    if (q.cols % 4 == 0 && tw_aligned(q.x, 4) && tw_aligned(q.out, sizeof(TwQuad))) {
        const u32 codes = *(const u32*)(q.x + at);
        TwQuad v;
        v.clear();
#pragma unroll
        for (int j = 0; j < 4; j++) v.set(j, tw_dequantised(codes >> 8 * j & 0xff, scale));
        *(TwQuad*)out = v;
        return;
    }
    for (u32 j = 0; j < 4 && c + j < q.cols; j++) out[j] = (Src::Bits)tw_dequantised(q.x[at + j], scale);
}
