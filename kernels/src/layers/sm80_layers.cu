// The layers of a transformer between products: crates/ops/src/layers on the device. Memory
// bandwidth bounds each of them, so each kernel reads and writes a row once.
//
// Source: host/ of that folder. Activations and weights have the type T of TW_SRC_MANTISSA bits (23
// f32, 10 f16, 7 bf16); the residual stream, its gradient, logits, probabilities and weight
// gradients are f32. Sums have a fixed order: equal inputs give equal bits. `d` and the columns of
// T rows are multiples of 4, the size of a head is a multiple of 16.
//
// Launch, blocks of TW_LAYERS_THREADS: tw_add_norm and tw_heads a block for each row; tw_norm_bwd
// any number of blocks, which share the rows; tw_sum_rows a block for each 32 columns. embed.cuh
// and classes.cuh, included at the end, hold further kernels.

#include "../common/convert.cuh"
#include "../common/last.cuh"

typedef TwElem<TW_SRC_MANTISSA> T;
typedef T::Bits Bits;
typedef TwQuads<TW_SRC_MANTISSA> TwQuad;
struct __align__(16) TwOct {
    TwQuad quad[2];
};
enum { THREADS = TW_LAYERS_THREADS, WARPS = THREADS / 32 };
static_assert(THREADS % 32 == 0 && WARPS <= 32, "whole warps");

// Added to the mean square in the norm.
#define TW_NORM_EPS 1e-5f
#define TW_ALL 0xffffffffu
#define TW_INF __uint_as_float(0x7f800000)
#define TW_NAN __uint_as_float(0x7fffffff)

extern __shared__ __align__(16) unsigned char tw_smem[];

__device__ __forceinline__ float tw_warp_sum(float v) {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) v += __shfl_xor_sync(TW_ALL, v, by);
    return v;
}

// Sums `a` and `b` over the block; all threads get both sums.
__device__ __forceinline__ void tw_block_sums(float& a, float& b) {
    __shared__ float sums[2 * WARPS];
    a = tw_warp_sum(a);
    b = tw_warp_sum(b);
    // All threads have read the sums of the previous call.
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = a;
        sums[WARPS + threadIdx.x / 32] = b;
    }
    __syncthreads();
    a = b = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        a += sums[w];
        b += sums[WARPS + w];
    }
}

struct TwNorm {
    const float* x;
    const Bits* y;  // added to x, or null
    const Bits* w;
    float* sum;  // x + y, if there is a y
    Bits* out;
    u32 d;
};

// sum = x + y; out = sum * w / rms(sum). Dynamic shared memory: d floats.
extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS) tw_add_norm(TwNorm a) {
    u64 at = (u64)blockIdx.x * a.d;
    float4* keep = (float4*)tw_smem;
    float square = 0, none = 0;
    for (u32 i = threadIdx.x; i < a.d / 4; i += THREADS) {
        float4 v = ((const float4*)(a.x + at))[i];
        if (a.y) {
            TwQuad y = ((const TwQuad*)(a.y + at))[i];
            v = make_float4(v.x + y.at(0), v.y + y.at(1), v.z + y.at(2), v.w + y.at(3));
            ((float4*)(a.sum + at))[i] = v;
        }
        keep[i] = v;
        square += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
    }
    tw_block_sums(square, none);
    float r = 1.0f / sqrtf(square / (float)a.d + TW_NORM_EPS);
    for (u32 i = threadIdx.x; i < a.d / 4; i += THREADS) {
        float4 v = keep[i];
        TwQuad w = ((const TwQuad*)a.w)[i], q;
        q.clear();
        q.set(0, T::round(v.x * r * w.at(0)));
        q.set(1, T::round(v.y * r * w.at(1)));
        q.set(2, T::round(v.z * r * w.at(2)));
        q.set(3, T::round(v.w * r * w.at(3)));
        ((TwQuad*)(a.out + at))[i] = q;
    }
}

struct TwNormBwd {
    const float* x;
    const Bits* w;
    const Bits* dy;
    const float* residual;  // gradient that goes past the norm, or null
    float* dx;
    Bits* narrow;    // dx in T, or null
    float* partial;  // [blocks][d]: this block's part of the gradient of w
    u32 n, d;
};

