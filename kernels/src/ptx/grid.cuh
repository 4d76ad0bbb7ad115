// Thin wrappers of what a kernel waits for that begins before the one before it has ended
// (`Grid::early` of the device layer). Nothing before sm_90, where none does. No includes:
// fixed-width names are made here.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// The kernel behind this one may begin, once every block has said so or ended. What it must not
// hold up may not depend on it: its blocks take multiprocessors while this kernel goes on.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels before this one have ended, and all that they wrote is there. Each
// thread, before it touches any memory but that of its block.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
