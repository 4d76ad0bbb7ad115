// The wrappers of ld_st.cuh for the emulator (kernels/emu), with the orders of C++ that those of
// PTX correspond to. The declarations are the same; a test compares them.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

__device__ __forceinline__ u64 ld_acquire_sys_u64(const u64* p) {
    emu_point("ld.acquire.sys", p, 8);
    emu_acquired_at(p);
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

__device__ __forceinline__ u64 ld_relaxed_gpu_u64(const u64* p) {
    emu_point("ld.relaxed.gpu", p, 8);
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}

__device__ __forceinline__ u64 ld_relaxed_sys_u64(const u64* p) {
    emu_point("ld.relaxed.sys", p, 8);
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}

__device__ __forceinline__ void st_release_sys_u64(u64* p, u64 v) {
    emu_point("st.release.sys", p, 8);
    if (emu_signal(p, v, false)) __atomic_store_n(p, v, __ATOMIC_RELEASE);
}

__device__ __forceinline__ void st_relaxed_sys_u64(u64* p, u64 v) {
    emu_point("st.relaxed.sys", p, 8);
    if (emu_signal(p, v, false)) __atomic_store_n(p, v, __ATOMIC_RELAXED);
}

__device__ __forceinline__ void red_add_release_sys_u64(u64* p, u64 v) {
    emu_point("red.release.sys.add", p, 8);
    if (emu_signal(p, v, true)) __atomic_fetch_add(p, v, __ATOMIC_RELEASE);
}

__device__ __forceinline__ u32 ld_acquire_gpu_u32(const u32* p) {
    emu_point("ld.acquire.gpu", p, 4);
    emu_acquired();
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

__device__ __forceinline__ void st_release_gpu_u32(u32* p, u32 v) {
    emu_point("st.release.gpu", p, 4);
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}

// Returns the value found; the exchange happened if that is `expect`.
__device__ __forceinline__ u64 atom_cas_acq_rel_gpu_u64(u64* p, u64 expect, u64 v) {
    emu_point("atom.acq_rel.gpu.cas", p, 8);
    emu_acquired();
    __atomic_compare_exchange_n(p, &expect, v, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return expect;
}

// Returns the value found.
__device__ __forceinline__ u64 atom_add_acq_rel_gpu_u64(u64* p, u64 v) {
    emu_point("atom.acq_rel.gpu.add", p, 8);
    emu_acquired();
    return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
}

__device__ __forceinline__ void fence_acq_rel_sys() {
    emu_point("fence.acq_rel.sys", nullptr, 0);
    emu_ordered();
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
}

// Nanoseconds of the run's clock.
__device__ __forceinline__ u64 globaltimer() {
    return emu_now();
}

__device__ __forceinline__ void nanosleep(u32 ns) {
    emu_sleep(ns);
}

// Behind the bodies, so that a signal is known by the function that it stands in.
#define st_release_sys_u64(p, v) (emu_site(__func__, __LINE__), st_release_sys_u64(p, v))
#define st_relaxed_sys_u64(p, v) (emu_site(__func__, __LINE__), st_relaxed_sys_u64(p, v))
#define red_add_release_sys_u64(p, v) (emu_site(__func__, __LINE__), red_add_release_sys_u64(p, v))
