// The wrappers of grid.cuh for the emulator (kernels/emu), which runs kernels one after the other.
// The declarations are the same; a test compares them.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
}

__device__ __forceinline__ void griddepcontrol_wait() {
}
