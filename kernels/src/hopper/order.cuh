// The order in which clusters of two blocks take the tiles of a product.
//
// A cluster computes two tiles at once that share an operand, half of which each block loads and
// multicasts: two blocks of rows beside each other share B; the last block of rows, if their number
// is odd, takes two columns of tiles, which share A. So no product is padded to two blocks of rows.
// Order: bands of TW_HG_BAND pairs of rows; in a band pairs of columns; in these the pairs of rows,
// then the odd block of rows, so that all who read a piece of B read it at about the same time.

#pragma once

#ifndef TW_HG_BAND
#define TW_HG_BAND 8
#endif

typedef unsigned int u32;

// The tile of one block of the cluster.
struct TwSpot {
    u32 row, col;  // in tiles; `col` may lie one behind the last, where nothing is stored
    bool shares_a;
};

// The tiles of a product of `rows` x `cols` tiles.
struct TwOrder {
    u32 cols, pairs, odd;

    __device__ __forceinline__ TwOrder(u32 rows, u32 cols) : cols(cols), pairs(rows / 2), odd(rows % 2) {}

    // How many times two tiles there are.
    __device__ __forceinline__ u32 num() const {
        return pairs * cols + odd * ((cols + 1) / 2);
    }

    // The tile number `t` of block `rank`: below num().
    __device__ __forceinline__ TwSpot at(u32 t, u32 rank) const {
        const u32 last = max((pairs + TW_HG_BAND - 1) / TW_HG_BAND, 1u) - 1;
        const u32 band = min(t / (TW_HG_BAND * cols), last), first = band * TW_HG_BAND;
        const u32 width = min(pairs - first, (u32)TW_HG_BAND), more = band == last ? odd : 0;
        // Of two columns: `width` pairs for each of them, and the odd block of rows once.
        const u32 in = t - first * cols, per = 2 * width + more, two = in / per, s = in - two * per;
        const u32 there = 2 * two + 1 < cols ? 2 : 1;
        if (s >= width * there) return {2 * pairs, 2 * two + rank, true};
        const u32 second = s >= width ? 1 : 0;
        return {2 * (first + s - second * width) + rank, 2 * two + second, false};
    }
};
