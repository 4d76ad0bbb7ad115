// Litmus tests of the memory orderings that the protocol relies on, many rounds in one launch. A
// rank's producers write to the next rank of the ring, round after round, a fresh value in every
// word. The consumers there check every word; they count wrong words and, among them, words of an
// earlier round. No word may be wrong unless TwLitmus::broken plants a mistake, which shows that
// the test can detect one. Every wait ends at the launch's deadline: a mistake costs the remaining
// rounds, never the device.

#include "../ptx/ld_st.cuh"
#include "../ptx/bulk.cuh"

struct TwLitmus {
    u64 put;      // producer: the next rank's receive area, `bytes` for each lane
    u64 flag;     // producer: the next rank's flags, TW_LITMUS_LINE bytes for each lane
    u64 credit;   // producer: where the next rank's credits arrive here, a line for each lane
    u64 got;      // consumer: this rank's receive area
    u64 seen;     // consumer: its flags
    u64 grant;    // consumer: where the previous rank takes its credits
    u64 own;      // this rank's alone: the counter of the producers; the epoch and behind it what is pushed
    u64 out;      // this rank's alone: a TwLitmusOut for each block
    u64 rounds;
    u64 timeout_ns;
    u32 bytes;    // of a lane, a multiple of 16
    u32 lanes;
    u32 reads;    // times that a consumer reads before it gives the credit
    u32 broken;   // 0, or a mistake below
    u32 late_ns;  // that the last producer of tw_litmus_count stores after the others
    u32 pad;
};

struct TwLitmusOut {
    u64 wrong, stale, rounds, ns;
};

enum {
    TW_FLAG_FIRST = 1,   // the flag is raised before the data is stored
    TW_NO_WAIT = 2,      // ... before the stores are complete
    TW_NO_CREDIT = 3,    // the data is overwritten before its credit has arrived
    TW_NO_COUNTER = 4,   // the first block raises the flag and does not wait for the others
    TW_RELAXED = 5,      // the flag is raised without release
};

constexpr u64 TW_LITMUS_LINE = 64;
constexpr u32 TW_ROUND_SHIFT = 20;

extern __shared__ __align__(128) unsigned char tw_smem[];

__device__ __forceinline__ u64 tw_litmus_value(u64 round, u32 word) {
    return round << TW_ROUND_SHIFT | word;
}

__device__ __forceinline__ u64* tw_line(u64 base, u32 lane) {
    return (u64*)(base + lane * TW_LITMUS_LINE);
}

// Polls until `p` reaches `value`; false at the deadline.
__device__ __forceinline__ bool tw_reached(const u64* p, u64 value, u64 end) {
    for (u32 polls = 1; ld_acquire_sys_u64(p) < value; polls++)
        if (polls % 64 == 0 && globaltimer() > end) return ld_acquire_sys_u64(p) >= value;
    return true;
}

// Checks the words of a round, and adds this thread's counts to `out`.
__device__ __forceinline__ void tw_litmus_check(const u64* words, u32 first, u32 num, u64 round, TwLitmusOut& out) {
    for (u32 i = threadIdx.x; i < num; i += blockDim.x) {
        u64 w = words[i];
        out.wrong += w != tw_litmus_value(round, first + i);
        out.stale += w >> TW_ROUND_SHIFT < round;
    }
}

__device__ __forceinline__ void tw_litmus_end(const TwLitmus& p, const TwLitmusOut& found, u64 rounds, u64 start) {
    TwLitmusOut* out = (TwLitmusOut*)p.out + blockIdx.x;
    if (found.wrong != 0) atomicAdd(&out->wrong, found.wrong);
    if (found.stale != 0) atomicAdd(&out->stale, found.stale);
    if (threadIdx.x != 0) return;
    out->rounds = rounds;
    out->ns = globaltimer() - start;
}

// Called by one thread: stores the staged round to the peer by a bulk store, then raises its flag.
__device__ __forceinline__ bool tw_litmus_store(const TwLitmus& p, u32 lane, u64 round, u64 end) {
    u64* credit = tw_line(p.credit, lane);
    u64* flag = tw_line(p.flag, lane);
    if (p.broken != TW_NO_CREDIT && !tw_reached(credit, round - 1, end)) return false;
    if (p.broken == TW_FLAG_FIRST) {
        st_release_sys_u64(flag, round);
        // Waits longer than the flag takes to arrive; else, between two GPUs, the data would arrive
        // before it is read.
        for (const u64 at = globaltimer() + 2000; globaltimer() < at;) {
        }
    }
    // The credit was read by a load, the data goes by a bulk store.
    fence_proxy_async();
    bulk_store((void*)(p.put + (u64)lane * p.bytes), tw_smem, p.bytes);
    bulk_commit_group();
    if (p.broken == TW_NO_WAIT) st_release_sys_u64(flag, round);
    bulk_wait_group<0>();
    fence_proxy_async();
    // Even with a planted mistake the producer is at most one round ahead, because flags count
    // rounds.
    if (p.broken == TW_NO_CREDIT && !tw_reached(credit, round - 1, end)) return false;
    if (p.broken != TW_FLAG_FIRST && p.broken != TW_NO_WAIT) st_release_sys_u64(flag, round);
    return true;
}

