// Kernels that show one wrapper of ptx/mma.cuh each.

// The tile of each block.
extern "C" __global__ void p_gemm_order(u32* out, u32 tiles_m, u32 tiles_n) {
    const TwTile t = tw_tile(threadIdx.x, tiles_m, tiles_n);
    out[2 * threadIdx.x] = t.m, out[2 * threadIdx.x + 1] = t.n;
}

// Four words of each lane; `in` is 32 rows of 16 bytes.
extern "C" __global__ void p_ldmatrix(const uint4* in, u32* out, u32 trans) {
    __shared__ uint4 rows[32];
    rows[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    u32 d[4];
    if (trans) ldmatrix_x4_trans_b16(d, &rows[threadIdx.x]);
    else ldmatrix_x4_b16(d, &rows[threadIdx.x]);
    for (u32 i = 0; i < 4; i++) out[4 * threadIdx.x + i] = d[i];
}

// D += A B, 16x8x16, one warp: A [16][16], B [8][16] in words of two, D [16][8].
extern "C" __global__ void p_gemm_mma(const u32* a, const u32* b, float* c, u32 f16) {
    const u32 row = threadIdx.x / 4, pair = threadIdx.x % 4, up = row * 8 + pair, down = up + 64;
    const u32 fa[4] = {a[up], a[down], a[up + 4], a[down + 4]}, fb[2] = {b[up], b[up + 4]};
    float *top = &c[row * 8 + pair * 2], *bottom = top + 64;
    float d[4] = {top[0], top[1], bottom[0], bottom[1]};
    if (f16) mma_m16n8k16_f32_f16(d, fa, fb);
    else mma_m16n8k16_f32_bf16(d, fa, fb);
    top[0] = d[0], top[1] = d[1], bottom[0] = d[2], bottom[1] = d[3];
}

// Piece t of `in` with its first t % 17 bytes; the second group is waited for if `all`.
extern "C" __global__ void p_gemm_copy(const uint4* in, uint4* out, u32 all) {
    __shared__ uint4 stage[64];
    for (u32 i = 0; i < 2; i++) {
        const u32 t = 32 * i + threadIdx.x;
        cp_async_cg_16_zfill(&stage[t], &in[t], t % 17);
        cp_async_commit_group();
    }
    if (all) cp_async_wait_group<0>();
    else cp_async_wait_group<1>();
    __syncthreads();
    for (u32 i = 0; i < 2; i++) out[32 * i + threadIdx.x] = stage[32 * i + threadIdx.x];
}

// Both conversions of in[t], and back from f16.
extern "C" __global__ void p_gemm_cvt(const float* in, u32* bf16, u32* f16, float* back) {
    const u32 t = threadIdx.x;
    bf16[t] = cvt_rn_bf16x2_f32(in[t], -in[t]);
    f16[t] = cvt_rn_f16x2_f32(in[t], -in[t]);
    back[t] = cvt_f32_f16((unsigned short)f16[t]);
}
