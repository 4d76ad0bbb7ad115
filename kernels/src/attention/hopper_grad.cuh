// The backward pass for sm_90a: one class computes dq (QUERIES), or dk and dv, as TwReturn of
// backward.cuh does: its rows x are queries or keys, and y is the other side.
//
//   s = x1 y1^T, p = exp(scale s - lse), g = x2 y2^T, ds = p (g - delta)
//   dq: x is (q, d_out), y is (k, v): sum1 = ds k.
//   dk, dv: x is (k, v), y is (q, d_out): sum1 = ds^T q, sum2 = p^T d_out, where s and p are
//     transposed: their rows are keys. One block adds the queries of all heads of a group, head
//     after head. Where registers do not hold both sums, two kernels make one each.
//
// p and ds come out of the sums of s and g as first operands in registers; y1 and y2 are read both
// K-major, for s and g, and MN-major.
//
// A block has 12 warps and a multiprocessor for itself. Its tile is TW_HA_M rows x of one head.
// Warpgroups 0 and 1 multiply for 64 rows each; of warpgroup 2 one warp loads. Tiles of Y rows of
// the other side follow each other.
//
// Shared memory: SLOTS slots of x1 and x2, a ring of STAGES tiles of y1 and y2; lse and delta
// beside those that are queries. Each slot and stage has two barriers:
//   full    completes when the bytes are there: an arrival by lane 0 of the loader, which announces
//           them and publishes what they are; if they are queries another one, which publishes
//           lse and delta that the warp has written beside.
//   empty   completes when its eight readers, the multiplying warps, are through with it.
// A warp is through when wgmma_wait_group has returned: the reads of wgmma are complete then. Its
// sums leave through its own rows of its slot. Of two slots, it gives one back one tile later, so
// that nobody waits for the store.
//
// Order of a warpgroup, for each tile of y: s is issued behind the sums of the tile before; as soon
// as those are there, their stage is given back, and g is issued behind s; the exponentials run
// beside g; sum2 += p^T y2 is issued, and ds made beside it; sum1 += ds y1 is issued. So products
// are under way all the time, and never more in registers than there are.
//
// Maps are ragged (TensorMapDesc::ragged): rows behind the end of a segment read as zeros and are
// not written. So no number of another sequence comes into a sum. Queries that are not there have
// lse = inf: their p is 0. Keys that are not there are masked: their p might be inf, and 0 times it
// NaN.
//
// Sums: each element is one chain over the other side in the order of the segments, of heads one
// after the other, whatever the number of blocks, their order or the counter: the same bits.

#pragma once

#include "hopper_tiles.cuh"

#ifndef TW_HB_DQ_N
#define TW_HB_DQ_N 96
#endif
#ifndef TW_HB_DQ_STAGES
#define TW_HB_DQ_STAGES 2
#endif
#ifndef TW_HB_DQ_SLOTS
#define TW_HB_DQ_SLOTS 2
#endif
#ifndef TW_HB_DKV_M
#define TW_HB_DKV_M 64
#endif
#ifndef TW_HB_DKV_STAGES
#define TW_HB_DKV_STAGES 3
#endif

#ifndef TW_HB_DKV_SLOTS
#define TW_HB_DKV_SLOTS 2
#endif
// 1: separate kernels compute dk and dv.
#ifndef TW_HB_SPLIT
#define TW_HB_SPLIT 0
#endif

enum : u32 { TW_SUM1 = 1, TW_SUM2 = 2 };
enum : u32 {
    TW_HB_THREADS = 384,
    TW_HB_STATE_BYTES = 512,
    // Readers of a slot or stage.
    TW_HB_WARPS = 8,
};

// The maps of a kernel: x1, x2, y1, y2 to load, sum1 and sum2 to store.
struct TwGradMaps {
    const TwTensorMap *x1, *x2, *y1, *y2, *sum1, *sum2;
};

