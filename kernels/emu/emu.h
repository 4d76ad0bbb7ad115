// CUDA C++ for the host's compiler: just enough that a kernel's text compiles and runs as it stands.
//
// A thread of a kernel is a fiber of the runtime (runtime.cpp). It gives way only inside the
// functions below and inside the wrappers of ptx/*_emu.h, so every memory operation that other
// threads may see must go through one of those.

#define __device__
// A kernel without EMU_ENTRY is read, and no code is made of it.
#define __global__ inline
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__ static
#define __align__(n) __attribute__((aligned(n)))
// Blocks of one OS thread take turns with this memory: the runtime saves and restores it.
#define __shared__ thread_local

#ifdef TW_EMU_SMEM
// A kernel declares it as `extern __shared__ unsigned char tw_smem[];`, under this name only.
alignas(1024) thread_local unsigned char tw_smem[TW_EMU_SMEM];
#endif
extern "C" __attribute__((visibility("default"))) unsigned char* emu_smem(unsigned* capacity) {
#ifdef TW_EMU_SMEM
    *capacity = TW_EMU_SMEM;
    return tw_smem;
#else
    *capacity = 0;
    return nullptr;
#endif
}

#define threadIdx (emu_self->tid)
#define blockIdx (emu_self->bid)
#define blockDim (emu_self->bdim)
#define gridDim (emu_self->gdim)
#define warpSize 32

// ---- How the runtime calls a kernel: pointers to the arguments, as a launch passes them.

template <unsigned... I> struct EmuSeq {};
template <unsigned N, unsigned... I> struct EmuCount : EmuCount<N - 1, N - 1, I...> {};
template <unsigned... I> struct EmuCount<0, I...> {
    typedef EmuSeq<I...> type;
};
template <class T> struct EmuBare {
    typedef T type;
};
template <class T> struct EmuBare<const T> {
    typedef T type;
};
template <class... A, unsigned... I> inline void emu_call(void (*kernel)(A...), void** args, EmuSeq<I...>) {
    kernel(*(const typename EmuBare<A>::type*)args[I]...);
}
template <class... A> inline void emu_call(void (*kernel)(A...), void** args) {
    emu_call(kernel, args, typename EmuCount<sizeof...(A)>::type());
}
template <class... A> constexpr unsigned emu_arity(void (*)(A...)) {
    return sizeof...(A);
}
template <class... A> inline void emu_sizes(void (*)(A...), unsigned* sizes) {
    const unsigned all[] = {(unsigned)sizeof(A)..., 0};
    for (unsigned i = 0; i < sizeof...(A); i++) sizes[i] = all[i];
}
// What the harness adds behind the text, for each kernel. The second function is how it checks
// that it passes as many bytes as the kernel takes.
#define EMU_ENTRY(kernel)                                                                    \
    extern "C" __attribute__((visibility("default"))) void emu_entry_##kernel(void** args) { \
        emu_call(kernel, args);                                                              \
    }                                                                                        \
    extern "C" __attribute__((visibility("default"))) unsigned emu_args_##kernel(unsigned* sizes) { \
        emu_sizes(kernel, sizes);                                                            \
        return emu_arity(kernel);                                                            \
    }

// ---- Meetings. The line is that of the caller: threads must meet at the same place.

inline void __syncthreads(unsigned line = __builtin_LINE()) {
    emu_sync(line, false);
}
inline int __syncthreads_or(int p, unsigned line = __builtin_LINE()) {
    return emu_sync(line, p != 0) != 0;
}
inline int __syncthreads_and(int p, unsigned line = __builtin_LINE()) {
    return emu_sync(line, p == 0) == 0;
}
inline int __syncthreads_count(int p, unsigned line = __builtin_LINE()) {
    return (int)emu_sync(line, p != 0);
}

// The lanes of one collective, as the function that carries it out sees them.
template <class In, class Out> struct EmuWarp {
    const EmuLanes& lanes;
    bool has(unsigned lane) const { return lane < 32 && (lanes.active >> lane & 1); }
    bool full() const { return lanes.active == 0xffffffffu; }
    const In& in(unsigned lane) const { return *(const In*)lanes.in[lane]; }
    Out& out(unsigned lane) const { return *(Out*)lanes.out[lane]; }
};

// A warp-collective operation. Each lane gives an In and gets an Out; `f` runs once, with the
// registers of all lanes. A result that `f` does not set stays poison (0xff).
template <class In, class Out, class F>
inline Out emu_collective(unsigned mask, const char* op, const In& in, F f, unsigned line = __builtin_LINE()) {
    static_assert(__is_empty(F), "what f captures would be that of one lane");
    Out out;
    __builtin_memset((void*)&out, 0xff, sizeof out);
    const EmuWarpFn run = [](const EmuLanes* l, const void* ctx) {
        (*(const F*)ctx)(EmuWarp<In, Out>{*l});
    };
    emu_warp(mask, op, line, &in, &out, run, &f);
    return out;
}