// dx = residual + d(norm)/dx. Dynamic shared memory: d / 4 times (float4 x, float4 sum, quad dy).
extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS) tw_norm_bwd(TwNormBwd a) {
    u32 quads = a.d / 4;
    float4* keep = (float4*)tw_smem;
    float4* sum = keep + quads;
    TwQuad* grad = (TwQuad*)(sum + quads);
    // A thread handles the same columns in every row, so its shared memory needs no barrier.
    for (u32 i = threadIdx.x; i < quads; i += THREADS) sum[i] = make_float4(0, 0, 0, 0);
    for (u64 row = blockIdx.x; row < a.n; row += gridDim.x) {
        u64 at = row * a.d;
        float square = 0, dot = 0;
        for (u32 i = threadIdx.x; i < quads; i += THREADS) {
            float4 x = ((const float4*)(a.x + at))[i];
            TwQuad dy = ((const TwQuad*)(a.dy + at))[i], w = ((const TwQuad*)a.w)[i];
            keep[i] = x;
            grad[i] = dy;
            square += (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
            dot += (x.x * dy.at(0) * w.at(0) + x.y * dy.at(1) * w.at(1)) +
                   (x.z * dy.at(2) * w.at(2) + x.w * dy.at(3) * w.at(3));
        }
        tw_block_sums(square, dot);
        float r = 1.0f / sqrtf(square / (float)a.d + TW_NORM_EPS), c = dot * r * r * r / (float)a.d;
        for (u32 i = threadIdx.x; i < quads; i += THREADS) {
            float4 x = keep[i], s = sum[i], o = make_float4(0, 0, 0, 0);
            TwQuad dy = grad[i], w = ((const TwQuad*)a.w)[i];
            if (a.residual) o = ((const float4*)(a.residual + at))[i];
            o.x += dy.at(0) * w.at(0) * r - x.x * c;
            o.y += dy.at(1) * w.at(1) * r - x.y * c;
            o.z += dy.at(2) * w.at(2) * r - x.z * c;
            o.w += dy.at(3) * w.at(3) * r - x.w * c;
            ((float4*)(a.dx + at))[i] = o;
            sum[i] = make_float4(s.x + dy.at(0) * x.x * r, s.y + dy.at(1) * x.y * r, s.z + dy.at(2) * x.z * r,
                                 s.w + dy.at(3) * x.w * r);
            if (!a.narrow) continue;
            TwQuad q;
            q.clear();
            q.set(0, T::round(o.x));
            q.set(1, T::round(o.y));
            q.set(2, T::round(o.z));
            q.set(3, T::round(o.w));
            ((TwQuad*)(a.narrow + at))[i] = q;
        }
    }
    for (u32 i = threadIdx.x; i < quads; i += THREADS) {
        ((float4*)(a.partial + (u64)blockIdx.x * a.d))[i] = sum[i];
    }
}

// out[c] = sum over `rows` of partial[row][c].
extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS)
    tw_sum_rows(const float* partial, float* out, u32 rows, u32 cols) {
    __shared__ float sums[WARPS][32];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    float sum = 0;
    if (c < cols) {
#pragma unroll 8
        for (u64 r = warp; r < rows; r += WARPS) sum += partial[r * cols + c];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || c >= cols) return;
    for (u32 w = 1; w < WARPS; w++) sum += sums[w][lane];
    out[c] = sum;
}

struct TwHeads {
    Bits* rows;  // [n, (heads + 2 kv_heads) * dim]: queries, keys, values
    Bits* q;
    Bits* k;
    Bits* v;
    const int* positions;
    const float* table;  // [positions, dim]: cosines, then sines
    u32 heads, kv_heads, dim;
    u32 join;  // from q, k, v to rows, turning back
};

// Splits rows into q, k and v, rotating queries and keys by their position; or joins them and
// rotates back.
extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS) tw_heads(TwHeads a) {
    u64 row = blockIdx.x;
    u32 half = a.dim / 2, per = half / 8, turned = a.heads + a.kv_heads;
    u64 width = (u64)(turned + a.kv_heads) * a.dim;
    Bits* rows = a.rows + row * width;
    const float* table = a.table + (u64)a.positions[row] * a.dim;
    for (u32 i = threadIdx.x; i < turned * per; i += THREADS) {
        u32 h = i / per, j = i % per * 8;
        Bits* apart = h < a.heads ? a.q + (row * a.heads + h) * a.dim : a.k + (row * a.kv_heads + h - a.heads) * a.dim;
        Bits* packed = rows + (u64)h * a.dim;
        const Bits* from = (a.join ? apart : packed) + j;
        Bits* to = (a.join ? packed : apart) + j;
        TwOct x = *(const TwOct*)from, y = *(const TwOct*)(from + half), u, v;
#pragma unroll
        for (int q = 0; q < 2; q++) {
            float4 cos = *(const float4*)(table + j + 4 * q), sin = *(const float4*)(table + half + j + 4 * q);
            const float c[4] = {cos.x, cos.y, cos.z, cos.w}, s[4] = {sin.x, sin.y, sin.z, sin.w};
            u.quad[q].clear();
            v.quad[q].clear();
#pragma unroll
            for (int n = 0; n < 4; n++) {
                float t = a.join ? -s[n] : s[n], first = x.quad[q].at(n), second = y.quad[q].at(n);
                u.quad[q].set(n, T::round(first * c[n] - second * t));
                v.quad[q].set(n, T::round(first * t + second * c[n]));
            }
        }
        *(TwOct*)to = u;
        *(TwOct*)(to + half) = v;
    }
    u32 values = a.kv_heads * a.dim / 8;
    TwOct* packed = (TwOct*)(rows + (u64)turned * a.dim);
    TwOct* apart = (TwOct*)(a.v + row * a.kv_heads * a.dim);
    for (u32 i = threadIdx.x; i < values; i += THREADS) {
        if (a.join) packed[i] = apart[i];
        else apart[i] = packed[i];
    }
}

// Kernels built on the helpers above.
#include "embed.cuh"
#include "classes.cuh"