// A tile of x.
struct TwOwnRows {
    u32 row, num;  // rows of the local tensor
    u32 head;
    int at;        // the position of the first one on the other side
    u32 meets;     // 1: there are tiles of y; else the sums are 0, whatever is in the rows
    u32 more;      // 0: there is no such tile, and this block is through
};

// A tile of y.
struct TwOtherRows {
    int pos;
    u32 num;
    u32 last;  // 1: of these x
};

// With extras, of a tile of y: its first row in the global tensors, and the head if it is of
// queries.
struct TwOtherPlace {
    u32 global, head;
};

// SUMS: which sums it makes.
// MORE: bytes of shared memory behind the stages, for kernels that have more there.
template <bool QUERIES, u32 SUMS, u32 Y, u32 STAGES, u32 SLOTS, u32 MORE = 0> struct TwGrad {
    static constexpr u32 X = TW_HA_M, D1 = TW_ATTN_DQK, D2 = TW_ATTN_DV;
    // Pieces of 64 columns, whose 128 bytes the maps' swizzle permutes.
    static constexpr u32 X_PIECE = X * 128, Y_PIECE = Y * 128;
    static constexpr bool SUM1 = (SUMS & TW_SUM1) != 0, SUM2 = (SUMS & TW_SUM2) != 0;
    // sum1 alone needs g, and so x2. Sums leave through a slot: sum2 through x1 if there is no
    // sum1.
    static constexpr u32 X1_BYTES = D1 / 64 * X_PIECE, SLOT = X1_BYTES + (SUM1 ? D2 / 64 * X_PIECE : 0);
    static constexpr u32 AT_SUM2 = SUM1 ? X1_BYTES : 0;
    static constexpr u32 Y1_BYTES = D1 / 64 * Y_PIECE, STAGE = Y1_BYTES + D2 / 64 * Y_PIECE;
    // Queries of a slot or stage: so many lse, then as many delta.
    static constexpr u32 NUMBERS = QUERIES ? X : Y;
    static constexpr u32 AT_Y = SLOTS * SLOT, AT_NUMBERS = AT_Y + STAGES * STAGE + MORE;
    static constexpr u32 AT_STATE = AT_NUMBERS + (QUERIES ? SLOTS : STAGES) * NUMBERS * 8;
    static constexpr u32 BYTES = AT_STATE + TW_HB_STATE_BYTES;
    // Registers of a thread that loads, and of one that multiplies: 128 x 24 + 256 x 240, or 128 x
    // 40 + 256 x 232, are the 384 x 168 that a block begins with.
    static constexpr int LOAD_REGISTERS = QUERIES ? 40 : 24, MULTIPLY_REGISTERS = QUERIES ? 232 : 240;
    static_assert(D1 % 64 == 0 && D2 % 64 == 0 && Y % 16 == 0 && NUMBERS % 32 == 0 && BYTES <= 232448, "whole pieces, and shared memory");

    struct Shared {
        u64 x_full[SLOTS], x_empty[SLOTS];
        u64 y_full[STAGES], y_empty[STAGES];
        TwOwnRows own[SLOTS];
        TwOtherRows other[STAGES];
        // Of the loader: the tile that it loads next, and what that meets.
        TwOwnRows next;
        TwSeg seg;
        TwWalk walk;
        // With extras.
        TwPlace own_places[SLOTS];
        TwOtherPlace other_places[STAGES];
    };
    static_assert(sizeof(Shared) <= TW_HB_STATE_BYTES, "what the host asks for");

    // A lane's sums: of rows 16 w + lane / 4 (half 0) and 8 more (half 1) of warp w of eight,
    // columns 8 j + 2 (lane % 4) and the next, which are elements 4 j + 2 half and the next.
    typedef float Scores[Y / 2];
    typedef u32 Rounded[Y / 4];

    static __device__ __forceinline__ Shared& shared() { return *(Shared*)(tw_smem + AT_STATE); }
    static __device__ __forceinline__ u8* slot(u32 i) { return tw_smem + i * SLOT; }
    static __device__ __forceinline__ u8* stage(u32 i) { return tw_smem + AT_Y + i * STAGE; }
    static __device__ __forceinline__ float* numbers(u32 i) { return (float*)(tw_smem + AT_NUMBERS) + i * (2 * NUMBERS); }

    // How far rows of the other side may be before and behind the own position.
    static __device__ __forceinline__ int before(const TwAttn& a) { return QUERIES ? a.left : a.right; }
    static __device__ __forceinline__ int behind(const TwAttn& a) { return QUERIES ? a.right : a.left; }
    static __device__ __forceinline__ u32 heads(const TwAttn& a) { return QUERIES ? a.heads_q : a.heads_kv; }

    // ---- The loader: one warp.

    // Writes lse (base 2; inf for queries that see nothing, or are not there) and delta of queries
    // beside the slot or stage that they are in, and arrives there.
    static __device__ __forceinline__ void load_numbers(const TwAttn& a, float* to, u64* full, u32 head, u32 row, u32 num) {
        float lse[NUMBERS / 32], delta[NUMBERS / 32];
        const u32 lane = threadIdx.x % 32;
        const i64 at = (i64)head * a.tokens_q + row + lane;
#pragma unroll
        for (u32 i = 0; i < NUMBERS / 32; i++) {
            const bool there = 32 * i + lane < num;
            lse[i] = there ? a.lse[at + 32 * i] : -TW_INF, delta[i] = there ? a.delta[at + 32 * i] : 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < NUMBERS / 32; i++) {
            to[32 * i + lane] = lse[i] == -TW_INF ? TW_INF : lse[i] * TW_LOG2E;
            to[NUMBERS + 32 * i + lane] = delta[i];
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(full);
    }

    // Describes tile `i`, and begins the walk over what it meets. Of several heads that are done
    // together those tiles come first that meet most under a causal mask.
    static __device__ __forceinline__ void begin(const TwAttn& a, const TwAttnOrder& order, u32 i, Shared& s) {
        const u32 group = i / (order.heads * a.tiles), in = i - group * order.heads * a.tiles;
        const u32 width = min(order.heads, heads(a) - group * order.heads);
        const u32 head = group * order.heads + in % width, t = QUERIES ? a.tiles - 1 - in / width : in / width;
        const TwSeg own = tw_own(a.own, a.num_own, t);
        const u32 first = (t - own.tile) * X, num = min(own.len - first, X);
        const int shift = own.shift == TW_ATTN_GAP ? 0 : QUERIES ? own.shift : -own.shift;
        const int at = (int)(own.pos + first) + shift;
        s.seg = own;
        const u32 share = a.heads_q / a.heads_kv;
        s.walk.template begin<Y>(a.other, own, at - before(a), at + (int)num + behind(a), QUERIES ? head : head * share, QUERIES ? 1 : share);
        s.next = {own.row + first, num, head, at, s.walk.tiles[0].num > 0 ? 1u : 0u, 1};
    }

    // Lane 0 loads a slot.
    static __device__ __forceinline__ void load_own(const TwGradMaps& maps, const TwOwnRows& x, u32 at, Shared& s) {
        u64* full = s.x_full + at;
        s.own[at] = x;
        if (TW_ATTN_EXTRA) s.own_places[at] = {s.seg.pos + x.row - s.seg.row, s.seg.global + x.row - s.seg.row};
        mbarrier_arrive_expect_tx(full, SLOT);
        tw_ha_load<D1, X>(slot(at), maps.x1, full, x.head, x.row, x.num);
        if (SUM1) tw_ha_load<D2, X>(slot(at) + X1_BYTES, maps.x2, full, x.head, x.row, x.num);
    }

    // Lane 0 loads a stage.
    static __device__ __forceinline__ void load_other(const TwGradMaps& maps, const TwTile& y, u32 head, u32 last, u32 at, Shared& s) {
        u64* full = s.y_full + at;
        s.other[at] = {y.pos, y.num, last};
        if (TW_ATTN_EXTRA) s.other_places[at] = {y.global, y.head};
        mbarrier_arrive_expect_tx(full, STAGE);
        tw_ha_load<D1, Y>(stage(at), maps.y1, full, head, y.row, y.num);
        tw_ha_load<D2, Y>(stage(at) + Y1_BYTES, maps.y2, full, head, y.row, y.num);
    }

    static __device__ __forceinline__ void load_tiles(const TwAttn& a, const TwAttnOrder& order, const TwGradMaps& maps) {
        Shared& s = shared();
        const bool first = threadIdx.x % 32 == 0;
        const u32 num = a.tiles * heads(a);
        TwRing<SLOTS> xs;
        TwRing<STAGES> ys;
        for (u32 i = blockIdx.x; i < num;) {
            if (first) begin(a, order, i, s);
            __syncwarp();
            const TwOwnRows x = s.next;
            xs.wait_empty(s.x_empty);
            if (first) load_own(maps, x, xs.at, s);
            if (QUERIES) load_numbers(a, numbers(xs.at), s.x_full + xs.at, x.head, x.row, x.num);
            xs.advance();
            for (u32 n = 0, last = x.meets ^ 1; last == 0; n++) {
                const TwTile& y = s.walk.tiles[n % 4];
                last = s.walk.tiles[(n + 1) % 4].num == 0 ? 1 : 0;
                ys.wait_empty(s.y_empty);
                if (first) load_other(maps, y, QUERIES ? x.head / (a.heads_q / a.heads_kv) : y.head, last, ys.at, s);
                if (!QUERIES) load_numbers(a, numbers(ys.at), s.y_full + ys.at, y.head, y.row, y.num);
                if (first && last == 0) s.walk.template step<Y>(a.other, s.seg, n + 2);
                __syncwarp();
                ys.advance();
            }
            const u32 next = first ? tw_ha_next(order, i, num) : 0;
            i = __shfl_sync(0xffffffffu, next, 0);
        }
        xs.wait_empty(s.x_empty);
        if (first) {
            s.own[xs.at].more = 0;
            mbarrier_arrive(s.x_full + xs.at);
            if (QUERIES) mbarrier_arrive(s.x_full + xs.at);
        }
    }

    // ---- A multiplying warpgroup.

    // Issues d = x y^T of D columns, for the rows of warpgroup `group`.
    template <u32 D> static __device__ __forceinline__ void issue_products(Scores& d, const u8* x, u32 group, const u8* y) {
        const u64 dx = wgmma_desc_k(x + group * (64 * 128)), dy = wgmma_desc_k(y);
        wgmma_fence();
#pragma unroll
        for (u32 z = 0; z < D / 16; z++)
            wgmma_m64k16_f32<Y, TW_ATTN_TYPE == 1, 0, 0>(d, dx + z / 4 * (X_PIECE / 16) + z % 4 * 2, dy + z / 4 * (Y_PIECE / 16) + z % 4 * 2, z > 0);
        wgmma_commit_group();
    }

    // Issues sum += p y of D columns.
    template <u32 D> static __device__ __forceinline__ void issue_sum(float (&sum)[D / 2], const Rounded& p, const u8* y) {
        const u64 dy = wgmma_desc_mn(y, Y_PIECE);
        wgmma_fence();
#pragma unroll
        for (u32 z = 0; z < Y / 16; z++) wgmma_m64k16_f32_registers<D, TW_ATTN_TYPE == 1, 1>(sum, p + 4 * z, dy + z * 128, 1);
        wgmma_commit_group();
    }

    // Sets scores to -inf where the mask hides the pair, and of keys that are not there.
    static __device__ __forceinline__ void mask(const TwAttn& a, Scores& s, const TwOwnRows& x, const TwOtherRows& y) {
        const int at = x.at + (int)(threadIdx.x / 128 * 64);
        const bool there = !QUERIES || y.num == Y;
        if (there && y.pos >= at + 63 - before(a) && y.pos + (int)Y - 1 <= at + behind(a)) return;
        // Relative to this lane's first column, so that columns are constants.
        const int lane = (int)(threadIdx.x % 4 * 2);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const int own = x.at + (int)(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half) - y.pos;
            const int most = QUERIES ? min(own + behind(a), (int)y.num - 1) : own + behind(a);
            const int first = own - before(a) - lane, last = most - lane;
#pragma unroll
            for (u32 j = 0; j < Y / 8; j++)
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    const int col = (int)(8 * j + e);
                    if (col < first || col > last) s[4 * j + 2 * half + e] = -TW_INF;
                }
        }
    }

    // With extras: the tile of pairs of a slot and a stage.
    static __device__ __forceinline__ TwPairTile pairs(u32 slot, u32 stage) {
        const Shared& s = shared();
        const TwOwnRows& x = s.own[slot];
        const TwOtherRows& y = s.other[stage];
        const TwPlace own = s.own_places[slot];
        const TwOtherPlace other = s.other_places[stage];
        if (QUERIES) return {x.head, own.pos, (u32)y.pos, own.global, other.global, x.num, y.num};
        return {other.head, (u32)y.pos, own.pos, other.global, own.global, y.num, x.num};
    }

    // What extras add to this lane's elements of a tile.
    struct Extras {
        // The derivatives of scores by products times scale.
        float slope[Y / 2];
        // Whether dropout keeps them, a bit for each.
        u32 kept[(Y / 2 + 31) / 32];

        __device__ __forceinline__ bool keeps(u32 e) const { return !TW_ATTN_EXTRA || (kept[e / 32] >> e % 32 & 1) != 0; }

        // Turns products into scores in base 2.
        __device__ __forceinline__ void scores(const TwAttn& a, Scores& s, const TwPairTile& at) {
            const auto pairs = tw_ha_pairs<QUERIES>(a, at);
            pairs.scores(s, [&](u32 e, float d) { slope[e] = d; });
            const bool drops = a.drop_below != 0;
#pragma unroll
            for (u32& word : kept) word = drops ? 0 : ~0u;
            if (drops) pairs.template drop<Y / 2>([&](u32 e, bool keeps) { kept[e / 32] |= (u32)keeps << e % 32; });
        }
    };

    // lse and delta of this lane's two rows, if rows are queries.
    struct Rows {
        float lse[2], delta[2];

        __device__ __forceinline__ void read(const float* from) {
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u32 row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
                lse[half] = from[row], delta[half] = from[X + row];
            }
        }
    };

    // Of columns 8 j + 2 (lane % 4) and the next, number `which` (0 lse, 1 delta), if columns are
    // queries.
    static __device__ __forceinline__ float2 of_columns(u32 stage, u32 which, u32 j) {
        return ((const float2*)numbers(stage))[which * (Y / 2) + 4 * j + threadIdx.x % 4];
    }

    // Turns products into probabilities.
    static __device__ __forceinline__ void exponentials(Scores& s, const Rows& r, u32 stage, float factor) {
#pragma unroll
        for (u32 j = 0; j < Y / 8; j++) {
            const float2 c = QUERIES ? make_float2(0.0f, 0.0f) : of_columns(stage, 0, j);
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                const float lse = QUERIES ? r.lse[e / 2] : e % 2 ? c.y : c.x;
                s[4 * j + e] = ex2_approx_ftz_f32(fmaf(s[4 * j + e], factor, -lse));
            }
        }
    }

    // g = p (g - delta); with extras g is that of what dropout keeps, and ds has the slope of its
    // score.
    static __device__ __forceinline__ void slopes(const TwAttn& a, Scores& g, const Scores& p, const Extras& x, const Rows& r, u32 stage) {
#pragma unroll
        for (u32 j = 0; j < Y / 8; j++) {
            const float2 c = QUERIES ? make_float2(0.0f, 0.0f) : of_columns(stage, 1, j);
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                const float delta = QUERIES ? r.delta[e / 2] : e % 2 ? c.y : c.x;
                const u32 i = 4 * j + e;
                if (TW_ATTN_EXTRA) g[i] = x.keeps(i) ? g[i] * a.keep : 0.0f;
                g[i] = p[i] * (g[i] - delta);
                if (TW_ATTN_EXTRA) g[i] *= x.slope[i];
            }
        }
    }

    // Sums, rounded, as A of a product: where s has its sums, A has its elements, or zeros for
    // those that are not kept.
    template <class F> static __device__ __forceinline__ void round(Rounded& r, const Scores& s, const F& keeps) {
#pragma unroll
        for (u32 i = 0; i < Y / 4; i++) r[i] = tw_pair(keeps(2 * i) ? s[2 * i] : 0.0f, keeps(2 * i + 1) ? s[2 * i + 1] : 0.0f, TW_ATTN_TYPE);
    }

    // Stores this warp's rows of `sum`, times `factor`, through its rows of `slot`.
    template <u32 D>
    static __device__ __forceinline__ void store(const TwAttn& a, const float (&sum)[D / 2], float factor, const TwOwnRows& x, void* out, i64 ld,
                                                 const TwTensorMap* map, u8* slot) {
        const float f[2] = {factor, factor};
        const TwRows to = {x.row, x.num, x.head};
        if (a.out_type == 2) tw_ha_store_32<D>(sum, f, to, (float*)out, ld);
        else tw_ha_store_16<D>(sum, f, to, a.out_type, map, slot);
    }

    // Gives a slot back: all lanes are through with it, and the store has read it, or soon has.
    static __device__ __forceinline__ void give_back(u64* empty) {
        __syncwarp();
        if (threadIdx.x % 32 != 0) return;
        bulk_wait_group_read<0>();
        mbarrier_arrive(empty);
    }

    static __device__ __forceinline__ void multiply(const TwAttn& a, const TwGradMaps& maps) {
        Shared& s = shared();
        const bool first = threadIdx.x % 32 == 0;
        // What turns what is exponentiated into base 2.
        const float factor = TW_ATTN_EXTRA ? 1.0f : a.scale * TW_LOG2E;
        TwRing<SLOTS> xs;
        TwRing<STAGES> ys;
        xs.wait_full(s.x_full);
        const u32 group = warpgroup_index();
        for (u32 i = 0; s.own[xs.at].more != 0; i++) {
            const TwOwnRows& x = s.own[xs.at];
            u8* own = slot(xs.at);
            Scores p, g;
            Rounded of_p = {}, of_g = {};
            float sum1[SUM1 ? D1 / 2 : 2], sum2[SUM2 ? D2 / 2 : 2];
#pragma unroll
            for (float& e : sum1) e = 0.0f;
#pragma unroll
            for (float& e : sum2) e = 0.0f;
            Rows r;
            if (QUERIES) r.read(numbers(xs.at));
            if (SLOTS == 2 && i > 0) give_back(s.x_empty + (xs.at ^ 1));
            u32 given = STAGES;
#pragma unroll 1
            for (u32 more = x.meets; more != 0;) {
                ys.wait_full(s.y_full);
                const u32 at = ys.at;
                const TwOtherRows y = s.other[at];
                issue_products<D1>(p, own, group, stage(at));
                // The sums of the tile before are there, and its stage is free.
                wgmma_wait_group<1>();
                if (SUM1) wgmma_hold(sum1), wgmma_hold(of_g);
                if (SUM2) wgmma_hold(sum2), wgmma_hold(of_p);
                if (given < STAGES && first) mbarrier_arrive(s.y_empty + given);
                if constexpr (SUM1) issue_products<D2>(g, own + X1_BYTES, group, stage(at) + Y1_BYTES);
                wgmma_wait_group<SUM1 ? 1 : 0>();
                wgmma_hold(p);
                Extras extras;
                if (TW_ATTN_EXTRA) extras.scores(a, p, pairs(xs.at, at));
                mask(a, p, x, y);
                exponentials(p, r, at, factor);
                if constexpr (SUM2) {
                    round(of_p, p, [&](u32 e) { return extras.keeps(e); });
                    issue_sum<D2>(sum2, of_p, stage(at) + Y1_BYTES);
                }
                if constexpr (SUM1) {
                    wgmma_wait_group<SUM2 ? 1 : 0>();
                    wgmma_hold(g);
                    slopes(a, g, p, extras, r, at);
                    round(of_g, g, [](u32) { return true; });
                    issue_sum<D1>(sum1, of_g, stage(at));
                }
                given = at;
                ys.advance();
                more = y.last ^ 1;
            }
            wgmma_wait_group<0>();
            if (SUM1) wgmma_hold(sum1), wgmma_hold(of_g);
            if (SUM2) wgmma_hold(sum2), wgmma_hold(of_p);
            if (given < STAGES && first) mbarrier_arrive(s.y_empty + given);
            if constexpr (SUM1) store<D1>(a, sum1, a.scale, x, QUERIES ? a.dq : a.dk, QUERIES ? a.ld_q : a.ld_k, maps.sum1, own);
            if constexpr (SUM2) store<D2>(a, sum2, TW_ATTN_EXTRA ? a.keep : 1.0f, x, a.dv, a.ld_v, maps.sum2, own + AT_SUM2);
            if (SLOTS == 1) give_back(s.x_empty);
            xs.advance();
            xs.wait_full(s.x_full);
        }
        if (first) bulk_wait_group<0>();
    }

    static __device__ __forceinline__ void run(const TwAttn& a, const TwAttnOrder& order, const TwGradMaps& maps) {
        if (threadIdx.x == 0) {
            tensor_prefetch(maps.x1), tensor_prefetch(maps.x2), tensor_prefetch(maps.y1), tensor_prefetch(maps.y2);
            Shared& s = shared();
            for (u32 i = 0; i < SLOTS; i++) mbarrier_init(s.x_full + i, QUERIES ? 2 : 1), mbarrier_init(s.x_empty + i, TW_HB_WARPS);
            for (u32 i = 0; i < STAGES; i++) mbarrier_init(s.y_full + i, QUERIES ? 1 : 2), mbarrier_init(s.y_empty + i, TW_HB_WARPS);
            fence_mbarrier_init_release_cluster();
        }
        __syncthreads();
        if (threadIdx.x / 128 == 2) {
            setmaxnreg_dec<LOAD_REGISTERS>();
            if (threadIdx.x / 32 == 8) load_tiles(a, order, maps);
            return;
        }
        setmaxnreg_inc<MULTIPLY_REGISTERS>();
        multiply(a, maps);
    }
};

typedef TwGrad<true, TW_SUM1, TW_HB_DQ_N, TW_HB_DQ_STAGES, TW_HB_DQ_SLOTS> TwHopperDq;
#if TW_HB_SPLIT
typedef TwGrad<false, TW_SUM1, TW_HB_DKV_M, TW_HB_DKV_STAGES, TW_HB_DKV_SLOTS> TwHopperDk;
typedef TwGrad<false, TW_SUM2, TW_HB_DKV_M, TW_HB_DKV_STAGES, 2> TwHopperDv;
#else
typedef TwGrad<false, TW_SUM1 | TW_SUM2, TW_HB_DKV_M, TW_HB_DKV_STAGES, TW_HB_DKV_SLOTS> TwHopperDkv;
#endif
