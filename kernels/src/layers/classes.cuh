// Rows of probabilities: the router, its gradient, and the loss. sm80_layers.cu includes this file
// behind its helpers.
//
// A group of LANES lanes handles a row of at most LANES * TW_LAYERS_KEPT columns, quad by quad in
// turn; `lanes` of a launch is 4, 8, 16 or 32. A block handles several rows one after the other,
// and loads the next before it computes. Sums over rows are formed by lane, group, warp and block
// in this order, and exactly between blocks, so they depend on the number of blocks only. Any grid
// of TW_LAYERS_THREADS.

#pragma once

enum { KEPT = TW_LAYERS_KEPT };
static_assert(KEPT % 4 == 0, "whole quads");

// The column of a lane's element i.
template <u32 LANES> __device__ __forceinline__ u32 tw_col(u32 i) {
    return 4 * (LANES * (i / 4) + threadIdx.x % LANES) + i % 4;
}

// The index of column c among this lane's elements; KEPT if another lane has it.
template <u32 LANES> __device__ __forceinline__ u32 tw_place(u32 c) {
    return c / 4 % LANES == threadIdx.x % LANES ? c / 4 / LANES * 4 + c % 4 : (u32)KEPT;
}

// Whether rows of `cols` elements of `x` consist of aligned quads.
template <class E> __device__ __forceinline__ bool tw_whole(const E* x, u32 cols) {
    return cols % 4 == 0 && tw_aligned(x, 4 * sizeof(E));
}

// Loads this lane's part of a row; `none` where there is no column. Offsets from the lane's first
// column are compile-time constants.
template <u32 LANES>
__device__ __forceinline__ void tw_get_row(float (&v)[KEPT], const float* row, u32 cols, bool whole, float none) {
    const float* from = row + tw_col<LANES>(0);
    int left = (int)(cols - tw_col<LANES>(0));
    if (whole) {
#pragma unroll
        for (int q = 0; q < KEPT; q += 4) {
            float4 f = make_float4(none, none, none, none);
            if ((int)LANES * q < left) f = *(const float4*)(from + LANES * q);
            v[q] = f.x, v[q + 1] = f.y, v[q + 2] = f.z, v[q + 3] = f.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < KEPT; i++) {
            int at = (int)LANES * (i / 4 * 4) + i % 4;
            v[i] = at < left ? from[at] : none;
        }
    }
}

template <u32 LANES, int MANTISSA>
__device__ __forceinline__ void tw_put_row(const float (&v)[KEPT], typename TwElem<MANTISSA>::Bits* row, u32 cols, bool whole) {
    typedef TwElem<MANTISSA> E;
    typename E::Bits* to = row + tw_col<LANES>(0);
    int left = (int)(cols - tw_col<LANES>(0));
    if (whole) {
#pragma unroll
        for (int q = 0; q < KEPT; q += 4) {
            TwQuads<MANTISSA> quad;
            quad.round_all({v[q], v[q + 1], v[q + 2], v[q + 3]});
            if ((int)LANES * q < left) *(TwQuads<MANTISSA>*)(to + LANES * q) = quad;
        }
    } else {
#pragma unroll
        for (int i = 0; i < KEPT; i++) {
            int at = (int)LANES * (i / 4 * 4) + i % 4;
            if (at < left) to[at] = (typename E::Bits)E::round(v[i]);
        }
    }
}

// The sum over lanes at distances FROM, 2 FROM, ... below END; all of them get it.
template <u32 FROM, u32 END, class V> __device__ __forceinline__ V tw_lanes_sum(V v) {
#pragma unroll
    for (u32 by = FROM; by < END; by *= 2) v += __shfl_xor_sync(TW_ALL, v, by);
    return v;
}

struct TwSoftmax {
    float most, inv;  // the largest, and 1 / the sum of exponentials
};

