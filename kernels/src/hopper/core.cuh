// The core of matrix products for sm_90a: D = A B, operands of 16 bits, sums in f32.
//
// A block has 12 warps and a multiprocessor for itself. Its tile is TW_HG_M x TW_HG_N. Warpgroups 0
// and 1 multiply 64 rows each (wgmma, both operands in shared memory); of warpgroup 2 one thread
// loads (TMA). Blocks are clusters of two, whose tiles share an operand (order.cuh).
//
// Stages of shared memory go round between the loader and the multipliers:
//   full[s]   completes when the bytes of A and B, or of what is added to (sums.cuh), are there:
//             one arrival, by the loader, which announces them. Half of the shared operand comes
//             from the other block.
// empty[s]  completes when both multipliers of both blocks are through with stage s: four arrivals
//             (sums.cuh: of four each). The loader waits for it, since what it multicasts also
//             overwrites the peer's stage.
// Tiles are handed out one at a time by a counter in device memory, if there is one: clusters that
// take fixed strides drift apart, and no longer meet in L2. A thread of the cluster's first block,
// one tile ahead, takes the next number and puts it into both blocks:
//   next_full   completes when the number is there: one arrival, which publishes it
// next_empty  completes when all readers of both blocks have it: 16 multiplying warps, two loaders
// The cluster that comes last leaves counter and count of ends at zero for the next launch.
//
// A warpgroup is through when wgmma_wait_group has returned: the reads of wgmma are complete then.
// Its arrival publishes nothing, so it is relaxed: with .release the loop would hold a
// MEMBAR.ALL.GPU (a fifth of the time, docs/lab/gemm.md). The stage is next written by a load that
// was issued behind that arrival.
//
// Both multipliers end a tile at about the same time, and nothing would be multiplied while they
// store it. So tiles of some units overlap (TW_HG_SEAMS): the products of a tile's last and first
// stages are made in two passes, of its first columns and of the rest. The first columns are stored
// under the products of the rest in the last stages, the rest under those of the next tile's first
// columns. Stages of such passes are given back when both are over.
//
// Sums: each element is one chain in the order of k, 16 at a time, whatever the tile, order or
// number of blocks: the same bits. Where k is cut into parts, each has a chain of its own, and
// another kernel adds them in their order (sm90_sum_parts.cu).
//
// The loader's block must not end before its peer's last multicast has come and its last arrivals
// have been made: at the end it waits until every stage is empty.

#pragma once

#include "../ptx/bulk.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/tensor.cuh"
#include "../ptx/wgmma.cuh"
#include "epilogue.cuh"
#include "order.cuh"
#include "pieces.cuh"
#include "stages.cuh"
#include "store.cuh"
#include "sums.cuh"
#include "tile.cuh"

// The numbers of the tiles that a thread computes: those of its cluster, one behind the other.
struct TwTickets {
    u64 *full, *empty;
    u32* word;
    u32 parity;
    bool counted;

    __device__ __forceinline__ explicit TwTickets(bool counted)
        : full((u64*)(tw_smem + TW_HG_AT_BARRIERS) + 2 * TW_HG_STAGES), empty(full + 1), word((u32*)(full + 2)), parity(0), counted(counted) {}

    // The one behind `t`, for a whole warp, of which one lane says that all have it, or for a
    // thread. That arrival must not overtake the load: it is relaxed, since a release would wait
    // for all stores of the warp, and takes another way than loads, which wait in a queue behind
    // those of the other warps' epilogues. So its address depends on the number, of less than 2^31.
    template <bool WARP> __device__ __forceinline__ u32 next(u32 t) {
        if (!counted) return t + nclusterid_x();
        while (!mbarrier_try_wait_parity_cluster(full, parity)) {
        }
        parity ^= 1;
        t = ld_shared_u32(word);
        if (WARP) __syncwarp();
        if (!WARP || threadIdx.x % 32 == 0) mbarrier_arrive_relaxed_cluster(empty + (t >> 31), 0);
        return t;
    }
};

