// Embedding: rows of a table by token, and its gradient, sums of rows by token. sm80_layers.cu
// includes this file behind its helpers.
//
// The gradient takes three launches: tw_embed_count and tw_embed_place (a block for each
// TW_LAYERS_TOKENS rows) sort the rows by token, and keep the order of each token's rows;
// tw_embed_bwd has a block for each chunk of one token's rows and each 4 * THREADS columns.

#pragma once

enum { VALUES = 256, TOKENS = TW_LAYERS_TOKENS, OF_WARP = TOKENS / WARPS };
static_assert(TOKENS % THREADS == 0, "whole rounds");

// x[r] = table[tokens[r]]. Grid: a block for each row.
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

struct TwEmbedBwd {
    const u8* tokens;  // [n]
    const float* dx;   // [n, d]
    float* grad;       // [VALUES, d]
    float* partial;    // [chunks, d]: sums of the chunks of tokens that have several
    u32* counts;       // [blocks of tw_embed_count][VALUES]: how many rows of each token
    u32* order;        // [n]: rows by token
    u64* starts;       // [VALUES + 1]: chunks (high word) and rows (low word) of the tokens before
    u32* tickets;      // [VALUES][parts of d], 0
    u32 n, d;
};

// Rows in a chunk of a token with `rows` rows: TW_LAYERS_CHUNK, or a multiple where there would be
// more than TW_LAYERS_CHUNKS chunks.
__device__ __forceinline__ u32 tw_chunk(u32 rows) {
    return TW_LAYERS_CHUNK * max(tw_ceil(rows, TW_LAYERS_CHUNK * TW_LAYERS_CHUNKS), 1u);
}

// Calls f(row, token, lanes with the same token) for this warp's rows, 32 at once, in their order.
// A lane behind the last row has the token VALUES.
template <class F> __device__ __forceinline__ void tw_each_row(const TwEmbedBwd& a, F f) {
    u32 first = blockIdx.x * TOKENS + threadIdx.x / 32 * OF_WARP + threadIdx.x % 32, token[OF_WARP / 32];
#pragma unroll
    for (u32 i = 0; i < OF_WARP / 32; i++) token[i] = first + 32 * i < a.n ? a.tokens[first + 32 * i] : VALUES;
#pragma unroll
    for (u32 i = 0; i < OF_WARP / 32; i++) f(first + 32 * i, token[i], __match_any_sync(TW_ALL, token[i]));
}

// counts[block][v] = the number of rows of token v among the block's TW_LAYERS_TOKENS rows.
extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS) tw_embed_count(TwEmbedBwd a) {
    __shared__ u32 counts[VALUES + 1];
    for (u32 v = threadIdx.x; v < VALUES; v += THREADS) counts[v] = 0;
    __syncthreads();
    tw_each_row(a, [&](u32, u32 token, u32 same) {
        if (threadIdx.x % 32 == (u32)__ffs(same) - 1) atomicAdd(&counts[token], (u32)__popc(same));
    });
    __syncthreads();
    for (u32 v = threadIdx.x; v < VALUES; v += THREADS) a.counts[blockIdx.x * VALUES + v] = counts[v];
}

// Fills `order` with the rows sorted by token, and `starts`, from the counts of all blocks.
extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS) tw_embed_place(TwEmbedBwd a) {
    __shared__ u32 at[WARPS][VALUES + 1], before[VALUES];
    __shared__ u64 upto[2][VALUES];
    u32 warp = threadIdx.x / 32;
    for (u32 v = threadIdx.x; v < VALUES; v += THREADS) {
        u32 all = 0, here = 0;
#pragma unroll 16
        for (u32 b = 0; b < gridDim.x; b++) {
            here = b == blockIdx.x ? all : here;
            all += a.counts[b * VALUES + v];
        }
        before[v] = here;
        // A token without rows has one chunk, too: its block writes the zeros.
        upto[0][v] = (u64)max(tw_ceil(all, tw_chunk(all)), 1u) << 32 | all;
        for (u32 w = 0; w < WARPS; w++) at[w][v] = 0;
    }
    __syncthreads();
    u32 from = 0;
    for (u32 by = 1; by < VALUES; by *= 2, from ^= 1) {
        for (u32 v = threadIdx.x; v < VALUES; v += THREADS)
            upto[from ^ 1][v] = upto[from][v] + (v >= by ? upto[from][v - by] : 0);
        __syncthreads();
    }
    tw_each_row(a, [&](u32, u32 token, u32 same) {
        if (threadIdx.x % 32 == (u32)__ffs(same) - 1) at[warp][token] += __popc(same);
        __syncwarp();
    });
    __syncthreads();
    for (u32 v = threadIdx.x; v < VALUES; v += THREADS) {
        u64 start = v == 0 ? 0 : upto[from][v - 1];
        u32 next = (u32)start + before[v];
        for (u32 w = 0; w < WARPS; w++) {
            u32 num = at[w][v];
            at[w][v] = next;
            next += num;
        }
        if (blockIdx.x != 0) continue;
        a.starts[v] = start;
        if (v == VALUES - 1) a.starts[VALUES] = upto[from][v];
    }
    __syncthreads();
    tw_each_row(a, [&](u32 row, u32 token, u32 same) {
        u32 lane = threadIdx.x % 32, to = at[warp][token] + __popc(same & ((1u << lane) - 1));
        __syncwarp();
        if (lane == (u32)__ffs(same) - 1) at[warp][token] += __popc(same);
        __syncwarp();
        if (token < VALUES) a.order[to] = row;
    });
}

