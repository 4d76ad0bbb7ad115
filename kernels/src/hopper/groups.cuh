// The tiles of products of groups, whose sizes are in device memory.
//
// By rows (TW_HG_A_MN is 0) a group has tiles for its rows, and every tile all of k. By columns
// (wgrad) every group has the same tiles, and its rows are the contraction.
//
// Every block reads all sizes before its first tile: one warp checks and adds them up. Loader,
// dealer and each multiplying warp then go from group to group by themselves, since the numbers of
// their tiles rise. By columns the groups of most rows come first, so that the last wave has short
// sums: their order and ends are in shared memory, if there are at most TW_HG_MAX_SORTED.

#pragma once

#include "../grouped_gemm/splits.cuh"
#include "../ptx/ld_st.cuh"
#include "boxes.cuh"
#include "store.cuh"
#include "order.cuh"
#include "tile.cuh"

// Products of groups. By rows `g.m` is the capacity of A and D, by columns `g.k` that of A and B.
struct TwHopperGrouped {
    TwHopper g;
    const void* splits;
    u32* status;
    const u8* accumulate;  // [groups], or null: by columns group e is added if it is not 0
    i64 stride;            // elements from group to group of D, by columns
    u32 groups, pad;
    // [groups], or null: maps of the weights, or by columns of D, of each group, and where D is.
    const TwTensorMap* maps;
    const u64* addresses;
};

#ifndef TW_HG_MAX_SORTED
#define TW_HG_MAX_SORTED 448
#endif

enum : u32 {
    // Behind the core's: code, rows, pairs of tiles; ends of groups; groups by size.
    TW_HG_AT_SUMMARY = TW_HG_BYTES,
    TW_HG_AT_ENDS = TW_HG_AT_SUMMARY + 16,
    TW_HG_AT_ORDER = TW_HG_AT_ENDS + 4 * TW_HG_MAX_SORTED,
    TW_HG_GROUPED_BYTES = TW_HG_AT_ORDER + 2 * TW_HG_MAX_SORTED,
    // Threads beside loader and dealer.
    TW_HG_ASIDE = 64,
};
static_assert(TW_HG_GROUPED_BYTES <= 232448, "shared memory");

// A product of groups, by whichever thread; a summary of its groups is in shared memory.
struct TwGroups {
    const TwHopperGrouped& p;
    const TwTensorMap *map_a, *map_b, *map_d;
    TwSplits splits;
    TwOrder order;
    TwSpot spot;
    u32 next, group, first, rows;  // the next group to visit; this one, its first row, and how many
    u32 before, pairs;             // pairs of tiles before this group, and of this group
    i64 last;                      // the split of this group
    const TwTensorMap* known;      // the map of a group that this thread has acquired

    enum : bool { BY_ROWS = !TW_HG_A_MN, MAY_BE_EMPTY = !BY_ROWS, MAY_ADD = TW_HG_ADDS && !BY_ROWS };

    __device__ __forceinline__ TwGroups(const TwHopperGrouped& p, const TwTensorMap* a, const TwTensorMap* b, const TwTensorMap* d)
        : p(p), map_a(a), map_b(b), map_d(d), splits{p.splits, p.groups, p.g.flags}, order(0, 0), spot(), next(0), group(0), first(0), rows(0),
          before(0), pairs(0), last(0), known(nullptr) {}

    __device__ __forceinline__ u32* summary() const {
        return (u32*)(tw_smem + TW_HG_AT_SUMMARY);
    }
    __device__ __forceinline__ u32* ends() const {
        return (u32*)(tw_smem + TW_HG_AT_ENDS);
    }
    __device__ __forceinline__ u16* by_size() const {
        return (u16*)(tw_smem + TW_HG_AT_ORDER);
    }
    __device__ __forceinline__ bool sorted() const {
        return !BY_ROWS && p.groups <= TW_HG_MAX_SORTED;
    }
    __device__ __forceinline__ TwOrder order_of(u32 rows) const {
        return TwOrder(((BY_ROWS ? rows : p.g.m) + TW_HG_M - 1) / TW_HG_M, (cols() + TW_HG_WIDTH - 1) / TW_HG_WIDTH);
    }

    // Makes the summary: all threads, before tw_begin, which publishes it.
    __device__ __forceinline__ void begin() {
        if (threadIdx.x < 32) {
            u64 rows = 0, tiles = 0;
            u32 code = 0;
            for (u32 base = 0; base < p.groups && code == 0; base += 32) {
                const TwSizes s = tw_sizes(splits, base, rows, BY_ROWS ? p.g.m : p.g.k);
                const u32 e = base + threadIdx.x;
                code = s.code;
                rows = __shfl_sync(0xffffffff, s.end, 31);
                const u64 own = e < p.groups ? order_of((u32)s.num).num() : 0;
                tiles += __shfl_sync(0xffffffff, tw_sum_to_lane(own), 31);
                if (sorted() && e < p.groups) ends()[e] = (u32)s.end;
            }
            if (threadIdx.x == 0) {
                summary()[0] = code, summary()[1] = (u32)rows, summary()[2] = code ? 0 : (u32)tiles;
                if (code && blockIdx.x == 0) *p.status = code;
            }
        }
        if (!sorted()) return;
        __syncthreads();
        for (u32 e = threadIdx.x; e < p.groups; e += TW_HG_THREADS) {
            const u32 own = size(e);
            u32 place = 0;
            for (u32 other = 0; other < p.groups; other++) {
                const u32 o = size(other);
                place += o > own || (o == own && other < e);
            }
            by_size()[place] = (u16)e;
        }
    }
    // Rows of a group whose end is in shared memory.
    __device__ __forceinline__ u32 size(u32 e) const {
        return ends()[e] - (e > 0 ? ends()[e - 1] : 0);
    }