// Takes numbers for the cluster until one is beyond the last tile: one thread of its first block.
__device__ __forceinline__ void tw_deal_tiles(u32* counter, u32 num) {
    const TwTickets tickets(true);
    u32 i = 0;
    for (bool more = clusterid_x() < num; more; i++) {
        const u32 t = nclusterid_x() + atomicAdd(counter, 1u);
        more = t < num;
        while (!mbarrier_try_wait_parity(tickets.empty, (i & 1) ^ 1)) {
        }
        st_arrive_release_cluster(tickets.word, tickets.full, 0, t);
        st_arrive_release_cluster(tickets.word, tickets.full, 1, t);
    }
    // The peer has read its last number: it may end, and so may this block.
    while (!mbarrier_try_wait_parity(tickets.empty, (i & 1) ^ 1)) {
    }
    if (atomicInc(counter + 1, nclusterid_x() - 1) == nclusterid_x() - 1) atomicExch(counter, 0u);
}

// Makes the barriers, and meets the other block: behind it both may be reached.
__device__ __forceinline__ void tw_begin() {
    if (threadIdx.x == 0) {
        const TwStages s;
        for (u32 i = 0; i < TW_HG_STAGES; i++) mbarrier_init(s.full + i, 1), mbarrier_init(s.empty + i, 4 * TW_HG_RELEASES);
        const TwTickets tickets(true);
        mbarrier_init(tickets.full, 1), mbarrier_init(tickets.empty, 18);
        fence_mbarrier_init_release_cluster();
    }
    cluster_sync();
}

// Brings the rows and columns of a tile of elements of D's type to L2.
__device__ __forceinline__ void tw_prefetch(const void* p, i64 ld, u32 row, u32 col, u32 rows, u32 cols) {
    const u32 size = TW_HG_OUT == 2 ? 4 : 2, bytes = min((u32)TW_HG_WIDTH, max(cols, col) - col) * size / 16 * 16;
    const u8* at = (const u8*)p + (row * ld + col) * size;
    if ((u64)p % 16 != 0 || ld * size % 16 != 0 || bytes == 0) return;
#pragma unroll 1
    for (u32 left = min((u32)TW_HG_M, max(rows, row) - row); left > 0; left--, at += ld * size) bulk_prefetch_l2(at, bytes);
}

// Brings the pre-activations that the epilogue of a tile reads to L2, under the tile's last
// products: else the multipliers would wait for memory. Not what it adds to: f32 mostly come by
// tensor map; else, of short sums, the loader would have no time (docs/lab/grouped_gemm.md).
template <class Tiles> __device__ __forceinline__ void tw_prefetch_epilogue(const Tiles& tiles) {
    const TwHopper& g = tiles.product(tiles.end());
    const u32 row = tiles.row(), col = tiles.col();
    if (TW_HG_EPI == TW_HG_DGELU || TW_HG_EPI == TW_HG_DSWIGLU) tw_prefetch(g.aux, g.ldaux, row, col, g.m, g.n);
    if (TW_HG_EPI == TW_HG_DSWIGLU && g.n % 8 == 0) tw_prefetch((const u16*)g.aux + g.n, g.ldaux, row, col, g.m, g.n);
}

// The loader: one thread. `Tiles` says which tiles there are and where their operands and results
// lie: TwDense of dense.cuh, TwGroups of groups.cuh.
template <class Tiles> __device__ __forceinline__ void tw_load_tiles(Tiles& tiles, bool counted) {
    TwStages s;
    const u32 rank = cluster_ctarank();
    // Of SwiGLU's tile half are columns of the gate, half those of up that go with them.
    const u32 jump = TW_HG_EPI == TW_HG_SWIGLU ? tiles.cols() - TW_HG_WIDTH : 0;
    TwTickets tickets(counted);
    for (u32 t = clusterid_x(); t < tiles.num(); t = tickets.next<false>(t)) {
        tiles.go(t, rank);
        tiles.acquire_b();
        for (u32 i = 0; i < tiles.steps(); i++) {
            if (i + TW_HG_AHEAD == max(tiles.steps(), (u32)TW_HG_AHEAD)) tw_prefetch_epilogue(tiles);
            s.wait_empty();
            u64* full = s.full + s.stage;
            mbarrier_arrive_expect_tx(full, TW_HG_A_BYTES + TW_HG_B_BYTES);
            const u32 k = tiles.k() + i * TW_HG_K;
            TwPieces<TW_HG_A_MN, TW_HG_M>::load(s.a(), tiles.a(), full, tiles.row(), k, 0, tiles.shares_a());
            TwPieces<TW_HG_B_MN, TW_HG_N>::load(s.b(), tiles.b(), full, tiles.col(), k, jump, !tiles.shares_a());
            s.advance();
        }
        if (Tiles::MAY_ADD && tiles.adds_by_map()) tiles.acquire_d(tiles.end()), tw_load_sums(tiles.sums(), s, tiles.steps(), tiles.product(tiles.end()).m, tiles.row(), tiles.col());
    }
    for (u32 i = 0; i < TW_HG_STAGES; i++) {
        s.wait_empty();
        s.advance();
    }
}

