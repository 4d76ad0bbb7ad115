// The tiles of one product. Where its contraction is cut into parts (TW_HG_IN_PARTS), each has all
// tiles: those of part 0 come first.

#pragma once

#include "boxes.cuh"
#include "store.cuh"
#include "order.cuh"
#include "tile.cuh"

struct TwDense {
    const TwHopper& g;
    const TwTensorMap *map_a, *map_b, *map_d;
    TwOrder order;
    TwSpot spot;
    u32 of;

    // The place of a tile.
    struct End {
        u32 row, col;
    };

    enum : bool { MAY_BE_EMPTY = false, MAY_ADD = TW_HG_ADDS };

    __device__ __forceinline__ TwDense(const TwHopper& g, const TwTensorMap* a, const TwTensorMap* b, const TwTensorMap* d)
        : g(g), map_a(a), map_b(b), map_d(d), order((g.m + TW_HG_M - 1) / TW_HG_M, (cols() + TW_HG_WIDTH - 1) / TW_HG_WIDTH), spot(), of(0) {}

    // Columns of D, or of each of its halves.
    __device__ __forceinline__ u32 cols() const {
        return TW_HG_EPI == TW_HG_SWIGLU ? g.n / 2 : g.n;
    }
    // Pairs of tiles.
    __device__ __forceinline__ u32 num() const {
        return TW_HG_IN_PARTS ? g.parts * order.num() : order.num();
    }
    // Goes to the tile of block `rank` of pair `t`, which is below num(), and never before the
    // last one: what follows is about it.
    __device__ __forceinline__ void go(u32 t, u32 rank) {
        of = TW_HG_IN_PARTS ? t / order.num() : 0;
        spot = order.at(t - of * order.num(), rank);
    }
    // The part of the contraction.
    __device__ __forceinline__ u32 part() const {
        return of;
    }
    __device__ __forceinline__ u32 row() const {
        return spot.row * TW_HG_M;
    }
    __device__ __forceinline__ u32 col() const {
        return spot.col * TW_HG_WIDTH;
    }
    __device__ __forceinline__ bool shares_a() const {
        return spot.shares_a;
    }
    // The first index of the contraction, and how many stages it has.
    __device__ __forceinline__ u32 k() const {
        return TW_HG_IN_PARTS ? of * g.steps * TW_HG_K : 0;
    }
    __device__ __forceinline__ u32 steps() const {
        const u32 all = (g.k + TW_HG_K - 1) / TW_HG_K;
        return TW_HG_IN_PARTS ? min(all - of * g.steps, g.steps) : all;
    }
    // True if D stays as it is.
    __device__ __forceinline__ bool keeps() const {
        return false;
    }
    // Before the first load or store of a tile.
    __device__ __forceinline__ void acquire_b() {}
    __device__ __forceinline__ void acquire_d(const End&) {}
    __device__ __forceinline__ TwPlane a() const {
        return {map_a, 0};
    }
    __device__ __forceinline__ TwPlane b() const {
        return {map_b, 0};
    }
    __device__ __forceinline__ TwPlane d(const End&) const {
        return {map_d, 0};
    }
    // True if D is added to by its map, which has rows as in boxes.cuh.
    __device__ __forceinline__ bool adds_by_map() const {
        return (g.flags & TW_ACCUMULATE) && (g.flags & TW_D_HAS_MAP);
    }
    __device__ __forceinline__ TwSumRows sums() const {
        return {map_d, 0};
    }
    // What the epilogue of a tile works by.
    __device__ __forceinline__ End end() const {
        return {row(), col()};
    }
    __device__ __forceinline__ const TwHopper& product(const End&) const {
        return g;
    }
    // What two warps do beside the product.
    __device__ __forceinline__ void aside() const {}
};
