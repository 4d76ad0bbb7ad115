// What a transformer's layers do between products: crates/ops/src/layers on the device. Each is bound
// by memory, so each reads and writes a row once.
//
// Source: host.rs of that folder. Activations and weights have the type T of TW_SRC_MANTISSA bits (23
// f32, 10 f16, 7 bf16); the residual stream, its gradient, logits, probabilities and weight gradients
// are f32. Sums have a fixed order: equal inputs give equal bits. `d` and columns of T rows are
// multiples of 4, a head is one of 16.
//
// Blocks of TW_LAYERS_THREADS. A block a row: tw_embed, tw_add_norm, tw_heads. Any number of blocks,
// each with some of the rows: tw_norm_bwd, tw_router_stats. A warp a row, of at most TW_CLASSES columns: tw_router,
// tw_router_bwd, tw_cross_entropy; the first two take four rows a warp of at most TW_FEW_CLASSES columns. tw_sum_rows: a block for 32 columns;
// tw_embed_bwd: a block for a token's value, 4 * THREADS columns and a part of the rows; tw_total: one
// block.

typedef TwElem<TW_SRC_MANTISSA> T;
typedef T::Bits Bits;
typedef TwQuads<TW_SRC_MANTISSA> TwQuad;
struct __align__(16) TwOct {
    TwQuad quad[2];
};
enum { THREADS = TW_LAYERS_THREADS, WARPS = THREADS / 32 };
static_assert(THREADS % 32 == 0 && WARPS <= 32, "whole warps");

// Guard of the norm.
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

// Sums of `a` and `b` over the block, on every thread.
__device__ __forceinline__ void tw_block_sums(float& a, float& b) {
    __shared__ float sums[2 * WARPS];
    a = tw_warp_sum(a);
    b = tw_warp_sum(b);
    // The last call's sums have been read.
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

// x[r] = table[tokens[r]].
extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS)
    tw_embed(const u8* tokens, const Bits* table, float* x, u32 d) {
    u64 row = blockIdx.x;
    const TwQuad* from = (const TwQuad*)(table + (u64)tokens[row] * d);
    float4* to = (float4*)(x + row * d);
    for (u32 i = threadIdx.x; i < d / 4; i += THREADS) {
        TwQuad q = from[i];
        to[i] = make_float4(q.at(0), q.at(1), q.at(2), q.at(3));
    }
}

// partial[split][v] = sum of dx[r] over the rows r of token v in that part of the rows, in their order.
// Block (v, columns, split). A list of rows first: of one token there are few among those that a block looks at
// together, and loads that wait for each other would be all that it does.
extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS)
    tw_embed_bwd(const u8* tokens, const float* dx, float* partial, u32 n, u32 d, u32 splits) {
    enum { EACH = 4, AHEAD = 8, ROUND = EACH * THREADS, LIST = 2 * ROUND };
    // Of every other round: written again only when all have read it.
    __shared__ u32 counts[2][WARPS];
    __shared__ u32 rows[LIST];
    u32 parts = (d / 4 + THREADS - 1) / THREADS, value = blockIdx.x % 256, split = blockIdx.x / 256 / parts;
    u32 quad = blockIdx.x / 256 % parts * THREADS + threadIdx.x, warp = threadIdx.x / 32;
    u32 per = (n + splits - 1) / splits, end = min(n, (split + 1) * per);
    u32 below = (1u << threadIdx.x % 32) - 1, num = 0;
    bool mine = quad < d / 4;
    const float4* from = (const float4*)dx + quad;
    float4 sum = make_float4(0, 0, 0, 0);
    for (u32 r0 = split * per, round = 0; r0 < end; r0 += ROUND, round ^= 1) {
        u32 r = r0 + EACH * threadIdx.x, before = 0, count = 0;
        bool is[EACH];
#pragma unroll
        for (u32 j = 0; j < EACH; j++) is[j] = r + j < end && tokens[r + j] == value;
#pragma unroll
        for (u32 j = 0; j < EACH; j++) {
            u32 mask = __ballot_sync(TW_ALL, is[j]);
            before += __popc(mask & below);
            count += __popc(mask);
        }
        if (threadIdx.x % 32 == 0) counts[round][warp] = count;
        __syncthreads();
        u32 at = num + before;
        for (u32 w = 0; w < WARPS; w++) {
            at += w < warp ? counts[round][w] : 0;
            num += counts[round][w];
        }
#pragma unroll
        for (u32 j = 0; j < EACH; j++)
            if (is[j]) rows[at++] = r + j;
        if (num + ROUND <= LIST && r0 + ROUND < end) continue;
        __syncthreads();
        for (u32 i = 0; mine && i < num; i += AHEAD) {
            float4 v[AHEAD];
#pragma unroll
            for (u32 j = 0; j < AHEAD; j++)
                if (i + j < num) v[j] = from[(u64)rows[i + j] * (d / 4)];
#pragma unroll
            for (u32 j = 0; j < AHEAD; j++)
                if (i + j < num) sum = make_float4(sum.x + v[j].x, sum.y + v[j].y, sum.z + v[j].z, sum.w + v[j].w);
        }
        num = 0;
        // The list is read.
        __syncthreads();
    }
    if (mine) ((float4*)(partial + ((u64)split * 256 + value) * d))[quad] = sum;
}

