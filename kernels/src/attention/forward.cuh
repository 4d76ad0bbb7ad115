// The forward pass: tiles of keys against one tile of queries, with a running maximum and sum.
#ifndef TW_ATTN_M
#define TW_ATTN_M 128
#endif
#ifndef TW_ATTN_N
#define TW_ATTN_N 64
#endif
#ifndef TW_ATTN_WARPS
#define TW_ATTN_WARPS 4
#endif

enum : u32 {
    TW_FM = TW_ATTN_M,
    TW_FN = TW_ATTN_N,
    TW_F_THREADS = 32 * TW_ATTN_WARPS,
    // Rows of a warp, in steps of 16.
    TW_F_MT = TW_FM / (16 * TW_ATTN_WARPS),
    TW_F_NT = TW_FN / 8,
    TW_F_DT = TW_DV16 / 8,
    TW_F_K_BYTES = TW_FN * TW_DQP * 2,
    TW_F_V_BYTES = TW_FN * TW_DVP * 2,
    TW_F_STAGE = TW_F_K_BYTES + TW_F_V_BYTES,
    // Queries, and then the output.
    TW_F_Q_BYTES = TW_FM * (TW_DQP > TW_DVP ? TW_DQP : TW_DVP) * 2,
};
static_assert(TW_FM % (16 * TW_ATTN_WARPS) == 0 && TW_FN % 16 == 0, "whole matrix instructions");

typedef float TwScores[TW_F_MT][TW_F_NT][4];
typedef float TwOut[TW_F_MT][TW_F_DT][4];

// What a thread knows of its rows: 2 * TW_F_MT of them.
struct TwRows {
    float max[TW_F_MT][2];  // of the scores so far: times `scale` or, with extras, in base 2
    float sum[TW_F_MT][2];  // this lane's part
};

// Row of the tile that element e / 2 of part i of an accumulator belongs to.
__device__ __forceinline__ u32 tw_f_row(u32 i, u32 e) {
    return threadIdx.x / 32 * (16 * TW_F_MT) + 16 * i + threadIdx.x % 32 / 4 + e / 2 * 8;
}

// s = q k^T.
__device__ __forceinline__ void tw_f_scores(TwScores& s, u32 q, u32 k) {
#pragma unroll
    for (u32 i = 0; i < TW_F_MT; i++)
#pragma unroll
        for (u32 j = 0; j < TW_F_NT; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) s[i][j][e] = 0;
    q += threadIdx.x / 32 * (16 * TW_F_MT) * (TW_DQP * 2) + tw_lane_a<TW_DQP>();
    k += tw_lane_b<TW_DQP>();
#pragma unroll
    for (u32 kk = 0; kk < TW_DQ16 / 16; kk++) {
        u32 fq[TW_F_MT][4];
#pragma unroll
        for (u32 i = 0; i < TW_F_MT; i++) tw_frag<TW_DQP>(fq[i], q, 16 * i, kk);
#pragma unroll
        for (u32 j = 0; j < TW_F_NT; j += 2) {
            u32 f[4];
            tw_frag<TW_DQP>(f, k, 8 * j, kk);
            const u32 f0[2] = {f[0], f[1]}, f1[2] = {f[2], f[3]};
#pragma unroll
            for (u32 i = 0; i < TW_F_MT; i++) tw_mma(s[i][j], fq[i], f0), tw_mma(s[i][j + 1], fq[i], f1);
        }
    }
}

// o += p v.
__device__ __forceinline__ void tw_f_values(TwOut& o, const TwScores& p, u32 v) {
    v += tw_lane_a<TW_DVP>();
#pragma unroll
    for (u32 kk = 0; kk < TW_FN / 16; kk++) {
        u32 fp[TW_F_MT][4];
#pragma unroll
        for (u32 i = 0; i < TW_F_MT; i++)
#pragma unroll
            for (u32 e = 0; e < 4; e++)
                fp[i][e] = tw_pair(p[i][2 * kk + e / 2][e % 2 * 2], p[i][2 * kk + e / 2][e % 2 * 2 + 1], TW_ATTN_TYPE);
#pragma unroll
        for (u32 j = 0; j < TW_F_DT; j += 2) {
            u32 f[4];
            tw_frag_t<TW_DVP>(f, v, 16 * kk, j / 2);
            const u32 f0[2] = {f[0], f[1]}, f1[2] = {f[2], f[3]};
#pragma unroll
            for (u32 i = 0; i < TW_F_MT; i++) tw_mma(o[i][j], fp[i], f0), tw_mma(o[i][j + 1], fp[i], f1);
        }
    }
}

