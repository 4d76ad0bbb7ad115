// Expert parallelism: tokens to the ranks of their experts and back; crates/ops/src/ep on the device.
//
// Source: config.rs of that folder (which row a copy gets), research notes EP §5 (one row over the wire
// for each (token, rank); slots from counts, without atomics or sorting). Equal inputs give equal bits.
//
// P ranks, E experts in all, T = max_tokens of a rank, k choices, capacity rows on each rank.
// Symmetric areas of a rank, at base + rank * stride for every rank:
//   counts  [P][E] u32                 copies that each rank sends to each expert
//   meta    [P * T] TwMeta + k TwCopy + scales f32, `meta_stride` bytes each
//   tokens  [P * T] rows, `row_stride` bytes each
//   back    [P * T] rows of results, then k f32 gradients of weights, `back_stride` bytes each
// What comes from token t of rank s lies at index s * T + t of an area: no place is negotiated. A
// record is there if its `num` is not 0; who has read it sets it back before it grants the next launch.
//
// Between the kernels below stand tw_enter of comm/signal.cu (everybody has done its part; everybody
// may write again). Peers' memory is written with plain stores, read never.
// Blocks of TW_EP_THREADS. Types of results by mantissa bits: TW_OUT_MANTISSA (23 f32, 10 f16, 7 bf16);
// payload of a dispatch is bytes.

enum { THREADS = TW_EP_THREADS, CHUNK = TW_EP_CHUNK, WARPS = THREADS / 32 };
static_assert(CHUNK % THREADS == 0 && THREADS % 32 == 0, "whole rounds of whole warps");

typedef TwElem<TW_OUT_MANTISSA> Out;
typedef TwQuads<TW_OUT_MANTISSA> OutQuad;

struct TwMeta {
    u32 num;  // copies, 0 if there is no record
    u32 pad;
};

struct TwCopy {
    int choice, row;
    float weight;
};

// The layer and the team, and where their memory is.
struct TwEp {
    u64 counts, meta, tokens, back;  // addresses of rank 0's areas; rank r's are r * stride behind
    u64 stride;
    const u32* first;       // [P + 1] first expert of each rank
    u64 meta_stride, row_stride, back_stride;
    u32 size, me, max_tokens, top_k, experts, capacity, align, scales;
};

// The routing of one microbatch, in this rank's memory.
struct TwHandle {
    int* rows;       // [T * k] row of each choice of mine at its rank, or -1
    int* ranks;      // [T * k] that rank
    u32* num;        // [P * T] copies of each record that came
    TwCopy* copies;  // [P * T * k]
    int* source;     // [capacity] record of each expert-major row, or -1
    int* place;      // [P * T] received row of each record (flat layout)
    i64* counts;     // [local experts] true number of copies
    i64* m_splits;   // [local experts] rows, with padding, within the capacity
    i64* total;      // [1] rows needed
    i64* dropped;    // [1] copies left out here
    i64* lost;       // [P] copies left out at each rank
};

struct TwRouting {
    const void* idx;  // [tokens * k] i32, or i64 if `wide`; -1 is masked
    u32* chunks;      // scratch [num_chunks][E + 1]; the last column counts indices that are no expert
    i64* next;        // scratch [E]
    u32* status;      // 1: an index is no expert
    u32 choices, wide, num_chunks, pad;
};

__device__ __forceinline__ i64 tw_index(const TwRouting& a, u64 i) {
    return a.wide ? ((const i64*)a.idx)[i] : ((const int*)a.idx)[i];
}

// The expert of choice i: -1 none, E if there is no such expert.
__device__ __forceinline__ int tw_choice(const TwEp& l, const TwRouting& a, u64 i) {
    if (i >= a.choices) return -1;
    const i64 e = tw_index(a, i);
    if (e == -1) return -1;
    return e < 0 || e >= l.experts ? (int)l.experts : (int)e;
}

// Copies of each expert in each chunk of choices. Grid: num_chunks (at least 1).
extern "C" __global__ void __launch_bounds__(TW_EP_THREADS)
tw_ep_count(const __grid_constant__ TwEp l, const __grid_constant__ TwRouting a) {
    u32* row = a.chunks + (u64)blockIdx.x * (l.experts + 1);
    for (u32 e = threadIdx.x; e <= l.experts; e += THREADS) row[e] = 0;
    __syncthreads();
    for (u32 n = threadIdx.x; n < CHUNK; n += THREADS) {
        const int e = tw_choice(l, a, (u64)blockIdx.x * CHUNK + n);
        // Sums of integers: their order decides nothing.
        if (e >= 0) atomicAdd(&row[e], 1u);
    }
}

