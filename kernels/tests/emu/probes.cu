// Kernels that test the emulator itself: each shows one thing that it does, or finds.

// Where each thread stands in a grid of three dimensions.
extern "C" __global__ void p_index(u32* out) {
    const u32 t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const u32 b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    out[b * blockDim.x * blockDim.y * blockDim.z + t] = b << 16 | t;
}

// Sums `n` numbers for each block; both kinds of shared memory are live while other blocks run.
extern "C" __global__ void __launch_bounds__(96) p_block_sum(const u32* in, u64* out, u32* blocks_done, u32 n) {
    __shared__ u32 warps[3];
    extern __shared__ __align__(16) unsigned char tw_smem[];
    u32* mine = (u32*)tw_smem;
    const u32 t = threadIdx.x;
    mine[t] = 0;
    for (u32 i = t; i < n; i += blockDim.x) mine[t] += in[blockIdx.x * n + i];
    __syncthreads();
    u32 v = mine[(t + 1) % blockDim.x];
    for (u32 by = 16; by > 0; by /= 2) v += __shfl_down_sync(0xffffffff, v, by);
    if (t % 32 == 0) warps[t / 32] = v;
    __syncthreads();
    if (t != 0) return;
    atomicAdd(out, (u64)warps[0] + warps[1] + warps[2]);
    atomicAdd(blocks_done, 1);
}

// What lies in shared memory before anybody has written to it.
extern "C" __global__ void p_unset(u32* out) {
    __shared__ u32 words[4];
    extern __shared__ unsigned char tw_smem[];
    out[threadIdx.x] = words[threadIdx.x] & ((u32*)tw_smem)[threadIdx.x];
    words[threadIdx.x] = 1;
}

// Shuffles and votes of whole warps, of halves, and of a block whose last warp is not full.
extern "C" __global__ void p_warp(u32* out) {
    const u32 t = threadIdx.x, lane = t % 32;
    const u32 half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    u32* mine = out + 12 * t;
    mine[0] = __shfl_sync(0xffffffff, t, 3);
    mine[1] = __shfl_up_sync(0xffffffff, t, 2);
    mine[2] = __shfl_down_sync(0xffffffff, t, 5, 8);
    mine[3] = __shfl_xor_sync(0xffffffff, t, 9);
    mine[4] = __ballot_sync(half, t % 3 == 0);
    __syncwarp();
    mine[5] = (u32)__any_sync(half, t == 20) << 1 | (u32)__all_sync(half, t != 20);
    mine[6] = __reduce_add_sync(half, t);
    mine[7] = (u32)__syncthreads_count(t % 2 == 0);
    mine[8] = (u32)__syncthreads_or(t == 17) << 1 | (u32)__syncthreads_and(t == 17);
    mine[9] = (u32)__syncthreads_or(0) << 1 | (u32)__syncthreads_and(1);
    mine[10] = (u32)__popc(t) << 8 | (u32)__ffs((int)t) << 4 | (u32)(__clz((int)t) & 15);
    mine[11] = __float_as_uint(fmaxf((float)t, 2.5f));
}

// A lane that has ended is not waited for.
extern "C" __global__ void p_lane_gone(u32* out) {
    if (threadIdx.x == 7) return;
    out[threadIdx.x] = __ballot_sync(0xffffffff, 1);
}

// How a wrapper of a warp-collective instruction is written: the registers of a lane go in, and one
// function computes the results of all. Fragments as PTX lays them out for m16n8k16 and bf16.
__device__ __forceinline__ void mma_m16n8k16_f32_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2],
                                                      const float (&c)[4]) {
    struct In {
        u32 a[4], b[2];
        float c[4];
    };
    struct Out {
        float d[4];
    };
    const In in = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {c[0], c[1], c[2], c[3]}};
    const Out out = emu_whole_warp<In, Out>("mma.m16n8k16.f32.bf16", in, [](const EmuWarp<In, Out>& w) {
        const auto value = [](u32 pair, int high) { return __uint_as_float(high ? pair & 0xffff0000u : pair << 16); };
        for (int row = 0; row < 16; row++) {
            for (int col = 0; col < 8; col++) {
                const int to = row % 8 * 4 + col / 2, at = row / 8 * 2 + col % 2;
                float sum = w.in(to).c[at];
                for (int k = 0; k < 16; k++) {
                    const int pair = k % 8 / 2;
                    const u32 left = w.in(row % 8 * 4 + pair).a[row / 8 + k / 8 * 2];
                    const u32 right = w.in(col * 4 + pair).b[k / 8];
                    sum += value(left, k % 2) * value(right, k % 2);
                }
                w.out(to).d[at] = sum;
            }
        }
    });
    for (int i = 0; i < 4; i++) d[i] = out.d[i];
}

// D = A B + C, 16x8x16: A row-major, B column-major, both bf16; `lanes` take part.
extern "C" __global__ void p_mma(const u32* a, const u32* b, float* c, u32 lanes) {
    const u32 lane = threadIdx.x, row = lane / 4, pair = lane % 4;
    if (lane >= lanes) return;
    // In words of two: A[row][k], B[col][k].
    const u32 up = row * 8 + pair, down = up + 64;
    const u32 fa[4] = {a[up], a[down], a[up + 4], a[down + 4]};
    const u32 fb[2] = {b[up], b[up + 4]};
    float *top = &c[row * 8 + pair * 2], *bottom = top + 64;
    float* at[4] = {top, top + 1, bottom, bottom + 1};
    const float fc[4] = {*at[0], *at[1], *at[2], *at[3]};
    float d[4];
    mma_m16n8k16_f32_bf16(d, fa, fb, fc);
    for (int i = 0; i < 4; i++) *at[i] = d[i];
}

