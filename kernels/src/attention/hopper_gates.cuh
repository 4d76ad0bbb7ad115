// Keys of other ranks that come while the kernel runs: each rank's rows lie behind a gate.
//
// Each rank has contiguous rows of one tensor for all of them, and a flag that its peer raises
// behind its rows. The keys of this rank are in a tensor of their own, without a gate. Where tables
// name this rank's segments first, and then those of the ranks in the order in which they come, a
// loader seldom waits.
//
//   flag    of a rank: a count of the team's signals. tw_wait_peers behind this kernel counts it.
//   gate    of a rank: a barrier in shared memory, of one arrival and one phase, that a warp of its
//           own opens (watch) when it has seen the flag. The loader waits there before its first
//           load of the rank's keys, and fences: it has acquired what the flag was released behind,
//           and the loads go through the async proxy. Values of a tile come behind its keys.
//
// A gate opens at a fault, too: the wait for a flag ends by an abort, when the peer has left, or at
// its deadline. The kernel then attends to what is there, and tw_poison spoils the result, as the
// team is over.

#pragma once

// ptxas ignores setmaxnreg in a kernel with calls.
#define TW_RARE __forceinline__
#define TW_HA_GATES 32
#define TW_HA_WATCH_BYTES 1152

#include "../comm/await.cuh"
#include "hopper.cuh"

struct TwGates {
    TwTeam team;
    const u64* flags;      // of rank 0 in `slot`; that of the next rank is two words behind
    u32 slot;
    u32 own;               // the first row of this rank among all keys
    u32 end[TW_HA_GATES];  // rank r has rows of all keys up to end[r], from the end of the rank before
};

// The gate of a rank, and when the lane that watches it began, last looked, and saw its peer leave.
struct TwGate {
    u64 bar, left_ns;
    TwLooks looks;
};

// In shared memory: the compiler would keep the notes of lanes, and what it makes of the team's
// words, in more registers than a warp has that does not multiply.
struct TwWatch {
    TwGate gates[TW_HA_GATES];
    TwTeam team;
};
static_assert(sizeof(TwWatch) <= TW_HA_WATCH_BYTES, "what the host asks for");

__device__ __forceinline__ TwWatch& tw_watch() {
    return *(TwWatch*)(tw_smem + TW_HA_AT_WATCH);
}

struct TwGatedKeys {
    const TwGates& g;
    const TwTensorMap *k, *v, *own_k, *own_v;
    u32 passed;    // gates, a bit each
    u32 from, to;  // rows behind the gate that was passed last

    __device__ __forceinline__ void begin() const {
        tensor_prefetch(k), tensor_prefetch(v), tensor_prefetch(own_k), tensor_prefetch(own_v);
        TwWatch& w = tw_watch();
        w.team = g.team;
        for (u32 r = 0; r < g.team.size; r++) mbarrier_init(&w.gates[r].bar, 1);
    }

    // Called by a warp, a lane for each rank: opens the gates, each when its rank's flag has come.
    __device__ __forceinline__ void watch() const {
        const TwTeam& t = tw_watch().team;
        const u32 r = threadIdx.x % 32;
        bool closed = r < t.size && r != t.me;
        const u64* flag = g.flags + 2 * (closed ? r : 0);
        const u64 expected = closed ? t.expected[(u64)g.slot * t.size + r] + 1 : 0;
        TwGate& gate = tw_watch().gates[r];
        const u64 start = globaltimer();
        gate.looks = {start, start}, gate.left_ns = 0;
        // All lanes loop as long as one has a gate to open. If a lane left the loop alone, it might
        // wait behind it for the others before it opens its own gate.
        for (u32 polls = 1; __any_sync(0xffffffffu, closed); polls++) {
            bool opens = closed && (i64)(ld_relaxed_sys_u64(flag) - expected) >= 0;
            // The acquire orders the loads behind the gate.
            if (opens) ld_acquire_sys_u64(flag);
            if (closed && !opens && polls % 64 == 0) {
                TwWait w = {TW_OP_WAIT, g.slot, r, 0, 0, expected, 0, 0, 0, gate.left_ns};
                opens = tw_look(t, flag, w, gate.looks) != TW_GOES_ON;
                gate.left_ns = w.left_ns;
                if (w.elapsed_ns > 100000) nanosleep(200);
            }
            if (opens) mbarrier_arrive(&gate.bar), closed = false;
        }
    }

    __device__ __forceinline__ bool is_own(u32 row) const {
        return row - g.own < g.end[g.team.me] - g.own;
    }

    __device__ __forceinline__ TwFrom keys(const TwTile& t) {
        // A tile of no keys has no row either.
        if (t.num == 0) return {own_k, 0};
        if (is_own(t.row)) return {own_k, t.row - g.own};
        if (t.row - from >= to - from) pass(t.row);
        return {k, t.row};
    }

    __device__ __forceinline__ TwFrom values(const TwTile& t) const {
        if (t.num == 0) return {own_v, 0};
        if (is_own(t.row)) return {own_v, t.row - g.own};
        return {v, t.row};
    }

    // Waits for the rank that has `row`. A fence is for all loads behind it, and takes as long as
    // a load: one for each rank.
    __device__ __forceinline__ void pass(u32 row) {
        u32 r = 0;
        while (row >= g.end[r]) r++;
        from = r == 0 ? 0 : g.end[r - 1], to = g.end[r];
        if (passed >> r & 1) return;
        while (!mbarrier_try_wait_parity(&tw_watch().gates[r].bar, 0)) {
        }
        fence_proxy_async();
        passed |= 1u << r;
    }
};
