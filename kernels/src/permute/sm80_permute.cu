// Copies tokens to expert-major rows and sums them back: crates/ops/src/permute on the device.
//
// Source: schedule.rs (the layout) and host/ (rows and gradients) of that folder. Rows are ordered
// by expert, then token, then choice; each expert's rows are padded to `align`; rows from
// `capacity` on are dropped. Results do not depend on the order of atomics: equal inputs give equal
// bits.
//
// idx: [tokens, top_k] i32 or i64, -1 masked. slots: [tokens, top_k] i32, the row of each choice or
// -1. sources: [capacity] i32, token * top_k + choice or -1. m_splits: [experts] i64. Rows have the
// type of TW_SRC_MANTISSA bits (23 f32, 10 f16, 7 bf16); tw_permute moves bytes of any type. If an
// index is no expert, the routing sets `status` to TW_PERMUTE_BAD_INDEX, and kernels that use the
// map fill their outputs with 0xFF.
//
// Launch, blocks of TW_PERMUTE_THREADS, no dynamic shared memory:
//   tw_route_count, tw_route_place   a block for each TW_PERMUTE_CHUNK choices (count: >= 1)
//   tw_route_scan                    one block, between them
//   tw_permute, tw_unpermute_bwd     a block for each row of the capacity
//   tw_unpermute                     a block for each token
//   tw_permute_words                 a thread for each element
//   tw_unpermute_bwd_weights         a warp for each choice

#include "../common/convert.cuh"

struct TwRoute {
    const void* idx;
    u32* counts;  // scratch [chunks][experts + 1]; the last column counts indices that are no expert
    i64* first;   // scratch [experts]: first row
    int* slots;
    int* sources;
    i64* m_splits;
    i64* total;    // rows needed to drop nothing
    i64* dropped;  // copies
    int* status;
    u32 choices, experts, capacity, align;
    u32 wide;    // idx is i64
    u32 chunks;  // blocks of count
};

typedef TwElem<TW_SRC_MANTISSA> Src;
typedef TwQuads<TW_SRC_MANTISSA> TwQuad;
enum { THREADS = TW_PERMUTE_THREADS, CHUNK = TW_PERMUTE_CHUNK, WARPS = THREADS / 32 };
static_assert(CHUNK % THREADS == 0 && THREADS % 32 == 0, "whole rounds of whole warps");

// The expert of choice i: -1 if masked, `experts` if there is no such expert.
__device__ __forceinline__ int tw_expert(const TwRoute& a, u32 i) {
    i64 e = a.wide ? ((const i64*)a.idx)[i] : ((const int*)a.idx)[i];
    if (e == -1) return -1;
    return e < 0 || e >= a.experts ? (int)a.experts : (int)e;
}

// counts[chunk][e] = the number of choices of the chunk that are e. Sets all sources to -1.
extern "C" __global__ void __launch_bounds__(TW_PERMUTE_THREADS) tw_route_count(TwRoute a) {
    u32* row = a.counts + (u64)blockIdx.x * (a.experts + 1);
    for (u32 e = threadIdx.x; e <= a.experts; e += THREADS) row[e] = 0;
    __syncthreads();
    for (u32 n = threadIdx.x; n < CHUNK; n += THREADS) {
        u64 i = (u64)blockIdx.x * CHUNK + n;
        int e = i < a.choices ? tw_expert(a, (u32)i) : -1;
        if (e >= 0) atomicAdd(&row[e], 1u);
    }
    u64 step = (u64)gridDim.x * THREADS;
    for (u64 r = (u64)blockIdx.x * THREADS + threadIdx.x; r < a.capacity; r += step) a.sources[r] = -1;
}

// Replaces counts[chunk][e] by the number in earlier chunks; returns the number in all chunks.
__device__ __forceinline__ u32 tw_prefix_of_chunks(const TwRoute& a, u32 e) {
    u32 sum = 0;
    u32* p = a.counts + e;
#pragma unroll 8
    for (u32 chunk = 0; chunk < a.chunks; chunk++, p += a.experts + 1) {
        u32 here = *p;
        *p = sum;
        sum += here;
    }
    return sum;
}

// The sum of `v` over earlier threads; *all is the sum over the block.
__device__ __forceinline__ i64 tw_before(i64 v, i64* all) {
    __shared__ i64 sums[WARPS];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 upto = v;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        i64 other = __shfl_up_sync(0xffffffffu, upto, by);
        if (lane >= (u32)by) upto += other;
    }
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    i64 before = upto - v;
    *all = 0;
    for (u32 w = 0; w < WARPS; w++) {
        before += w < warp ? sums[w] : 0;
        *all += sums[w];
    }
    // The next call overwrites `sums`.
    __syncthreads();
    return before;
}

