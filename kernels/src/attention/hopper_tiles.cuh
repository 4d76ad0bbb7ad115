// What the attention kernels for sm_90a share: who takes which tile, rings of slots and stages,
// loads by ragged maps, and how a warp stores its rows of a tile of sums.

#pragma once

#include "../ptx/bulk.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/tensor.cuh"
#include "../ptx/wgmma.cuh"
#include "extras.cuh"

typedef unsigned char u8;

// Warpgroups of a block that multiply.
#ifndef TW_HA_GROUPS
#define TW_HA_GROUPS 2
#endif

// Segments that a launch may contain: most have one of queries and one of keys.
enum : u32 { TW_HA_FEW = 4 };

// In which order blocks take tiles, and the segments if they are few: else two kernels would write
// them to memory first.
struct TwAttnOrder {
    u32* counter;  // null, or a word that is zero, of this launch alone while it runs
    u32 heads;     // so many heads, at least one, are done before others: their keys fit in L2
    u32 few;       // 1: the segments are these, and those of TwAttn are not read
    TwSeg own[TW_HA_FEW], other[TW_HA_FEW];
};

enum : u32 {
    // Rows of a block's tile: 64 for each warpgroup that multiplies.
    TW_HA_M = 64 * TW_HA_GROUPS,
    // The outermost coordinate of ragged maps, from which rows count.
    TW_HA_RAGGED = 1 << 30,
};

extern __shared__ __align__(1024) unsigned char tw_smem[];

// Where the first row of a tile lies, with extras.
struct TwPlace {
    u32 pos;     // in the sequence
    u32 global;  // in the global tensors
};

// Which slot or stage of NUM comes next.
template <u32 NUM> struct TwRing {
    u32 at, parity;

    __device__ __forceinline__ TwRing() : at(0), parity(0) {}

    __device__ __forceinline__ void advance() {
        if (++at == NUM) at = 0, parity ^= 1;
    }
    // Whether the place is full, without a wait. Asked for some time before it is needed, this
    // hides the latency of the answer, some 40 clocks in which a warp could not issue a product.
    __device__ __forceinline__ bool is_full(u64* full) const { return mbarrier_test_wait_parity(full + at, parity); }

    // Waits, unless `is_full` has said of this place that it is `there`.
    __device__ __forceinline__ void wait_full(u64* full, bool there = false) const {
        if (there) return;
        while (!mbarrier_try_wait_parity(full + at, parity)) {
        }
    }
    __device__ __forceinline__ void wait_empty(u64* empty) const {
        while (!mbarrier_try_wait_parity(empty + at, parity ^ 1)) {
        }
    }
};

// This lane's elements of a tile of sums, with extras.
template <bool QUERIES> __device__ __forceinline__ TwLanePairs<QUERIES> tw_ha_pairs(const TwAttn& a, const TwPairTile& at) {
    return {a, at, threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, threadIdx.x % 4 * 2};
}

// A tile of queries.
struct TwQueryTile {
    u32 row, num;  // rows of the local tensor
    u32 head;
    int at;        // the position of the first one among the keys
    u32 gap;       // 1: rows of no sequence
    u32 more;      // 0: there is no such tile, and this block is through
};

// Describes tile `i` of a forward pass, and returns its segment. Of several heads that are done
// together the last tiles come first: under a causal mask they have most keys.
__device__ __forceinline__ TwSeg tw_ha_describe(const TwAttn& a, const TwAttnOrder& order, u32 i, TwQueryTile& q) {
    const u32 group = i / (order.heads * a.tiles), in = i - group * order.heads * a.tiles;
    const u32 width = min(order.heads, a.heads_q - group * order.heads);
    const u32 head = group * order.heads + in % width, t = a.tiles - 1 - in / width;
    const TwSeg own = tw_own(order.few ? order.own : a.own, a.num_own, t);
    const u32 first = (t - own.tile) * TW_HA_M, num = min(own.len - first, (u32)TW_HA_M);
    const bool gap = own.shift == TW_ATTN_GAP;
    const int at = (int)(own.pos + first) + (gap ? 0 : own.shift);
    q = {own.row + first, num, head, at, gap ? 1u : 0u, 1};
    return own;
}

// Sets scores of a tile of queries, whose first one is at position `q_at` among the keys, and a
// tile of N keys from `k_pos` on to -inf where the mask hides the pair or the key is behind `num`
// keys.
template <u32 N> __device__ __forceinline__ void tw_ha_mask(const TwAttn& a, float (&s)[N / 2], int q_at, int k_pos, u32 num) {
    const int at = q_at + (int)(threadIdx.x / 128 * 64);
    if (num == N && k_pos >= at + 63 - a.left && k_pos + (int)N - 1 <= at + a.right) return;
    // Relative to this lane's first column, so that columns are constants.
    const int lane = (int)(threadIdx.x % 4 * 2);
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const int own = q_at + (int)(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half) - k_pos;
        const int first = own - a.left - lane, last = min(own + a.right, (int)num - 1) - lane;
#pragma unroll
        for (u32 j = 0; j < N / 8; j++)
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
                const int col = (int)(8 * j + e);
                if (col < first || col > last) s[4 * j + 2 * half + e] = -TW_INF;
            }
    }
}