// Two stages of asynchronous copies, of which all but the last `keep` are waited for.
extern "C" __global__ void p_async(const uint4* in, u32* out, u32 keep) {
    __shared__ uint4 stage[2][32];
    const u32 t = threadIdx.x;
    for (u32 s = 0; s < 2; s++) {
        emu_copy_async(&stage[s][t], &in[32 * s + t], t == 31 ? 4 : 16, t == 31 ? 12 : 0);
        emu_copy_commit();
    }
    emu_copy_wait(keep);
    __syncthreads();
    for (u32 s = 0; s < 2; s++) out[32 * s + t] = stage[s][(t + 1) % 32].x | stage[s][(t + 1) % 32].w;
}

// Atomics on one word each, from all threads of all blocks.
extern "C" __global__ void p_atomics(u32* words, float* sum, u64* last) {
    const u32 t = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&words[0], 1u);
    atomicSub(&words[1], 2u);
    atomicOr(&words[2], 1u << t % 32);
    atomicAnd(&words[3], ~(1u << t % 32));
    atomicMax(&words[4], t);
    atomicMin(&words[5], t);
    if (atomicCAS(&words[6], 0u, t + 1) == 0) atomicAdd(&words[7], 1u);
    atomicAdd(sum, 0.5f);
    atomicExch(last, (u64)t + 1);
    red_add_release_sys_u64(last + 1, 1);
    __threadfence();
}

// Blocks that wait for each other.
extern "C" __global__ void p_grid_barrier(u64* count) {
    __syncthreads();
    if (threadIdx.x == 0) {
        red_add_release_sys_u64(count, 1);
        while (ld_acquire_sys_u64(count) < gridDim.x) nanosleep(100);
    }
    __syncthreads();
}

// Two ranks pass a number to and fro.
extern "C" __global__ void p_ping(u64* mine, u64* other, u32 first, u64 rounds) {
    for (u64 i = 1; i <= rounds; i++) {
        if (first) st_release_sys_u64(other, i);
        while (ld_acquire_sys_u64(mine) != i) {
        }
        if (!first) st_release_sys_u64(other, i);
    }
}

// Warps give numbers to each other through named barriers; `wrong` says what goes wrong.
extern "C" __global__ void p_named(u32* out, u32 wrong) {
    __shared__ u32 words[32];
    const u32 lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        words[lane] = 7 * lane;
        emu_barrier("bar", wrong == 1 ? 16 : 3, 64, false);
        if (wrong == 2) emu_barrier("bar", 4, 64, false);
        emu_barrier("bar", 5, wrong == 3 ? 96 : 64, true);
        out[lane] = words[lane];
    } else {
        emu_barrier("bar", 3, 64, true);
        const u32 mine = words[31 - lane];
        __syncwarp();
        words[lane] = mine + 1;
        if (wrong != 4) emu_barrier("bar", 5, wrong == 5 ? 32 : 64, wrong == 5);
    }
}

// ---- What must be found.

extern "C" __global__ void p_sync_ended(u32 before) {
    if (threadIdx.x == 5 && before) return;
    if (threadIdx.x != 5) __syncthreads();
}

extern "C" __global__ void p_sync_elsewhere() {
    if (threadIdx.x < 8) {
        __syncthreads();  // here
    } else {
        __syncthreads();  // there
    }
}

extern "C" __global__ void p_warp_elsewhere(u32* out) {
    if (threadIdx.x % 2) out[threadIdx.x] = __shfl_xor_sync(0xffffffff, 1u, 1);
    else out[threadIdx.x] = __ballot_sync(0xffffffff, 1);
}

extern "C" __global__ void p_warp_without_me() {
    __syncwarp(0xfffffffe);
}

// Lane 3 waits for the block, the others for lane 3.
extern "C" __global__ void p_deadlock() {
    if (threadIdx.x != 3) __syncwarp();
    __syncthreads();
}

// Word `i` of a buffer, by a plain store or by a wrapper.
extern "C" __global__ void p_store(u64* words, u64 i, u32 plain) {
    if (plain) *(volatile u64*)&words[i] = 1;
    else st_relaxed_sys_u64(&words[i], 1);
}

extern "C" __global__ void p_misaligned(unsigned char* p) {
    st_relaxed_sys_u64((u64*)(p + 4), 1);
}

extern "C" __global__ void p_smem(u32 i) {
    extern __shared__ unsigned char tw_smem[];
    tw_smem[i] = 1;
}

extern "C" __global__ void p_divide(u32 by) {
    volatile u32 v = 1000 / by;
    (void)v;
}

__device__ __noinline__ u32 deeper(u32 n) {
    volatile u32 big[256];
    big[n % 256] = n;
    return n == 0 ? 0 : deeper(n - 1) + big[n % 256];
}
extern "C" __global__ void p_stack(u32 n) {
    volatile u32 v = deeper(n);
    (void)v;
}

extern "C" __global__ void p_spin(const u64* word) {
    if (threadIdx.x == 2) return;
    while (ld_acquire_sys_u64(word) == 0) {
    }
}

extern "C" __global__ void p_loop(u32 on) {
    volatile u32 forever = on;
    while (forever) {
    }
}

extern "C" __global__ void p_fail() {
    emu_fail("this is not emulated");
}