struct TwNorm {
    const float* x;
    const Bits* y;  // added to x, or null
    const Bits* w;
    float* sum;  // x + y, if there is a y
    Bits* out;
    u32 d;
};

// sum = x + y; out = sum * w / rms(sum). Shared: d floats.
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

// dx = residual + d(norm)/dx. Shared: d/4 of (float4 x, float4 sum, quad dy).
extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS) tw_norm_bwd(TwNormBwd a) {
    u32 quads = a.d / 4;
    float4* keep = (float4*)tw_smem;
    float4* sum = keep + quads;
    TwQuad* grad = (TwQuad*)(sum + quads);
    // A thread meets the same columns in every row: what it keeps needs no barrier.
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

// Takes rows apart, turning queries and keys by their position; or the reverse.
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

// The row of a group of LANES lanes. It may be `n`: none.
template <u32 LANES>
__device__ __forceinline__ u32 tw_row_of_group(u32 n) {
    u64 row = ((u64)blockIdx.x * THREADS + threadIdx.x) / LANES;
    return row < n ? (u32)row : n;
}

template <u32 LANES>
__device__ __forceinline__ float tw_group_sum(float v) {
#pragma unroll
    for (int by = LANES / 2; by > 0; by /= 2) v += __shfl_xor_sync(TW_ALL, v, by);
    return v;
}

// The most columns of a row that a warp keeps, and those of a row that a quarter of a warp keeps: fewer steps of a
// reduction, of four rows at once.
#define TW_CLASSES 512
#define TW_FEW_CLASSES 64
enum { FEW = 8 };

// What a lane keeps of a row of at most LANES * KEPT columns: p[i] is column LANES * i + lane.
// p = softmax(logits), by a group of lanes; all lanes of the warp call it. Columns that are not there are 0.
template <u32 LANES, u32 KEPT>
__device__ __forceinline__ void tw_softmax(float (&p)[KEPT], const float* logits, u32 cols) {
    u32 lane = threadIdx.x % LANES;
    float most = -TW_INF, sum = 0;
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) {
        p[i] = LANES * i + lane < cols ? logits[LANES * i + lane] : -TW_INF;
        most = fmaxf(most, p[i]);
    }
#pragma unroll
    for (int by = LANES / 2; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(TW_ALL, most, by));
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) {
        p[i] = LANES * i + lane < cols ? expf(p[i] - most) : 0;
        sum += p[i];
    }
    sum = tw_group_sum<LANES>(sum);
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) p[i] /= sum;
}

struct TwRouter {
    const float* logits;  // [n, experts]
    float* probs;         // [n, experts]
    i64* topk;            // [n, k]
    float* weights;       // [n, k]
    u32 n, experts, k;
};

