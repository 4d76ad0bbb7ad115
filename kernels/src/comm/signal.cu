// Signal, wait, barrier, and the epoch word of copy-engine pushes.
//
// The control page of rank r is at control + r * stride, with the layout of the host backend's
// page (TW_OFF_* come from there). Counters only grow. What a rank has sent and what it expects
// next live in its own device memory, so a replayed graph needs no new values.
//
// A wait ends by its signal, by an abort (of a peer, or of this host), or at its deadline. Nothing
// traps: the first failure claims the fault word, writes a 64-byte report into pinned memory and
// tells all peers; every later kernel of the team returns at once.

struct TwTeam {
    u64 control;     // base of the control pages
    u64 stride;      // bytes from one page to the next
    u64* sent;       // [slot][dst]: counts raised so far
    u64* expected;   // [slot][src]: counts waited for so far
    u64* epoch;      // [channel]: barrier rounds entered so far
    u64* fault;      // 0, or why this team is over
    u64* pinned;     // word 0: host abort; words 8..15: report
    u64 timeout_ns;  // of every wait
    u32 me, size, generation, pad;
};

enum { TW_TIMEOUT = 1, TW_ABORTED = 3, TW_OTHER = 5, TW_HOST = 6 };  // reasons, as in protocol::AbortCode
enum { TW_OP_WAIT = 1, TW_OP_BARRIER = 2, TW_OP_INPUT = 3 };

struct TwWait {
    u32 op, slot, peer, reason, about;
    u64 expected, seen, elapsed_ns;
    u64 heard;  // the abort word that ended the wait, or 0
};

__device__ __forceinline__ u64* tw_word(const TwTeam& t, u32 page, u64 offset) {
    return (u64*)(t.control + page * t.stride + offset);
}

__device__ __forceinline__ u64* tw_count(const TwTeam& t, u32 page, u32 slot, u32 writer) {
    return tw_word(t, page, TW_OFF_SIGNALS + ((u64)slot * t.size + writer) * 16);
}

__device__ __forceinline__ bool tw_is_over(const TwTeam& t) {
    return ld_relaxed_gpu_u64(t.fault) != 0;
}

// The first failure of this rank: reports it and tells the peers.
__device__ void tw_fail(const TwTeam& t, const TwWait& w) {
    // One that was heard is passed on as it is, so that all ranks name the rank that began.
    u64 code = w.heard;
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
    for (u32 p = 0; p < t.size; p++)
        if (p != t.me) st_release_sys_u64(tw_word(t, p, TW_OFF_ABORT + 8 * t.me), code);
}

// True if the team is over or was aborted; says why in `w`.
__device__ bool tw_heard_abort(const TwTeam& t, TwWait& w) {
    if (tw_is_over(t)) return true;
    for (u32 p = 0; p < t.size; p++) {
        u64 word = p == t.me ? 0 : ld_acquire_sys_u64(tw_word(t, t.me, TW_OFF_ABORT + 8 * p));
        if (word >> 63 && (u32)word == t.generation) {
            w.reason = TW_ABORTED;
            w.about = word >> 48 & 0xff;
            w.heard = word;
            return true;
        }
    }
    u64 host = ld_acquire_sys_u64(t.pinned);
    if (host != 0) {
        w.reason = TW_HOST;
        w.about = t.me;
        w.heard = host;
        return true;
    }
    return false;
}

// Polls `p` until it reaches w.expected. False once the wait had to end.
__device__ bool tw_poll(const TwTeam& t, const u64* p, TwWait w) {
    u64 start = globaltimer();
    for (u32 polls = 1;; polls++) {
        w.seen = ld_acquire_sys_u64(p);
        if ((i64)(w.seen - w.expected) >= 0) return true;
        if (polls % 64 != 0) continue;
        w.elapsed_ns = globaltimer() - start;
        bool over = tw_heard_abort(t, w);
        if (!over && w.elapsed_ns > t.timeout_ns) {
            w.reason = TW_TIMEOUT;
            w.about = w.peer;
            over = true;
        }
        if (over) {
            // The last look comes after the reason to end: a peer that signalled and then ended
            // is not taken for missing.
            w.seen = ld_acquire_sys_u64(p);
            if ((i64)(w.seen - w.expected) >= 0) return true;
            tw_fail(t, w);
            return false;
        }
        if (w.elapsed_ns > 100000) nanosleep(200);
    }
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

// One more count for `num` slots from `first` on and every peer: what copy engines will carry behind
// the data of one launch. One kernel for all of them: a kernel between two copies costs more than
// the flag.
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

// Fills outputs with the poison of their types once the team is over: nobody takes them for results. The
// fault word of a team in good order is all that is read.
struct TwPoison {
    u64 out[8], len[8];
    unsigned char byte[8];
};

extern "C" __global__ void __launch_bounds__(256) tw_poison(TwTeam t, TwPoison p) {
    if (!tw_is_over(t)) return;
    for (u32 o = 0; o < 8; o++)
        for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < p.len[o]; i += (u64)gridDim.x * blockDim.x)
            ((unsigned char*)p.out[o])[i] = p.byte[o];
}

// Ends the team if a kernel of this stream has found an input that cannot be: `what` is told.
extern "C" __global__ void __launch_bounds__(1) tw_fail_if(TwTeam t, const u32* status, u32 what) {
    if (*status == 0 || tw_is_over(t)) return;
    TwWait w = {TW_OP_INPUT, what, t.me, TW_OTHER, t.me, 0, *status, 0, 0};
    tw_fail(t, w);
}