// Replaces v by exp(v - max); times `inv` that is the softmax. Missing columns hold -inf.
template <u32 LANES> __device__ __forceinline__ TwSoftmax tw_softmax(float (&v)[KEPT]) {
    float most = -TW_INF, sum = 0;
#pragma unroll
    for (u32 q = 0; q < KEPT; q += 4) most = fmaxf(most, fmaxf(fmaxf(v[q], v[q + 1]), fmaxf(v[q + 2], v[q + 3])));
#pragma unroll
    for (u32 by = LANES / 2; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(TW_ALL, most, by));
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) v[i] = expf(v[i] - most);
#pragma unroll
    for (u32 q = 0; q < KEPT; q += 4) sum += (v[q] + v[q + 1]) + (v[q + 2] + v[q + 3]);
    return TwSoftmax{most, 1.0f / tw_lanes_sum<1, LANES>(sum)};
}

struct TwRouter {
    const float* logits;  // [n, experts]
    float* probs;         // [n, experts]
    i64* topk;            // [n, k]
    float* weights;       // [n, k]
    u64* sums;            // [2 experts], 0: those of `stats`, of the blocks so far
    float* stats;         // [2 experts]: how often each expert was chosen, then its probabilities' sum
    u32 n, experts, k, lanes;
};

// The largest of a lane's elements, and its index: the first of equals.
__device__ __forceinline__ float tw_first_most(const float (&p)[KEPT], u32& at) {
    float best = -1;
#pragma unroll
    for (u32 q = 0; q < KEPT; q += 4) {
        bool odd = p[q + 1] > p[q], odd2 = p[q + 3] > p[q + 2];
        float a = odd ? p[q + 1] : p[q], b = odd2 ? p[q + 3] : p[q + 2];
        u32 i = odd ? q + 1 : q, j = odd2 ? q + 3 : q + 2;
        if (b > a) a = b, i = j;
        if (a > best) best = a, at = i;
    }
    return best;
}

// The k most likely experts (ties to the lower), and their probabilities scaled to sum to one. Rows
// that are no numbers go to the first experts, with weights that are none either. Lane j of a group
// keeps choice j until all are there.
template <u32 LANES>
__device__ __forceinline__ void tw_choose(const TwRouter& a, float (&p)[KEPT], u32 row, bool mine, u32* chosen) {
    u32 lane = threadIdx.x % LANES, own = 0;
    i64* topk = a.topk + (u64)row * a.k;
    float* weights = a.weights + (u64)row * a.k;
    float sum = 0, weight = 0;
    if (a.experts < LANES * KEPT) {
#pragma unroll
        for (u32 i = 0; i < KEPT; i++) p[i] = tw_col<LANES>(i) < a.experts ? p[i] : -1;
    }
    for (u32 j = 0; j < a.k; j++) {
        u32 at = 0;
        float best = tw_first_most(p, at);
        u32 expert = tw_col<LANES>(at);
#pragma unroll
        for (u32 by = LANES / 2; by > 0; by /= 2) {
            float q = __shfl_xor_sync(TW_ALL, best, by);
            u32 e = __shfl_xor_sync(TW_ALL, expert, by);
            if (q > best || (q == best && e < expert)) best = q, expert = e;
        }
        if (!(best >= 0)) expert = j, best = TW_NAN;
        sum += best;
        // A chosen expert is not chosen again.
        at = tw_place<LANES>(expert);
        if (j + 1 < a.k) {
#pragma unroll
            for (u32 i = 0; i < KEPT; i++)
                if (i == at) p[i] = -1;
        }
        if (lane == j % LANES) weight = best, own = expert;
        if (lane == 0 && mine) atomicAdd(&chosen[expert], 1u);
        // All lanes of the group hold a choice and more follow: these weights are stored now, and
        // divided by the sum later.
        if (j % LANES == LANES - 1 && j + 1 < a.k && mine) topk[j + 1 - LANES + lane] = own, weights[j + 1 - LANES + lane] = weight;
    }
    if (!mine || a.k == 0) return;
    u32 full = (a.k - 1) / LANES * LANES;
    for (u32 j = lane; j < full; j += LANES) weights[j] /= sum;
    if (full + lane < a.k) topk[full + lane] = own, weights[full + lane] = weight / sum;
}

// Sums between blocks are integers, so their order does not matter. The bits above a sum count the
// blocks that have added to it: the block that adds last has the complete sum in hand, so no block
// waits for another, nor for its own stores. The highest bit says that a block's sum was NaN.
#define TW_ADDED (1ull << 52)
#define TW_NO_NUMBER (1ull << 63)

