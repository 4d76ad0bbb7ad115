// What the emulator's runtime, the kernels and the Rust harness agree on. No includes: this text
// stands before a kernel's. Mirrored in tests/emu/host.rs, which checks the sizes.

struct EmuDim {
    unsigned x, y, z;
};

// What a thread of a kernel sees of itself.
struct EmuThread {
    EmuDim tid, bid, bdim, gdim;
    unsigned lane;
};

// The message of a run that gets no memory for the stacks of its threads.
#define EMU_NO_MEMORY "no memory for the threads of a kernel"

// One warp-collective operation: what each lane gave, and where each lane wants its result.
struct EmuLanes {
    unsigned mask;    // lanes that were asked for
    unsigned active;  // those that take part: a lane that has ended does not
    const void* in[32];
    void* out[32];
};
typedef void (*EmuWarpFn)(const EmuLanes* lanes, const void* ctx);

// Told right before each memory operation of a wrapper.
struct EmuEvent {
    const char* op;      // as PTX names it
    const char* kernel;
    unsigned long long addr;  // 0: a fence
    unsigned rank, block, thread, pad;
};

// Memory that kernels of `rank` (EMU_ANY: of all) may touch.
struct EmuRegion {
    const char* name;
    unsigned long long base, len;
    unsigned rank, pad;
};
enum : unsigned { EMU_ANY = 0xffffffffu };

struct EmuLaunch {
    void (*entry)(void** args);
    unsigned char* (*smem_of)(unsigned* capacity);
    void** args;
    const char* kernel;
    unsigned grid[3], block[3], smem;
    unsigned cluster;  // blocks side by side in x that are one cluster; 0 and 1: none
};

// Types of elements that reductions by tensor maps add; others are only copied.
enum EmuElement : unsigned char { EMU_BYTES, EMU_F32, EMU_BF16, EMU_F16 };

// A tensor map, in the 128 bytes of the driver's. Sizes from the innermost dimension on.
struct alignas(64) EmuTensorMap {
    unsigned long long mark;  // EMU_TENSOR_MAP
    unsigned long long base;
    unsigned long long dims[5];
    unsigned long long strides[4];  // bytes from an index to the next, of dimensions 1 to 4
    unsigned short box[5];
    unsigned char rank, size;       // dimensions; bytes of an element
    EmuElement element;
    unsigned char swizzle;          // bytes whose 16-byte pieces are permuted: 0, 32, 64, 128
    unsigned short pad[2];
    unsigned long long more[2];
};
constexpr unsigned long long EMU_TENSOR_MAP = 0x70616d2d726f7374ull;
static_assert(sizeof(EmuTensorMap) == 128, "as large as the driver's");

// Launches that run one after the other.
struct EmuStream {
    const EmuLaunch* launches;
    unsigned len, rank;
    unsigned worker, pad;  // EMU_ANY: its blocks go to whoever is free
};

struct EmuStats {
    unsigned long long steps;     // memory operations and meetings
    unsigned long long switches;  // from one thread of a kernel to another
    unsigned long long trace;     // hash of the order in which threads ran
    unsigned long long now_ns;    // the kernels' clock at the end
};

struct EmuRun {
    const EmuStream* streams;
    const EmuRegion* regions;  // by their addresses
    bool (*hook)(void* ctx, const EmuEvent* event);  // may be null; false ends the run
    void* hook_ctx;
    char* message;  // what went wrong
    unsigned long long message_len;
    unsigned long long seed;
    unsigned long long max_steps;    // of one worker, then it is a hang
    unsigned long long deadline_ns;  // of the whole run, by a clock that no one sets
    unsigned long long tick_ns;      // added to the kernels' clock by each step; 0: the real clock
    unsigned num_streams, num_regions;
    unsigned workers;        // OS threads; 1: the seed decides everything
    unsigned resident;       // most blocks of a launch that are alive at once
    unsigned yield_permille; // chance to let another thread run before a memory operation
    unsigned no_views;       // not 0: bulk copies see all that is in shared memory, whatever fences have told of (faster)
    unsigned warp_pauses;    // not 0: now and then a warp stands still while others of its block go on
    unsigned pad;
    EmuStats stats;  // out
};

// A word that a kernel is about to store, or to add to, for somebody who waits for it: by a store
// or a reduction at system scope, release or behind a fence.
struct EmuSignal {
    const char *kernel, *function;  // and where in the flattened text
    unsigned long long addr, value;
    unsigned rank, line;
    bool adds;
};
// Who watches what kernels do to memory of others; any may be null. Set before anything runs.
struct EmuWatch {
    bool (*signal)(const EmuSignal* s);  // false: it is not to be stored, or is stored already
    bool (*acquired)(unsigned rank, unsigned long long addr);  // true: the thread stands still, and asks again
    // `len` bytes are about to be written, by this block << 8 | warp. Plain stores are told of if
    // the compiler was asked to (driver.cpp).
    void (*write)(unsigned rank, unsigned warp, unsigned long long addr, unsigned long long len);
};