// Computes the rows of each expert, and the totals.
extern "C" __global__ void __launch_bounds__(TW_PERMUTE_THREADS) tw_route_scan(TwRoute a) {
    u32 bad = threadIdx.x == 0 ? tw_prefix_of_chunks(a, a.experts) : 0;
    bool good = !__syncthreads_or(bad != 0);
    i64 row = 0, lost = 0;
    for (u32 e0 = 0; e0 < a.experts; e0 += THREADS) {
        u32 e = e0 + threadIdx.x;
        i64 num = e < a.experts ? tw_prefix_of_chunks(a, e) : 0;
        i64 padded = (num + a.align - 1) / a.align * a.align, all, capacity = a.capacity;
        i64 first = row + tw_before(padded, &all), end = first + padded;
        row += all;
        if (e >= a.experts) continue;
        a.first[e] = first;
        a.m_splits[e] = good ? min(end, capacity) - min(first, capacity) : 0;
        lost += max(first + num, capacity) - max(first, capacity);
    }
    i64 dropped;
    tw_before(lost, &dropped);
    if (threadIdx.x != 0) return;
    *a.total = good ? row : 0;
    *a.dropped = good ? dropped : 0;
    *a.status = good ? 0 : TW_PERMUTE_BAD_INDEX;
}

// Computes slots and sources. A block handles its chunk in rounds of one choice a thread; its row
// of `counts` holds the number of each expert's choices before the round.
extern "C" __global__ void __launch_bounds__(TW_PERMUTE_THREADS) tw_route_place(TwRoute a) {
    __shared__ int experts[THREADS];
    u32* counts = a.counts + (u64)blockIdx.x * (a.experts + 1);
    bool good = *a.status == 0;
    for (u32 n = 0; n < CHUNK; n += THREADS) {
        u64 i = (u64)blockIdx.x * CHUNK + n + threadIdx.x;
        int e = i < a.choices ? tw_expert(a, (u32)i) : -1;
        if (!good) e = -1;
        experts[threadIdx.x] = e;
        __syncthreads();
        u32 before = 0, after = 0;
        for (u32 t = 0; t < THREADS; t++) {
            bool same = experts[t] == e;
            before += same && t < threadIdx.x;
            after += same && t > threadIdx.x;
        }
        i64 at = e >= 0 ? a.first[e] + counts[e] + before : a.capacity;
        bool kept = at < a.capacity;
        if (i < a.choices) a.slots[i] = kept ? (int)at : -1;
        if (kept) a.sources[at] = (int)i;
        __syncthreads();
        // The last choice of each expert in a round adds the round to `counts`.
        if (e >= 0 && after == 0) counts[e] += before + 1;
        __syncthreads();
    }
}

// out[r] = x[sources[r] / top_k] for rows of `row_bytes`, 0 where there is no source.
extern "C" __global__ void __launch_bounds__(TW_PERMUTE_THREADS)
tw_permute(const int* sources, const int* status, u32 top_k, const u8* x, u8* out, u64 row_bytes) {
    int i = sources[blockIdx.x];
    u32 fill = *status == 0 ? 0 : 0xffffffff;
    u8* to = out + (u64)blockIdx.x * row_bytes;
    u64 words = row_bytes % 16 == 0 && tw_aligned(x, 16) && tw_aligned(out, 16) ? row_bytes / 16 : 0;
    if (fill != 0 || i < 0) {
        for (u64 n = threadIdx.x; n < words; n += THREADS) ((uint4*)to)[n] = make_uint4(fill, fill, fill, fill);
        for (u64 n = 16 * words + threadIdx.x; n < row_bytes; n += THREADS) to[n] = (u8)fill;
        return;
    }
    const u8* from = x + (u64)(i / top_k) * row_bytes;
    for (u64 n = threadIdx.x; n < words; n += THREADS) ((uint4*)to)[n] = ((const uint4*)from)[n];
    for (u64 n = 16 * words + threadIdx.x; n < row_bytes; n += THREADS) to[n] = from[n];
}

// out[i] = x[map[i]] for words of f32, 0 where map[i] is -1: weights by their sources, and
// gradients of weights by their slots.
extern "C" __global__ void __launch_bounds__(TW_PERMUTE_THREADS)
tw_permute_words(const int* map, const int* status, u32 num, const u32* x, u32* out) {
    u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= num) return;
    int at = *status == 0 ? map[i] : -1;
    out[i] = *status != 0 ? 0xffffffff : at < 0 ? 0 : x[at];
}

