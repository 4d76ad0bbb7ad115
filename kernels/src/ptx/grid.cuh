// Thin wrappers for programmatic dependent launch: a kernel that begins before the kernel before it
// has ended (`Grid::early` of the device layer). They do nothing before sm_90, where no kernel is
// launched so. No includes: fixed-width types are defined here.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Lets the next kernel begin once every block has called this or ended. Its blocks take
// multiprocessors while this kernel runs, so this kernel must not wait from here on for anything
// that those blocks could hold up.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels before this one have ended and their writes are visible. Every thread
// calls this before it touches memory other than its block's shared memory.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
