// The backward pass for sm_90a in one kernel: dq, dk and dv by five products, where hopper_grad.cuh
// makes seven in two.
//
//   s = k q^T, p = exp(scale s - lse), g = v d_out^T, ds = p (g - delta)
//   dv = p d_out, dk = ds q, and of each tile of queries dq += ds^T k
//
// A block has a tile of keys, and visits tiles of queries, as the kernel of dk and dv does. Beside
// it adds what its keys contribute to dq to sums in memory, which `tw_attn_dq_of_sums` turns into
// dq. These sums have a fixed order, so that they have the same bits in every run: a tile of
// queries has a turn for each tile of keys that it meets, in the order of keys.
//
// Turns. A word for each tile of queries and head counts the tiles of keys whose contribution is
// there. A block adds its own when the word says that all tiles of keys in front of it are there;
// the first one stores, so nothing needs to be zero. `turn_of` computes how many are in front of it
// from the masks alone.
//   - Blocks draw their tiles from a counter, all of them, and tiles of keys ascend within a head.
//     So a block waits only for tiles that were drawn before its own. Of all drawn tiles that are
//     not done, the first waits for none: the kernel ends, however few of its blocks run.
//   - Queries are visited from the last to the first, of each tile all heads of the group, and
//     tiles of keys that meet most come first. Under a causal mask all blocks begin at the last
//     queries, and those with later keys end earlier. So a block whose neighbour has begun a few
//     tiles before it, as is so for all but the first blocks, finds its turn everywhere. (Head
//     after head it would not: at the second head it had to wait for its neighbour's longer way.)
//
// Without turns (TW_HB_UNORDERED) all blocks add at once to sums that are zero when the launch
// begins, and the bits of dq differ from run to run. Nobody waits for a word; no word but that of
// tiles is touched.
//
// Memory order of a turn: the thread that adds waits until its bulk copy is written
// (cp.async.bulk.wait_group, never .read), orders it before what it does next
// (fence.proxy.async), and raises the word by a release. The next one acquires the word, and
// fences before its own copy.
//
// Shared memory, beside that of TwGrad with one slot:
//   two tiles of ds, by turns: for each query 64 keys, as a K-major operand, of each warpgroup.
//   Both
//     write their keys and read all. `ds_full` has an arrival of each of eight warps.
//   two tiles of dq, by turns, in two halves of D / 2 columns: warpgroup h makes half h.
//     `dq_full`  completes when the eight warps have written their rows.
//     `dq_empty` completes when the bulk copies have read them: one arrival of the thread that
//     adds.
// A warp that writes ds of tile n + 2 has waited for `ds_full` of tile n + 1, where all warps have
// arrived behind their products of tile n: nobody reads that buffer any more.
//
// Warps of warpgroup 2: one loads; of two that add, one has the even tiles and one the odd ones,
// because a copy takes longer to be written than a tile takes to be made. With one tile of dq the
// multipliers would wait for all that comes before it has been read: that its turn is known, and
// has come, and the copies (docs/lab/attention.md).
//
// Order of a multiplying warpgroup, for each tile of queries: s is issued, ds of the tile before
// stored, and dk += ds q of that one issued; p is made beside dk. When dk is there, the stage of
// the tile before is given back. With ds of the other warpgroup, dq = ds^T k of the tile before is
// issued, and dv += p d_out; dq is stored beside dv. g is issued, and when it is there, ds made. So
// nothing is under way from one tile to the next, and never more in registers than there are.
//
// Keys that are not there, behind the end of a segment, are rows of zeros, whose p might be inf.
// Other kernels do not store such rows; here they would come into dq, and are masked.

#pragma once

#include "../ptx/barrier.cuh"
#include "../ptx/ld_st.cuh"
#include "hopper_grad.cuh"

#ifndef TW_HB_FUSED_STAGES
#define TW_HB_FUSED_STAGES 2
#endif
#ifndef TW_HB_UNORDERED
#define TW_HB_UNORDERED 0
#endif

