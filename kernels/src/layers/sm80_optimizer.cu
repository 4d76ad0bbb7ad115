// The optimizer on the device: the norm of the gradient, AdamW, the count of steps, initial values.
//
// Source: adamw.rs and host/ of crates/ops/src/layers. Weights have the type T of TW_SRC_MANTISSA
// bits; masters, gradients and moments are f32. Launch: blocks of TW_LAYERS_THREADS, no dynamic
// shared memory.
//
// `small` holds sums over all ranks: the loss, the square of the gradient's norm as two floats, and
// a number that is finite if every rank has its sums of gradients. If one of them is not finite (a
// team with a fault leaves NaN), no step is taken: nothing is written. Ranks that have these sums
// have the same bits, so all of them take the step or none does. A rank that fails in the last sum
// itself has NaN and takes no step; other ranks may have complete sums by then, and learn of the
// fault after their step.

#include "../common/convert.cuh"

typedef TwElem<TW_SRC_MANTISSA> T;
typedef T::Bits Bits;
enum { THREADS = TW_LAYERS_THREADS };

__device__ __forceinline__ bool tw_finite(float v) {
    return (__float_as_uint(v) & 0x7f800000) != 0x7f800000;
}

__device__ __forceinline__ bool tw_step_is_taken(const float* small) {
    return tw_finite(small[0]) && tw_finite(small[1]) && tw_finite(small[2]) && tw_finite(small[3]);
}

// The sum of `v` over the block.
__device__ __forceinline__ double tw_block_total(double v) {
    __shared__ double sums[THREADS];
    sums[threadIdx.x] = v;
    __syncthreads();
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    return sums[0];
}

// partial[block] = the sum of g^2 over the block's share. Any grid.
extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS)
    tw_square_sum(const float* g, double* partial, u64 n) {
    double sum = 0;
    u64 step = (u64)gridDim.x * THREADS, first = (u64)blockIdx.x * THREADS + threadIdx.x;
    for (u64 i = first; i < n / 4; i += step) {
        float4 v = ((const float4*)g)[i];
        sum += (double)v.x * v.x + (double)v.y * v.y + (double)v.z * v.z + (double)v.w * v.w;
    }
    for (u64 i = n / 4 * 4 + first; i < n; i += step) sum += (double)g[i] * g[i];
    sum = tw_block_total(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// out[0] + out[1] = the sum of the partials: two floats hold most digits of a double. Grid: 1
// block.
extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS)
    tw_square_total(const double* partial, float* out, u32 n) {
    double sum = 0;
    for (u32 i = threadIdx.x; i < n; i += THREADS) sum += partial[i];
    sum = tw_block_total(sum);
    if (threadIdx.x != 0) return;
    out[0] = (float)sum;
    out[1] = (float)(sum - (double)out[0]);
}

struct TwAdamW {
    Bits* w;
    float* master;  // null: w is f32 and its own master
    const float* g;
    float* m;
    float* v;
    const float* small;
    const int* count;  // steps taken before
    u64 n;
    double lr, beta1, beta2, eps, decay, clip;
    u64 warmup, total;
};

// Learning rate of step `step`: linear warm-up, then cosine down to a tenth.
__device__ __forceinline__ double tw_rate(const TwAdamW& a, u64 step) {
    if (step < a.warmup) return a.lr * (double)(step + 1) / (double)a.warmup;
    u64 span = a.total > a.warmup ? a.total - a.warmup : 1;
    double t = (double)(step - a.warmup) / (double)span;
    return a.lr * (0.1 + 0.45 * (1.0 + cos(3.14159265358979323846 * (t < 1.0 ? t : 1.0))));
}

// Factors that all elements share.
struct TwFactors {
    float clip, first, second, rate;
};

// A step of AdamW with clipping by the global norm, if the step is taken. Any grid.
extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS) tw_adamw(TwAdamW a) {
    __shared__ TwFactors shared;
    if (!tw_step_is_taken(a.small)) return;
    if (threadIdx.x == 0) {
        u32 step = (u32)*a.count;
        double square = (double)a.small[1] + a.small[2];
        // Rounding may leave the square slightly below zero.
        double norm = sqrt(square > 0 ? square : 0.0), clip = a.clip / (norm + 1e-6);
        shared.clip = (float)(clip < 1.0 ? clip : 1.0);
        shared.first = (float)(1.0 / (1.0 - pow(a.beta1, (double)(step + 1))));
        shared.second = (float)(1.0 / (1.0 - pow(a.beta2, (double)(step + 1))));
        shared.rate = (float)tw_rate(a, step);
    }
    __syncthreads();
    TwFactors f = shared;
    float b1 = (float)a.beta1, b2 = (float)a.beta2, eps = (float)a.eps, decay = (float)a.decay;
    float* master = a.master ? a.master : (float*)a.w;
    u64 step = (u64)gridDim.x * THREADS;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < a.n; i += step) {
        float g = a.g[i] * f.clip, w = master[i];
        float m = b1 * a.m[i] + (1.0f - b1) * g, v = b2 * a.v[i] + (1.0f - b2) * g * g;
        a.m[i] = m;
        a.v[i] = v;
        w -= f.rate * (m * f.first / (sqrtf(v * f.second) + eps) + decay * w);
        master[i] = w;
        if (a.master) a.w[i] = (Bits)T::round(w);
    }
}

// Counts the step if it is taken. Runs after every tw_adamw of the step. Grid: 1 thread.
extern "C" __global__ void tw_count_step(const float* small, int* count) {
    if (tw_step_is_taken(small)) *count += 1;
}

struct TwInit {
    Bits* w;
    float* master;  // or null
    u64 n, cols;
    u64 row0, col0, global_cols;  // where the piece lies in the whole parameter
    u64 seed;                     // mixed
    double std;                   // 0: ones
};

__device__ __forceinline__ double tw_unit(u64 seed, u64 i) {
    u64 z = seed + i * 0x9e3779b97f4a7c15ull + 1;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    return (double)(z >> 11) * (1.0 / 9007199254740992.0);
}

// Initial values: a function of the seed and the global position. Any grid.
extern "C" __global__ void __launch_bounds__(TW_LAYERS_THREADS) tw_init(TwInit a) {
    u64 step = (u64)gridDim.x * THREADS;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < a.n; i += step) {
        u64 at = (a.row0 + i / a.cols) * a.global_cols + a.col0 + i % a.cols;
        float w = 1;
        if (a.std != 0) {
            double u = 1.0 - tw_unit(a.seed, 2 * at);
            w = (float)(a.std * (sqrt(-2.0 * log(u)) * cos(6.28318530717958647692 * tw_unit(a.seed, 2 * at + 1))));
        }
        if (a.master) a.master[i] = w;
        a.w[i] = (Bits)T::round(w);
    }
}
