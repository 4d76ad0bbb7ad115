// Every conversion of common/convert.cuh over a list of numbers, for tests/emu/convert.rs.

struct CNarrow {
    const float* in;
    u64 n;
    u16 *bf16, *f16;
    u8 *e4m3, *e5m2, *e8m0;
    u16 *pair4, *pair5;  // codes of (v, -v)
};

extern "C" __global__ void c_narrow(CNarrow c) {
    for (u64 i = threadIdx.x; i < c.n; i += blockDim.x) {
        float v = c.in[i];
        c.bf16[i] = (u16)TwElem<7>::round(v);
        c.f16[i] = (u16)TwElem<10>::round(v);
        c.e4m3[i] = (u8)tw_f32_to_e4m3(v);
        c.e5m2[i] = (u8)tw_f32_to_e5m2(v);
        c.e8m0[i] = (u8)tw_f32_to_e8m0(v);
        c.pair4[i] = (u16)cvt_rn_satfinite_e4m3x2_f32(-v, v);
        c.pair5[i] = (u16)cvt_rn_satfinite_e5m2x2_f32(-v, v);
    }
}

// All 65536 patterns of 16 bits and all 256 of 8.
extern "C" __global__ void c_widen(float* bf16, float* f16, float* e4m3, float* e5m2, float* e8m0) {
    for (u32 b = threadIdx.x; b < 65536; b += blockDim.x) {
        bf16[b] = TwElem<7>::widen(b);
        f16[b] = TwElem<10>::widen(b);
        if (b >= 256) continue;
        e4m3[b] = tw_e4m3_to_f32(b);
        e5m2[b] = tw_e5m2_to_f32(b);
        e8m0[b] = tw_e8m0_to_f32(b);
    }
}