// The sum of column quad `quad` over `num` rows of d columns; row i of the sum is at(i).
template <class At> __device__ __forceinline__ float4 tw_sum_quads(const float* x, u32 quad, u32 d, u32 num, At at) {
    enum { AHEAD = 8 };
    const float4* from = (const float4*)x + quad;
    float4 sum = make_float4(0, 0, 0, 0);
    auto add = [&](float4 v) { sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w); };
    u32 i = 0;
    for (; i + AHEAD <= num; i += AHEAD) {
        float4 v[AHEAD];
#pragma unroll
        for (u32 j = 0; j < AHEAD; j++) v[j] = from[(u64)at(i + j) * (d / 4)];
#pragma unroll
        for (u32 j = 0; j < AHEAD; j++) add(v[j]);
    }
#pragma unroll AHEAD - 1
    for (; i < num; i++) add(from[(u64)at(i) * (d / 4)]);
    return sum;
}

// grad[v] = the sum of dx[r] over the rows r of token v: rows of a chunk in their order, then
// chunks in theirs. The last block of the token's chunks adds the chunks.
extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS, 4) tw_embed_bwd(TwEmbedBwd a) {
    enum { LIST = 4 * THREADS };
    __shared__ u32 value, rows[LIST];
    u32 parts = tw_ceil(a.d / 4, THREADS), part = blockIdx.x % parts, chunk = blockIdx.x / parts;
    if (chunk >= (u32)(a.starts[VALUES] >> 32)) return;
    for (u32 v = threadIdx.x; v < VALUES; v += THREADS)
        if (a.starts[v] >> 32 <= chunk && chunk < a.starts[v + 1] >> 32) value = v;
    __syncthreads();
    u64 start = a.starts[value], end = a.starts[value + 1];
    u32 of_token = (u32)end - (u32)start, first = (u32)(start >> 32), chunks = (u32)(end >> 32) - first;
    u32 per = tw_chunk(of_token), from = (u32)start + (chunk - first) * per, stop = min(from + per, (u32)end);
    u32 quad = part * THREADS + threadIdx.x;
    bool mine = quad < a.d / 4;
    float4 sum = make_float4(0, 0, 0, 0);
    for (; from < stop; from += LIST) {
        u32 num = min(stop - from, (u32)LIST);
        for (u32 i = threadIdx.x; i < num; i += THREADS) rows[i] = a.order[from + i];
        __syncthreads();
        if (mine) {
            float4 s = tw_sum_quads(a.dx, quad, a.d, num, [&](u32 i) { return rows[i]; });
            sum = make_float4(sum.x + s.x, sum.y + s.y, sum.z + s.z, sum.w + s.w);
        }
        // All threads have read the list.
        __syncthreads();
    }
    float4* grad = (float4*)(a.grad + (u64)value * a.d) + quad;
    if (chunks == 1) {
        if (mine) *grad = sum;
        return;
    }
    if (mine) ((float4*)(a.partial + (u64)chunk * a.d))[quad] = sum;
    if (!tw_last_of(a.tickets + value * parts + part, chunks) || !mine) return;
    *grad = tw_sum_quads(a.partial, quad, a.d, chunks, [&](u32 i) { return first + i; });
}