extern "C" {
// Libraries are loaded into a process that runs; this word still has its place in every thread.
extern __thread EmuThread* emu_self __attribute__((tls_model("initial-exec")));
extern const EmuWatch* emu_watch;

// Before a memory operation: checks the address, tells the hook, may let another thread run.
void emu_point(const char* op, const void* p, unsigned bytes);
// Where this thread's next signal stands; and whether it is to be stored.
void emu_site(const char* function, unsigned line);
bool emu_signal(const void* p, unsigned long long value, bool adds);
// The rank of the thread that runs; its block << 8 | its warp.
unsigned emu_rank();
unsigned emu_warp_number();
// An acquire of what is at `p`.
void emu_acquired_at(const void* p);
// All threads of the block meet; returns how many came with `vote` true.
unsigned emu_sync(unsigned line, bool vote);
// Comes to named barrier `id` of `threads` threads; with `wait`, until all have come.
void emu_bar(unsigned id, unsigned threads, bool wait, unsigned line);
// The lanes of `mask` meet; the last to come runs `fn` for all of them.
void emu_warp(unsigned mask, const char* op, unsigned line, const void* in, void* out, EmuWarpFn fn, const void* ctx);
// A copy of `bytes`, and `zeros` zero bytes behind them, that has happened for certain only when the
// thread has waited for its group: it happens now or then, as the seed decides.
void emu_copy_async(void* dst, const void* src, unsigned bytes, unsigned zeros);
void emu_copy_commit();               // ends a group
void emu_copy_wait(unsigned groups);  // for all groups but this many of the latest
// Barriers in shared memory, as mbarrier.* of PTX; and bulk copies, which happen some time after they were issued.
void emu_mbar_init(unsigned long long* bar, unsigned count);
void emu_mbar_arrive(unsigned long long* bar, unsigned bytes);
bool emu_mbar_done(unsigned long long* bar, unsigned parity);
void emu_bulk_load(void* shared, const void* global, unsigned bytes, unsigned long long* bar);
void emu_bulk_store(void* global, const void* shared, unsigned bytes);
void emu_bulk_reduce_add(void* global, const void* shared, unsigned bytes);
void emu_bulk_commit();                              // ends a group
void emu_bulk_wait(unsigned groups, bool written);   // for all groups but this many of the latest: read, or written
// Bulk copies know of barriers that were made; see shared memory as it is; come behind what was acquired, too.
enum EmuFence : unsigned { EMU_BARRIERS, EMU_SHARED, EMU_ALL };
void emu_proxy_fence(EmuFence what);
void emu_acquired();  // this thread has acquired what another, of any block, has written
void emu_ordered();   // a fence: threads of this block may have told this one of what they did
// The number of this block in its cluster. A barrier of all of the cluster's threads.
unsigned emu_cluster_rank();
unsigned emu_cluster_size();
void emu_cluster_sync();
// Arrives at a barrier of block `rank` of the cluster, which lies where `bar` does here; and stores
// a word there before.
void emu_peer_arrive(unsigned long long* bar, unsigned rank);
void emu_peer_store(unsigned* word, unsigned rank, unsigned value);
// Where so many bytes of its shared memory lie, to be read at once; aligned to their number.
const void* emu_peer_load(const void* p, unsigned rank, unsigned bytes);
// Bytes that are read some time, and change nothing.
void emu_bulk_prefetch(const void* p, unsigned bytes);
// A map in memory is known to this thread from here on.
void emu_tensor_acquire(const void* map);
// Boxes of tensors: a load into the blocks of the cluster whose bits are set, a store, a sum.
void emu_tensor_load(void* shared, const void* map, unsigned long long* bar, const int* at, unsigned rank, unsigned blocks);
void emu_tensor_store(const void* map, const void* shared, const int* at, unsigned rank, bool adds);
// Products of a warpgroup, by each of its warps: the accumulators of its lanes, the descriptors,
// whether to add. Operands are read, and sums set, some time until a wait has ended.
enum : unsigned { EMU_WG_F16 = 1, EMU_WG_A_MN = 2, EMU_WG_B_MN = 4, EMU_WG_E4M3 = 8 };
unsigned emu_e4m3(float x);
unsigned long long emu_product_desc(const void* tile);
void emu_product_fence();
void emu_product(float* const* d, unsigned n, unsigned long long a, unsigned long long b, bool adds, unsigned flags);
// The same with A in four registers of each lane, which must be as they are until a wait has ended.
void emu_product_of_registers(float* const* d, unsigned n, const unsigned* const* a, unsigned long long b, bool adds, unsigned flags);
void emu_product_commit();
// Waits until all warps of the warpgroup have ended the groups that this warp is about to wait for.
void emu_product_meet(unsigned groups);
void emu_product_wait(unsigned groups);
// The lane that elect.sync takes. Registers of each thread, from now on.
unsigned emu_elected();
void emu_registers(unsigned num, bool more);
void emu_sleep(unsigned ns);
unsigned long long emu_now();
// Ends the run with this message.
[[noreturn]] void emu_fail(const char* what);
}
