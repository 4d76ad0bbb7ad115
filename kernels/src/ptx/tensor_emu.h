// The wrappers of tensor.cuh for the emulator (kernels/emu). The declarations are the same; a test
// compares them. A copy completes some time after it was issued: emu/bulk.h, emu/hopper.h.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(64) TwTensorMap {
    u64 words[16];
};

__device__ __forceinline__ void tensor_prefetch(const TwTensorMap* map) {
    (void)map;
}

__device__ __forceinline__ void tensor_acquire(const TwTensorMap* map) {
    emu_tensor_acquire(map);
}

inline u32 emu_own_block() {
    return 1u << emu_cluster_rank();
}

__device__ __forceinline__ void tensor_load_3d(void* shared, const TwTensorMap* map, u64* bar, int x, int y, int z) {
    const int at[] = {x, y, z};
    emu_tensor_load(shared, map, bar, at, 3, emu_own_block());
}

__device__ __forceinline__ void tensor_load_3d_multicast(void* shared, const TwTensorMap* map, u64* bar, int x, int y, int z, u32 blocks) {
    const int at[] = {x, y, z};
    emu_tensor_load(shared, map, bar, at, 3, blocks);
}

__device__ __forceinline__ void tensor_load_4d(void* shared, const TwTensorMap* map, u64* bar, int x, int y, int z, int w) {
    const int at[] = {x, y, z, w};
    emu_tensor_load(shared, map, bar, at, 4, emu_own_block());
}

__device__ __forceinline__ void tensor_load_4d_multicast(void* shared, const TwTensorMap* map, u64* bar, int x, int y, int z, int w, u32 blocks) {
    const int at[] = {x, y, z, w};
    emu_tensor_load(shared, map, bar, at, 4, blocks);
}

__device__ __forceinline__ void tensor_store_3d(const TwTensorMap* map, const void* shared, int x, int y, int z) {
    const int at[] = {x, y, z};
    emu_tensor_store(map, shared, at, 3, false);
}

__device__ __forceinline__ void tensor_store_4d(const TwTensorMap* map, const void* shared, int x, int y, int z, int w) {
    const int at[] = {x, y, z, w};
    emu_tensor_store(map, shared, at, 4, false);
}

__device__ __forceinline__ void tensor_reduce_add_3d(const TwTensorMap* map, const void* shared, int x, int y, int z) {
    const int at[] = {x, y, z};
    emu_tensor_store(map, shared, at, 3, true);
}

__device__ __forceinline__ void tensor_reduce_add_4d(const TwTensorMap* map, const void* shared, int x, int y, int z, int w) {
    const int at[] = {x, y, z, w};
    emu_tensor_store(map, shared, at, 4, true);
}
