// Small kernels of the protocol: signal, wait, barrier, epoch words of copy-engine pushes, entry of
// a launch, poison.
//
// The control page of rank r is at control + r * stride and has the layout of the host backend's
// page (TW_OFF_*). Counters only grow. The counts that a rank has sent and that it expects next are
// in its own device memory, so a replayed graph needs no new values. Every kernel but tw_poison
// returns at once, without effect, if the team has a fault. Parameter t is the team; no kernel has
// dynamic shared memory.

#include "team.cuh"

__device__ __forceinline__ u64* tw_count(const TwTeam& t, u32 page, u32 slot, u32 writer) {
    return tw_word(t, page, TW_OFF_SIGNALS + ((u64)slot * t.size + writer) * 16);
}

// Raises the counter of `slot` at rank `dst` by n. Grid: 1 thread.
extern "C" __global__ void __launch_bounds__(1) tw_signal(TwTeam t, u32 dst, u32 slot, u64 n) {
    if (tw_is_over(t)) return;
    u64* sent = t.sent + (u64)slot * t.size + dst;
    *sent += n;
    // Earlier work of this stream, also by copy engines, is ordered before the count.
    fence_acq_rel_sys();
    // One producer for each (slot, source), so a posted store does what an atomic add would.
    st_release_sys_u64(tw_count(t, dst, slot, t.me), *sent);
}

// Raises this rank's copy of a counter by n; a copy engine then carries it to the peer. After a
// fault the word stays unchanged, so that the copy signals nothing. Grid: 1 thread.
extern "C" __global__ void __launch_bounds__(1) tw_bump_epoch(TwTeam t, u32 dst, u32 slot, u64 n) {
    if (tw_is_over(t)) return;
    t.sent[(u64)slot * t.size + dst] += n;
    fence_acq_rel_sys();
}

// Waits until the counter of `slot` from rank `src` has grown by n. Grid: 1 thread.
extern "C" __global__ void __launch_bounds__(1) tw_wait(TwTeam t, u32 src, u32 slot, u64 n) {
    if (tw_is_over(t)) return;
    u64* expected = t.expected + (u64)slot * t.size + src;
    *expected += n;
    TwWait w = {TW_OP_WAIT, slot, src, 0, 0, *expected, 0, 0};
    tw_poll(t, tw_count(t, t.me, slot, src), w);
}

// A barrier of all ranks. Thread p announces the round to rank p, then waits for its announcement.
// Grid: 1 block of 64 threads.
extern "C" __global__ void __launch_bounds__(64) tw_barrier(TwTeam t, u32 channel) {
    u32 p = threadIdx.x;
    u64 round = t.epoch[channel] + 1;
    // The fault word may change while threads read it: all return or none. All threads have read
    // the round before thread 0 writes it.
    if (__syncthreads_or(tw_is_over(t))) return;
    if (p == 0) t.epoch[channel] = round;
    if (p >= t.size || p == t.me) return;
    u64 at = TW_OFF_INBOX + (u64)channel * TW_INBOX_ROW;
    fence_acq_rel_sys();
    st_release_sys_u64(tw_word(t, p, at + 8 * t.me), round);
    TwWait w = {TW_OP_BARRIER, channel, p, 0, 0, round, 0, 0};
    tw_poll(t, tw_word(t, t.me, at + 8 * p), w);
}

// Adds one to this rank's copies of `num` counters from slot `first` on, for every peer; copy
// engines carry them behind the data of one launch. One kernel for all: a kernel between two copies
// costs more than the flag.
__device__ __forceinline__ void tw_raise(const TwTeam& t, u32 first, u32 num) {
    u64* sent = t.sent + (u64)first * t.size;
    for (u64 i = threadIdx.x; i < (u64)num * t.size; i += blockDim.x)
        if (i % t.size != t.me) sent[i] += 1;
}

// Makes the counts for the copies of a launch (see tw_raise). Grid: 1 block of 256 threads.
extern "C" __global__ void __launch_bounds__(256) tw_advance(TwTeam t, u32 first, u32 num) {
    const bool over = __syncthreads_or(tw_is_over(t));
    if (over) return;
    tw_raise(t, first, num);
    fence_acq_rel_sys();
}

// Enters a launch: grants this rank's receive areas to every peer, waits for the grants of all
// peers, and makes the counts that the copies of this launch will carry. Grid: 1 block of 64
// threads, one for each peer.
extern "C" __global__ void __launch_bounds__(64) tw_enter(TwTeam t, u32 credit, u32 first, u32 num) {
    u32 p = threadIdx.x;
    const bool over = __syncthreads_or(tw_is_over(t));
    if (over) return;
    tw_raise(t, first, num);
    // Earlier work, also of other streams that were joined, is ordered before the credit.
    fence_acq_rel_sys();
    if (p >= t.size || p == t.me) return;
    u64* sent = t.sent + (u64)credit * t.size + p;
    u64* expected = t.expected + (u64)credit * t.size + p;
    *sent += 1;
    *expected += 1;
    u64* there = tw_count(t, p, credit, t.me);
    st_release_sys_u64(there, *sent);
    TwWait w = {TW_OP_WAIT, credit, p, 0, 0, *expected, 0, 0};
    tw_poll(t, tw_count(t, t.me, credit, p), w);
}

// Waits until the counters of `slot` from all peers have grown by one. Grid: 1 block of 64 threads.
extern "C" __global__ void __launch_bounds__(64) tw_wait_peers(TwTeam t, u32 slot) {
    u32 p = threadIdx.x;
    const bool over = __syncthreads_or(tw_is_over(t));
    if (over || p >= t.size || p == t.me) return;
    u64* expected = t.expected + (u64)slot * t.size + p;
    *expected += 1;
    TwWait w = {TW_OP_WAIT, slot, p, 0, 0, *expected, 0, 0};
    tw_poll(t, tw_count(t, t.me, slot, p), w);
}

// Poisons outputs if the team has a fault here or at a peer, so that no consumer takes them for
// results. The kernel reads abort words itself, because no earlier kernel here may have seen a
// peer's fault: all signals that they waited for may have arrived. Any grid of 256 threads.
extern "C" __global__ void __launch_bounds__(256) tw_poison(TwTeam t, TwPoison p) {
    if (!tw_told(t)) return;
    for (u32 o = 0; o < 8; o++)
        for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < p.len[o]; i += (u64)gridDim.x * blockDim.x)
            ((unsigned char*)p.out[o])[i] = p.byte[o];
}

// Ends the team if a kernel of this stream has set `status` because of a bad input; `what` is
// reported. Grid: 1 thread.
extern "C" __global__ void __launch_bounds__(1) tw_fail_if(TwTeam t, const u32* status, u32 what) {
    if (*status == 0 || tw_is_over(t)) return;
    TwWait w = {TW_OP_INPUT, what, t.me, TW_OTHER, t.me, 0, *status, 0, 0};
    tw_fail(t, w);
}
