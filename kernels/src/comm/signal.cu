// Signal, wait, barrier, and the epoch word of copy-engine pushes.
//
// The control page of rank r is at control + r * stride, with the layout of the host backend's
// page (TW_OFF_* come from there). Counters only grow. What a rank has sent and what it expects
// next live in its own device memory, so a replayed graph needs no new values.

#include "team.cuh"

__device__ __forceinline__ u64* tw_count(const TwTeam& t, u32 page, u32 slot, u32 writer) {
    return tw_word(t, page, TW_OFF_SIGNALS + ((u64)slot * t.size + writer) * 16);
}

extern "C" __global__ void __launch_bounds__(1) tw_signal(TwTeam t, u32 dst, u32 slot, u64 n) {
    if (tw_is_over(t)) return;
    u64* sent = t.sent + (u64)slot * t.size + dst;
    *sent += n;
    // Earlier work of this stream, of copy engines too, is ordered before the count.
    fence_acq_rel_sys();
    // One producer for each (slot, source), so a posted store does what an atomic add would.
    st_release_sys_u64(tw_count(t, dst, slot, t.me), *sent);
}

// The new value of the word that a copy engine will carry to the peer. After a fault it stays as
// it is, so that the copy behind it signals nothing.
extern "C" __global__ void __launch_bounds__(1) tw_bump_epoch(TwTeam t, u32 dst, u32 slot, u64 n) {
    if (tw_is_over(t)) return;
    t.sent[(u64)slot * t.size + dst] += n;
    fence_acq_rel_sys();
}

extern "C" __global__ void __launch_bounds__(1) tw_wait(TwTeam t, u32 src, u32 slot, u64 n) {
    if (tw_is_over(t)) return;
    u64* expected = t.expected + (u64)slot * t.size + src;
    *expected += n;
    TwWait w = {TW_OP_WAIT, slot, src, 0, 0, *expected, 0, 0};
    tw_poll(t, tw_count(t, t.me, slot, src), w);
}

// One thread for each peer: announce the round to it, then wait for its announcement.
extern "C" __global__ void __launch_bounds__(64) tw_barrier(TwTeam t, u32 channel) {
    u32 p = threadIdx.x;
    u64 round = t.epoch[channel] + 1;
    // The fault word may change while the threads look at it: they leave together or not at all.
    // Behind this meeting all have read the round.
    if (__syncthreads_or(tw_is_over(t))) return;
    if (p == 0) t.epoch[channel] = round;
    if (p >= t.size || p == t.me) return;
    u64 at = TW_OFF_INBOX + (u64)channel * TW_INBOX_ROW;
    fence_acq_rel_sys();
    st_release_sys_u64(tw_word(t, p, at + 8 * t.me), round);
    TwWait w = {TW_OP_BARRIER, channel, p, 0, 0, round, 0, 0};
    tw_poll(t, tw_word(t, t.me, at + 8 * p), w);
}

// One more count for `num` slots from `first` on and every peer: what copy engines will carry
// behind the data of one launch. One kernel for all of them: a kernel between two copies costs more
// than the flag.
__device__ __forceinline__ void tw_raise(const TwTeam& t, u32 first, u32 num) {
    u64* sent = t.sent + (u64)first * t.size;
    for (u64 i = threadIdx.x; i < (u64)num * t.size; i += blockDim.x)
        if (i % t.size != t.me) sent[i] += 1;
}

extern "C" __global__ void __launch_bounds__(256) tw_advance(TwTeam t, u32 first, u32 num) {
    const bool over = __syncthreads_or(tw_is_over(t));
    if (over) return;
    tw_raise(t, first, num);
    fence_acq_rel_sys();
}

// The beginning of a launch: everybody tells everybody that its receive areas are free, waits for
// the same of all, and makes the totals that this launch's copies will carry.
extern "C" __global__ void __launch_bounds__(64) tw_enter(TwTeam t, u32 credit, u32 first, u32 num) {
    u32 p = threadIdx.x;
    const bool over = __syncthreads_or(tw_is_over(t));
    if (over) return;
    tw_raise(t, first, num);
    // Everything before, of other streams that were joined too, is ordered before the credit.
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

// One more count of every peer on one slot.
extern "C" __global__ void __launch_bounds__(64) tw_wait_peers(TwTeam t, u32 slot) {
    u32 p = threadIdx.x;
    const bool over = __syncthreads_or(tw_is_over(t));
    if (over || p >= t.size || p == t.me) return;
    u64* expected = t.expected + (u64)slot * t.size + p;
    *expected += 1;
    TwWait w = {TW_OP_WAIT, slot, p, 0, 0, *expected, 0, 0};
    tw_poll(t, tw_count(t, t.me, slot, p), w);
}

// Fills outputs with the poison of their types once the team is over, here or at a peer: nobody
// takes them for results. What a peer has reported may not be known to any kernel here: all that
// this rank waited for had come.
extern "C" __global__ void __launch_bounds__(256) tw_poison(TwTeam t, TwPoison p) {
    if (!tw_told(t)) return;
    for (u32 o = 0; o < 8; o++)
        for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < p.len[o]; i += (u64)gridDim.x * blockDim.x)
            ((unsigned char*)p.out[o])[i] = p.byte[o];
}

// Ends the team if a kernel of this stream has found an input that cannot be: `what` is reported.
extern "C" __global__ void __launch_bounds__(1) tw_fail_if(TwTeam t, const u32* status, u32 what) {
    if (*status == 0 || tw_is_over(t)) return;
    TwWait w = {TW_OP_INPUT, what, t.me, TW_OTHER, t.me, 0, *status, 0, 0};
    tw_fail(t, w);
}
