// The emulator's runtime, first part: threads of kernels as fibers, and what is said when they go
// wrong. Compiled once, as abi.h + fibers.h + runtime.cpp; every kernel's library links to it.
//
// A block lives on one OS thread (a worker) from its first to its last instruction, so its fibers
// never run at once and never move. With one worker the seed decides the whole run: the next fiber
// is drawn at random, and the kernels' clock advances by a tick with each step.

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

__thread EmuThread* emu_self = nullptr;

namespace {

typedef unsigned long long u64;
constexpr size_t PAGE = 4096;
constexpr size_t STACK = (256 << 10) + PAGE;

enum State { READY, SYNC, WARP, NAMED, DONE };

struct Block;
struct Worker;

// Blocks that were launched together and reach each other's shared memory; null where one has
// ended.
struct Cluster {
    std::vector<Block*> blocks;
    unsigned threads, come, phase, left;  // of their barrier; blocks that have not ended
};

#if defined(__x86_64__) && !defined(TW_EMU_UCONTEXT)
struct Context {
    void* sp;
};
#else
typedef ucontext_t Context;
#endif

// An asynchronous copy that has not happened yet.
struct Copy {
    char* dst;
    const void* src;
    unsigned bytes, zeros, group;
};

// A box of a tensor: its map and where it begins. Without a map (`rank` 0) a copy is of one piece.
struct Box {
    EmuTensorMap map;
    int at[5];
    bool adds;  // to what the tensor holds
    unsigned offset;  // of its tile in the dynamic shared memory
};

// A bulk copy on its way: of a load its barrier, and the phase that its bytes belong to. The side
// of the tensor of a box is null.
struct Bulk {
    char* to;
    const char* from;
    unsigned bytes, thread, group;
    u64 read_at, write_at;  // ticks of its block
    u64* bar;
    unsigned parity;
    bool read;
    std::vector<char> data;  // once it is read, as it lies in shared memory
    Box box;
};

// A product of a warpgroup that one of its warps has issued, and whose sums are not in its
// registers yet.
struct Product {
    float* d[32];  // of each lane
    unsigned n, group;
    u64 a, b;      // descriptors
    unsigned flags;
    bool adds, read;
    const unsigned* registers[32];  // of each lane, if A is there
    unsigned held[32][4];           // what they had
    // Once they are read: 16 rows of A, then B, 32 bytes of k each, in pairs.
    std::vector<unsigned short> tiles;
};

// Sums in registers that products are being added to.
struct Sums {
    float* d;  // of lane 0
    std::vector<float> v;
};

// Registers that products had as sums or as A, and what they held at the last fence.
struct Registers {
    const char* at[32];  // of each lane
    unsigned bytes;
    std::vector<char> then;
};

// What one warp has issued.
struct Products {
    std::vector<Registers> known;
    std::vector<Product> waiting;
    std::vector<Sums> sums;
    unsigned groups;   // ended so far
    bool fenced;       // behind what registers were last touched
    unsigned registers, changes;
};

// A load that has come, and that nobody has waited for.
struct Unseen {
    u64* bar;
    unsigned parity;
};

// What a thread knows of its block by its own doing and by meetings: the latest acquire; the latest behind which there
// was a proxy fence of all memory; the latest proxy fence.
struct Known {
    u64 acquired, fenced, fence;