// Columns of a tile: all of them, the first TW_HG_FIRST, and the others.
enum TwColumns { TW_HG_ALL, TW_HG_BEFORE, TW_HG_BEHIND };

// Whether tiles overlap, and whether one instruction multiplies all columns. Where tiles overlap it
// must not: sums of some columns would be part of what another instruction has in registers, and
// ptxas makes copies of them, for which most widths leave no space ("serialized").
//
// Not all tiles overlap: SwiGLU and its derivative need columns of both halves at once, or
// registers that are not there, and halves of narrower tiles would read A too often.
enum : bool {
    TW_HG_SEAMS = TW_HG_OUT != 2 && TW_HG_EPI != TW_HG_SWIGLU && TW_HG_EPI != TW_HG_DSWIGLU && TW_HG_N > 192,
    TW_HG_AT_ONCE = !TW_HG_SEAMS && TW_HG_N <= 256,
};

__device__ __forceinline__ float (&tw_before(float (&acc)[TW_HG_N / 2]))[TW_HG_FIRST / 2] {
    return *(float(*)[TW_HG_FIRST / 2])acc;
}
__device__ __forceinline__ float (&tw_behind(float (&acc)[TW_HG_N / 2]))[(TW_HG_N - TW_HG_FIRST) / 2] {
    return *(float(*)[(TW_HG_N - TW_HG_FIRST) / 2])(acc + TW_HG_FIRST / 2);
}

// Begins the products of a stage with some columns: one warpgroup, which has half of the tile's
// rows. `fresh`: the sums begin with them.
template <TwColumns COLUMNS> __device__ __forceinline__ void tw_multiply(float (&acc)[TW_HG_N / 2], const TwStages& s, u32 half, bool fresh) {
    // Half of A is one piece, whichever way it lies.
    const u8* a = s.a() + half * (TW_HG_A_BYTES / 2);
    const u64 da = TW_HG_A_MN ? wgmma_desc_mn(a, 0) : wgmma_desc_k(a);
    const u64 db = TW_HG_B_MN ? wgmma_desc_mn(s.b(), 64 * TW_HG_K * 2) : wgmma_desc_k(s.b());
#pragma unroll
    for (u32 z = 0; z < TW_HG_K / 16; z++) {
        const u64 az = da + z * (TW_HG_A_MN ? 128 : 2), bz = db + z * (TW_HG_B_MN ? 128 : 2);
        const u32 add = !fresh || z > 0;
        if constexpr (COLUMNS == TW_HG_ALL && TW_HG_AT_ONCE) wgmma_m64k16_f32<TW_HG_N, TW_HG_F16, TW_HG_A_MN, TW_HG_B_MN>(acc, az, bz, add);
        else if constexpr (COLUMNS != TW_HG_BEHIND) wgmma_m64k16_f32<TW_HG_FIRST, TW_HG_F16, TW_HG_A_MN, TW_HG_B_MN>(tw_before(acc), az, bz, add);
        // 128 bytes of B further on for each column, whichever way it lies.
        if constexpr (COLUMNS == TW_HG_BEHIND || (COLUMNS == TW_HG_ALL && !TW_HG_AT_ONCE))
            wgmma_m64k16_f32<TW_HG_N - TW_HG_FIRST, TW_HG_F16, TW_HG_A_MN, TW_HG_B_MN>(tw_behind(acc), az, bz + TW_HG_FIRST * 128 / 16, add);
    }
}