// Probabilities, the k most likely experts (ties to the lower), and their probabilities scaled to sum
// to one. Rows that are no numbers go to the first experts, with weights that are none either.
template <u32 LANES, u32 KEPT>
__device__ __forceinline__ void tw_route(const TwRouter& a) {
    u32 lane = threadIdx.x % LANES, row = tw_row_of_group<LANES>(a.n);
    // Lanes without a row go along with the last one's, and write nothing.
    const bool mine = row < a.n;
    row = min(row, a.n - 1);
    i64* topk = a.topk + (u64)row * a.k;
    float* weights = a.weights + (u64)row * a.k;
    float probs[KEPT];
    tw_softmax<LANES>(probs, a.logits + (u64)row * a.experts, a.experts);
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) {
        if (mine && LANES * i + lane < a.experts) a.probs[(u64)row * a.experts + LANES * i + lane] = probs[i];
    }
    float last = TW_INF, sum = 0;
    u32 at = a.experts;
    for (u32 j = 0; j < a.k; j++) {
        // The first in the order that comes after the last pick.
        float best = -1;
        u32 expert = a.experts;
#pragma unroll
        for (u32 i = 0; i < KEPT; i++) {
            u32 e = LANES * i + lane;
            float p = probs[i];
            bool after = e < a.experts && (p < last || (p == last && e > at));
            if (after && p > best) best = p, expert = e;
        }
#pragma unroll
        for (int by = LANES / 2; by > 0; by /= 2) {
            float p = __shfl_xor_sync(TW_ALL, best, by);
            u32 e = __shfl_xor_sync(TW_ALL, expert, by);
            if (p > best || (p == best && e < expert)) best = p, expert = e;
        }
        if (expert == a.experts) expert = j, best = TW_NAN;
        sum += best;
        last = best;
        at = expert;
        if (lane != 0 || !mine) continue;
        topk[j] = expert;
        weights[j] = best;
    }
    if (lane != 0 || !mine) return;
    for (u32 j = 0; j < a.k; j++) weights[j] /= sum;
}

extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS) tw_router(TwRouter a) {
    if (a.n == 0) return;
    if (a.experts <= TW_FEW_CLASSES) tw_route<FEW, TW_FEW_CLASSES / FEW>(a);
    else if (a.experts <= 256) tw_route<32, 8>(a);
    else tw_route<32, TW_CLASSES / 32>(a);
}

// partial[block] = how often each expert was chosen, then its probabilities' sum. Shared: WARPS rows. A warp reads DEEP
// rows before it adds them.
template <u32 KEPT, u32 DEEP>
__device__ __forceinline__ void tw_stats(const float* probs, const i64* topk, float* mine, u32 n, u32 experts, u32 k) {
    u32 lane = threadIdx.x % 32;
    float sum[KEPT] = {};
    for (u64 row = ((u64)blockIdx.x * WARPS + threadIdx.x / 32) * DEEP; row < n; row += (u64)gridDim.x * WARPS * DEEP) {
        float p[DEEP][KEPT];
        u32 pick[DEEP];
#pragma unroll
        for (u32 r = 0; r < DEEP; r++) {
            bool is = row + r < n;
#pragma unroll
            for (u32 i = 0; i < KEPT; i++)
                p[r][i] = is && 32 * i + lane < experts ? probs[(row + r) * experts + 32 * i + lane] : 0;
            pick[r] = is && lane < k ? (u32)topk[(row + r) * k + lane] : experts;
        }
#pragma unroll
        for (u32 r = 0; r < DEEP; r++) {
#pragma unroll
            for (u32 i = 0; i < KEPT; i++) sum[i] += p[r][i];
            // The experts of a row differ, so lanes do not meet.
            if (pick[r] < experts) mine[pick[r]] += 1;
            for (u32 j = lane + 32; row + r < n && j < k; j += 32) mine[topk[(row + r) * k + j]] += 1;
            __syncwarp();
        }
    }
#pragma unroll
    for (u32 i = 0; i < KEPT; i++)
        if (32 * i + lane < experts) mine[experts + 32 * i + lane] = sum[i];
}

extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS)
    tw_router_stats(const float* probs, const i64* topk, float* partial, u32 n, u32 experts, u32 k) {
    u32 lane = threadIdx.x % 32, cols = 2 * experts;
    float* all = (float*)tw_smem;
    float* mine = all + threadIdx.x / 32 * cols;
    for (u32 c = lane; c < cols; c += 32) mine[c] = 0;
    __syncwarp();
    if (experts <= 64) tw_stats<2, 8>(probs, topk, mine, n, experts, k);
    else if (experts <= 256) tw_stats<8, 2>(probs, topk, mine, n, experts, k);
    else tw_stats<TW_CLASSES / 32, 1>(probs, topk, mine, n, experts, k);
    __syncthreads();
    for (u32 c = threadIdx.x; c < cols; c += THREADS) {
        float sum = 0;
        for (u32 w = 0; w < WARPS; w++) sum += all[w * cols + c];
        partial[(u64)blockIdx.x * cols + c] = sum;
    }
}

