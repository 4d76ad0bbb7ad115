// Loads of an operand's tile by tensor maps.

#pragma once

#include "../ptx/cluster.cuh"
#include "tile.cuh"

// An operand's tile: pieces that are one load each. K-major: two halves of the tile's rows;
// MN-major: 64 columns each.
template <bool MN, u32 EXTENT> struct TwPieces {
    enum : u32 { NUM = MN ? EXTENT / 64 : 2, SPAN = EXTENT / NUM, BYTES = SPAN * TW_HG_K * 2 };
    static_assert(EXTENT % NUM == 0 && BYTES % 1024 == 0, "whole pieces, of whole patterns of the swizzle");

    // Loads what this block loads of the tile of `box` at `at` along m or n, and `k`: all of it for
    // itself, or every other piece for both. The second half of the pieces lies `jump` further on.
    template <class Box> __device__ __forceinline__ static void load(u8* tile, const Box& box, u64* bar, u32 at, u32 k, u32 jump, bool shared) {
        const u32 rank = cluster_ctarank();
#pragma unroll
        for (u32 i = 0; i < NUM; i++) {
            const u32 mn = at + i * SPAN + (2 * i >= NUM ? jump : 0);
            const u32 x = MN ? mn : k, y = MN ? k : mn;
            if (!shared) box.load(tile + i * BYTES, bar, x, y);
            else if (i % 2 == rank) box.multicast(tile + i * BYTES, bar, x, y);
        }
    }
};