// The sum of n probabilities is less than 2^52 units.
__device__ __forceinline__ double tw_units(u32 n) {
    return (double)(1ull << (20 + __clz((int)n)));
}

// Dynamic shared memory: `experts` words, then WARPS rows of `experts` words.
template <u32 LANES> __device__ __forceinline__ void tw_route(const TwRouter& a) {
    const u32 rows = THREADS / LANES, group = threadIdx.x / LANES;
    const u32 step = gridDim.x * rows;
    const bool whole = tw_whole(a.logits, a.experts), whole_out = tw_whole(a.probs, a.experts);
    u32* chosen = (u32*)tw_smem;
    float* sums = (float*)tw_smem + a.experts;
    float next[KEPT], sum[KEPT] = {};
    u32 first = blockIdx.x * rows;
    // Groups without a row compute the last row, and write nothing.
    auto read = [&](u32 at) {
        tw_get_row<LANES>(next, a.logits + (u64)min(at + group, a.n - 1) * a.experts, a.experts, whole, -TW_INF);
    };
    if (first < a.n) read(first);
    for (u32 e = threadIdx.x; e < a.experts; e += THREADS) chosen[e] = 0;
    __syncthreads();
    for (; first < a.n; first += step) {
        u32 row = first + group;
        bool mine = row < a.n;
        float p[KEPT];
#pragma unroll
        for (u32 i = 0; i < KEPT; i++) p[i] = next[i];
        if (first + step < a.n) read(first + step);
        // A row that does not exist adds 0, or NaN if the last row, which is computed in its place,
        // has NaN; that row adds NaN itself.
        float inv = tw_softmax<LANES>(p).inv;
        if (!mine) inv = 0;
#pragma unroll
        for (u32 i = 0; i < KEPT; i++) p[i] *= inv, sum[i] += p[i];
        row = min(row, a.n - 1);
        if (mine) tw_put_row<LANES, 23>(p, (u32*)a.probs + (u64)row * a.experts, a.experts, whole_out);
        tw_choose<LANES>(a, p, row, mine, chosen);
    }
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) {
        float all = tw_lanes_sum<LANES, 32>(sum[i]);
        if (threadIdx.x % 32 < LANES && tw_col<LANES>(i) < a.experts) sums[threadIdx.x / 32 * a.experts + tw_col<LANES>(i)] = all;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < 2 * a.experts; i += THREADS) {
        bool count = i < a.experts;
        u64 add = TW_ADDED;
        if (count) {
            add += chosen[i];
        } else {
            float all = 0;
            for (u32 w = 0; w < WARPS; w++) all += sums[w * a.experts + i - a.experts];
            if (all >= 0) add += (u64)((double)all * tw_units(a.n));
            else atomicOr(&a.sums[i], TW_NO_NUMBER);
        }
        u64 all = atomicAdd(&a.sums[i], add) + add;
        if (all % TW_NO_NUMBER / TW_ADDED != gridDim.x) continue;
        a.sums[i] = 0;
        u64 sum = all % TW_ADDED;
        a.stats[i] = count ? (float)sum : all < TW_NO_NUMBER ? (float)((double)sum / tw_units(a.n)) : TW_NAN;
    }
}

// The router: fewer than 2048 blocks.
extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS, 2) tw_router(TwRouter a) {
    if (a.lanes == 4) tw_route<4>(a);
    else if (a.lanes == 8) tw_route<8>(a);
    else if (a.lanes == 16) tw_route<16>(a);
    else tw_route<32>(a);
}

struct TwRouterBwd {
    const float* probs;
    const i64* topk;
    const float* weights;
    const float* d_weights;  // or null
    const float* load;       // [experts]: how often each was chosen, by all ranks
    Bits* d_logits;          // [n, experts]
    float scale;             // of a probability's gradient by the load
    u32 n, experts, k, lanes;
};

// One choice of a row; with expert == a.experts, one without effect.
struct TwChoice {
    u32 expert;
    float weight, d_weight, prob;
};

__device__ __forceinline__ TwChoice tw_choice(const TwRouterBwd& a, u32 row, u32 j) {
    if (j >= a.k) return TwChoice{a.experts, 0, 0, 0};
    u64 at = (u64)row * a.k + j;
    return TwChoice{(u32)a.topk[at], a.weights[at], a.d_weights[at], 0};
}