// Where dq is summed.
struct TwDqSums {
    // [heads_q, 2, tokens_q, DQK / 2]: without the scale. Columns lie as TwFused::store_dq has
    // them. Zero when the launch begins, without turns.
    float* sums;
    // [1 + 2 * own tiles of queries * heads_q]: zero when the launch begins, and behind it. The
    // first word deals out tiles of keys; the last draw resets it. The others count turns, of each
    // half of an own tile; `tw_attn_dq_of_sums` resets them.
    u32* words;
};

enum : u32 {
    // Queries of a tile.
    TW_HB_FUSED_M = 64,
    TW_HB_FUSED_DS = TW_HA_M * TW_HB_FUSED_M * 2,
    TW_HB_FUSED_HALF = TW_HB_FUSED_M * (TW_ATTN_DQK / 2) * 4,
    TW_HB_FUSED_STATE = 1024,
};

// The word that counts turns of tile `tile` of queries.
__device__ __forceinline__ u32* tw_turns(const TwDqSums& to, u32 heads, u32 tile, u32 head) {
    return to.words + 1 + (u64)tile * heads + head;
}

// A tile of queries that a block visits.
struct TwQueries {
    u32 row, num, head;  // none behind the last one
    int pos;
    u32 tile;  // of all tiles of queries of the tables
    u32 keys;  // the first segment of keys that they may meet
};

// What a thread that adds needs of it, and of the tile of keys: its segment, and its number there.
struct TwAdded {
    TwQueries q;
    u32 own, own_tile;
};

struct TwFused : TwGrad<false, TW_SUM1 | TW_SUM2, TW_HB_FUSED_M, TW_HB_FUSED_STAGES, 1, 2 * (TW_HB_FUSED_DS + 2 * TW_HB_FUSED_HALF)> {
    static constexpr u32 Y = TW_HB_FUSED_M, STAGES = TW_HB_FUSED_STAGES;
    static constexpr u32 AT_DS = AT_Y + STAGES * STAGE, AT_DQ = AT_DS + 2 * TW_HB_FUSED_DS;
    static constexpr u32 TOTAL = AT_STATE + TW_HB_FUSED_STATE;
    // Tiles whose numbers are kept. When the loader writes those of tile n, the stage of tile n -
    // STAGES has been given back, so that dq of tile n - STAGES - 1 is stored, and all but the last
    // two of those have been read. Who adds the last one read of either turn may still look at its
    // numbers: the earlier of both is tile n - STAGES - 4.
    static constexpr u32 ADDED = 8;
    static_assert(ADDED >= STAGES + 5, "numbers in use at once");
    static_assert(D1 == 128 && Y == 64 && X % Y == 0, "a half of dq has as many sums as g");
    static_assert(TOTAL <= 232448 && TW_ATTN_EXTRA == 0, "shared memory; extras need more registers");

    struct State : Shared {
        u64 ds_full[2], dq_full[2], dq_empty[2];
        TwAdded added[ADDED];
        // Of the loader: the next two tiles of queries, the segment of keys and the tile in it, and
        // where it is: in which segment of queries, between which rows, heads of the group that
        // follow.
        TwQueries ahead[2];
        u32 own_index, own_tile, seg_index, at, lowest, head, heads, loaded, slots;
        int lo, end;
    };
    static_assert(sizeof(State) <= TW_HB_FUSED_STATE, "what the host asks for");

    static __device__ __forceinline__ State& state() { return *(State*)(tw_smem + AT_STATE); }
    static __device__ __forceinline__ u8* slopes_of(u32 i) { return tw_smem + AT_DS + i * TW_HB_FUSED_DS; }
    static __device__ __forceinline__ float* half_of(u32 tile, u32 half) { return (float*)(tw_smem + AT_DQ + (2 * tile + half) * TW_HB_FUSED_HALF); }

