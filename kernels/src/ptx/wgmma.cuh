// Thin wrappers of warpgroup matrix instructions (sm_90a alone), which read operands from shared
// memory, or the first one from registers, and complete late. No includes: fixed-width types are
// defined here.
//
// Operands are tiles of 16-bit elements, or of e4m3, as a tensor map with a swizzle of 128 bytes
// writes them. Of 16-bit elements:
//   K-major   a row of 64 elements of k (128 bytes) for each index of m or n, one behind the other
// MN-major  a row of 64 elements of m or n (128 bytes) for each index of k; the next 64 elements of
//             m or n lie `chunk` bytes behind
// Of e4m3 a tile is K-major, a row of 128 elements of k for each index of m or n. A tile begins at
// a multiple of 1024 bytes. Source: PTX ISA, "Asynchronous warpgroup level matrix
// instructions", strides in canonical layouts.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// The index of this warpgroup in its block. All lanes take it from one, which the compiler knows:
// it keeps descriptors that depend on it in registers of the warp, from which products read them.
// Otherwise it moves two registers of threads there (R2UR) in front of each product.
__device__ __forceinline__ u32 warpgroup_index() {
    return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
}

// The descriptor of a K-major tile. Adding 2 goes on by 32 bytes of k.
__device__ __forceinline__ u64 wgmma_desc_k(const void* tile) {
    const u32 at = (u32)__cvta_generic_to_shared(tile);
    return (u64)((at & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// The descriptor of an MN-major tile. Adding 128 goes on by 16 elements of k.
__device__ __forceinline__ u64 wgmma_desc_mn(const void* tile, u32 chunk) {
    const u32 at = (u32)__cvta_generic_to_shared(tile);
    return (u64)((at & 0x3ffff) >> 4) | (u64)(chunk >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

// Orders registers that this warpgroup has touched before the products that it issues next.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits for all groups of this warpgroup except the latest N.
template <int N>
__device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from moving uses of `d` across this place: behind a wait.
template <int N>
__device__ __forceinline__ void wgmma_hold(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// The same of what products read from registers: these must not change before the wait.
template <int N>
__device__ __forceinline__ void wgmma_hold(u32 (&a)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(a[i])::"memory");
}

// Lists of accumulators for the bodies below.
#define TW_WG_R8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define TW_WG_R32(i) TW_WG_R8(i), TW_WG_R8(i + 8), TW_WG_R8(i + 16), TW_WG_R8(i + 24)
#define TW_WG_L4 "%0, %1, %2, %3"
#define TW_WG_L8 TW_WG_L4 ", %4, %5, %6, %7"
#define TW_WG_L16 TW_WG_L8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TW_WG_L24 TW_WG_L16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TW_WG_L32 TW_WG_L24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TW_WG_L48 TW_WG_L32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TW_WG_L64 TW_WG_L48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TW_WG_L80 TW_WG_L64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define TW_WG_L96 TW_WG_L80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TW_WG_L112 TW_WG_L96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define TW_WG_L128 TW_WG_L112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// One instruction: type, width, list of accumulators, the numbers of the operands behind them.
#define TW_WGMMA(type, n, list, a, b, p, ta, tb, ...)                                                                \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p ", 0;\n"                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" list "}, " a ", " b            \
                 ", p, 1, 1, " ta ", " tb ";\n}"                                                                     \
                 : __VA_ARGS__                                                                                       \
                 : "l"(a_desc), "l"(b_desc), "r"(accumulate), "n"(A_MN), "n"(B_MN)                                   \
                 : "memory")

// d = A B, plus d where `accumulate` is not 0: A is 64 x 16, B is 16 x N, sums are f32. Lane l of
// warp w of the warpgroup has elements 8 j + 2 (l % 4), and the next, of rows 16 w + l / 4 and 8
// more of each: d[4 j] to d[4 j + 3]. A_MN, B_MN: the operand is MN-major.
template <int N, bool F16, int A_MN, int B_MN>
__device__ __forceinline__ void wgmma_m64k16_f32(float (&d)[N / 2], u64 a_desc, u64 b_desc, u32 accumulate) {
    static_assert(N == 8 || N == 16 || N == 32 || N == 48 || N == 64 || N == 96 || N == 128 || N == 160 || N == 192 || N == 224 || N == 256, "no such width");
    if constexpr (N == 8) {
        if constexpr (F16) TW_WGMMA("f16", 8, TW_WG_L4, "%4", "%5", "%6", "%7", "%8", "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]));
        else TW_WGMMA("bf16", 8, TW_WG_L4, "%4", "%5", "%6", "%7", "%8", "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]));
    } else if constexpr (N == 16) {
        if constexpr (F16) TW_WGMMA("f16", 16, TW_WG_L8, "%8", "%9", "%10", "%11", "%12", TW_WG_R8(0));
        else TW_WGMMA("bf16", 16, TW_WG_L8, "%8", "%9", "%10", "%11", "%12", TW_WG_R8(0));
    } else if constexpr (N == 32) {
        if constexpr (F16) TW_WGMMA("f16", 32, TW_WG_L16, "%16", "%17", "%18", "%19", "%20", TW_WG_R8(0), TW_WG_R8(8));
        else TW_WGMMA("bf16", 32, TW_WG_L16, "%16", "%17", "%18", "%19", "%20", TW_WG_R8(0), TW_WG_R8(8));
    } else if constexpr (N == 48) {
        if constexpr (F16) TW_WGMMA("f16", 48, TW_WG_L24, "%24", "%25", "%26", "%27", "%28", TW_WG_R8(0), TW_WG_R8(8), TW_WG_R8(16));
        else TW_WGMMA("bf16", 48, TW_WG_L24, "%24", "%25", "%26", "%27", "%28", TW_WG_R8(0), TW_WG_R8(8), TW_WG_R8(16));
    } else if constexpr (N == 64) {
        if constexpr (F16) TW_WGMMA("f16", 64, TW_WG_L32, "%32", "%33", "%34", "%35", "%36", TW_WG_R32(0));
        else TW_WGMMA("bf16", 64, TW_WG_L32, "%32", "%33", "%34", "%35", "%36", TW_WG_R32(0));
    } else if constexpr (N == 96) {
        if constexpr (F16) TW_WGMMA("f16", 96, TW_WG_L48, "%48", "%49", "%50", "%51", "%52", TW_WG_R32(0), TW_WG_R8(32), TW_WG_R8(40));
        else TW_WGMMA("bf16", 96, TW_WG_L48, "%48", "%49", "%50", "%51", "%52", TW_WG_R32(0), TW_WG_R8(32), TW_WG_R8(40));
    } else if constexpr (N == 128) {
        if constexpr (F16) TW_WGMMA("f16", 128, TW_WG_L64, "%64", "%65", "%66", "%67", "%68", TW_WG_R32(0), TW_WG_R32(32));
        else TW_WGMMA("bf16", 128, TW_WG_L64, "%64", "%65", "%66", "%67", "%68", TW_WG_R32(0), TW_WG_R32(32));
    } else if constexpr (N == 160) {
        if constexpr (F16) TW_WGMMA("f16", 160, TW_WG_L80, "%80", "%81", "%82", "%83", "%84", TW_WG_R32(0), TW_WG_R32(32), TW_WG_R8(64), TW_WG_R8(72));
        else TW_WGMMA("bf16", 160, TW_WG_L80, "%80", "%81", "%82", "%83", "%84", TW_WG_R32(0), TW_WG_R32(32), TW_WG_R8(64), TW_WG_R8(72));
    } else if constexpr (N == 192) {
        if constexpr (F16) TW_WGMMA("f16", 192, TW_WG_L96, "%96", "%97", "%98", "%99", "%100", TW_WG_R32(0), TW_WG_R32(32), TW_WG_R32(64));
        else TW_WGMMA("bf16", 192, TW_WG_L96, "%96", "%97", "%98", "%99", "%100", TW_WG_R32(0), TW_WG_R32(32), TW_WG_R32(64));
    } else if constexpr (N == 224) {
        if constexpr (F16) TW_WGMMA("f16", 224, TW_WG_L112, "%112", "%113", "%114", "%115", "%116", TW_WG_R32(0), TW_WG_R32(32), TW_WG_R32(64), TW_WG_R8(96), TW_WG_R8(104));
        else TW_WGMMA("bf16", 224, TW_WG_L112, "%112", "%113", "%114", "%115", "%116", TW_WG_R32(0), TW_WG_R32(32), TW_WG_R32(64), TW_WG_R8(96), TW_WG_R8(104));
    } else if constexpr (N == 256) {
        if constexpr (F16) TW_WGMMA("f16", 256, TW_WG_L128, "%128", "%129", "%130", "%131", "%132", TW_WG_R32(0), TW_WG_R32(32), TW_WG_R32(64), TW_WG_R32(96));
        else TW_WGMMA("bf16", 256, TW_WG_L128, "%128", "%129", "%130", "%131", "%132", TW_WG_R32(0), TW_WG_R32(32), TW_WG_R32(64), TW_WG_R32(96));
    }
}

// The same with A in registers.
#define TW_WGMMA_R(type, n, list, a0, a1, a2, a3, b, p, tb, ...)                                                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p ", 0;\n"                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" list "}, {" a0 ", " a1 ", " a2     \
                 ", " a3 "}, " b ", p, 1, 1, " tb ";\n}"                                                               \
                 : __VA_ARGS__                                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_desc), "r"(accumulate), "n"(B_MN)                \
                 : "memory")

// The same product with A in four registers of each lane, as sums of 16 columns lie (see above),
// rounded and paired: of columns 0-7 of rows l / 4 and of 8 more, then of columns 8-15. They are
// read until the wait.
template <int N, bool F16, int B_MN>
__device__ __forceinline__ void wgmma_m64k16_f32_registers(float (&d)[N / 2], const u32* a, u64 b_desc, u32 accumulate) {
    static_assert(N == 64 || N == 128 || N == 192 || N == 256, "no such width");
    if constexpr (N == 64) {
        if constexpr (F16) TW_WGMMA_R("f16", 64, TW_WG_L32, "%32", "%33", "%34", "%35", "%36", "%37", "%38", TW_WG_R32(0));
        else TW_WGMMA_R("bf16", 64, TW_WG_L32, "%32", "%33", "%34", "%35", "%36", "%37", "%38", TW_WG_R32(0));
    } else if constexpr (N == 128) {
        if constexpr (F16) TW_WGMMA_R("f16", 128, TW_WG_L64, "%64", "%65", "%66", "%67", "%68", "%69", "%70", TW_WG_R32(0), TW_WG_R32(32));
        else TW_WGMMA_R("bf16", 128, TW_WG_L64, "%64", "%65", "%66", "%67", "%68", "%69", "%70", TW_WG_R32(0), TW_WG_R32(32));
    } else if constexpr (N == 192) {
        if constexpr (F16) TW_WGMMA_R("f16", 192, TW_WG_L96, "%96", "%97", "%98", "%99", "%100", "%101", "%102", TW_WG_R32(0), TW_WG_R32(32), TW_WG_R32(64));
        else TW_WGMMA_R("bf16", 192, TW_WG_L96, "%96", "%97", "%98", "%99", "%100", "%101", "%102", TW_WG_R32(0), TW_WG_R32(32), TW_WG_R32(64));
    } else if constexpr (N == 256) {
        if constexpr (F16) TW_WGMMA_R("f16", 256, TW_WG_L128, "%128", "%129", "%130", "%131", "%132", "%133", "%134", TW_WG_R32(0), TW_WG_R32(32), TW_WG_R32(64), TW_WG_R32(96));
        else TW_WGMMA_R("bf16", 256, TW_WG_L128, "%128", "%129", "%130", "%131", "%132", "%133", "%134", TW_WG_R32(0), TW_WG_R32(32), TW_WG_R32(64), TW_WG_R32(96));
    }
}

// One instruction of e4m3: width, list of accumulators, the operand A, the numbers of B and of the
// predicate, what A is.
#define TW_WGMMA_E4M3(n, list, a, b, p, in, ...) \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p ", 0;\n"                                               \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" list "}, " a ", " b ", p, 1, 1;\n}" \
                 : __VA_ARGS__                                                                                \
                 : in, "l"(b_desc), "r"(accumulate)                                                           \
                 : "memory")

// d = A B, plus d where `accumulate` is not 0, of e4m3: A is 64 x 32, B is 32 x N, both K-major.
// Sums are f32 and lie as above; the hardware adds them with some 14 bits.
template <int N>
__device__ __forceinline__ void wgmma_m64k32_f32_e4m3(float (&d)[N / 2], u64 a_desc, u64 b_desc, u32 accumulate) {
    static_assert(N == 128, "no such width");
    TW_WGMMA_E4M3(128, TW_WG_L64, "%64", "%65", "%66", "l"(a_desc), TW_WG_R32(0), TW_WG_R32(32));
}

#define TW_WG_A4 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// The same product with A in four registers of each lane: elements 4 (l % 4) to the third behind it
// of row l / 4, the lowest byte first, and of 8 rows more; then elements 16 behind these, of both.
// They are read until the wait.
template <int N>
__device__ __forceinline__ void wgmma_m64k32_f32_e4m3_registers(float (&d)[N / 2], const u32* a, u64 b_desc, u32 accumulate) {
    static_assert(N == 128, "no such width");
    TW_WGMMA_E4M3(128, TW_WG_L64, "{%64, %65, %66, %67}", "%68", "%69", TW_WG_A4, TW_WG_R32(0), TW_WG_R32(32));
}

// Four e4m3, `a` in the lowest byte: round to nearest even, saturate.
__device__ __forceinline__ u32 cvt_rn_satfinite_e4m3x4_f32(float a, float b, float c, float d) {
    u32 codes;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return codes;
}

// Stores four 8x8 matrices of 16-bit elements, as ldmatrix_x4_b16 loads them: lanes 8i to 8i + 7
// give the addresses of the 16-byte rows of matrix i.
__device__ __forceinline__ void stmatrix_x4_b16(void* row, const u32 (&v)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"((u32)__cvta_generic_to_shared(row)),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}

// The same, transposed: the rows in memory are the columns of the matrices.
__device__ __forceinline__ void stmatrix_x4_trans_b16(void* row, const u32 (&v)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"((u32)__cvta_generic_to_shared(row)),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}