    // Columns of D, or of each of its halves.
    __device__ __forceinline__ u32 cols() const {
        return TW_HG_EPI == TW_HG_SWIGLU ? p.g.n / 2 : p.g.n;
    }
    __device__ __forceinline__ u32 num() const {
        return ld_shared_u32(summary() + 2);
    }
    // Leaves the group, whose pairs have been counted, for the next one.
    __device__ __forceinline__ void go_on() {
        before += pairs;
        if (sorted()) {
            group = by_size()[next];
            rows = size(group), first = ends()[group] - rows;
        } else {
            const i64 v = splits[next];
            group = next, first += rows;
            rows = (u32)(splits.flags & TW_ENDS ? v - last : v);
            last = v;
        }
        next++;
        order = order_of(rows), pairs = order.num();
    }
    __device__ __forceinline__ void go(u32 t, u32 rank) {
        while (t - before >= pairs) go_on();
        spot = order.at(t - before, rank);
    }
    __device__ __forceinline__ u32 row() const {
        return (BY_ROWS ? first : 0) + spot.row * TW_HG_M;
    }
    __device__ __forceinline__ u32 col() const {
        return spot.col * TW_HG_WIDTH;
    }
    __device__ __forceinline__ bool shares_a() const {
        return spot.shares_a;
    }
    // The place of a tile, and where its group ends.
    struct End {
        u32 row, col, group, until;
    };
    __device__ __forceinline__ End end() const {
        return {row(), col(), group, first + rows};
    }
    // Sums are whole.
    __device__ __forceinline__ u32 part() const {
        return 0;
    }
    __device__ __forceinline__ u32 k() const {
        return BY_ROWS ? 0 : first;
    }
    __device__ __forceinline__ u32 steps() const {
        return ((BY_ROWS ? p.g.k : rows) + TW_HG_K - 1) / TW_HG_K;
    }
    __device__ __forceinline__ bool adds(u32 group) const {
        return !BY_ROWS && p.accumulate != nullptr && p.accumulate[group] != 0;
    }
    // True if the gradient is added to by its map, which has rows as in boxes.cuh.
    __device__ __forceinline__ bool adds_by_map() const {
        return rows > 0 && adds(group) && (p.g.flags & TW_D_HAS_MAP);
    }
    __device__ __forceinline__ TwSumRows sums() const {
        if (p.maps != nullptr) return {p.maps + group, 0};
        return {map_d, group * (p.g.m / 8)};
    }
    // Adding zeros would turn -0 into 0.
    __device__ __forceinline__ bool keeps() const {
        return rows == 0 && adds(group);
    }
    __device__ __forceinline__ void acquire(u32 group) {
        if (p.maps == nullptr || known == p.maps + group) return;
        known = p.maps + group;
        tensor_acquire(known);
    }
    __device__ __forceinline__ void acquire_b() {
        if (BY_ROWS) acquire(group);
    }
    __device__ __forceinline__ void acquire_d(const End& e) {
        if (!BY_ROWS) acquire(e.group);
    }
    // The matrix of a group: behind its own map, or one of all.
    __device__ __forceinline__ TwPlane plane(const TwTensorMap* all, u32 group) const {
        if (p.maps != nullptr) return {p.maps + group, 0};
        return {all, group};
    }
    __device__ __forceinline__ TwRagged a() const {
        return {map_a, first + rows};
    }
    __device__ __forceinline__ auto b() const {
        if constexpr (BY_ROWS) return plane(map_b, group);
        else return TwRagged{map_b, first + rows};
    }
    __device__ __forceinline__ auto d(const End& e) const {
        if constexpr (BY_ROWS) return TwRagged{map_d, e.until};
        else return plane(map_d, e.group);
    }
    __device__ __forceinline__ TwHopper product(const End& e) const {
        TwHopper g = p.g;
        const u32 group = e.group;
        if (BY_ROWS) {
            g.m = e.until;
            const u32 bytes = TW_HG_OUT != 2 && (g.flags & TW_BIAS_OUT) ? 2 : 4;
            if (g.bias) g.bias = (const u8*)g.bias + (i64)group * g.n * bytes;
        } else {
            if (p.addresses != nullptr) g.d = (void*)p.addresses[group];
            else g.d = (u8*)g.d + group * p.stride * (TW_HG_OUT == 2 ? 4 : 2);
            if (adds(group)) g.flags |= TW_ACCUMULATE;
        }
        return g;
    }
    // Zeroes the rows behind the last group.
    __device__ __forceinline__ void aside() const {
        if (!BY_ROWS || !(p.g.flags & TW_ZERO_TAIL) || summary()[0]) return;
        const u32 bytes = TW_HG_OUT == 2 ? 4 : 2, thread = threadIdx.x % TW_HG_ASIDE;
        for (u32 row = summary()[1] + blockIdx.x; row < p.g.m; row += gridDim.x) {
            zero((u8*)p.g.d + row * p.g.ldd * bytes, cols() * bytes, thread);
            if (p.g.aux) zero((u8*)p.g.aux + row * p.g.ldaux * bytes, p.g.n * bytes, thread);
        }
    }
    __device__ __forceinline__ static void zero(u8* row, u32 bytes, u32 thread) {
        for (u32 i = 16 * thread; i < bytes; i += 16 * TW_HG_ASIDE) *(uint4*)(row + i) = make_uint4(0, 0, 0, 0);
    }
};
