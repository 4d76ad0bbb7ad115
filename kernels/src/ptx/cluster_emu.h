// The wrappers of cluster.cuh for the emulator (kernels/emu). The declarations are the same; a test
// compares them. Clusters lie in x.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

__device__ __forceinline__ u32 cluster_ctarank() {
    return emu_cluster_rank();
}

__device__ __forceinline__ u32 clusterid_x() {
    return blockIdx.x / emu_cluster_size();
}

__device__ __forceinline__ u32 nclusterid_x() {
    return gridDim.x / emu_cluster_size();
}

__device__ __forceinline__ void cluster_sync() {
    emu_whole_warp<EmuNothing, EmuNothing>("barrier.cluster", EmuNothing(), [](const auto&) {});
    emu_cluster_sync();
}

__device__ __forceinline__ void mbarrier_arrive(u64* bar) {
    emu_point("mbarrier.arrive", bar, 8);
    emu_mbar_arrive(bar, 0);
}

__device__ __forceinline__ void mbarrier_arrive_relaxed_cluster(u64* bar, u32 rank) {
    emu_peer_arrive(bar, rank);
}

__device__ __forceinline__ void mbarrier_arrive_relaxed_cluster(u64* bar, u32 rank, u32 count) {
    for (u32 i = 0; i < count; i++) emu_peer_arrive(bar, rank);
}

__device__ __forceinline__ void st_arrive_release_cluster(u32* word, u64* bar, u32 rank, u32 value) {
    emu_peer_store(word, rank, value);
    emu_peer_arrive(bar, rank);
}

__device__ __forceinline__ bool mbarrier_try_wait_parity_cluster(u64* bar, u32 parity) {
    emu_point("mbarrier.try_wait", bar, 8);
    return emu_mbar_done(bar, parity);
}

__device__ __forceinline__ u32 ld_shared_u32(const u32* p) {
    return *(const volatile u32*)p;
}

__device__ __forceinline__ float4 ld_shared_cluster_f32x4(const float* p, u32 rank) {
    return *(const float4*)emu_peer_load(p, rank, sizeof(float4));
}

__device__ __forceinline__ bool elect_sync() {
    emu_whole_warp<EmuNothing, EmuNothing>("elect.sync", EmuNothing(), [](const auto&) {});
    return emu_self->lane == emu_elected();
}

template <int N>
__device__ __forceinline__ void setmaxnreg_dec() {
    emu_whole_warp<EmuNothing, EmuNothing>("setmaxnreg.dec", EmuNothing(), [](const auto&) { emu_registers(N, false); });
}

template <int N>
__device__ __forceinline__ void setmaxnreg_inc() {
    emu_whole_warp<EmuNothing, EmuNothing>("setmaxnreg.inc", EmuNothing(), [](const auto&) { emu_registers(N, true); });
}