// My counts to every rank, mine included. Grid: P.
extern "C" __global__ void __launch_bounds__(TW_EP_THREADS)
tw_ep_publish(const __grid_constant__ TwEp l, const __grid_constant__ TwRouting a) {
    const u32 p = (l.me + blockIdx.x) % l.size;
    u32* to = (u32*)(l.counts + p * l.stride) + (u64)l.me * l.experts;
    for (u32 e = threadIdx.x; e <= l.experts; e += THREADS) {
        u32 sum = 0;
        for (u32 c = 0; c < a.num_chunks; c++) sum += a.chunks[(u64)c * (l.experts + 1) + e];
        if (e < l.experts) to[e] = sum;
        else if (blockIdx.x == 0) *a.status = sum != 0;
    }
}

// The sum of `v` over earlier threads; `all` over the block.
__device__ __forceinline__ i64 tw_before(i64 v, i64* all) {
    __shared__ i64 sums[WARPS];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 upto = v;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const i64 other = __shfl_up_sync(0xffffffffu, upto, by);
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
    // The next call writes the sums again.
    __syncthreads();
    return before;
}

// The rank of an expert.
__device__ __forceinline__ u32 tw_owner(const TwEp& l, u32 e) {
    u32 r = 0;
    while (e >= l.first[r + 1]) r++;
    return r;
}

// Rows from everybody's counts: a.next[e] and a.chunks become the row of my first copy of e, and of the
// first in each chunk; the counts of the handle. One pass over all experts: the rows of a rank begin where
// the sum over all earlier ranks' experts ends. Grid: 1.
extern "C" __global__ void __launch_bounds__(TW_EP_THREADS)
tw_ep_scan(const __grid_constant__ TwEp l, const __grid_constant__ TwRouting a, const __grid_constant__ TwHandle h) {
    __shared__ u64 lost[64], rows[65];
    const u32* counts = (const u32*)(l.counts + l.me * l.stride);
    const i64 cap = l.capacity;
    if (threadIdx.x < 64) lost[threadIdx.x] = 0;
    i64 sum = 0, all;
    for (u32 e0 = 0; e0 < l.experts; e0 += THREADS) {
        const u32 e = e0 + threadIdx.x;
        i64 total = 0;
        for (u32 s = 0; e < l.experts && s < l.size; s++) total += counts[(u64)s * l.experts + e];
        const i64 at = sum + tw_before((total + l.align - 1) / l.align * l.align, &all);
        sum += all;
        if (e < l.experts) a.next[e] = at;
    }
    __syncthreads();
    // Where each rank begins; a rank without experts begins where the next one does.
    for (u32 r = threadIdx.x; r <= l.size; r += THREADS) rows[r] = l.first[r] < l.experts ? a.next[l.first[r]] : sum;
    __syncthreads();
    for (u32 e = threadIdx.x; e < l.experts; e += THREADS) {
        const u32 r = tw_owner(l, e);
        i64 total = 0, mine = 0;
        for (u32 s = 0; s < l.size; s++) {
            const u32 c = counts[(u64)s * l.experts + e];
            mine += s < l.me ? c : 0;
            total += c;
        }
        const i64 at = a.next[e] - (i64)rows[r], padded = (total + l.align - 1) / l.align * l.align;
        a.next[e] = at + mine;
        const i64 left = max(at + total, cap) - max(at, cap);
        // Sums of integers: their order decides nothing.
        if (left > 0) atomicAdd(&lost[r], (u64)left);
        if (r != l.me) continue;
        h.counts[e - l.first[r]] = total;
        h.m_splits[e - l.first[r]] = min(at + padded, cap) - min(at, cap);
    }
    __syncthreads();
    for (u32 r = threadIdx.x; r < l.size; r += THREADS) {
        h.lost[r] = (i64)lost[r];
        if (r == l.me) *h.total = (i64)(rows[r + 1] - rows[r]), *h.dropped = (i64)lost[r];
    }
    __syncthreads();
    for (u32 e = threadIdx.x; e < l.experts; e += THREADS) {
        u32 sum = 0;
        for (u32 c = 0; c < a.num_chunks; c++) {
            u32* here = &a.chunks[(u64)c * (l.experts + 1) + e];
            const u32 num = *here;
            *here = sum;
            sum += num;
        }
    }
}

