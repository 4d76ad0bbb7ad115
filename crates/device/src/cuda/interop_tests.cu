// Kernels of interop_tests.rs. They stand here and not among the kernels because only those tests
// have a use for them: clusters of blocks, and copies by tensor maps.
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
    u64 opaque[16];
};

__device__ __forceinline__ u32 smem(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Block b tells the word of the block behind it in its cluster, times 16 the blocks of the cluster.
extern "C" __global__ void test_cluster(u32* out) {
    __shared__ u32 word;
    u32 rank, num, theirs, value;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(num));
    if (threadIdx.x == 0) word = 1000 + blockIdx.x;
    cluster_barrier();
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(smem(&word)), "r"((rank + 1) % num));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(theirs) : "memory");
    // Nobody's shared memory ends before it was read.
    cluster_barrier();
    if (threadIdx.x == 0) out[blockIdx.x] = value * 16 + num;
}

// Every block writes `*value`, long after it has let the kernel behind it begin.
extern "C" __global__ void test_early_write(const u32* value, u32* out) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    for (u32 i = 0; i < 20; i++) __nanosleep(1000);
    if (threadIdx.x == 0) out[blockIdx.x] = *value;
}

// What another block of the kernel before wrote, and what stood there when this one began.
extern "C" __global__ void test_early_read(const u32* in, u32* out, u32 blocks) {
    const u32* word = in + (blockIdx.x + 1) % blocks;
    u32 before;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(before) : "l"(word) : "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x == 0) out[2 * blockIdx.x] = *word, out[2 * blockIdx.x + 1] = before;
}

// Block (x, y): the tile at row y * rows, column x * cols, of `bytes` bytes: from `in` to shared
// memory, from there as it lies there to the block's place in `seen`, and by `out` to the same
// place of another tensor.
extern "C" __global__ void test_tile(const __grid_constant__ TensorMap in, const __grid_constant__ TensorMap out, u8* seen,
                                     u32 rows, u32 cols, u32 bytes) {
    extern __shared__ __align__(1024) u8 tile[];
    __shared__ __align__(8) u64 full;
    u32 row = blockIdx.y * rows, col = blockIdx.x * cols, done = 0;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(smem(&full)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem(&full)), "r"(bytes) : "memory");
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                smem(tile)),
            "l"(&in), "r"(col), "r"(row), "r"(smem(&full))
            : "memory");
    }
    __syncthreads();
    while (!done)
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(smem(&full))
            : "memory");
    u8* mine = seen + (u64)(blockIdx.y * gridDim.x + blockIdx.x) * bytes;
    for (u32 i = threadIdx.x; i < bytes; i += blockDim.x) mine[i] = tile[i];
    if (threadIdx.x != 0) return;
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&out), "r"(col),
                 "r"(row), "r"(smem(tile))
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
}