    // ---- The loader.

    // Draws a tile. The draw that is the launch's last leaves the counter at zero for the next one:
    // each block draws until it gets none.
    static __device__ __forceinline__ u32 draw(u32* counter, u32 num) {
        const u32 drawn = atomicAdd(counter, 1u);
        if (drawn == num + gridDim.x - 1) atomicExch(counter, 0u);
        return drawn;
    }

    // Describes the tile of queries of the next head of the group, or the one in front of it.
    static __device__ __forceinline__ void step(const TwAttn& a, State& s, TwQueries& to) {
        if (s.heads > 0) {
            s.heads--, s.head++;
        } else {
            to.num = 0;
#pragma unroll 1
            while (s.at == s.lowest) {
                if (s.seg_index == s.seg.first) return;
                const TwSeg& q = a.other[--s.seg_index];
                const int pos = (int)q.pos, first = max(s.lo - pos, 0), last = min(s.end - pos, (int)q.len);
                if (first < last) s.lowest = (u32)first / Y * Y, s.at = ((u32)last + Y - 1) / Y * Y;
            }
            s.at -= Y;
            s.heads = a.heads_q / a.heads_kv - 1, s.head = s.next.head * (s.heads + 1);
        }
        const TwSeg& q = a.other[s.seg_index];
        to.row = q.row + s.at, to.num = min(q.len - s.at, Y), to.head = s.head;
        to.pos = (int)(q.pos + s.at), to.tile = X / Y * q.tile + s.at / Y, to.keys = q.first;
    }

    // The own segment that tile `t` is of.
    static __device__ __forceinline__ u32 own_of(const TwAttn& a, u32 t) {
        u32 lo = 0, hi = a.num_own;
#pragma unroll 1
        while (hi - lo > 1) {
            const u32 mid = (lo + hi) / 2;
            if (a.own[mid].tile <= t) lo = mid;
            else hi = mid;
        }
        return lo;
    }

    // Draws a tile of keys and heads, and describes it and the first two tiles of queries that it
    // meets.
    static __device__ __forceinline__ void begin(const TwAttn& a, const TwDqSums& to, u32 together, State& s) {
        const u32 i = draw(to.words, a.tiles * a.heads_kv);
        s.next.more = i < a.tiles * a.heads_kv ? 1 : 0;
        if (s.next.more == 0) return;
        const u32 group = i / (together * a.tiles), in = i - group * together * a.tiles;
        const u32 width = min(together, a.heads_kv - group * together), t = in / width;
        s.next.head = group * together + in - t * width;
        s.own_index = own_of(a, t);
        // Word by word: registers are few.
        const u32* own = (const u32*)(a.own + s.own_index);
#pragma unroll 1
        for (u32 w = 0; w < sizeof(TwSeg) / 4; w++) ((u32*)&s.seg)[w] = own[w];
        s.own_tile = t - s.seg.tile;
        const u32 first = s.own_tile * X;
        s.next.row = s.seg.row + first, s.next.num = min(s.seg.len - first, X);
        s.next.at = (int)(s.seg.pos + first) - (s.seg.shift == TW_ATTN_GAP ? 0 : s.seg.shift);
        s.next.meets = 0;
        s.lo = s.next.at - a.right, s.end = s.next.at + (int)s.next.num + a.left;
        s.at = s.lowest = s.heads = 0, s.seg_index = s.seg.end;
        s.ahead[0].num = 0;
#pragma unroll 1
        for (u32 n = 0; n < 2; n++) {
            step(a, s, s.ahead[n]);
            if (s.ahead[0].num == 0) return;
        }
        s.next.meets = 1;
    }