// One for which all 32 lanes must be there, as for matrix instructions.
template <class In, class Out, class F> struct EmuWhole : F {
    void operator()(const EmuWarp<In, Out>& w) const {
        if (!w.full()) emu_fail("an instruction of the whole warp without all 32 lanes");
        F::operator()(w);
    }
};
template <class In, class Out, class F>
inline Out emu_whole_warp(const char* op, const In& in, F f, unsigned line = __builtin_LINE()) {
    return emu_collective<In, Out>(0xffffffffu, op, in, EmuWhole<In, Out, F>{f}, line);
}

struct EmuNothing {};
inline void __syncwarp(unsigned mask = 0xffffffffu, unsigned line = __builtin_LINE()) {
    emu_collective<EmuNothing, EmuNothing>(mask, "__syncwarp", EmuNothing(), [](const auto&) {}, line);
}

// A named barrier, to which warps come as wholes.
inline void emu_barrier(const char* op, unsigned id, unsigned threads, bool wait, unsigned line = __builtin_LINE()) {
    emu_whole_warp<EmuNothing, EmuNothing>(op, EmuNothing(), [](const auto&) {}, line);
    emu_bar(id, threads, wait, line);
}

template <class T> struct EmuShfl {
    T v;
    int by, width;
};

// F: (lane, by, first lane of the segment, width) to the lane that is read.
template <class T, class F> struct EmuShuffle : F {
    void operator()(const EmuWarp<EmuShfl<T>, T>& w) const {
        for (int lane = 0; lane < 32; lane++) {
            if (!w.has(lane)) continue;
            const EmuShfl<T>& in = w.in(lane);
            const int from = F::operator()(lane, in.by, lane & ~(in.width - 1), in.width);
            if (w.has(from)) w.out(lane) = w.in(from).v;
        }
    }
};
template <class T, class F>
inline T emu_shfl(unsigned mask, const char* op, T v, int by, int width, F f, unsigned line) {
    return emu_collective<EmuShfl<T>, T>(mask, op, EmuShfl<T>{v, by, width}, EmuShuffle<T, F>{f}, line);
}
template <class T>
inline T __shfl_sync(unsigned mask, T v, int src, int width = 32, unsigned line = __builtin_LINE()) {
    const auto from = [](int, int by, int first, int n) { return first + (by & (n - 1)); };
    return emu_shfl(mask, "__shfl_sync", v, src, width, from, line);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T v, int by, int width = 32, unsigned line = __builtin_LINE()) {
    const auto from = [](int l, int d, int first, int) { return l - d < first ? l : l - d; };
    return emu_shfl(mask, "__shfl_up_sync", v, by, width, from, line);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T v, int by, int width = 32, unsigned line = __builtin_LINE()) {
    const auto from = [](int l, int d, int first, int n) { return l + d >= first + n ? l : l + d; };
    return emu_shfl(mask, "__shfl_down_sync", v, by, width, from, line);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T v, int by, int width = 32, unsigned line = __builtin_LINE()) {
    const auto from = [](int l, int d, int first, int n) { return (l ^ d) >= first + n ? l : l ^ d; };
    return emu_shfl(mask, "__shfl_xor_sync", v, by, width, from, line);
}

inline unsigned __ballot_sync(unsigned mask, int p, unsigned line = __builtin_LINE()) {
    const auto g = [](const EmuWarp<int, unsigned>& w) {
        unsigned all = 0;
        for (unsigned l = 0; l < 32; l++) all |= w.has(l) && w.in(l) ? 1u << l : 0;
        for (unsigned l = 0; l < 32; l++)
            if (w.has(l)) w.out(l) = all;
    };
    return emu_collective<int, unsigned>(mask, "__ballot_sync", p, g, line);
}
inline int __any_sync(unsigned mask, int p, unsigned line = __builtin_LINE()) {
    return __ballot_sync(mask, p, line) != 0;
}
inline int __all_sync(unsigned mask, int p, unsigned line = __builtin_LINE()) {
    return __ballot_sync(mask, !p, line) == 0;
}
inline unsigned __match_any_sync(unsigned mask, int v, unsigned line = __builtin_LINE()) {
    const auto g = [](const EmuWarp<int, unsigned>& w) {
        for (unsigned l = 0; l < 32; l++) {
            if (!w.has(l)) continue;
            w.out(l) = 0;
            for (unsigned o = 0; o < 32; o++) w.out(l) |= w.has(o) && w.in(o) == w.in(l) ? 1u << o : 0;
        }
    };
    return emu_collective<int, unsigned>(mask, "__match_any_sync", v, g, line);
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned v, unsigned line = __builtin_LINE()) {
    const auto g = [](const EmuWarp<unsigned, unsigned>& w) {
        unsigned sum = 0;
        for (unsigned l = 0; l < 32; l++) sum += w.has(l) ? w.in(l) : 0;
        for (unsigned l = 0; l < 32; l++)
            if (w.has(l)) w.out(l) = sum;
    };
    return emu_collective<unsigned, unsigned>(mask, "__reduce_add_sync", v, g, line);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v, unsigned line = __builtin_LINE()) {
    const auto g = [](const EmuWarp<unsigned, unsigned>& w) {
        unsigned top = 0;
        for (unsigned l = 0; l < 32; l++) top = w.has(l) && w.in(l) > top ? w.in(l) : top;
        for (unsigned l = 0; l < 32; l++)
            if (w.has(l)) w.out(l) = top;
    };
    return emu_collective<unsigned, unsigned>(mask, "__reduce_max_sync", v, g, line);
}