// True in a warp both of whose rows have a largest product so far that is not negative: see
// tw_ha_top.
__device__ __forceinline__ bool tw_ha_not_negative(const float (&max)[2]) {
    return __all_sync(0xffffffffu, (__float_as_int(max[0]) | __float_as_int(max[1])) >= 0);
}

// The largest of `from` and this lane's elements of row `half` of a tile of N keys. Floats that are
// not negative have the order of their bits as integers, and sm_90 compares three integers at once:
// half the instructions. What is negative, -inf too, is less than `from` in both orders if `from`
// is `not_negative`.
template <u32 N> __device__ __forceinline__ float tw_ha_top(const float (&s)[N / 2], u32 half, float from, bool not_negative) {
    if (not_negative) {
        int top = __float_as_int(from);
#pragma unroll
        for (u32 j = 2 * half; j < N / 2; j += 4) top = max(max(top, __float_as_int(s[j])), __float_as_int(s[j + 1]));
        return __int_as_float(top);
    }
#pragma unroll
    for (u32 j = 2 * half; j < N / 2; j += 4) from = fmaxf(from, fmaxf(s[j], s[j + 1]));
    return from;
}

// Loads D columns of head `head`, of ROWS rows from `row` on, of which `num` are there.
template <u32 D, u32 ROWS>
__device__ __forceinline__ void tw_ha_load(u8* to, const TwTensorMap* map, u64* bar, u32 head, u32 row, u32 num) {
#pragma unroll
    for (u32 i = 0; i < D / 64; i++)
        tensor_load_4d(to + i * (ROWS * 128), map, bar, (int)(head * D + 64 * i), (int)(TW_HA_RAGGED - num), (int)(row + num), (int)TW_HA_RAGGED);
}

// The tile behind `i`, of `num`. The draw that is the launch's last leaves the counter at zero for
// the next one: there are as many draws as tiles, since each block draws until it gets none.
__device__ __forceinline__ u32 tw_ha_next(const TwAttnOrder& order, u32 i, u32 num) {
    if (order.counter == nullptr) return i + gridDim.x;
    const u32 drawn = atomicAdd(order.counter, 1u);
    if (drawn == num - 1) atomicExch(order.counter, 0u);
    return gridDim.x + drawn;
}

// Rows of one head of a local tensor.
struct TwRows {
    u32 row, num, head;
};

// Stores this warp's 16 rows of a tile of sums, times the factor of their half, through its rows of
// `slot`, pieces of TW_HA_M rows that nobody else reads any more.
template <u32 D>
__device__ __forceinline__ void tw_ha_store_16(const float (&o)[D / 2], const float (&factor)[2], const TwRows& to, u32 type, const TwTensorMap* out,
                                               u8* slot) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u8* own = slot + warp * (16 * 128);
#pragma unroll
    for (u32 j = 0; j < D / 16; j++) {
        u32 w[4];
#pragma unroll
        for (u32 e = 0; e < 4; e++) w[e] = tw_pair(o[8 * j + 2 * e] * factor[e % 2], o[8 * j + 2 * e + 1] * factor[e % 2], type);
        // Matrices: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15; their 16-byte pieces
        // lie as the map's swizzle has them.
        const u32 r = lane % 16, piece = (j % 4 * 2 + lane / 16) ^ (r % 8);
        stmatrix_x4_b16(own + j / 4 * (TW_HA_M * 128) + r * 128 + piece * 16, w);
    }
    fence_proxy_async_shared_cta();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
        for (u32 i = 0; i < D / 64; i++)
            tensor_store_4d(out, own + i * (TW_HA_M * 128), (int)(to.head * D + 64 * i), (int)(TW_HA_RAGGED - to.num + 16 * warp),
                            (int)(to.row + to.num), (int)TW_HA_RAGGED);
        bulk_commit_group();
    }
}

// Stores them in f32 from registers, to rows that are `ld` elements apart: four lanes have 32 bytes
// of a row.
template <u32 D>
__device__ __forceinline__ void tw_ha_store_32(const float (&o)[D / 2], const float (&factor)[2], const TwRows& to, float* out, i64 ld) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u32 row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
        float* at = out + (i64)(to.row + row) * ld + to.head * D + threadIdx.x % 4 * 2;
        if (row >= to.num) continue;
#pragma unroll
        for (u32 j = 0; j < D / 8; j++)
            *(float2*)(at + 8 * j) = make_float2(o[4 * j + 2 * half] * factor[half], o[4 * j + 2 * half + 1] * factor[half]);
    }
}
