// Sums of parts that peers have pushed: the owner's half of reduce_scatter, all_reduce and GEMM+RS.
//
// out[i] = round(scale * (part_0[i] + part_1[i] + ... + part_{size-1}[i]) + bias[i % cols]), summed
// in f32 in rank order and rounded once, so the bits depend on the inputs alone. The part of rank r
// is at slots + r * stride; that of rank `me` at `own`, in a type of its own. If `me` >= `size`,
// all parts are in slots and `own` is not read.
//
// Types by mantissa bits (23 f32, 10 f16, 7 bf16): TW_WIRE_MANTISSA of the slots, TW_OWN_MANTISSA,
// TW_OUT_MANTISSA. `num` elements, aligned to their size; fastest if aligned to four elements.
// Launch: any grid of blocks of TW_REDUCE_THREADS; a thread sums four elements at a time. No
// dynamic shared memory.
//
// The slots are symmetric memory: the kernel reads them by plain loads, after the stream has waited
// for their writers.

#include "../common/convert.cuh"
#include "sum.cuh"

struct TwReduce {
    u64 slots;
    u64 stride;  // bytes
    u64 own;
    u64 out;
    const void* bias;  // [cols] f32, or of the output's type with bias_out; or null
    u64 num;
    u32 cols, me, size;
    float scale;
    u32 bias_out, pad;
};

typedef TwElem<TW_WIRE_MANTISSA> Wire;
typedef TwElem<TW_OWN_MANTISSA> Own;
typedef TwElem<TW_OUT_MANTISSA> Out;
typedef TwQuads<TW_WIRE_MANTISSA> WireQuad;
typedef TwQuads<TW_OWN_MANTISSA> OwnQuad;
typedef TwQuads<TW_OUT_MANTISSA> OutQuad;

__device__ __forceinline__ float tw_reduce_bias(const TwReduce& a, u64 col) {
    return a.bias_out ? Out::widen(((const Out::Bits*)a.bias)[col]) : ((const float*)a.bias)[col];
}

extern "C" __global__ void __launch_bounds__(TW_REDUCE_THREADS) tw_reduce(const __grid_constant__ TwReduce a) {
    const u64 quads = (a.num + 3) / 4;
    for (u64 n = (u64)blockIdx.x * TW_REDUCE_THREADS + threadIdx.x; n < quads;
         n += (u64)gridDim.x * TW_REDUCE_THREADS) {
        float sum[4];
        OwnQuad mine;
        mine.clear();
        if (a.me < a.size) mine = tw_quad<OwnQuad>(a.own, n, a.num);
        // Eight loads are in flight, whatever the number of ranks.
        for (u32 r0 = 0; r0 < a.size; r0 += 8) {
            WireQuad part[8];
#pragma unroll
            for (u32 k = 0; k < 8; k++)
                if (r0 + k < a.size && r0 + k != a.me)
                    part[k] = tw_quad<WireQuad>(a.slots + (r0 + k) * a.stride, n, a.num);
#pragma unroll
            for (u32 k = 0; k < 8; k++) {
                if (r0 + k >= a.size) break;
                if (r0 + k == a.me)
                    tw_add(sum, mine.at(0), mine.at(1), mine.at(2), mine.at(3), r0 + k == 0);
                else
                    tw_add(sum, part[k].at(0), part[k].at(1), part[k].at(2), part[k].at(3), r0 + k == 0);
            }
        }
        OutQuad out;
        out.clear();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float v = __fmul_rn(sum[j], a.scale);
            if (a.bias) v = __fadd_rn(v, tw_reduce_bias(a, (4 * n + j) % a.cols));
            out.set(j, Out::round(v));
        }
        tw_put_quad<OutQuad>(a.out, n, a.num, out);
    }
}