// The row of each choice. Grid: num_chunks (at least 1).
extern "C" __global__ void __launch_bounds__(TW_EP_THREADS)
tw_ep_place(const __grid_constant__ TwEp l, const __grid_constant__ TwRouting a, const __grid_constant__ TwHandle h) {
    __shared__ int experts[THREADS];
    u32* counts = a.chunks + (u64)blockIdx.x * (l.experts + 1);
    for (u32 n = 0; n < CHUNK; n += THREADS) {
        const u64 i = (u64)blockIdx.x * CHUNK + n + threadIdx.x;
        int e = tw_choice(l, a, i);
        if (e == (int)l.experts) e = -1;
        experts[threadIdx.x] = e;
        __syncthreads();
        u32 before = 0, after = 0;
        for (u32 t = 0; t < THREADS; t++) {
            const bool same = experts[t] == e;
            before += same && t < threadIdx.x;
            after += same && t > threadIdx.x;
        }
        const i64 at = e >= 0 ? a.next[e] + counts[e] + before : l.capacity;
        if (i < a.choices) {
            int rank = -1;
            for (u32 r = 0; e >= 0 && r < l.size; r++)
                if ((u32)e >= l.first[r] && (u32)e < l.first[r + 1]) rank = (int)r;
            h.rows[i] = at < l.capacity ? (int)at : -1;
            h.ranks[i] = rank;
        }
        __syncthreads();
        // The last of an expert's choices counts them.
        if (e >= 0 && after == 0) counts[e] += before + 1;
        __syncthreads();
    }
}

// `len` bytes from `src` to `num` places, in the largest pieces that all of them allow.
template <class Piece>
__device__ __forceinline__ void tw_copy_pieces(const u64* to, u32 num, u64 src, u64 len) {
    for (u64 i = threadIdx.x; i < len / sizeof(Piece); i += THREADS) {
        const Piece v = ((const Piece*)src)[i];
        for (u32 d = 0; d < num; d++) ((Piece*)to[d])[i] = v;
    }
}

struct __align__(16) TwPiece {
    u32 w[4];
};

__device__ __forceinline__ void tw_copy(const u64* to, u32 num, u64 src, u64 len) {
    u64 bits = src | len;
    for (u32 d = 0; d < num; d++) bits |= to[d];
    if (bits % 16 == 0) tw_copy_pieces<TwPiece>(to, num, src, len);
    else if (bits % 4 == 0) tw_copy_pieces<u32>(to, num, src, len);
    else if (bits % 2 == 0) tw_copy_pieces<u16>(to, num, src, len);
    else tw_copy_pieces<u8>(to, num, src, len);
}

// The same to one place, which needs no array.
template <class Piece> __device__ __forceinline__ void tw_copy_piece(u64 to, u64 src, u64 len) {
#pragma unroll 1
    for (u64 i = threadIdx.x; i < len / sizeof(Piece); i += THREADS) ((Piece*)to)[i] = ((const Piece*)src)[i];
}

__device__ __forceinline__ void tw_copy_one(u64 to, u64 src, u64 len) {
    const u64 bits = to | src | len;
    if (bits % 16 == 0) tw_copy_piece<TwPiece>(to, src, len);
    else if (bits % 4 == 0) tw_copy_piece<u32>(to, src, len);
    else if (bits % 2 == 0) tw_copy_piece<u16>(to, src, len);
    else tw_copy_piece<u8>(to, src, len);
}

__device__ __forceinline__ u64 tw_meta(const TwEp& l, u32 rank, u64 record) {
    return l.meta + rank * l.stride + record * l.meta_stride;
}

