// Thin wrappers for clusters of blocks (sm_90 and newer): who is where, barriers of the cluster,
// and a peer's barriers and words in shared memory; also of elect and of registers that
// warpgroups give to each other. No includes: fixed-width types are defined here.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// The number of this block in its cluster.
__device__ __forceinline__ u32 cluster_ctarank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

// The number of this block's cluster in x, and how many there are.
__device__ __forceinline__ u32 clusterid_x() {
    u32 r;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(r));
    return r;
}

__device__ __forceinline__ u32 nclusterid_x() {
    u32 r;
    asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(r));
    return r;
}

// Every thread of the cluster arrives, and waits for all: what they wrote before is visible behind.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives at a barrier of this block.
__device__ __forceinline__ void mbarrier_arrive(u64* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"((u32)__cvta_generic_to_shared(bar)) : "memory");
}

// Arrives at the barrier of block `rank` of the cluster that lies where `bar` does here, and
// publishes nothing: for slots whose readers are through. With `.release` it would cost a
// MEMBAR.ALL.GPU each time.
__device__ __forceinline__ void mbarrier_arrive_relaxed_cluster(u64* bar, u32 rank) {
    asm volatile(
        "{\n"
        ".reg .b32 r;\n"
        "mapa.shared::cluster.u32 r, %0, %1;\n"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [r];\n"
        "}" ::"r"((u32)__cvta_generic_to_shared(bar)),
        "r"(rank)
        : "memory");
}

// The same for `count` arrivals.
__device__ __forceinline__ void mbarrier_arrive_relaxed_cluster(u64* bar, u32 rank, u32 count) {
    asm volatile(
        "{\n"
        ".reg .b32 r;\n"
        "mapa.shared::cluster.u32 r, %0, %1;\n"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [r], %2;\n"
        "}" ::"r"((u32)__cvta_generic_to_shared(bar)),
        "r"(rank), "r"(count)
        : "memory");
}

// Stores `value` to the word of block `rank` that lies where `word` does here, and arrives at its
// barrier `bar`, which publishes the word: it is read behind mbarrier_try_wait_parity_cluster.
__device__ __forceinline__ void st_arrive_release_cluster(u32* word, u64* bar, u32 rank, u32 value) {
    asm volatile(
        "{\n"
        ".reg .b32 r;\n"
        "mapa.shared::cluster.u32 r, %0, %3;\n"
        "st.shared::cluster.u32 [r], %2;\n"
        "mapa.shared::cluster.u32 r, %1, %3;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r];\n"
        "}" ::"r"((u32)__cvta_generic_to_shared(word)),
        "r"((u32)__cvta_generic_to_shared(bar)), "r"(value), "r"(rank)
        : "memory");
}

// True once the phase of this parity is complete; what blocks of the cluster published by it is
// visible then.
__device__ __forceinline__ bool mbarrier_try_wait_parity_cluster(u64* bar, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"((u32)__cvta_generic_to_shared(bar)), "r"(parity)
        : "memory");
    return done != 0;
}

// A word of shared memory that a block of the cluster has stored, behind the wait for it.
__device__ __forceinline__ u32 ld_shared_u32(const u32* p) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"((u32)__cvta_generic_to_shared(p)) : "memory");
    return v;
}

// Four numbers of the shared memory of block `rank` of the cluster that lie where `p` does here,
// behind the meeting with it.
__device__ __forceinline__ float4 ld_shared_cluster_f32x4(const float* p, u32 rank) {
    float4 v;
    asm volatile(
        "{\n"
        ".reg .b32 r;\n"
        "mapa.shared::cluster.u32 r, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [r];\n"
        "}"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "r"((u32)__cvta_generic_to_shared(p)), "r"(rank)
        : "memory");
    return v;
}

// True in one lane of a whole warp.
__device__ __forceinline__ bool elect_sync() {
    u32 p;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(p));
    return p != 0;
}

// A whole warpgroup gives registers back, to N for each thread, or takes as many.
template <int N>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