// Products to scores in base 2: factor, softcap and bias. `pos` is of the tiles' first rows.
__device__ __forceinline__ void tw_f_extra(const TwAttn& a, TwScores& s, u32 head, u32 q_pos, u32 num_q, u32 kv_pos,
                                           u32 num_kv) {
#pragma unroll
    for (u32 i = 0; i < TW_F_MT; i++)
#pragma unroll
        for (u32 j = 0; j < TW_F_NT; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                const u32 row = tw_f_row(i, e), col = 8 * j + threadIdx.x % 4 * 2 + e % 2;
                float z = s[i][j][e] * a.scale;
                if (a.softcap > 0) z = a.softcap * tanhf(z / a.softcap);
                if (a.bias && row < num_q && col < num_kv) z += a.bias[tw_bias_at(a, head, q_pos + row, kv_pos + col)];
                s[i][j][e] = z * TW_LOG2E;
            }
}

// Hides what the mask does, and what is behind the tile's `num` keys. `shift` is the key position
// of the first query, less that of the first key.
__device__ __forceinline__ void tw_f_mask(const TwAttn& a, TwScores& s, int shift, u32 num) {
#pragma unroll
    for (u32 i = 0; i < TW_F_MT; i++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const int own = (int)tw_f_row(i, 2 * half) + shift;
            const int first = own - a.left, last = min(own + a.right, (int)num - 1);
#pragma unroll
            for (u32 j = 0; j < TW_F_NT; j++)
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    const int col = (int)(8 * j + threadIdx.x % 4 * 2 + e);
                    if (col < first || col > last) s[i][j][2 * half + e] = -TW_INF;
                }
        }
}

// Scores to probabilities before they are divided by their sum; the state to the new maximum.
__device__ __forceinline__ void tw_f_softmax(TwScores& s, TwRows& r, TwOut& o, float factor) {
#pragma unroll
    for (u32 i = 0; i < TW_F_MT; i++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float top = r.max[i][half];
#pragma unroll
            for (u32 j = 0; j < TW_F_NT; j++) top = fmaxf(top, fmaxf(s[i][j][2 * half], s[i][j][2 * half + 1]));
            top = tw_quad_max(top);
            // Nothing visible so far: -inf less -inf would be NaN.
            const float base = top == -TW_INF ? 0.0f : top * factor;
            const float shrink = ex2_approx_ftz_f32(r.max[i][half] * factor - base);
            r.max[i][half] = top;
            float sum = r.sum[i][half] * shrink;
#pragma unroll
            for (u32 j = 0; j < TW_F_NT; j++)
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    float& x = s[i][j][2 * half + e];
                    x = ex2_approx_ftz_f32(fmaf(x, factor, -base));
                    sum += x;
                }
            r.sum[i][half] = sum;
#pragma unroll
            for (u32 j = 0; j < TW_F_DT; j++) o[i][j][2 * half] *= shrink, o[i][j][2 * half + 1] *= shrink;
        }
}

// Zeros for dropped pairs. The factor of the others comes at the end.
__device__ __forceinline__ void tw_f_drop(const TwAttn& a, TwScores& p, u32 head, u32 q_global, u32 kv_global) {
    const u64 seed = tw_drop_seed(a);
#pragma unroll
    for (u32 i = 0; i < TW_F_MT; i++)
#pragma unroll
        for (u32 j = 0; j < TW_F_NT; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                const u32 col = 8 * j + threadIdx.x % 4 * 2 + e % 2;
                if (!tw_kept(a, seed, head, q_global + tw_f_row(i, e), kv_global + col)) p[i][j][e] = 0.0f;
            }
}