// A record of each of my tokens to each rank that has a kept copy of it, ranks from me + 1 on. Weights
// [tokens, k] and scales [tokens, scales] may be null. Grid: tokens.
extern "C" __global__ void __launch_bounds__(TW_EP_THREADS)
tw_ep_push(const __grid_constant__ TwEp l, const __grid_constant__ TwHandle h, const u8* x, u64 row_bytes,
           const float* weights, const float* scales) {
    __shared__ u64 to[64], scale_to[64];
    __shared__ u32 num_to;
    const u32 t = blockIdx.x, k = l.top_k;
    const u64 record = (u64)l.me * l.max_tokens + t;
    // One thread for a rank: its copies in the order of choices.
    if (threadIdx.x == 0) num_to = 0;
    __syncthreads();
    if (threadIdx.x < l.size) {
        const u32 r = threadIdx.x;
        const u64 meta = tw_meta(l, r, record);
        TwCopy* copies = (TwCopy*)(meta + sizeof(TwMeta));
        u32 n = 0;
        for (u32 j = 0; j < k; j++) {
            const u64 i = (u64)t * k + j;
            if (h.ranks[i] != (int)r || h.rows[i] < 0) continue;
            TwCopy c = {(int)j, h.rows[i], weights ? weights[i] : 0.0f};
            copies[n++] = c;
        }
        if (n > 0) ((TwMeta*)meta)->num = n;
        to[r] = n > 0 ? l.tokens + r * l.stride + record * l.row_stride : 0;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        // In rotated order, so that not everybody writes to one rank first.
        u64 list[64];
        u32 n = 0;
        for (u32 i = 1; i <= l.size; i++) {
            const u32 r = (l.me + i) % l.size;
            if (!to[r]) continue;
            list[n] = to[r];
            scale_to[n++] = tw_meta(l, r, record) + sizeof(TwMeta) + (u64)k * sizeof(TwCopy);
        }
        for (u32 i = 0; i < n; i++) to[i] = list[i];
        num_to = n;
    }
    __syncthreads();
    if (num_to == 0) return;
    tw_copy(to, num_to, (u64)x + t * row_bytes, row_bytes);
    if (scales) tw_copy(scale_to, num_to, (u64)(scales + (u64)t * l.scales), (u64)l.scales * 4);
}

// What came: the handle's records, the record of each expert-major row, weights by rows (may be null,
// must be 0 before). `source` must be -1 before. Clears the records. Grid: P * T / THREADS, rounded up.
extern "C" __global__ void __launch_bounds__(TW_EP_THREADS)
tw_ep_index(const __grid_constant__ TwEp l, const __grid_constant__ TwHandle h, float* weights) {
    const u64 record = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (record >= (u64)l.size * l.max_tokens) return;
    TwMeta* meta = (TwMeta*)tw_meta(l, l.me, record);
    const TwCopy* copies = (const TwCopy*)(meta + 1);
    const u32 num = meta->num < l.top_k ? meta->num : l.top_k;
    h.num[record] = num;
    for (u32 n = 0; n < num; n++) {
        const TwCopy c = copies[n];
        h.copies[record * l.top_k + n] = c;
        // Rows within the capacity are all that a peer sends; another would be outside of the memory.
        if ((u32)c.row >= l.capacity) continue;
        h.source[c.row] = (int)record;
        if (weights) weights[c.row] = c.weight;
    }
    meta->num = 0;
}

// Received rows without gaps, by source and token: h.place of each record, and the record of each row in
// `row_source` (-1 before). Grid: 1.
extern "C" __global__ void __launch_bounds__(TW_EP_THREADS)
tw_ep_flat(const __grid_constant__ TwEp l, const __grid_constant__ TwHandle h, int* row_source) {
    const u64 records = (u64)l.size * l.max_tokens;
    i64 row = 0, all;
    for (u64 r0 = 0; r0 < records; r0 += THREADS) {
        const u64 r = r0 + threadIdx.x;
        const bool there = r < records && h.num[r] > 0;
        const i64 at = row + tw_before(there, &all);
        row += all;
        if (r < records) h.place[r] = there ? (int)at : -1;
        if (there) row_source[at] = (int)r;
    }
}

// The received row of each record of a rank-major layout is the record's own. Grid: P * T / THREADS.
extern "C" __global__ void __launch_bounds__(TW_EP_THREADS)
tw_ep_rank_major(const __grid_constant__ TwEp l, const __grid_constant__ TwHandle h, int* row_source) {
    const u64 r = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (r >= (u64)l.size * l.max_tokens) return;
    const int at = h.num[r] > 0 ? (int)r : -1;
    h.place[r] = at;
    row_source[r] = at;
}