    void join(const Known& k) {
        if (k.acquired > acquired) acquired = k.acquired;
        if (k.fenced > fenced) fenced = k.fenced;
        if (k.fence > fence) fence = k.fence;
    }
};

// Shared memory as bulk copies see it: behind the fence that first told of what is there, for each 16 bytes, and
// before. Empty: as the block began.
struct View {
    std::vector<char> now, before;
    std::vector<u64> fence;
};

// What those knew who came to a barrier in shared memory.
struct Told {
    u64* bar;
    Known known;
};

// What a change of threads reads lies in the first lines of the processor's cache.
struct alignas(64) Fiber : EmuThread {
    Block* block;
    char* stack;
    unsigned index;
    State state;
    volatile bool inside;  // in the runtime: not to be left by a signal
    // What it does, or waits for.
    const char* op;
    const void* at;
    unsigned line, mask, barrier;
    const void* before;  // what it touched before that
    const char* site;  // of its latest signal: the function, and the line
    unsigned site_line;
    std::vector<Copy> copies;
    unsigned groups;  // of copies, ended so far
    unsigned stored_groups, read_groups;  // up to its latest bulk store; whose shared memory was read for certain
    Known known;
};

// A collective that not all of its lanes have reached.
struct Gather {
    unsigned warp;
    const char* op;
    EmuWarpFn fn;
    const void* ctx;
    EmuLanes lanes;
};

// A library with kernels: where its code and its variables of __shared__ lie.
struct Module {
    u64 lo, hi;
    unsigned long tls[2];  // as __tls_get_addr takes it
    size_t shared_len;
    char* shared;  // of the worker's thread; null where there is none
};

struct Stream {
    unsigned launch, next, live, done;
    std::vector<Bulk> late;  // writes of blocks that have ended
};

struct Run {
    EmuRun* cfg;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    std::vector<Stream> streams;
    unsigned open, active;  // streams, workers
    unsigned version;       // changes whenever a block may start
    bool stop, failed, list;
    std::string message;
    u64 clock;
};

// A named barrier: who has come, of how many; none of both when nobody has.
struct Barrier {
    unsigned come, threads;
    Known known;
};

struct Block {
    Worker* worker;
    const EmuLaunch* launch;
    unsigned stream, rank, number;
    Cluster* cluster;
    unsigned cluster_rank;
    int module;
    std::vector<Fiber> fibers;
    std::vector<Context> contexts;  // of each, in few lines: the next one's is known before it is there
    std::vector<unsigned> ready;
    unsigned drawn, drawn_of;  // the place in `ready` of the next one, if it is one of the first so many
    std::vector<std::unique_ptr<Gather>> gathers, spare;  // open; for the next ones
    std::vector<char> shared;
    bool started;
    unsigned done, at_sync, sync_line, votes, voted;
    Barrier barriers[16];
    std::vector<Products> products;  // of each warp
    std::vector<Bulk> bulks;
    std::vector<Unseen> unseen;
    std::vector<std::pair<const Fiber*, const void*>> maps;  // in memory, and by whom they are known
    std::vector<u64*> made;   // barriers that bulk copies do not know of
    std::vector<Told> told;
    View view;
    u64 ticks, due;           // steps while there are bulk copies; when the next of them goes on
    u64 acquires, fences;
};

struct Worker {
    Run* run;
    unsigned id;
    pthread_t thread;
    Context context;
    u64 rng;
    std::vector<Block*> live, spare;
    std::vector<char*> stacks;
    std::vector<Module> modules;
    std::vector<Block*> loaded;  // whose shared memory lies in each module's variables
    Block* current;
    unsigned seen, stay, victim, frozen;
    unsigned still_warp, still;  // a warp that stands still, and for how many turns
    unsigned polls;  // one behind the other
    EmuStats stats;
};

Fiber* self() {
    return static_cast<Fiber*>(emu_self);
}

u64 random(Worker* w) {  // xorshift64*
    w->rng ^= w->rng >> 12, w->rng ^= w->rng << 25, w->rng ^= w->rng >> 27;
    return w->rng * 2685821657736338717ull >> 16;
}

// A number below `num`: a product instead of a remainder, which takes longer than all the rest.
unsigned below(Worker* w, unsigned num) {
    return (unsigned)((random(w) & 0xffffffff) * num >> 32);
}

u64 real_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

u64 load(const u64* p) {
    return __atomic_load_n(p, __ATOMIC_RELAXED);
}
bool stopped(const Run* r) {
    return __atomic_load_n(&r->stop, __ATOMIC_ACQUIRE);
}

// ---- Contexts.

void fiber_main();

Context* context_of(const Fiber* f) {
    return &f->block->contexts[f->index];
}

#if defined(__x86_64__) && !defined(TW_EMU_UCONTEXT)
asm(R"(
.text
.type emu_switch,@function
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emu_switch, .-emu_switch
)");
extern "C" __attribute__((visibility("hidden"))) void emu_switch(Context* from, Context* to);
void change(Context* from, Context* to) {
    emu_switch(from, to);
}
const char* stack_of(const Context& c) {
    return (const char*)c.sp;
}
void prepare(Fiber* f) {
    // Six registers, the address that `ret` takes, and the one that a function finds above it. All
    // stacks begin at a page: from the same place in each, the frames of all threads would share
    // the same few lines of the processor's cache.
    void** top = (void**)(f->stack + STACK - f->index % 64 * 64);
    *--top = nullptr;
    *--top = (void*)fiber_main;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    context_of(f)->sp = top;
}
#else
void change(Context* from, Context* to) {
    swapcontext(from, to);
}
const char* stack_of(const Context& c) {
    return (const char*)&c;
}
void prepare(Fiber* f) {
    Context* c = context_of(f);
    getcontext(c);
    c->uc_stack.ss_sp = f->stack;
    c->uc_stack.ss_size = STACK;
    c->uc_link = nullptr;
    makecontext(c, fiber_main, 0);
}
#endif

Fiber* next_fiber(Worker* w);
bool goes_on(const Worker* w);

// Comes back when it is this fiber's turn, never if the run has ended. Where nothing else is to be
// done, the next fiber follows at once: a way round by the worker's context costs as much again.
void leave(Fiber* f) {
    Worker* w = f->block->worker;
    if (!goes_on(w)) return change(context_of(f), &w->context);
    Fiber* next = next_fiber(w);
    if (next == f) return;
    emu_self = next;
    change(context_of(f), context_of(next));
}

// ---- What went wrong.

void append(std::string& s, const char* fmt, ...) __attribute__((format(printf, 2, 3)));
void append(std::string& s, const char* fmt, ...) {
    char line[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    s += line;
}

// The first message stays. With `list`, the places of all threads follow it.
void end_run(Run* r, const std::string& message, bool list) {
    pthread_mutex_lock(&r->lock);
    if (!r->failed) {
        r->failed = true;
        r->message = message;
        r->list = list;
    } else if (r->list && r->message.size() < 4096) {
        r->message += "\n  " + message;
    }
    __atomic_store_n(&r->stop, true, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&r->ended);
    pthread_mutex_unlock(&r->lock);
}

std::string name_of(const Run* r, u64 addr) {
    const EmuRegion* near = nullptr;
    std::string s;
    for (unsigned i = 0; i < r->cfg->num_regions; i++) {
        const EmuRegion* g = &r->cfg->regions[i];
        if (addr >= g->base && addr < g->base + g->len) {
            append(s, "%s+0x%llx", g->name, addr - g->base);
            return s;
        }
        if (addr >= g->base && (near == nullptr || g->base > near->base)) near = g;
    }
    append(s, "0x%llx", addr);
    if (near != nullptr && addr - near->base - near->len < 1 << 20)
        append(s, " (%lld bytes past the end of %s)", addr - near->base - near->len, near->name);
    return s;
}

std::string who(const Fiber* f) {
    std::string s;
    const Block* b = f->block;
    append(s, "rank %u %s block (%u,%u,%u) thread (%u,%u,%u): ", b->rank, b->launch->kernel, f->bid.x,
           f->bid.y, f->bid.z, f->tid.x, f->tid.y, f->tid.z);
    return s;
}

std::string where(const Run* r, const Fiber* f) {
    std::string s;
    if (f->state == DONE) return "has ended";
    if (f->state == SYNC) {
        append(s, "waits in __syncthreads @%u@", f->line);
    } else if (f->state == WARP) {
        append(s, "waits in %s of lanes %08x @%u@", f->op, f->mask, f->line);
    } else if (f->state == NAMED) {
        append(s, "waits at barrier %u @%u@", f->barrier, f->line);
    } else if (f->op == nullptr) {
        s = "has not begun";
    } else {
        append(s, "at %s %s", f->op, f->at == nullptr ? "" : name_of(r, (u64)f->at).c_str());
    }
    return s;
}

// One line for each stretch of threads that stand at the same place.
std::string places(const Run* r, const Block* b) {
    std::string s;
    for (size_t i = 0; i < b->fibers.size();) {
        const std::string at = where(r, &b->fibers[i]);
        size_t j = i + 1;
        while (j < b->fibers.size() && where(r, &b->fibers[j]) == at) j++;
        append(s, "\n  rank %u %s block %u ", b->rank, b->launch->kernel, b->number);
        if (j == i + 1) append(s, "thread %zu ", i);
        else append(s, "threads %zu-%zu ", i, j - 1);
        s += at;
        i = j;
    }
    return s;
}

[[noreturn]] void die(Fiber* f, const std::string& what) {
    f->inside = true;
    end_run(f->block->worker->run, who(f) + what, false);
    for (;;) leave(f);
}

struct Inside {  // the time that a fiber spends in the runtime
    Fiber* f;
    explicit Inside(Fiber* fiber) : f(fiber) { f->inside = true; }
    ~Inside() { f->inside = false; }
};

// ---- Fibers.

void yield(Fiber* f) {
    f->block->ready.push_back(f->index);
    leave(f);
}

// A thread that waits for other ranks gives way at once, and a worker whose threads do nothing else
// leaves its processor to those that work: else most of a run's time goes into polls. It sleeps for
// about an eighth of the time that it has waited, so that it is late by no more, and a third of a
// millisecond at most: a wait costs few sleeps, however long it is.
void poll(Fiber* f) {
    const unsigned polls = ++f->block->worker->polls;
    if (polls % 64 == 0) usleep(polls < 16 * 512 ? 20 * (1 + polls / 512) : 320);
    yield(f);
}

// The kernels' clock. One worker is the only one to set it, and needs no locked instruction in each
// step.
void advance(Run* r, u64 ns) {
    if (r->cfg->workers == 1) __atomic_store_n(&r->clock, load(&r->clock) + ns, __ATOMIC_RELAXED);
    else __atomic_fetch_add(&r->clock, ns, __ATOMIC_RELAXED);
}

void progress(Fiber* f);
void check_stores(Fiber* f);
void check_products(Fiber* f);

void step(Fiber* f) {
    Worker* w = f->block->worker;
    const EmuRun* cfg = w->run->cfg;
    w->stats.steps++;
    if (cfg->tick_ns != 0) advance(w->run, cfg->tick_ns);
    if (w->stats.steps > cfg->max_steps && !stopped(w->run)) {
        std::string s;
        append(s, "no end after %llu steps", cfg->max_steps);
        end_run(w->run, s, true);
    }
    if (stopped(w->run))
        for (;;) leave(f);
    Block* b = f->block;
    if (!b->bulks.empty() && ++b->ticks >= b->due) progress(f);
}

void wake(Block* b, unsigned index) {
    b->fibers[index].state = READY;
    b->ready.push_back(index);
}

// Threads that meet know what each of them knew: those of `mask` from `first` on.
void meet(Block* b, unsigned first, unsigned mask) {
    if (b->acquires + b->fences == 0) return;
    Known all = {};
    for (unsigned l = 0; l < 32; l++)
        if (mask >> l & 1) all.join(b->fibers[first + l].known);
    for (unsigned l = 0; l < 32; l++)
        if (mask >> l & 1) b->fibers[first + l].known = all;
}

// Whether all lanes have come that can: of those that were asked for, the ones that have not ended.
bool is_complete(const Block* b, const EmuLanes& lanes, unsigned warp) {
    if (lanes.mask == lanes.active) return true;
    if (b->done == 0 && b->fibers.size() % 32 == 0) return false;
    unsigned there = 0;
    for (unsigned l = 0; l < 32; l++) {
        const size_t t = warp * 32 + l;
        if (t < b->fibers.size() && b->fibers[t].state != DONE) there |= 1u << l;
    }
    return (lanes.mask & there) == lanes.active;
}

// Carries out collective `i`, for which nobody is missing any more. `but` is the lane that runs on
// by itself.
void carry_out(Block* b, size_t i, unsigned but) {
    std::unique_ptr<Gather> g = std::move(b->gathers[i]);
    b->gathers.erase(b->gathers.begin() + i);
    g->fn(&g->lanes, g->ctx);
    meet(b, g->warp * 32, g->lanes.active);
    for (unsigned l = 0; l < 32; l++)
        if ((g->lanes.active >> l & 1) && g->warp * 32 + l != but) wake(b, g->warp * 32 + l);
    b->spare.push_back(std::move(g));
}

// Carries out the collectives of a warp that wait for nobody, now that one of its lanes has ended.
void settle(Block* b, unsigned warp) {
    for (size_t i = 0; i < b->gathers.size();) {
        if (b->gathers[i]->warp != warp || !is_complete(b, b->gathers[i]->lanes, warp)) {
            i++;
            continue;
        }
        carry_out(b, i, EMU_ANY);
        i = 0;
    }
}

void fiber_main() {
    Fiber* f = self();
    Block* b = f->block;
    f->inside = false;
    b->launch->entry(b->launch->args);
    f->inside = true;
    check_stores(f);
    check_products(f);
    f->state = DONE;
    b->done++;
    if (b->at_sync > 0) {
        std::string s;
        append(s, "ends while %u threads of its block wait in __syncthreads @%u@", b->at_sync, b->sync_line);
        die(f, s);
    }
    settle(b, f->index / 32);
    leave(f);
    abort();  // nobody resumes a fiber that has ended
}

}  // namespace