// Normalises: the factors of the rows of `o`, and lse to memory.
__device__ __forceinline__ void tw_f_finish(const TwAttn& a, TwRows& r, const TwSeg& own, u32 first, u32 num, u32 head,
                                            float factor) {
    const bool sink = a.sink && own.shift != TW_ATTN_GAP;
    const float extra = sink ? a.sink[a.first_head + head] * TW_LOG2E : -TW_INF;
#pragma unroll
    for (u32 i = 0; i < TW_F_MT; i++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const float mine = r.max[i][half] == -TW_INF ? -TW_INF : r.max[i][half] * factor;
            const float sum = tw_quad_sum(r.sum[i][half]), top = fmaxf(mine, extra);
            const u32 row = tw_f_row(i, 2 * half);
            // A NaN in the scores is not in the maximum but in the sum.
            const bool empty = top == -TW_INF && sum == 0.0f;
            const float base = top == -TW_INF ? 0.0f : top;
            const float part = mine == -TW_INF && sum == 0.0f ? 0.0f : exp2f((mine == -TW_INF ? 0.0f : mine) - base);
            const float total = sum * part + (sink ? exp2f(extra - base) : 0.0f);
            if (threadIdx.x % 4 == 0 && row < num)
                a.lse[(i64)head * a.tokens_q + own.row + first + row] =
                    empty ? -TW_INF : (base + log2f(total)) * TW_LN2;
            float f = empty ? 0.0f : part / total;
            if (TW_ATTN_EXTRA) f *= a.keep;
            r.sum[i][half] = f;
        }
}

// Rows of `o` to memory: 16-bit types through this warp's rows of `stage`, which only it uses.
__device__ __forceinline__ void tw_f_store(const TwAttn& a, const TwOut& o, const TwRows& r, u8* stage, i64 at,
                                           u32 num) {
    const u32 lane = threadIdx.x % 32;
    if (a.out_type == 2) {
#pragma unroll
        for (u32 i = 0; i < TW_F_MT; i++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u32 row = tw_f_row(i, 2 * half);
                float* to = (float*)a.out + at + (i64)row * a.ld_o + lane % 4 * 2;
#pragma unroll
                for (u32 j = 0; j < TW_F_DT; j++)
                    if (row < num && (TW_DV % 16 == 0 || 8 * j < TW_DV)) {
                        const float f = r.sum[i][half];
                        *(float2*)(to + 8 * j) = make_float2(o[i][j][2 * half] * f, o[i][j][2 * half + 1] * f);
                    }
            }
        return;
    }
#pragma unroll
    for (u32 i = 0; i < TW_F_MT; i++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 row = tw_f_row(i, 2 * half);
#pragma unroll
            for (u32 j = 0; j < TW_F_DT; j++) {
                const float f = r.sum[i][half], x = o[i][j][2 * half] * f, y = o[i][j][2 * half + 1] * f;
                *(u32*)(stage + tw_at<TW_DVP>(row, j) + lane % 4 * 4) = tw_pair(x, y, a.out_type);
            }
        }
    __syncwarp();
    const u32 chunks = TW_DV / 8, rows = 16 * TW_F_MT, row0 = threadIdx.x / 32 * rows;
#pragma unroll 4
    for (u32 i = lane; i < rows * chunks; i += 32) {
        const u32 row = row0 + i / chunks, c = i % chunks;
        if (row < num)
            *(uint4*)((u16*)a.out + at + (i64)row * a.ld_o + 8 * c) = *(const uint4*)(stage + tw_at<TW_DVP>(row, c));
    }
}

// Which tile this block makes; a barrier must follow.
__device__ __forceinline__ void tw_f_begin(const TwAttn& a, TwBlock& b) {
    if (threadIdx.x != 0) return;
    // The last tiles see most under a causal mask: they begin.
    const u32 head = blockIdx.x % a.heads_q, t = a.tiles - 1 - blockIdx.x / a.heads_q;
    const TwSeg own = tw_own(a, t);
    b.own = own, b.head = head, b.kv_head = head / (a.heads_q / a.heads_kv);
    b.first = (t - own.tile) * TW_FM, b.num = min(own.len - b.first, (u32)TW_FM);
    b.at = (int)(own.pos + b.first) + (own.shift == TW_ATTN_GAP ? 0 : own.shift), b.at_last = b.at + (int)b.num - 1;
    b.walk.begin<TW_FN>(a, own, b.at - a.left, b.at_last + a.right + 1);
}