// index[row] = the received row that feeds an expert-major row, -1 in padding. `place` is null where the
// received rows are expert-major. Grid: capacity / THREADS.
extern "C" __global__ void __launch_bounds__(TW_EP_THREADS)
tw_ep_row_index(const __grid_constant__ TwEp l, const __grid_constant__ TwHandle h, const int* place, int* index) {
    const u64 row = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (row >= l.capacity) return;
    const int record = h.source[row];
    index[row] = record < 0 ? -1 : place ? place[record] : (int)row;
}

// out[row] = the payload of record row_source[row], 0 where there is none; scales likewise (may be null).
// Grid: rows.
extern "C" __global__ void __launch_bounds__(TW_EP_THREADS)
tw_ep_gather(const __grid_constant__ TwEp l, const int* row_source, u8* out, u64 row_bytes, float* scales) {
    const u64 row = blockIdx.x;
    const int record = row_source[row];
    const u64 to = (u64)out + row * row_bytes;
    if (record < 0) {
        for (u64 i = threadIdx.x; i < row_bytes; i += THREADS) ((u8*)to)[i] = 0;
    } else {
        tw_copy_one(to, l.tokens + l.me * l.stride + record * l.row_stride, row_bytes);
    }
    if (!scales) return;
    const float* from = (const float*)(tw_meta(l, l.me, record < 0 ? 0 : record) + sizeof(TwMeta) +
                                       (u64)l.top_k * sizeof(TwCopy));
    for (u32 i = threadIdx.x; i < l.scales; i += THREADS) scales[row * l.scales + i] = record < 0 ? 0.0f : from[i];
}

// Four elements of a row of `hidden`; 0 behind its end.
__device__ __forceinline__ OutQuad tw_quad(u64 row, u32 n, u32 hidden) {
    if (hidden % 4 == 0 && row % sizeof(OutQuad) == 0) return ((const OutQuad*)row)[n];
    OutQuad q;
    q.clear();
#pragma unroll
    for (u32 j = 0; j < 4; j++)
        if (4 * n + j < hidden) q.set(j, ((const Out::Bits*)row)[4 * n + j]);
    return q;
}

__device__ __forceinline__ void tw_store(u64 row, u32 n, u32 hidden, const float (&v)[4]) {
    OutQuad q;
    q.clear();
#pragma unroll
    for (int j = 0; j < 4; j++) q.set(j, Out::round(v[j]));
    if (hidden % 4 == 0 && row % sizeof(OutQuad) == 0) {
        ((OutQuad*)row)[n] = q;
        return;
    }
#pragma unroll
    for (u32 j = 0; j < 4; j++)
        if (4 * n + j < hidden) ((Out::Bits*)row)[4 * n + j] = (Out::Bits)q.bits(j);
}

// The sum of each record's copies in the order of choices, in f32, rounded once, to the rank it came from,
// with the gradients of its weights. With `expert_major`, y has a row for each copy and is weighted by
// `weights` if given; else it has a row for each record. Grid: P * T, sources from me + 1 on.
extern "C" __global__ void __launch_bounds__(TW_EP_THREADS)
tw_ep_return(const __grid_constant__ TwEp l, const __grid_constant__ TwHandle h, const Out::Bits* y,
             const float* weights, const float* dw, u32 hidden, u32 expert_major) {
    const u32 s = (l.me + 1 + blockIdx.x / l.max_tokens) % l.size, t = blockIdx.x % l.max_tokens;
    const u64 record = (u64)s * l.max_tokens + t;
    const u32 num = h.num[record];
    if (num == 0) return;
    const TwCopy* copies = h.copies + record * l.top_k;
    const u64 to = l.back + s * l.stride + ((u64)l.me * l.max_tokens + t) * l.back_stride;
    for (u32 n = threadIdx.x; n < tw_ceil(hidden, 4); n += THREADS) {
        float sum[4] = {0, 0, 0, 0};
        for (u32 c = 0; c < (expert_major ? num : 1); c++) {
            const u64 row = expert_major ? copies[c].row : h.place[record];
            const float w = expert_major && weights ? weights[row] : 1.0f;
            const OutQuad q = tw_quad((u64)(y + row * hidden), n, hidden);
#pragma unroll
            for (int j = 0; j < 4; j++) sum[j] = __fadd_rn(sum[j], __fmul_rn(w, q.at(j)));
        }
        tw_store(to, n, hidden, sum);
    }
    float* grads = (float*)(to + l.back_stride) - l.top_k;
    if (dw)
        for (u32 n = threadIdx.x; n < num; n += THREADS) grads[n] = dw[copies[n].row];
}