struct TwRouterBwd {
    const float* probs;
    const i64* topk;
    const float* weights;
    const float* d_weights;  // or null
    const float* load;       // [experts]: how often each was chosen, by all ranks
    Bits* d_logits;          // [n, experts]
    float scale;             // of a probability's gradient by the load
    u32 n, experts, k;
};

template <u32 LANES, u32 KEPT>
__device__ __forceinline__ void tw_route_bwd(const TwRouterBwd& a) {
    u32 row = tw_row_of_group<LANES>(a.n), lane = threadIdx.x % LANES;
    const bool mine = row < a.n;
    row = min(row, a.n - 1);
    const float* probs = a.probs + (u64)row * a.experts;
    const i64* topk = a.topk + (u64)row * a.k;
    const float* weights = a.weights + (u64)row * a.k;
    const float* d_weights = a.d_weights + (u64)row * a.k;
    float p[KEPT], d[KEPT], sum = 0, mean = 0, dot = 0;
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) {
        u32 e = LANES * i + lane;
        p[i] = e < a.experts ? probs[e] : 0;
        d[i] = e < a.experts ? a.load[e] * a.scale : 0;
    }
    for (u32 j = 0; j < a.k; j++) {
        sum += probs[topk[j]];
        if (a.d_weights) mean += weights[j] * d_weights[j];
    }
    for (u32 j = 0; a.d_weights && j < a.k; j++) {
        u32 expert = (u32)topk[j];
        float by = (d_weights[j] - mean) / sum;
#pragma unroll
        for (u32 i = 0; i < KEPT; i++)
            if (expert == LANES * i + lane) d[i] += by;
    }
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) dot += p[i] * d[i];
    dot = tw_group_sum<LANES>(dot);
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) {
        u32 e = LANES * i + lane;
        if (mine && e < a.experts) a.d_logits[(u64)row * a.experts + e] = (Bits)T::round(p[i] * (d[i] - dot));
    }
}

extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS) tw_router_bwd(TwRouterBwd a) {
    if (a.n == 0) return;
    if (a.experts <= TW_FEW_CLASSES) tw_route_bwd<FEW, TW_FEW_CLASSES / FEW>(a);
    else if (a.experts <= 256) tw_route_bwd<32, 8>(a);
    else tw_route_bwd<32, TW_CLASSES / 32>(a);
}

struct TwLoss {
    const float* logits;  // [n, cols]
    const int* targets;   // [n], negative where there is none
    float* row_loss;      // [n]
    Bits* d_logits;       // [n, cols]
    float scale;
    u32 n, cols;
};

// row_loss = -log p[target]; d_logits = scale * its gradient.
template <u32 KEPT>
__device__ __forceinline__ void tw_loss(const TwLoss& a, u32 row) {
    u32 lane = threadIdx.x % 32;
    int target = a.targets[row];
    Bits* out = a.d_logits + (u64)row * a.cols;
    float probs[KEPT];
    tw_softmax<32>(probs, a.logits + (u64)row * a.cols, a.cols);
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) {
        u32 c = 32 * i + lane;
        if (c >= a.cols) continue;
        float p = probs[i], d = target < 0 ? 0.0f : a.scale * (p - ((int)c == target ? 1.0f : 0.0f));
        out[c] = (Bits)T::round(d);
        // A NaN stays one.
        if ((int)c == target) a.row_loss[row] = -logf(p < 1.17549435e-38f ? 1.17549435e-38f : p);
    }
    if (target < 0 && lane == 0) a.row_loss[row] = 0;
}

extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS) tw_cross_entropy(TwLoss a) {
    u32 row = tw_row_of_group<32>(a.n);
    if (row == a.n) return;
    if (a.cols <= 256) tw_loss<8>(a, row);
    else tw_loss<TW_CLASSES / 32>(a, row);
}

// out = scale * the sum of v, in f64.
extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS)
    tw_total(const float* v, float* out, double scale, u32 n) {
    __shared__ double sums[THREADS];
    double sum = 0;
#pragma unroll 8
    for (u32 i = threadIdx.x; i < n; i += THREADS) sum += v[i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) *out = (float)(sums[0] * scale);
}