// Dynamic shared memory: one word for each of LANES * KEPT columns.
template <u32 LANES> __device__ __forceinline__ void tw_route_bwd(const TwRouterBwd& a) {
    const u32 rows = THREADS / LANES, group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const u32 step = gridDim.x * rows;
    const bool whole = tw_whole(a.probs, a.experts), whole_out = tw_whole(a.d_logits, a.experts);
    // Without gradients of weights the choices have no effect.
    const u32 k = a.d_weights ? a.k : 0;
    // The gradient of the balancing loss by each expert's probability.
    float* even = (float*)tw_smem;
    for (u32 e = threadIdx.x; e < LANES * KEPT; e += THREADS) even[e] = e < a.experts ? a.load[e] * a.scale : 0;
    __syncthreads();
    float next[KEPT];
    TwChoice ahead = {};
    auto read = [&](u32 at) {
        u32 row = min(at + group, a.n - 1);
        tw_get_row<LANES>(next, a.probs + (u64)row * a.experts, a.experts, whole, 0);
        if (k > 0) ahead = tw_choice(a, row, lane);
    };
    u32 first = blockIdx.x * rows;
    if (first < a.n) read(first);
    for (; first < a.n; first += step) {
        u32 row = min(first + group, a.n - 1);
        float p[KEPT], dot = 0, sum = 0, mean = 0;
        TwChoice choice = ahead;
#pragma unroll
        for (u32 i = 0; i < KEPT; i++) p[i] = next[i];
#pragma unroll
        for (u32 q = 0; q < KEPT; q += 4) {
            float4 e = *(const float4*)(even + tw_col<LANES>(q));
            dot += (p[q] * e.x + p[q + 1] * e.y) + (p[q + 2] * e.z + p[q + 3] * e.w);
        }
        if (first + step < a.n) read(first + step);
        // The first choice of a lane stays in registers; further ones are read again.
        auto with_prob = [&](TwChoice c) {
            if (c.expert < a.experts) c.prob = a.probs[(u64)row * a.experts + c.expert];
            return c;
        };
        if (k > 0) choice = with_prob(choice);
        auto chosen = [&](u32 j0) { return j0 == 0 ? choice : with_prob(tw_choice(a, row, j0 + lane)); };
#pragma unroll 1
        for (u32 j0 = 0; j0 < k; j0 += LANES) {
            TwChoice c = chosen(j0);
            sum += c.prob;
            mean += c.weight * c.d_weight;
        }
        sum = tw_lanes_sum<1, LANES>(sum);
        mean = tw_lanes_sum<1, LANES>(mean);
        auto part = [&](const TwChoice& c) { return c.expert < a.experts ? c.prob * ((c.d_weight - mean) / sum) : 0; };
#pragma unroll 1
        for (u32 j0 = 0; j0 < k; j0 += LANES) dot += part(chosen(j0));
        dot = tw_lanes_sum<1, LANES>(dot);
#pragma unroll
        for (u32 q = 0; q < KEPT; q += 4) {
            float4 e = *(const float4*)(even + tw_col<LANES>(q));
            p[q] *= e.x - dot, p[q + 1] *= e.y - dot, p[q + 2] *= e.z - dot, p[q + 3] *= e.w - dot;
        }
#pragma unroll 1
        for (u32 j0 = 0; j0 < k; j0 += LANES) {
            TwChoice c = chosen(j0);
            float more = part(c);
            for (u32 j = 0; j < LANES && j0 + j < k; j++) {
                u32 at = tw_place<LANES>(__shfl_sync(TW_ALL, c.expert, j, LANES));
                float by = __shfl_sync(TW_ALL, more, j, LANES);
#pragma unroll
                for (u32 i = 0; i < KEPT; i++)
                    if (i == at) p[i] += by;
            }
        }
        if (first + group < a.n) tw_put_row<LANES, TW_SRC_MANTISSA>(p, a.d_logits + (u64)row * a.experts, a.experts, whole_out);
    }
}

// Resident blocks on a multiprocessor: with three, f32 spills before sm_90.
#if __CUDA_ARCH__ >= 900
#define TW_ROUTER_BWD_BLOCKS 3
#else
#define TW_ROUTER_BWD_BLOCKS 2
#endif

extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS, TW_ROUTER_BWD_BLOCKS) tw_router_bwd(TwRouterBwd a) {
    if (a.lanes == 4) tw_route_bwd<4>(a);
    else if (a.lanes == 8) tw_route_bwd<8>(a);
    else if (a.lanes == 16) tw_route_bwd<16>(a);
    else tw_route_bwd<32>(a);
}

struct TwLoss {
    const float* logits;  // [n, cols]
    const int* targets;   // [n], negative where there is none
    Bits* d_logits;       // [n, cols]
    float* loss;          // [1]
    double* partial;      // [blocks]
    u32* ticket;          // 0
    double scale;
    u32 n, cols, lanes;
};

// The sum over the block of the values of lanes at distances of LANES, in f64.
template <u32 LANES> __device__ __forceinline__ double tw_block_sum(double v) {
    __shared__ double sums[WARPS];
    v = tw_lanes_sum<LANES, 32>(v);
    // All threads have read the sums of the previous call.
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (u32 w = 0; w < WARPS; w++) v += sums[w];
    return v;
}

// d_logits = scale * the gradient of -log p[target]; returns the block's sum of -log p[target].
template <u32 LANES> __device__ __forceinline__ double tw_losses(const TwLoss& a) {
    const u32 rows = THREADS / LANES, group = threadIdx.x / LANES;
    const u32 step = gridDim.x * rows;
    const bool whole = tw_whole(a.logits, a.cols), whole_out = tw_whole(a.d_logits, a.cols);
    const float scale = (float)a.scale;
    float next[KEPT];
    int ahead = -1;
    double sum = 0;
    auto read = [&](u32 at) {
        u32 row = min(at + group, a.n - 1);
        tw_get_row<LANES>(next, a.logits + (u64)row * a.cols, a.cols, whole, -TW_INF);
        ahead = a.targets[row];
    };
    u32 first = blockIdx.x * rows;
    if (first < a.n) read(first);
    for (; first < a.n; first += step) {
        u32 row = min(first + group, a.n - 1);
        int target = ahead;
        float v[KEPT], logit = 0;
#pragma unroll
        for (u32 i = 0; i < KEPT; i++) v[i] = next[i];
        // One lane of a group counts the loss. A target that is no class makes it NaN.
        bool counts = threadIdx.x % LANES == 0 && first + group < a.n && target >= 0;
        if (counts) logit = (u32)target < a.cols ? a.logits[(u64)row * a.cols + target] : TW_NAN;
        if (first + step < a.n) read(first + step);
        TwSoftmax s = tw_softmax<LANES>(v);
        float by = scale * s.inv;
        u32 at = tw_place<LANES>((u32)target);
#pragma unroll
        for (u32 i = 0; i < KEPT; i++) v[i] = target < 0 ? 0 : fmaf(v[i], by, i == at ? -scale : 0.0f);
        if (first + group < a.n) tw_put_row<LANES, TW_SRC_MANTISSA>(v, a.d_logits + (u64)row * a.cols, a.cols, whole_out);
        if (!counts) continue;
        // A NaN is kept.
        float p = expf(logit - s.most) * s.inv;
        sum -= logf(p < 1.17549435e-38f ? 1.17549435e-38f : p);
    }
    return tw_block_sum<LANES>(sum);
}

// loss = scale * the sum of -log p[target], in f64; the last block adds the blocks' sums.
extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS, 3) tw_cross_entropy(TwLoss a) {
    double sum = 0;
    if (a.lanes == 4) sum = tw_losses<4>(a);
    else if (a.lanes == 8) sum = tw_losses<8>(a);
    else if (a.lanes == 16) sum = tw_losses<16>(a);
    else sum = tw_losses<32>(a);
    if (threadIdx.x == 0) a.partial[blockIdx.x] = sum;
    if (!tw_comes_last(a.ticket)) return;
    sum = 0;
    for (u32 b = threadIdx.x; b < gridDim.x; b += THREADS) sum += a.partial[b];
    sum = tw_block_sum<1>(sum);
    if (threadIdx.x == 0) *a.loss = (float)(sum * a.scale);
}