// ---- Atomics of CUDA C++: relaxed, as on the device.

#define EMU_ATOMIC(name, builtin)                                             \
    template <class T, class V> inline T name(T* p, V v) {                    \
        emu_point(#name, p, sizeof(T));                                       \
        return builtin(p, (T)v, __ATOMIC_RELAXED);                            \
    }
EMU_ATOMIC(atomicAdd, __atomic_fetch_add)
EMU_ATOMIC(atomicSub, __atomic_fetch_sub)
EMU_ATOMIC(atomicOr, __atomic_fetch_or)
EMU_ATOMIC(atomicAnd, __atomic_fetch_and)
EMU_ATOMIC(atomicExch, __atomic_exchange_n)
#undef EMU_ATOMIC

// The function that turns the old value into the new one.
template <class T, class F> inline T emu_atomic(const char* op, T* p, F f) {
    emu_point(op, p, sizeof(T));
    T old, now;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do {
        now = f(old);
    } while (!__atomic_compare_exchange(p, &old, &now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}
inline float atomicAdd(float* p, float v) {
    return emu_atomic("atomicAdd", p, [v](float old) { return old + v; });
}
template <class T, class V> inline T atomicMax(T* p, V v) {
    return emu_atomic("atomicMax", p, [v](T old) { return old < (T)v ? (T)v : old; });
}
template <class T, class V> inline T atomicInc(T* p, V last) {
    return emu_atomic("atomicInc", p, [last](T old) { return old >= (T)last ? (T)0 : (T)(old + 1); });
}
template <class T, class V> inline T atomicMin(T* p, V v) {
    return emu_atomic("atomicMin", p, [v](T old) { return (T)v < old ? (T)v : old; });
}
template <class T, class E, class V> inline T atomicCAS(T* p, E expect, V v) {
    return emu_atomic("atomicCAS", p, [=](T old) { return old == (T)expect ? (T)v : old; });
}
inline void __threadfence() {
    emu_point("fence.acq_rel.gpu", nullptr, 0);
    emu_ordered();
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void __threadfence_block() {
    __threadfence();
}
inline void __threadfence_system() {
    __threadfence();
}

// ---- Vectors, bits and arithmetic. More are one line each.

typedef EmuDim uint3;
struct dim3 : EmuDim {
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : EmuDim{a, b, c} {}
};
#define EMU_VECTORS(T, name)                                                                    \
    struct __align__(2 * sizeof(T)) name##2 {                                                   \
        T x, y;                                                                                 \
    };                                                                                          \
    struct __align__(16) name##4 {                                                              \
        T x, y, z, w;                                                                           \
    };                                                                                          \
    inline name##2 make_##name##2(T x, T y) { return name##2{x, y}; }                           \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return name##4{x, y, z, w}; }
EMU_VECTORS(int, int)
EMU_VECTORS(unsigned, uint)
EMU_VECTORS(float, float)
#undef EMU_VECTORS

template <class To, class From> inline To emu_bits(From v) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To to;
    __builtin_memcpy(&to, &v, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float v) { return emu_bits<unsigned>(v); }
inline float __uint_as_float(unsigned v) { return emu_bits<float>(v); }
inline double __longlong_as_double(long long v) { return emu_bits<double>(v); }
inline int __float_as_int(float v) { return emu_bits<int>(v); }
inline float __int_as_float(int v) { return emu_bits<float>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz((unsigned)v); }
inline int __ffs(int v) { return __builtin_ffs(v); }

template <class T> constexpr T min(T a, T b) { return b < a ? b : a; }
template <class T> constexpr T max(T a, T b) { return a < b ? b : a; }
// Of two numbers, one of which is NaN, the other: of a signalling NaN, too, as on the device.
inline float fminf(float a, float b) { return a != a || b < a ? b : a; }
inline float fmaxf(float a, float b) { return a != a || a < b ? b : a; }
inline float fabsf(float a) { return __builtin_fabsf(a); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
extern "C" {
float expf(float), exp2f(float), logf(float), log2f(float), sqrtf(float), rintf(float), floorf(float), ceilf(float);
float ldexpf(float, int), tanhf(float), powf(float, float);
double sqrt(double), cos(double), log(double), pow(double, double);
}
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
// The device's fast forms are less exact; tests of a kernel must allow for that anyway.
inline float __expf(float a) { return expf(a); }
inline float __logf(float a) { return logf(a); }
inline float __fdividef(float a, float b) { return a / b; }
