// Waits for other ranks by many warps of a kernel at once.

#pragma once

#include "team.cuh"

// When a wait began, and when it last read words that are not in this device's memory.
struct TwLooks {
    u64 start, looked;
};

// How a wait goes on.
enum TwWaits { TW_GOES_ON, TW_REACHED, TW_FAILED };

// Looks for a reason to end a wait for `p`. Thousands of threads wait, and each calls this once in
// 64 polls. The host's words are across the bus, which so many polls would saturate, so each thread
// reads them only every 2 ms. The first thread that finds the team over sets the fault word, which
// the other threads read.
__device__ __forceinline__ TwWaits tw_look(const TwTeam& t, const u64* p, TwWait& w, TwLooks& l) {
    const u64 now = globaltimer();
    w.elapsed_ns = now - l.start;
    bool over = tw_is_over(t);
    if (!over && (now - l.looked > 2000000 || w.elapsed_ns > t.timeout_ns)) {
        l.looked = now;
        over = tw_seen_abort(t, w);
        if (!over && w.elapsed_ns > t.timeout_ns) {
            w.reason = TW_TIMEOUT;
            w.about = w.peer;
            over = true;
        }
    }
    if (!over) return TW_GOES_ON;
    // The last look comes after the reason to end, so a peer that signalled and then ended is not
    // reported missing.
    w.seen = ld_acquire_sys_u64(p);
    if ((i64)(w.seen - w.expected) >= 0) return TW_REACHED;
    tw_fail(t, w);
    return TW_FAILED;
}

// Like tw_poll, for thousands of waiting threads.
__device__ __forceinline__ bool tw_await(const TwTeam& t, const u64* p, TwWait w) {
    const u64 start = globaltimer();
    TwLooks looks = {start, start};
    for (;;) {
        for (u32 polls = 0; polls < 64; polls++) {
            if ((i64)(ld_relaxed_sys_u64(p) - w.expected) < 0) continue;
            // The acquire orders reads of the data before the word behind it.
            w.seen = ld_acquire_sys_u64(p);
            return true;
        }
        const TwWaits how = tw_look(t, p, w, looks);
        if (how != TW_GOES_ON) return how == TW_REACHED;
        if (w.elapsed_ns > 100000) nanosleep(200);
    }
}
