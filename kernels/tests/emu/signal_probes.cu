// What stands around the kernels of comm/signal.cu in their tests: puts, copies and checks.

// Pages of data that all ranks map; word `i` of a page is written by rank `i`.
struct TwPages {
    u64 base, stride;
    u64* errors;
    u32 me, size;
};

__device__ __forceinline__ u64* t_word(const TwPages& t, u32 page, u32 writer) {
    return (u64*)(t.base + page * t.stride) + writer;
}

// Plain stores, as a kernel makes them before it signals.
extern "C" __global__ void t_put(TwPages t, u32 dst, u64 v) {
    *t_word(t, dst, t.me) = v;
}

// The word must be this one: neither the data before it nor that after it.
extern "C" __global__ void t_check(TwPages t, u32 src, u64 v) {
    if (*t_word(t, t.me, src) != v) *t.errors += 1;
}

// An 8-byte copy by a copy engine.
extern "C" __global__ void t_copy(u64* dst, const u64* src) {
    st_release_sys_u64(dst, *src);
}

extern "C" __global__ void t_enter(TwPages t, u64 round) {
    for (u32 p = 0; p < t.size; p++) *t_word(t, p, t.me) = round;
}

// Behind a barrier everybody has entered this round, and nobody is past the next.
extern "C" __global__ void t_left(TwPages t, u64 round) {
    for (u32 p = 0; p < t.size; p++) {
        const u64 seen = *t_word(t, t.me, p);
        if (seen < round || seen > round + 1) *t.errors += 1;
    }
}