    // Lane 0 loads stage `at`, and keeps for the threads that add what it is.
    static __device__ __forceinline__ void load_queries(const TwGradMaps& maps, const TwQueries& q, u32 last, u32 at, State& s) {
        load_other(maps, {q.row, q.num, 0, q.pos, q.head}, q.head, last, at, s);
        s.added[s.loaded++ % ADDED] = {q, s.own_index, s.own_tile};
    }

    // Waits for the slot, of which `slots` counts uses: in shared memory, since registers are few.
    static __device__ __forceinline__ void wait_slot(State& s) {
        while (!mbarrier_try_wait_parity(s.x_empty, s.slots % 2 ^ 1)) {
        }
        s.slots++;
    }

    static __device__ __forceinline__ void load_tiles(const TwAttn& a, const TwDqSums& to, u32 together, const TwGradMaps& maps) {
        State& s = state();
        const bool first = threadIdx.x % 32 == 0;
        TwRing<STAGES> ys;
        if (first) s.loaded = s.slots = 0;
        for (;;) {
            if (first) begin(a, to, together, s);
            __syncwarp();
            if (s.next.more == 0) break;
            if (first) wait_slot(s), load_own(maps, s.next, 0, s);
            u32 n = 0;
            for (u32 last = s.next.meets ^ 1; last == 0; n ^= 1) {
                last = s.ahead[n ^ 1].num == 0 ? 1 : 0;
                ys.wait_empty(s.y_empty);
                const TwQueries& q = s.ahead[n];
                if (first) load_queries(maps, q, last, ys.at, s);
                load_numbers(a, numbers(ys.at), s.y_full + ys.at, q.head, q.row, q.num);
                // All lanes have met there, and read what the next step overwrites.
                if (first && last == 0) step(a, s, s.ahead[n]);
                __syncwarp();
                ys.advance();
            }
            // The same of what the next tile of keys overwrites.
            __syncwarp();
        }
        if (first) {
            wait_slot(s);
            s.added[s.loaded % ADDED].q.num = s.added[(s.loaded + 1) % ADDED].q.num = 0;
            s.own[0].more = 0;
            mbarrier_arrive(s.x_full);
        }
    }

    // ---- A thread that adds tiles of dq: every second one.

    // How many tiles of keys are added to these queries in front of the block's own: in each
    // segment those from the first one on that the queries meet.
    static __device__ __forceinline__ u32 turn_of(const TwAttn& a, const TwAdded& t) {
        u32 turn = 0;
#pragma unroll 1
        for (u32 k = t.q.keys; k <= t.own; k++) {
            const TwSeg& keys = a.own[k];
            // The first key's position on the side of queries.
            const int base = (int)keys.pos - keys.shift, len = (int)keys.len;
            const int from = t.q.pos - a.left - base, to = t.q.pos + (int)t.q.num + a.right - base;
            const int first = max(from, 0) / (int)X;
            const int end = k == t.own ? (int)t.own_tile : (max(min(to, len), 0) + (int)X - 1) / (int)X;
            if (from < len && first < end) turn += (u32)(end - first);
        }
        return turn;
    }

    // Addresses are made anew behind each wait: registers are few.
    static __device__ __forceinline__ u32* turns_of(const TwAttn& a, const TwDqSums& to, u32 n) {
        const TwQueries& q = state().added[opaque(n) % ADDED].q;
        return tw_turns(to, a.heads_q, q.tile, q.head);
    }