// out[t] = the sum of what came back for it, in the order of the ranks, in f32, rounded once; dw[t, j] the
// gradient that came with choice j, 0 if it was not sent. Grid: tokens.
extern "C" __global__ void __launch_bounds__(TW_EP_THREADS)
tw_ep_sum(const __grid_constant__ TwEp l, const __grid_constant__ TwHandle h, Out::Bits* out, float* dw, u32 hidden) {
    __shared__ u64 from[64];
    __shared__ u32 num_from;
    const u32 t = blockIdx.x, k = l.top_k;
    const u64 mine = l.back + l.me * l.stride;
    if (threadIdx.x == 0) {
        u32 n = 0;
        for (u32 r = 0; r < l.size; r++) {
            bool any = false;
            for (u32 j = 0; j < k; j++) any |= h.ranks[(u64)t * k + j] == (int)r && h.rows[(u64)t * k + j] >= 0;
            if (any) from[n++] = mine + ((u64)r * l.max_tokens + t) * l.back_stride;
        }
        num_from = n;
    }
    __syncthreads();
    for (u32 n = threadIdx.x; n < tw_ceil(hidden, 4); n += THREADS) {
        float sum[4] = {0, 0, 0, 0};
        for (u32 r = 0; r < num_from; r++) {
            const OutQuad q = tw_quad(from[r], n, hidden);
#pragma unroll
            for (int j = 0; j < 4; j++) sum[j] = __fadd_rn(sum[j], q.at(j));
        }
        tw_store((u64)(out + (u64)t * hidden), n, hidden, sum);
    }
    if (!dw || threadIdx.x >= k) return;
    for (u32 j = threadIdx.x; j < k; j += THREADS) {
        const int r = h.ranks[(u64)t * k + j];
        u32 n = 0;  // earlier choices of the same rank that were kept
        for (u32 i = 0; i < j; i++) n += h.ranks[(u64)t * k + i] == r && h.rows[(u64)t * k + i] >= 0;
        const bool sent = r >= 0 && h.rows[(u64)t * k + j] >= 0;
        const u64 back = mine + ((u64)(sent ? r : 0) * l.max_tokens + t) * l.back_stride;
        dw[(u64)t * k + j] = sent ? ((const float*)(back + l.back_stride) - k)[n] : 0.0f;
    }
}

// dy[row] = weights[row] * g of the row's record (g itself without weights), 0 in padding; with weights also
// d_weights[row] = <g, y[row]>, added by lanes in their order, then in pairs. Grid: capacity.
extern "C" __global__ void __launch_bounds__(TW_EP_THREADS)
tw_ep_gather_bwd(const __grid_constant__ TwEp l, const __grid_constant__ TwHandle h, Out::Bits* dy,
                 const float* weights, const Out::Bits* y, float* d_weights, u32 hidden) {
    __shared__ float sums[WARPS];
    const u64 row = blockIdx.x;
    const int record = h.source[row];
    const u64 from = l.tokens + l.me * l.stride + (record < 0 ? 0 : record) * l.row_stride;
    float dot = 0;
    for (u32 n = threadIdx.x; n < tw_ceil(hidden, 4); n += THREADS) {
        float v[4] = {0, 0, 0, 0};
        if (record >= 0) {
            const OutQuad g = tw_quad(from, n, hidden);
            const float w = weights ? weights[row] : 1.0f;
            if (weights) {
                const OutQuad out = tw_quad((u64)(y + row * hidden), n, hidden);
#pragma unroll
                for (int j = 0; j < 4; j++) dot = __fmaf_rn(g.at(j), out.at(j), dot);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = weights ? __fmul_rn(w, g.at(j)) : g.at(j);
        }
        tw_store((u64)(dy + row * hidden), n, hidden, v);
    }
    if (!weights) return;
#pragma unroll
    for (int by = 16; by > 0; by /= 2) dot = __fadd_rn(dot, __shfl_xor_sync(0xffffffffu, dot, by));
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = dot;
    __syncthreads();
    if (threadIdx.x != 0) return;
    float all = 0;
    for (u32 w = 0; w < WARPS; w++) all = __fadd_rn(all, sums[w]);
    d_weights[row] = record < 0 ? 0.0f : all;
}