// Copies tile `n` of keys and values to its stage.
__device__ __forceinline__ void tw_f_load(const TwAttn& a, const TwBlock& b, u32 n) {
    u8* to = tw_smem + TW_F_Q_BYTES + n % 2 * TW_F_STAGE;
    const TwTile& t = b.walk.tiles[n % 4];
    const u16* k = (const u16*)a.k + (i64)t.row * a.ld_k + b.kv_head * TW_DQ;
    const u16* v = (const u16*)a.v + (i64)t.row * a.ld_v + b.kv_head * TW_DV;
    tw_load_tile<TW_FN, TW_DQ, TW_DQP, TW_F_THREADS>(to, k, a.ld_k, t.num);
    tw_load_tile<TW_FN, TW_DV, TW_DVP, TW_F_THREADS>(to + TW_F_K_BYTES, v, a.ld_v, t.num);
    cp_async_commit_group();
}

__device__ __forceinline__ void tw_forward(const TwAttn& a) {
    __shared__ TwBlock b;
    tw_f_begin(a, b);
    __syncthreads();
    TwOut o;
    TwRows r;
#pragma unroll
    for (u32 i = 0; i < TW_F_MT; i++) {
        r.max[i][0] = r.max[i][1] = -TW_INF, r.sum[i][0] = r.sum[i][1] = 0.0f;
#pragma unroll
        for (u32 j = 0; j < TW_F_DT; j++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) o[i][j][e] = 0.0f;
    }
    const float factor = TW_ATTN_EXTRA ? 1.0f : a.scale * TW_LOG2E;
    if (b.walk.tiles[0].num > 0) {
        const u16* from = (const u16*)a.q + (i64)(b.own.row + b.first) * a.ld_q + b.head * TW_DQ;
        tw_load_tile<TW_FM, TW_DQ, TW_DQP, TW_F_THREADS>(tw_smem, from, a.ld_q, b.num);
        tw_f_load(a, b, 0);
    }
#pragma unroll 1
    for (u32 n = 0; b.walk.tiles[n % 4].num > 0; n++) {
        cp_async_wait_group<0>();
        // Everybody's copies are there, and nobody reads the stage that is next filled.
        __syncthreads();
        if (b.walk.tiles[(n + 1) % 4].num > 0) tw_f_load(a, b, n + 1);
        const u32 k = TW_F_Q_BYTES + n % 2 * TW_F_STAGE;
        TwScores s;
        tw_f_scores(s, 0, k);
        const TwTile t = b.walk.tiles[n % 4];
        if (TW_ATTN_EXTRA) tw_f_extra(a, s, b.head, b.own.pos + b.first, b.num, (u32)t.pos, t.num);
        const bool whole = t.num == TW_FN && t.pos >= b.at_last - a.left && t.pos + (int)TW_FN - 1 <= b.at + a.right;
        if (!whole) tw_f_mask(a, s, b.at - t.pos, t.num);
        tw_f_softmax(s, r, o, factor);
        if (TW_ATTN_EXTRA && a.drop_below) tw_f_drop(a, s, b.head, b.own.global + b.first, t.global);
        // Here, because the branch keeps the compiler from loading values before: it would spill.
        if (threadIdx.x == 0) b.walk.step<TW_FN>(a, b.own.end, n + 2);
        tw_f_values(o, s, k + TW_F_K_BYTES);
    }
    tw_f_finish(a, r, b.own, b.first, b.num, b.head, factor);
    // Of the queries a warp read, and overwrites, its own rows only, unless they are of other lengths.
    if (TW_DQP != TW_DVP) __syncthreads();
    tw_f_store(a, o, r, tw_smem, (i64)(b.own.row + b.first) * a.ld_o + b.head * TW_DV, b.num);
}