    static __device__ __forceinline__ void add_tiles(const TwAttn& a, const TwDqSums& to, u32 begin) {
        State& s = state();
        for (u32 n = begin;; n += 2) {
            while (!mbarrier_try_wait_parity(s.dq_full + begin, n / 2 & 1)) {
            }
            if (s.added[n % ADDED].q.num == 0) return;
            const u32 turn = TW_HB_UNORDERED ? 1 : turn_of(a, s.added[n % ADDED]);
            if (!TW_HB_UNORDERED && turn > 0) {
                const u32* turns = turns_of(a, to, n);
                while (ld_acquire_gpu_u32(turns) != turn) {
                }
                // What others have added is ordered before these copies.
                fence_proxy_async();
            }
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const TwQueries& q = s.added[opaque(n) % ADDED].q;
                float* sums = to.sums + ((u64)(q.head * 2 + half) * a.tokens_q + q.row) * (D1 / 2);
                if (turn == 0) bulk_store(sums, half_of(begin, half), q.num * (D1 / 2) * 4);
                else bulk_reduce_add_f32(sums, half_of(begin, half), q.num * (D1 / 2) * 4);
            }
            bulk_commit_group();
            bulk_wait_group_read<0>();
            mbarrier_arrive(s.dq_empty + begin);
            // The end of the kernel waits for what nobody else does.
            if (TW_HB_UNORDERED) continue;
            // They are written, and ordered before the word.
            bulk_wait_group<0>();
            fence_proxy_async();
            st_release_gpu_u32(turns_of(a, to, n), turn + 1);
        }
    }

    // ---- A multiplying warpgroup.

    // Issues dq = ds^T k: the columns of warpgroup `group`.
    static __device__ __forceinline__ void issue_dq(Scores& dq, u32 group, const u8* ds, const u8* keys) {
        const u64 d = wgmma_desc_k(ds), k = wgmma_desc_mn(keys + group * X_PIECE, X_PIECE);
        wgmma_fence();
#pragma unroll
        for (u32 z = 0; z < X / 16; z++)
            wgmma_m64k16_f32<D1 / 2, TW_ATTN_TYPE == 1, 0, 1>(dq, d + z / 4 * (Y * 128 / 16) + z % 4 * 2, k + z * 128, z > 0);
        wgmma_commit_group();
    }

    // Stores this warp's 16 keys of ds, transposed: 32 bytes of the row of each query, swizzled as
    // by a tensor map. Matrices of registers: keys 0-7 and 8-15 of queries 0-7, then of queries
    // 8-15.
    static __device__ __forceinline__ void store_slopes(const Rounded& ds, u8* to, u64* full) {
        const u32 row = threadIdx.x % 8, chunk = threadIdx.x % 128 / 32 * 2 + threadIdx.x / 8 % 2;
        u8* own = to + threadIdx.x / 128 * (Y * 128) + (threadIdx.x / 16 % 2 * 8 + row) * 128 + (chunk ^ row) * 16;
#pragma unroll
        for (u32 z = 0; z < Y / 16; z++) {
            const u32 w[4] = {ds[4 * z], ds[4 * z + 1], ds[4 * z + 2], ds[4 * z + 3]};
            stmatrix_x4_trans_b16(own + z * (16 * 128), w);
        }
        fence_proxy_async_shared_cta();
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(full);
    }

    // Stores this warp's 16 queries of a half of dq. A row has 16 chunks of four columns; chunk 4 i
    // + l has what lane l of four has of columns 16 i to 16 i + 15: 2 l, 2 l + 1, 2 l + 8, 2 l + 9.
    // In odd rows chunks i and i ^ 4 change places, so that eight lanes write to all banks.
    static __device__ __forceinline__ void store_dq(State& s, const Scores& dq, u32 group, const TwRing<2>& ring) {
        ring.wait_empty(s.dq_empty);
        float* half = half_of(ring.at, group);
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const u32 row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h;
            float4* to = (float4*)(half + row * (D1 / 2));
            const u32 flip = row % 2 * 4;
#pragma unroll
            for (u32 i = 0; i < D1 / 32; i++) {
                const float* d = dq + 8 * i + 2 * h;
                to[(4 * i + threadIdx.x % 4) ^ flip] = make_float4(d[0], d[1], d[4], d[5]);
            }
        }
        fence_proxy_async_shared_cta();
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(s.dq_full + ring.at);
    }

    // Hides keys from `num` on.
    static __device__ __forceinline__ void hide(Scores& s, u32 num) {
        if (num == X) return;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const bool there = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half < num;
#pragma unroll
            for (u32 j = 0; j < Y / 8; j++)
#pragma unroll
                for (u32 e = 0; e < 2; e++)
                    if (!there) s[4 * j + 2 * half + e] = -TW_INF;
        }
    }

    static __device__ __forceinline__ void multiply(const TwAttn& a, const TwGradMaps& maps) {
        State& s = state();
        const bool first = threadIdx.x % 32 == 0;
        const float factor = a.scale * TW_LOG2E;
        TwRing<1> xs;
        TwRing<2> dss;
        TwRing<STAGES> ys;
        const Rows none = {};
        const Extras extras = {};
        u8* own = slot(0);
        const u32 group = warpgroup_index();
        for (;;) {
            xs.wait_full(s.x_full);
            const TwOwnRows& x = s.own[0];
            if (x.more == 0) break;
            Scores p, g;
            Rounded of_p = {}, of_g = {};
            float sum1[D1 / 2], sum2[D2 / 2];
#pragma unroll
            for (float& e : sum1) e = 0.0f;
#pragma unroll
            for (float& e : sum2) e = 0.0f;
            // The stage of the tile before; of the first one there is none: what is issued for it
            // adds nothing, or is not stored.
            u32 before = STAGES;
#pragma unroll 1
            for (u32 more = x.meets; more != 0;) {
                ys.wait_full(s.y_full);
                const u32 at = ys.at;
                const TwOtherRows y = s.other[at];
                const bool any = before < STAGES;
                issue_products<D1>(p, own, group, stage(at));
                if (any) store_slopes(of_g, slopes_of(dss.at), s.ds_full + dss.at);
                issue_sum<D1>(sum1, of_g, stage(any ? before : at));
                wgmma_wait_group<1>();
                wgmma_hold(p);
                mask(a, p, x, y);
                hide(p, x.num);
                exponentials(p, none, at, factor);
                round(of_p, p, [](u32) { return true; });
                // dk of the tile before is there, and its stage is free.
                wgmma_wait_group<0>();
                wgmma_hold(sum1), wgmma_hold(of_g);
                if (any && first) mbarrier_arrive(s.y_empty + before);
                if (any) dss.wait_full(s.ds_full);
                issue_dq(g, group, slopes_of(dss.at), own);
                issue_sum<D2>(sum2, of_p, stage(at) + Y1_BYTES);
                wgmma_wait_group<1>();
                wgmma_hold(g);
                if (any) {
                    store_dq(s, g, group, dss);
                    dss.advance();
                }
                issue_products<D2>(g, own + X1_BYTES, group, stage(at) + Y1_BYTES);
                wgmma_wait_group<0>();
                wgmma_hold(g), wgmma_hold(sum2), wgmma_hold(of_p);
                slopes(a, g, p, extras, none, at);
                round(of_g, g, [](u32) { return true; });
                before = at;
                ys.advance();
                more = y.last ^ 1;
            }
            if (before < STAGES) {
                store_slopes(of_g, slopes_of(dss.at), s.ds_full + dss.at);
                issue_sum<D1>(sum1, of_g, stage(before));
                dss.wait_full(s.ds_full);
                issue_dq(g, group, slopes_of(dss.at), own);
                wgmma_wait_group<0>();
                wgmma_hold(sum1), wgmma_hold(of_g), wgmma_hold(g);
                if (first) mbarrier_arrive(s.y_empty + before);
                store_dq(s, g, group, dss);
                dss.advance();
            }
            // Both warpgroups have read all keys, which the last `ds_full` does not say.
            bar_sync(1, 256);
            store<D1>(a, sum1, a.scale, x, a.dk, a.ld_k, maps.sum1, own);
            store<D2>(a, sum2, 1.0f, x, a.dv, a.ld_v, maps.sum2, own + AT_SUM2);
            give_back(s.x_empty);
            xs.advance();
        }
        if (!first) return;
        bulk_wait_group<0>();
        // Both threads that add have seen their last tile: else a barrier would be two phases
        // ahead.
        for (u32 i = 0; i < 2; i++, dss.advance()) dss.wait_empty(s.dq_empty);
        // Now they find that there are no more.
        mbarrier_arrive(s.dq_full), mbarrier_arrive(s.dq_full + 1);
    }

    static __device__ __forceinline__ void run(const TwAttn& a, const TwDqSums& to, u32 together, const TwGradMaps& maps) {
        if (threadIdx.x == 0) {
            tensor_prefetch(maps.x1), tensor_prefetch(maps.x2), tensor_prefetch(maps.y1), tensor_prefetch(maps.y2);
            State& s = state();
            mbarrier_init(s.x_full, 1), mbarrier_init(s.x_empty, TW_HB_WARPS);
            for (u32 i = 0; i < STAGES; i++) mbarrier_init(s.y_full + i, 2), mbarrier_init(s.y_empty + i, TW_HB_WARPS);
            for (u32 i = 0; i < 2; i++) {
                mbarrier_init(s.ds_full + i, TW_HB_WARPS);
                mbarrier_init(s.dq_full + i, TW_HB_WARPS);
                mbarrier_init(s.dq_empty + i, 1);
            }
            fence_mbarrier_init_release_cluster();
        }
        __syncthreads();
        if (threadIdx.x / 128 == 2) {
            setmaxnreg_dec<24>();
            const u32 warp = threadIdx.x / 32 - 8;
            if (warp == 0) load_tiles(a, to, together, maps);
            else if (warp < 3 && threadIdx.x % 32 == 0) add_tiles(a, to, warp - 1);
            return;
        }
        setmaxnreg_inc<240>();
        multiply(a, maps);
    }
};

