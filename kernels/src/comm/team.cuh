// A team in kernels: its control words, its fault, and waits that always end.
//
// A wait ends by its signal, by an abort (a peer's or this host's), when the peer has left, or at
// its deadline. Nothing traps: the first failure claims the fault word, writes a 64-byte report
// into pinned memory and raises the abort word at all peers. Every later kernel of the team returns
// at once.

#pragma once

#include "../ptx/ld_st.cuh"

// Of functions that few launches call. A kernel that gives registers from warp to warp has no calls
// (ptxas ignores setmaxnreg where there are some): it defines this as __forceinline__.
#ifndef TW_RARE
#define TW_RARE __noinline__
#endif

struct TwTeam {
    u64 control;     // base of the control pages
    u64 stride;      // bytes from one page to the next
    u64* sent;       // [slot][dst]: counts raised so far
    u64* expected;   // [slot][src]: counts waited for so far
    u64* epoch;      // [channel]: barrier rounds entered so far
    u64* fault;      // 0, or why this team is over
    u64* pinned;     // word 0: host abort; 2: ranks that have left, a bit each; words 8..15: report
    u64 timeout_ns;  // of every wait
    u32 me, size, generation;
    u32 abort;       // where the abort words are in a control page
};

enum { TW_TIMEOUT = 1, TW_GONE = 2, TW_ABORTED = 3, TW_OTHER = 5, TW_HOST = 6 };  // reasons, as in protocol::AbortCode
enum { TW_OP_WAIT = 1, TW_OP_BARRIER = 2, TW_OP_INPUT = 3 };

struct TwWait {
    u32 op, slot, peer, reason, about;
    u64 expected, seen, elapsed_ns;
    u64 abort;  // the abort word that ended the wait, or 0
    u64 left_ns;  // how long the wait had lasted when the peer was first seen to have left, or 0
};

__device__ __forceinline__ u64* tw_word(const TwTeam& t, u32 page, u64 offset) {
    return (u64*)(t.control + page * t.stride + offset);
}

__device__ __forceinline__ bool tw_is_over(const TwTeam& t) {
    return ld_relaxed_gpu_u64(t.fault) != 0;
}

// Called by a warp: all lanes get the same answer, even while the word changes.
__device__ __forceinline__ bool tw_warp_is_over(const TwTeam& t) {
    return __any_sync(0xffffffffu, tw_is_over(t));
}

// The first failure of this rank: claims the fault word, writes the report, and aborts the peers.
__device__ TW_RARE void tw_fail(const TwTeam& t, const TwWait& w) {
    // A peer's abort word is passed on unchanged, so that all ranks name the rank that failed
    // first.
    u64 code = w.abort;
    if (code == 0) code = 1ull << 63 | (u64)t.me << 48 | (u64)w.about << 40 | (u64)w.reason << 32 | t.generation;
    if (atom_cas_acq_rel_gpu_u64(t.fault, 0, code) != 0) return;
    u64* report = t.pinned + 8;
    st_relaxed_sys_u64(report + 1, w.slot);
    st_relaxed_sys_u64(report + 2, w.peer);
    st_relaxed_sys_u64(report + 3, w.expected);
    st_relaxed_sys_u64(report + 4, w.seen);
    st_relaxed_sys_u64(report + 5, w.elapsed_ns);
    st_relaxed_sys_u64(report + 6, code);
    st_relaxed_sys_u64(report + 7, t.generation);
    st_release_sys_u64(report, 1ull << 63 | (u64)w.op << 8 | w.reason);
#pragma unroll 1
    for (u32 p = 0; p < t.size; p++)
        if (p != t.me) st_release_sys_u64(tw_word(t, p, t.abort + 8 * t.me), code);
}

// Signals that a rank sent before it left may be in flight for this long.
__device__ constexpr u64 TW_UNDER_WAY_NS = 1000000000;

// True if the team has a fault, was aborted, or the peer has left; writes the reason to `w`.
__device__ TW_RARE bool tw_seen_abort(const TwTeam& t, TwWait& w) {
    if (tw_is_over(t)) return true;
#pragma unroll 1
    for (u32 p = 0; p < t.size; p++) {
        u64 word = p == t.me ? 0 : ld_acquire_sys_u64(tw_word(t, t.me, t.abort + 8 * p));
        if (word >> 63 && (u32)word == t.generation) {
            w.reason = TW_ABORTED;
            w.about = word >> 48 & 0xff;
            w.abort = word;
            return true;
        }
    }
    u64 host = ld_acquire_sys_u64(t.pinned);
    if (host != 0) {
        w.reason = TW_HOST;
        w.about = t.me;
        w.abort = host;
        return true;
    }
    // Only waits of more than 1 ms read this word, which is across the bus.
    if (w.elapsed_ns > 1000000 && ld_acquire_sys_u64(t.pinned + 2) >> w.peer & 1) {
        if (w.left_ns == 0) w.left_ns = w.elapsed_ns;
        if (w.elapsed_ns - w.left_ns > TW_UNDER_WAY_NS) {
            w.reason = TW_GONE;
            w.about = w.peer;
            return true;
        }
    }
    return false;
}

// Called by all threads of a block: true if the team has a fault, or a peer has raised its abort
// word, which then becomes this rank's fault, too. Reads only this device's memory, no word of the
// host's.
__device__ __forceinline__ bool tw_told(const TwTeam& t) {
    bool over = tw_is_over(t);
    for (u32 p = threadIdx.x; p < t.size && !over; p += blockDim.x) {
        const u64 word = p == t.me ? 0 : ld_acquire_sys_u64(tw_word(t, t.me, t.abort + 8 * p));
        if (!(word >> 63) || (u32)word != t.generation) continue;
        const TwWait w = {TW_OP_WAIT, 0, p, TW_ABORTED, (u32)(word >> 48 & 0xff), 0, 0, 0, word};
        tw_fail(t, w);
        over = true;
    }
    return __syncthreads_or(over);
}

// Polls `p` until it reaches w.expected. False if the wait ended for another reason, now the fault.
__device__ bool tw_poll(const TwTeam& t, const u64* p, TwWait w) {
    u64 start = globaltimer();
    for (u32 polls = 1;; polls++) {
        w.seen = ld_acquire_sys_u64(p);
        if ((i64)(w.seen - w.expected) >= 0) return true;
        if (polls % 64 != 0) continue;
        w.elapsed_ns = globaltimer() - start;
        bool over = tw_seen_abort(t, w);
        if (!over && w.elapsed_ns > t.timeout_ns) {
            w.reason = TW_TIMEOUT;
            w.about = w.peer;
            over = true;
        }
        if (over) {
            // The last look comes after the reason to end, so a peer that signalled and then ended
            // is not reported missing.
            w.seen = ld_acquire_sys_u64(p);
            if ((i64)(w.seen - w.expected) >= 0) return true;
            tw_fail(t, w);
            return false;
        }
        if (w.elapsed_ns > 100000) nanosleep(200);
    }
}

// Outputs of a launch, their lengths in bytes, and the byte that poisons each.
struct TwPoison {
    u64 out[8], len[8];
    unsigned char byte[8];
};