// Gives back a stage whose products are over: two threads of a warpgroup.
__device__ __forceinline__ void tw_release(TwStages& s) {
    const u32 thread = threadIdx.x % 128;
    if (TW_HG_RELEASES == 1 && thread < 2) mbarrier_arrive_relaxed_cluster(s.empty + s.stage, thread);
    if (TW_HG_RELEASES > 1 && thread < 2) mbarrier_arrive_relaxed_cluster(s.empty + s.stage, thread, TW_HG_RELEASES);
    s.advance();
}

// acc = the product of 64 rows of A and the tile's columns over `steps` stages: one warpgroup. `t`
// becomes the number of the next tile, under the last products of this one.
template <bool MAY_BE_EMPTY>
__device__ __forceinline__ void tw_sum_tile(float (&acc)[TW_HG_N / 2], TwStages& s, TwTickets& tickets, u32& t, u32 steps, u32 half) {
    if (MAY_BE_EMPTY && steps == 0) {
        t = tickets.next<true>(t);
#pragma unroll
        for (u32 i = 0; i < TW_HG_N / 2; i++) acc[i] = 0.0f;
        return;
    }
    for (u32 i = 0; i < steps; i++) {
        s.wait_full();
        wgmma_fence();
        tw_multiply<TW_HG_ALL>(acc, s, half, i == 0);
        wgmma_commit_group();
        if (i + 1 == steps) t = tickets.next<true>(t);
        wgmma_wait_group<0>();
        tw_release(s);
    }
    wgmma_hold(acc);
}

// The first stages of a tile, if BEGINS: acc = their products, or the last ones, whose products are
// added to acc. `between` is called under the products of the first columns, before those of the
// others begin; `behind` under the latter, which alone may be in flight behind wait_group<1>.
template <bool BEGINS, class Between, class Behind>
__device__ __forceinline__ void tw_multiply_seam(float (&acc)[TW_HG_N / 2], TwStages& s, u32 half, const Between& between, const Behind& behind) {
    TwStages again = s, done = s;
    wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < TW_HG_SEAM; i++) {
        s.wait_full();
        tw_multiply<TW_HG_BEFORE>(acc, s, half, BEGINS && i == 0);
        s.advance();
    }
    wgmma_commit_group();
    between();
    if (BEGINS) wgmma_fence();
#pragma unroll
    for (u32 i = 0; i < TW_HG_SEAM; i++) {
        tw_multiply<TW_HG_BEHIND>(acc, again, half, BEGINS && i == 0);
        again.advance();
    }
    wgmma_commit_group();
    behind();
    wgmma_wait_group<0>();
    if (!BEGINS) wgmma_hold(tw_behind(acc));
    for (u32 i = 0; i < TW_HG_SEAM; i++) tw_release(done);
}