// dq of the 128 queries of an own tile and a head, a block for each: sums times the scale, or zeros
// where no key was met. Leaves the words of turns at zero. 256 threads, a warp to a row.
__device__ __forceinline__ void tw_dq_of_sums(const TwAttn& a, const TwDqSums& to) {
    __shared__ u32 added[2];
    const u32 t = blockIdx.x / a.heads_q, head = blockIdx.x - t * a.heads_q, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (!TW_HB_UNORDERED && threadIdx.x < 2) {
        u32* word = tw_turns(to, a.heads_q, 2 * t + threadIdx.x, head);
        added[threadIdx.x] = *word;
        *word = 0;
    }
    __syncthreads();
    const TwSeg own = tw_own(a.own, a.num_own, t);
    const u32 first = (t - own.tile) * TW_HA_M, num = min(own.len - first, (u32)TW_HA_M);
    const u32 half = lane / 16, place = lane % 16;
    for (u32 r = warp; r < num; r += 8) {
        const u32 row = own.row + first + r, chunk = place ^ r % 2 * 4;
        float4 d = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (TW_HB_UNORDERED || added[r / 64] != 0)
            d = ((const float4*)(to.sums + ((u64)(head * 2 + half) * a.tokens_q + row) * (TW_ATTN_DQK / 2)))[place];
        const i64 at = (i64)row * a.ld_q + head * TW_ATTN_DQK + half * (TW_ATTN_DQK / 2) + chunk / 4 * 16 + chunk % 4 * 2;
        if (a.out_type == 2) {
            *(float2*)((float*)a.dq + at) = make_float2(d.x * a.scale, d.y * a.scale);
            *(float2*)((float*)a.dq + at + 8) = make_float2(d.z * a.scale, d.w * a.scale);
        } else {
            *(u32*)((u16*)a.dq + at) = tw_pair(d.x * a.scale, d.y * a.scale, a.out_type);
            *(u32*)((u16*)a.dq + at + 8) = tw_pair(d.z * a.scale, d.w * a.scale, a.out_type);
        }
    }
}