__device__ void tw_litmus_produce(const TwLitmus& p, u32 lane) {
    u64 start = globaltimer(), end = start + p.timeout_ns, round = 1;
    u64* stage = (u64*)tw_smem;
    for (; round <= p.rounds; round++) {
        for (u32 i = threadIdx.x; i < p.bytes / 8; i += blockDim.x) stage[i] = tw_litmus_value(round, i);
        // Orders each thread's own stores before the bulk store that one of them issues.
        fence_proxy_async();
        __syncthreads();
        bool late = threadIdx.x == 0 && !tw_litmus_store(p, lane, round, end);
        if (__syncthreads_or(late)) break;
    }
    tw_litmus_end(p, TwLitmusOut{0, 0, 0, 0}, round - 1, start);
}

__device__ void tw_litmus_consume(const TwLitmus& p, u32 lane) {
    __shared__ __align__(8) u64 full;
    u64 start = globaltimer(), end = start + p.timeout_ns, round = 1;
    const u64* data = (const u64*)(p.got + (u64)lane * p.bytes);
    u32 parity = 0;
    TwLitmusOut found = {0, 0, 0, 0};
    if (threadIdx.x == 0) {
        mbarrier_init(&full, 1);
        fence_mbarrier_init_release_cluster();
    }
    __syncthreads();
    for (; round <= p.rounds; round++) {
        bool late = threadIdx.x == 0 && !tw_reached(tw_line(p.seen, lane), round, end);
        if (__syncthreads_or(late)) break;
        for (u32 k = 0; k < p.reads; k++, parity ^= 1) {
            if (threadIdx.x == 0) {
                // The thread that acquired the flag orders its bulk load behind it.
                fence_proxy_async();
                mbarrier_arrive_expect_tx(&full, p.bytes);
                bulk_load(tw_smem, data, p.bytes, &full);
            }
            // No deadline: the block's own load always completes.
            while (!mbarrier_try_wait_parity(&full, parity)) {
            }
            tw_litmus_check((const u64*)tw_smem, 0, p.bytes / 8, round, found);
            __syncthreads();
        }
        if (threadIdx.x == 0) st_release_sys_u64(tw_line(p.grant, lane), round);
    }
    tw_litmus_end(p, found, round - 1, start);
}

// Bulk store -> flag -> bulk load. Blocks below `lanes` are producers, the blocks behind them
// consumers; a launch of `lanes` blocks has consumers only. Blocks of up to 256 threads; dynamic
// shared memory: `bytes`.
extern "C" __global__ void __launch_bounds__(256) tw_litmus_bulk(TwLitmus p) {
    bool produces = gridDim.x > p.lanes && blockIdx.x < p.lanes;
    if (produces) tw_litmus_produce(p, blockIdx.x);
    else tw_litmus_consume(p, blockIdx.x % p.lanes);
}

// Prepares a round of copy-engine pushes: waits for the credit of the last round, then makes the
// epoch word and the data of the next, which the copies behind this kernel carry to the peer. Grid:
// 1 block.
extern "C" __global__ void __launch_bounds__(256) tw_litmus_fill(TwLitmus p) {
    TwLitmusOut* out = (TwLitmusOut*)p.out;
    u64* epoch = (u64*)p.own;
    u64 round = *epoch + 1, end = globaltimer() + p.timeout_ns;
    // After one deadline later launches must not wait for theirs.
    bool late = out->wrong != 0;
    if (threadIdx.x == 0 && !late) late = !tw_reached(tw_line(p.credit, 0), round - 1, end);
    if (__syncthreads_or(late)) {
        if (threadIdx.x == 0) out->wrong = 1;
        return;
    }
    u64* data = (u64*)(p.own + TW_LITMUS_LINE);
    for (u32 i = threadIdx.x; i < p.bytes / 8; i += blockDim.x) data[i] = tw_litmus_value(round, i);
    if (threadIdx.x == 0) {
        *epoch = round;
        out->rounds = round;
    }
}

// Plain stores by many blocks -> counter -> the last block raises the single flag -> plain loads. A
// consumer block reads data of another block than the one that raised the flag. Roles of blocks are
// as in tw_litmus_bulk.
extern "C" __global__ void __launch_bounds__(256) tw_litmus_count(TwLitmus p) {
    u64 start = globaltimer(), end = start + p.timeout_ns, round = 1;
    u32 lane = blockIdx.x % p.lanes, words = p.bytes / 8;
    bool produces = blockIdx.x < p.lanes;
    u64* data = (u64*)((produces ? p.put : p.got) + (u64)lane * p.bytes);
    TwLitmusOut found = {0, 0, 0, 0};
    for (; round <= p.rounds; round++) {
        const u64* gate = produces ? tw_line(p.credit, lane) : (const u64*)p.seen;
        bool late = threadIdx.x == 0 && !tw_reached(gate, produces ? round - 1 : round, end);
        if (__syncthreads_or(late)) break;
        if (!produces) {
            tw_litmus_check(data, lane * words, words, round, found);
            __syncthreads();
            if (threadIdx.x == 0) st_release_sys_u64(tw_line(p.grant, lane), round);
            continue;
        }
        if (p.late_ns != 0 && lane == p.lanes - 1) nanosleep(p.late_ns);
        for (u32 i = threadIdx.x; i < words; i += blockDim.x) data[i] = tw_litmus_value(round, lane * words + i);
        __syncthreads();
        if (threadIdx.x != 0) continue;
        bool last = atom_add_acq_rel_gpu_u64((u64*)p.own, 1) == round * p.lanes - 1;
        if (p.broken == TW_NO_COUNTER) last = lane == 0;
        if (last && p.broken != TW_RELAXED) st_release_sys_u64((u64*)p.flag, round);
        if (last && p.broken == TW_RELAXED) st_relaxed_sys_u64((u64*)p.flag, round);
    }
    tw_litmus_end(p, found, round - 1, start);
}