// All tiles, the end of each under the products of others: one warpgroup. Between tiles acc has the
// sums of the last columns of the tile before, which are still to be stored: under the next tile's
// first products, or before them if that tile has too few steps to overlap.
template <class Tiles> __device__ __forceinline__ void tw_multiply_seams(Tiles& tiles, TwTickets& tickets, u32 half) {
    enum : u32 { FIRST = TW_HG_FIRST / 64 };
    const u32 rank = cluster_ctarank(), warp = threadIdx.x / 32;
    TwStages s;
    float acc[TW_HG_N / 2];
    u32 buffer = 0;
    bool left = false;
    typename Tiles::End end = {};
    TwChunkBias bias;
    const auto store_first = [&] {
        tiles.acquire_d(end);
        tw_store_16<0, FIRST>(acc, tiles.product(end), tiles.d(end), end.row + 16 * warp, end.col, buffer, bias);
    };
    const auto store_rest = [&] {
        if (!left) return;
        tw_store_16<FIRST, TW_HG_CHUNKS>(acc, tiles.product(end), tiles.d(end), end.row + 16 * warp, end.col, buffer, bias);
    };
    u32 t = clusterid_x();
    const auto go = [&] {
        if (t < tiles.num()) tiles.go(t, rank);
    };
    go();
    while (t < tiles.num()) {
        const u32 steps = tiles.steps();
        if (Tiles::MAY_BE_EMPTY && tiles.keeps()) {
            t = tickets.next<true>(t);
            go();
            continue;
        }
        if (steps >= 2 * TW_HG_SEAM) {
            tw_multiply_seam<true>(acc, s, half, store_rest, [] {});
            for (u32 i = TW_HG_SEAM; i < steps - TW_HG_SEAM; i++) {
                s.wait_full();
                wgmma_fence();
                tw_multiply<TW_HG_ALL>(acc, s, half, false);
                wgmma_commit_group();
                wgmma_wait_group<0>();
                tw_release(s);
            }
            const auto end_tile = [&] {
                end = tiles.end();
                tw_load_bias(bias, tiles.product(end), end.col, 0);
                t = tickets.next<true>(t);
                wgmma_wait_group<1>();
                wgmma_hold(tw_before(acc));
                store_first();
            };
            tw_multiply_seam<false>(acc, s, half, [] {}, end_tile);
            go();
        } else {
            store_rest();
            end = tiles.end();
            tw_load_bias(bias, tiles.product(end), end.col, 0);
            tw_sum_tile<Tiles::MAY_BE_EMPTY>(acc, s, tickets, t, steps, half);
            go();
            store_first();
        }
        left = true;
    }
    store_rest();
}

// What every kernel of the core does behind tw_begin: `product` has its counter.
template <class Tiles> __device__ __forceinline__ void tw_hopper_product(const TwHopper& product, Tiles& tiles) {
    const u32 rank = cluster_ctarank(), warp = threadIdx.x / 32;
    const bool counted = product.counter != nullptr;
    if (threadIdx.x / 128 == 2) {
        setmaxnreg_dec<TW_HG_LOAD_REGISTERS>();
        if (warp == 8 && elect_sync()) tw_load_tiles(tiles, counted);
        if (warp == 9 && rank == 0 && counted && elect_sync()) tw_deal_tiles(product.counter, tiles.num());
        if (warp >= 10) tiles.aside();
        return;
    }
    setmaxnreg_inc<TW_HG_MULTIPLY_REGISTERS>();
    TwTickets tickets(counted);
    const u32 group = warpgroup_index();
    if constexpr (TW_HG_SEAMS) {
        tw_multiply_seams(tiles, tickets, group);
        if (threadIdx.x % 32 == 0) bulk_wait_group<0>();
        return;
    }
    TwStages s;
    u32 buffer = 0;
    for (u32 t = clusterid_x(); t < tiles.num();) {
        tiles.go(t, rank);
        float acc[TW_HG_N / 2];
        tw_sum_tile<Tiles::MAY_BE_EMPTY>(acc, s, tickets, t, tiles.steps(), group);
        if (Tiles::MAY_BE_EMPTY && tiles.keeps()) continue;
        const auto e = tiles.end();
        const TwHopper& g = tiles.product(e);
        const u32 row = tiles.row() + 16 * warp;
        if (Tiles::MAY_ADD && tiles.adds_by_map()) tiles.acquire_d(e), tw_add_sums(acc, tiles.sums(), s, tiles.steps(), g.m, row, tiles.col(), buffer);
        else if (TW_HG_OUT == 2) tw_store_32(acc, g, (float*)g.d + tiles.part() * (u64)g.m * g.n, row, tiles.col());
        else {
            TwChunkBias bias;
            tw_load_bias(bias, g, tiles.col(), 0);
            tiles.acquire_d(e), tw_store_16<0, TW_HG_CHUNKS>(acc, g, tiles.d(e), row, tiles.col(), buffer, bias);
        }
    }
    if ((TW_HG_OUT != 2 || Tiles::MAY_ADD) && threadIdx.x % 32 == 0) bulk_wait_group<0>();
}
