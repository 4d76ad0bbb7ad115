// The sizes of groups, which are in device memory: counts, or the groups' ends, in 64 or 32 bits.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Flags of a grouped product.
enum : u32 {
    TW_ZERO_TAIL = 128,       // rows behind the last group become zeros
    TW_ENDS = 512,            // splits are the ends of groups, not their counts
    TW_NARROW_SPLITS = 1024,  // splits are i32
};

struct TwSplits {
    const void* at;
    u32 num, flags;

    __device__ __forceinline__ i64 operator[](u32 e) const {
        return flags & TW_NARROW_SPLITS ? ((const int*)at)[e] : ((const i64*)at)[e];
    }
};

// v of this lane and all lanes before it.
__device__ __forceinline__ u64 tw_sum_to_lane(u64 v) {
    for (u32 by = 1; by < 32; by *= 2) {
        const u64 other = __shfl_up_sync(0xffffffff, v, by);
        if (threadIdx.x % 32 >= by) v += other;
    }
    return v;
}

// A lane's group of 32: rows, and where they end. `code` is that of the first of them that is
// invalid, for all lanes: 1 negative, 2 beyond the capacity; else 0.
struct TwSizes {
    u64 num, end;
    u32 code;
};

// The groups from `base` on, behind `rows` rows: a whole warp.
__device__ __forceinline__ TwSizes tw_sizes(const TwSplits& s, u32 base, u64 rows, u32 capacity) {
    const u32 e = base + threadIdx.x % 32, all = 0xffffffff;
    const bool ends = s.flags & TW_ENDS;
    const i64 before = ends && e > 0 && e < s.num ? s[e - 1] : 0;
    const i64 v = e < s.num ? s[e] : before;
    // Clamped, so that no sum overflows. If a group's end is valid, all groups before it are, too.
    const u64 num = v < before ? 0 : min((u64)v - (u64)before, (u64)capacity + 1);
    const u64 end = tw_sum_to_lane(num) + rows;
    const u32 code = v < before ? 1 : end > capacity ? 2 : 0;
    const u32 bad = __ballot_sync(all, code != 0);
    return {num, end, bad ? __shfl_sync(all, code, __ffs(bad) - 1) : 0};
}