// Elements 4n to 4n + 3 of a row of h; `whole`: all of them exist and are aligned.
__device__ __forceinline__ TwQuad tw_get(const Src::Bits* row, u32 n, u32 h, bool whole) {
    if (whole) return ((const TwQuad*)row)[n];
    TwQuad q;
    q.clear();
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (4 * n + j < h) q.set(j, row[4 * n + j]);
    return q;
}

__device__ __forceinline__ void tw_put(Src::Bits* row, u32 n, u32 h, bool whole, const float (&v)[4], bool good) {
    TwQuad q;
    q.clear();
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 bits = good ? Src::round(v[j]) : (Src::Bits)0xffffffff;
        q.set(j, bits);
        if (!whole && 4 * n + j < h) row[4 * n + j] = (Src::Bits)bits;
    }
    if (whole) ((TwQuad*)row)[n] = q;
}

__device__ __forceinline__ bool tw_whole(const void* a, const void* b, u32 h) {
    return h % 4 == 0 && tw_aligned(a, sizeof(TwQuad)) && tw_aligned(b, sizeof(TwQuad));
}

// out[t] = sum over j of weights[t, j] * rows[slots[t, j]], in the order of j, in f32 (product and
// sum rounded each, as on the host), rounded once to the type. Without weights they are 1.
extern "C" __global__ void __launch_bounds__(TW_PERMUTE_THREADS)
tw_unpermute(const int* slots, const int* status, u32 top_k, const Src::Bits* rows, const float* weights,
             Src::Bits* out, u32 hidden) {
    u64 t = blockIdx.x;
    bool good = *status == 0, whole = tw_whole(rows, out, hidden);
    for (u32 n = threadIdx.x; n < tw_ceil(hidden, 4); n += THREADS) {
        float sum[4] = {0, 0, 0, 0};
        for (u32 j = 0; j < top_k; j++) {
            int slot = good ? slots[t * top_k + j] : -1;
            if (slot < 0) continue;
            float w = weights ? weights[t * top_k + j] : 1.0f;
            TwQuad q = tw_get(rows + (u64)slot * hidden, n, hidden, whole);
#pragma unroll
            for (int k = 0; k < 4; k++) sum[k] = __fadd_rn(sum[k], __fmul_rn(w, q.at(k)));
        }
        tw_put(out + t * hidden, n, hidden, whole, sum, good);
    }
}

// d_rows[r] = weights[sources[r]] * d_out[sources[r] / top_k]; 0 in padding.
extern "C" __global__ void __launch_bounds__(TW_PERMUTE_THREADS)
tw_unpermute_bwd(const int* sources, const int* status, u32 top_k, const Src::Bits* d_out, const float* weights,
                 Src::Bits* d_rows, u32 hidden) {
    u64 r = blockIdx.x;
    bool good = *status == 0, whole = tw_whole(d_out, d_rows, hidden);
    int i = good ? sources[r] : -1;
    float w = i >= 0 && weights ? weights[i] : 1.0f;
    for (u32 n = threadIdx.x; n < tw_ceil(hidden, 4); n += THREADS) {
        float v[4] = {0, 0, 0, 0};
        if (i >= 0) {
            TwQuad q = tw_get(d_out + (u64)(i / top_k) * hidden, n, hidden, whole);
#pragma unroll
            for (int k = 0; k < 4; k++) v[k] = __fmul_rn(w, q.at(k));
        }
        tw_put(d_rows + r * hidden, n, hidden, whole, v, good);
    }
}

// d_weights[i] = <d_out[i / top_k], rows[slots[i]]> in f32, 0 where there is no row. Each lane adds
// its columns in order, then lanes add in pairs: the order is fixed.
extern "C" __global__ void __launch_bounds__(TW_PERMUTE_THREADS)
tw_unpermute_bwd_weights(const int* slots, const int* status, u32 top_k, u32 choices, const Src::Bits* d_out,
                         const Src::Bits* rows, float* d_weights, u32 hidden) {
    u64 i = (u64)blockIdx.x * WARPS + threadIdx.x / 32;
    if (i >= choices) return;
    u32 lane = threadIdx.x % 32;
    bool good = *status == 0, whole = tw_whole(d_out, rows, hidden);
    int slot = good ? slots[i] : -1;
    float sum = 0;
    for (u32 n = lane; slot >= 0 && n < tw_ceil(hidden, 4); n += 32) {
        TwQuad a = tw_get(d_out + i / top_k * hidden, n, hidden, whole);
        TwQuad b = tw_get(rows + (u64)slot * hidden, n, hidden, whole);
#pragma unroll
        for (int k = 0; k < 4; k++) sum = __fmaf_rn(a.at(k), b.at(k), sum);
    }
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, by));
    if (lane == 0) d_weights[i] = good ? sum : __uint_as_float(0xffffffff);
}
