// The emulator's runtime, third part: blocks on OS threads, launches in streams, and the functions
// that kernels and the harness call.

namespace {

// ---- Blocks.

Module* module_of(Block* b) {
    return &b->worker->modules[b->module];
}

extern "C" void* __tls_get_addr(unsigned long* index);

int find_module(Worker* w, const EmuLaunch* l) {
    const u64 entry = (u64)l->entry;
    for (size_t i = 0; i < w->modules.size(); i++)
        if (entry >= w->modules[i].lo && entry < w->modules[i].hi) return (int)i;
    struct Search {
        u64 entry;
        Module found;
    } search = {entry, {0, 0, {0, 0}, 0, nullptr}};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* ctx) {
            Search* s = (Search*)ctx;
            Module m = {~0ull, 0, {info->dlpi_tls_modid, 0}, 0, nullptr};
            for (int i = 0; i < info->dlpi_phnum; i++) {
                const auto& h = info->dlpi_phdr[i];
                if (h.p_type == PT_TLS) m.shared_len = h.p_memsz;
                if (h.p_type != PT_LOAD) continue;
                const u64 at = info->dlpi_addr + h.p_vaddr;
                if (at < m.lo) m.lo = at;
                if (at + h.p_memsz > m.hi) m.hi = at + h.p_memsz;
            }
            if (s->entry < m.lo || s->entry >= m.hi) return 0;
            s->found = m;
            return 1;
        },
        &search);
    // This is the worker's thread, where they stay.
    Module& m = search.found;
    if (m.shared_len > 0) m.shared = (char*)__tls_get_addr(m.tls);
    w->modules.push_back(m);
    w->loaded.push_back(nullptr);
    return (int)w->modules.size() - 1;
}

// Where a block's dynamic memory ends, what nobody may change behind it, and where the library's ends: offsets in its variables.
struct Used {
    size_t end, guard, capacity;
};
Used used_of(Block* b, const char* at) {
    constexpr size_t GUARD = 4096;
    unsigned capacity;
    const char* dynamic = (const char*)b->launch->smem_of(&capacity);
    if (capacity == 0) return {0, 0, 0};
    const size_t begin = dynamic - at, end = begin + b->launch->smem, last = begin + capacity;
    return {end, last - end < GUARD ? last - end : GUARD, last};
}

// What a block finds in its shared memory. Not zeros: what a kernel reads before it writes must
// show.
void fill_shared(Module* m, char* at, Used u) {
    memset(at, 0xff, u.end);
    memset(at + u.end, 0xa5, u.guard);
    memset(at + u.capacity, 0xff, m->shared_len - u.capacity);
}

// Puts the block's shared memory where its code looks for it.
void load_shared(Block* b) {
    Module* m = module_of(b);
    Block** loaded = &b->worker->loaded[b->module];
    if (m->shared_len == 0 || *loaded == b) return;
    char* at = m->shared;
    // Between what a launch has of the dynamic memory, with its guard, and what lies behind all of it there is nothing to keep.
    const auto copy = [m](char* to, const char* from, Used u) {
        memcpy(to, from, u.end + u.guard);
        memcpy(to + u.capacity, from + u.capacity, m->shared_len - u.capacity);
    };
    if (*loaded != nullptr) {
        (*loaded)->shared.resize(m->shared_len);
        copy((*loaded)->shared.data(), at, used_of(*loaded, at));
    }
    const Used u = used_of(b, at);
    if (b->started) {
        copy(at, b->shared.data(), u);
    } else {
        fill_shared(m, at, u);
    }
    *loaded = b;
}

// Where the shared memory of a block lies that is not in its place: another one of its cluster
// runs. `at` is that place.
char* image_of(Block* b, const char* at) {
    Module* m = module_of(b);
    if (!b->started) {
        b->shared.resize(m->shared_len);
        fill_shared(m, b->shared.data(), used_of(b, at));
        b->started = true;
    }
    return b->shared.data();
}

// Who comes to a barrier and who waits at it must go together, to the end.
void check_barriers(Block* b) {
    for (unsigned i = 0; i < 16; i++) {
        if (b->barriers[i].come == 0) continue;
        std::string s;
        append(s, "rank %u %s block %u: ends with %u of %u threads at barrier %u", b->rank, b->launch->kernel, b->number,
               b->barriers[i].come, b->barriers[i].threads, i);
        return end_run(b->worker->run, s, false);
    }
}

void check_shared(Block* b) {
    const char* at = module_of(b)->shared;
    const Used u = used_of(b, at);
    for (size_t i = 0; i < u.guard; i++) {
        if (at[u.end + i] == (char)0xa5) continue;
        std::string s;
        append(s, "rank %u %s block %u: wrote byte %zu of the dynamic shared memory, which has %u", b->rank,
               b->launch->kernel, b->number, b->launch->smem + i, b->launch->smem);
        return end_run(b->worker->run, s, false);
    }
}

// Stacks that no run uses: mapping them anew would take longer than most runs.
struct Pool {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    std::vector<char*> stacks;
};
Pool& pool() {
    static Pool* p = new Pool();
    return *p;
}

// A process may have 65530 mappings. A page that mprotect takes away cuts one in two; the guard of Linux 6.13 does not. Without
// it the stacks behind the first ones have none: many tests at once need tens of thousands.
void guard(char* page) {
    constexpr int GUARD_INSTALL = 102;
    static unsigned cut;
    if (madvise(page, PAGE, GUARD_INSTALL) == 0) return;
    if (__atomic_fetch_add(&cut, 1, __ATOMIC_RELAXED) < 16000) mprotect(page, PAGE, PROT_NONE);
}

// So many stacks for the worker: from the pool, and new ones. False if the system refuses.
bool stock(Worker* w, size_t num) {
    if (w->stacks.size() >= num) return true;
    // No more than that: runs at the same time would map more and more.
    pthread_mutex_lock(&pool().lock);
    while (w->stacks.size() < num && !pool().stacks.empty()) {
        w->stacks.push_back(pool().stacks.back());
        pool().stacks.pop_back();
    }
    pthread_mutex_unlock(&pool().lock);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    while (w->stacks.size() < num) {
        char* s = (char*)mmap(nullptr, PAGE + STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (s == MAP_FAILED) return false;
        guard(s);
        w->stacks.push_back(s + PAGE);
    }
    return true;
}

char* take_stack(Worker* w) {
    char* s = w->stacks.back();
    w->stacks.pop_back();
    return s;
}

EmuDim unflatten(unsigned i, const unsigned* n) {
    return {i % n[0], i / n[0] % n[1], i / n[0] / n[1]};
}

void begin(Worker* w, unsigned stream, const EmuLaunch* l, unsigned number, Cluster* cluster) {
    Block* b = w->spare.empty() ? new Block() : w->spare.back();
    if (!w->spare.empty()) w->spare.pop_back();
    const unsigned n = l->block[0] * l->block[1] * l->block[2];
    b->worker = w, b->launch = l, b->stream = stream, b->number = number;
    b->rank = w->run->cfg->streams[stream].rank;
    b->module = find_module(w, l);
    b->started = false;
    b->done = b->at_sync = b->votes = 0;
    for (Barrier& bar : b->barriers) bar = {};
    b->cluster = cluster, b->cluster_rank = (unsigned)cluster->blocks.size();
    cluster->blocks.push_back(b);
    cluster->threads += n, cluster->left++;
    b->products.assign((n + 31) / 32, {});
    b->bulks.clear(), b->unseen.clear(), b->made.clear(), b->maps.clear(), b->told.clear(), b->view.now.clear();
    b->ticks = b->due = b->acquires = b->fences = 0;
    b->fibers.resize(n), b->contexts.resize(n);
    b->ready.clear();
    b->drawn_of = 0;
    b->gathers.clear();
    for (unsigned i = 0; i < n; i++) {
        Fiber* f = &b->fibers[i];
        f->tid = unflatten(i, l->block);
        f->bid = unflatten(number, l->grid);
        f->bdim = {l->block[0], l->block[1], l->block[2]};
        f->gdim = {l->grid[0], l->grid[1], l->grid[2]};
        f->lane = i % 32;
        f->block = b, f->index = i, f->state = READY, f->inside = true;
        f->op = nullptr, f->at = f->before = nullptr;
        f->copies.clear();
        f->groups = f->stored_groups = f->read_groups = 0;
        f->known = {};
        f->stack = take_stack(w);
        prepare(f);
        b->ready.push_back(i);
    }
    w->live.push_back(b);
}

void finish(Worker* w, Block* b) {
    Run* r = w->run;
    check_shared(b);
    check_barriers(b);
    check_loads(b);
    check_registers(b);
    b->cluster->blocks[b->cluster_rank] = nullptr;
    if (--b->cluster->left == 0) delete b->cluster;
    w->loaded[b->module] = nullptr;
    for (Fiber& f : b->fibers) w->stacks.push_back(f.stack);
    for (size_t i = 0; i < w->live.size(); i++)
        if (w->live[i] == b) w->live[i] = w->live.back(), w->live.pop_back();
    w->spare.push_back(b);
    w->current = nullptr;
    pthread_mutex_lock(&r->lock);
    Stream* s = &r->streams[b->stream];
    s->live--;
    s->done++;
    // What nobody has waited for is written by the end of the kernel, not before.
    for (Bulk& c : b->bulks)
        if (c.bar == nullptr) s->late.push_back(std::move(c));
    if (s->done == b->launch->grid[0] * b->launch->grid[1] * b->launch->grid[2]) {
        for (const Bulk& c : s->late) write_global(b, c);
        *s = {s->launch + 1, 0, 0, 0, {}};
        if (s->launch == r->cfg->streams[b->stream].len) r->open--;
    }
    __atomic_fetch_add(&r->version, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&r->lock);
}

// Starts the blocks that may start here.
void admit(Worker* w) {
    Run* r = w->run;
    const unsigned version = __atomic_load_n(&r->version, __ATOMIC_ACQUIRE);
    if (w->seen == version) return;
    w->seen = version;
    bool is_short = false;
    pthread_mutex_lock(&r->lock);
    for (unsigned i = 0; i < r->streams.size() && !is_short; i++) {
        const EmuStream* e = &r->cfg->streams[i];
        Stream* s = &r->streams[i];
        if (s->launch == e->len || (e->worker != EMU_ANY && e->worker % r->cfg->workers != w->id)) continue;
        const EmuLaunch* l = &e->launches[s->launch];
        const unsigned total = l->grid[0] * l->grid[1] * l->grid[2];
        // A share for each worker, so that the first to come does not take all.
        const unsigned share = e->worker == EMU_ANY ? (r->cfg->resident - 1) / r->cfg->workers + 1 : r->cfg->resident;
        // Blocks of a cluster live together, however few may.
        const unsigned size = l->cluster == 0 ? 1 : l->cluster;
        for (unsigned k = 0; k < share && s->next < total && (s->live == 0 || s->live + size <= r->cfg->resident); k += size) {
            is_short = !stock(w, (size_t)size * l->block[0] * l->block[1] * l->block[2]);
            if (is_short) break;
            Cluster* cluster = new Cluster();
            for (unsigned j = 0; j < size; j++) {
                s->live++;
                begin(w, i, l, s->next++, cluster);
            }
        }
    }
    pthread_mutex_unlock(&r->lock);
    if (is_short) end_run(r, EMU_NO_MEMORY, false);
}

// ---- Workers.

Block* choose(Worker* w) {
    // Another block costs a copy of its shared memory: stay longer where there is much.
    if (w->current != nullptr && w->stay > 0 && !w->current->ready.empty()) {
        w->stay--;
        return w->current;
    }
    // Now and then a stream stands still for a while: fair turns would hide who does not wait.
    if (w->frozen == 0 && random(w) % 512 == 0) {
        w->victim = w->live[random(w) % w->live.size()]->stream;
        w->frozen = random(w) % 1024;
    }
    if (w->frozen > 0) w->frozen--;
    for (int tries = 0; tries < 4; tries++) {
        w->current = w->live[random(w) % w->live.size()];
        if (w->frozen == 0 || w->current->stream != w->victim) break;
    }
    w->stay = 4 + (unsigned)(module_of(w->current)->shared_len / 512);
    return w->current;
}

// Now and then a warp stands still, long enough for others to go once round all that they share:
// fair turns would hide who does not wait for it. Place `k` of those that are ready, or another.
size_t pick(Worker* w, Block* b, size_t k) {
    if (w->still == 0 && random(w) % 4096 == 0) {
        w->still_warp = (unsigned)(random(w) % (b->fibers.size() / 32 + 1));
        w->still = (unsigned)(random(w) % (1u << 17));
    }
    if (w->still == 0) return k;
    w->still--;
    for (int tries = 0; tries < 16 && b->ready[k] / 32 == w->still_warp; tries++) k = random(w) % b->ready.size();
    return k;
}

// Draws the next of those that are ready now, and has the processor load what a change to it reads:
// with hundreds of threads, each on a stack of its own, that would be waited for.
void draw_ahead(Worker* w, Block* b) {
    b->drawn_of = (unsigned)b->ready.size();
    if (b->drawn_of == 0) return;
    b->drawn = below(w, b->drawn_of);
    const Fiber* f = &b->fibers[b->ready[b->drawn]];
    // The registers that a change pops, and the frames of the runtime's functions above them.
    const char* top = stack_of(b->contexts[b->ready[b->drawn]]);
    for (unsigned line = 0; line < 3; line++) __builtin_prefetch(top + line * 64);
    __builtin_prefetch(&f->state);
    __builtin_prefetch(&f->known);
}

// A place among those that are ready, each as likely: the one that was drawn ahead stands for those
// that were there then.
size_t place(Worker* w, Block* b) {
    const unsigned k = below(w, (unsigned)b->ready.size());
    return k < b->drawn_of ? b->drawn : k;
}

// The fiber whose turn is next; the shared memory of its block is in its place.
Fiber* next_fiber(Worker* w) {
    Block* b = choose(w);
    load_shared(b);
    b->started = true;
    size_t k = place(w, b);
    if (w->run->cfg->warp_pauses != 0) k = pick(w, b, k);
    Fiber* f = &b->fibers[b->ready[k]];
    b->ready[k] = b->ready.back();
    b->ready.pop_back();
    draw_ahead(w, b);
    w->stats.switches++;
    w->stats.trace = (w->stats.trace ^ (b->rank << 20 ^ b->number << 10 ^ f->index)) * 1099511628211ull;
    return f;
}

// Whether fibers may follow each other without the worker's loop between: it begins and ends blocks
// and the run, and gives way to other workers.
bool goes_on(const Worker* w) {
    const Run* r = w->run;
    const Block* b = w->current;
    return !stopped(r) && b->done < b->fibers.size() && !b->ready.empty() && (r->cfg->workers == 1 || r->cfg->tick_ns == 0) &&
           w->seen == __atomic_load_n(&r->version, __ATOMIC_ACQUIRE);
}

// Runs fibers until one of them leaves something to do.
void turn(Worker* w) {
    Fiber* f = next_fiber(w);
    emu_self = f;
    change(&w->context, context_of(f));
    emu_self = nullptr;
    Block* b = w->current;
    if (stopped(w->run)) return;
    if (b->done == b->fibers.size()) {
        finish(w, b);
    } else if (b->ready.empty()) {
        end_run(w->run, "deadlock: each thread of a block waits for another" + places(w->run, b), false);
    }
}

void* work(void* ctx) {
    Worker* w = (Worker*)ctx;
    Run* r = w->run;
    std::vector<char> alternate(64 << 10);
    stack_t stack = {}, old;
    stack.ss_sp = alternate.data();
    stack.ss_size = alternate.size();
    sigaltstack(&stack, &old);
    for (unsigned i = 0; !stopped(r); i++) {
        admit(w);
        if (__atomic_load_n(&r->open, __ATOMIC_ACQUIRE) == 0) break;
        // Peers that this one waits for may need its processor. By the real clock whoever waits
        // sleeps (`poll`).
        const unsigned often = r->cfg->tick_ns != 0 && r->cfg->workers > 1 ? 32 : 0;
        if (w->live.empty() || (often != 0 && i % often == 0)) sched_yield();
        if (!w->live.empty()) turn(w);
    }
    pthread_mutex_lock(&r->lock);
    if (r->list)
        for (Block* b : w->live)
            if (r->message.size() < 4096) r->message += places(r, b);
    EmuStats* s = &r->cfg->stats;
    s->steps += w->stats.steps, s->switches += w->stats.switches, s->trace ^= w->stats.trace;
    r->active--;
    pthread_cond_broadcast(&r->ended);
    pthread_mutex_unlock(&r->lock);
    for (Block* b : w->live) {
        for (Fiber& f : b->fibers) w->stacks.push_back(f.stack);
        if (--b->cluster->left == 0) delete b->cluster;
        delete b;
    }
    for (Block* b : w->spare) delete b;
    pthread_mutex_lock(&pool().lock);
    pool().stacks.insert(pool().stacks.end(), w->stacks.begin(), w->stacks.end());
    pthread_mutex_unlock(&pool().lock);
    sigaltstack(&old, nullptr);
    return nullptr;
}

// ---- Signals: a kernel that touches what it may not, or that never gives way.

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGUSR2};
struct sigaction before[4];

// Not a kernel's: as if our handler were not there.
void pass_on(int number, siginfo_t* info, void* context) {
    int i = 0;
    while (SIGNALS[i] != number) i++;
    if (before[i].sa_flags & SA_SIGINFO) before[i].sa_sigaction(number, info, context);
    else if (number != SIGUSR2) sigaction(number, &before[i], nullptr);
}

void on_signal(int number, siginfo_t* info, void* context) {
    Fiber* f = self();
    if (f == nullptr) return pass_on(number, info, context);
    if (number == SIGUSR2 && f->inside) return;
    std::string s;
    const u64 at = (u64)info->si_addr;
    if (number == SIGUSR2) s = "runs on without a memory operation or a meeting";
    else if (number == SIGFPE) s = "divides by zero";
    else if (at + PAGE >= (u64)f->stack && at < (u64)f->stack) s = "needs more stack than there is";
    else s = "touches memory that is not there: " + name_of(f->block->worker->run, at);
#if defined(__x86_64__)
    Dl_info symbol;
    const u64 pc = ((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
    if (dladdr((void*)pc, &symbol) && symbol.dli_sname != nullptr)
        append(s, " (in %s+0x%llx)", symbol.dli_sname, pc - (u64)symbol.dli_saddr);
#endif
    die(f, s);
}

void install() {
    struct sigaction act = {};
    act.sa_sigaction = on_signal;
    // NODEFER: the handler leaves the fiber for good and does not return.
    act.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &act, &before[i]);
}

// By the clock of `Run::ended`, which no one sets.
timespec clock_in(u64 ns) {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    const u64 all = t.tv_sec * 1000000000ull + t.tv_nsec + ns;
    return {(time_t)(all / 1000000000ull), (long)(all % 1000000000ull)};
}

// Waits for the workers; ends a run that takes too long.
void watch(Run* r, std::vector<Worker>& workers) {
    timespec until = clock_in(r->cfg->deadline_ns);
    pthread_mutex_lock(&r->lock);
    while (r->active > 0) {
        const int late = pthread_cond_timedwait(&r->ended, &r->lock, &until);
        if (late != ETIMEDOUT || r->active == 0) continue;
        pthread_mutex_unlock(&r->lock);
        if (!stopped(r)) {
            end_run(r, "the run is not over at its deadline", true);
        } else {
            // Who has not stopped by now is in a loop that calls nothing.
            for (Worker& w : workers) pthread_kill(w.thread, SIGUSR2);
        }
        until = clock_in(200000000);
        pthread_mutex_lock(&r->lock);
    }
    pthread_mutex_unlock(&r->lock);
}

void check(Fiber* f, const char* op, const void* p, unsigned bytes) {
    const Run* r = f->block->worker->run;
    const u64 a = (u64)p;
    std::string s;
    if (a % bytes != 0) {
        append(s, "%s of %u bytes at an address that is no multiple: ", op, bytes);
        die(f, s + name_of(r, a));
    }
    const EmuRegion *first = r->cfg->regions, *last = first + r->cfg->num_regions;
    const EmuRegion* g = std::upper_bound(first, last, a, [](u64 v, const EmuRegion& x) { return v < x.base; }) - 1;
    if (g >= first && a < g->base + g->len) {
        if (g->rank == EMU_ANY || g->rank == f->block->rank) return;
        append(s, "%s through a mapping of rank %u: ", op, g->rank);
        die(f, s + name_of(r, a));
    }
    Module* m = module_of(f->block);
    const u64 shared = (u64)m->shared, stack = (u64)f->stack;
    if (a >= shared && a < shared + m->shared_len) return;
    if (a >= m->lo && a < m->hi) return;
    if (a >= stack && a < stack + STACK) return;
    append(s, "%s outside of all buffers: ", op);
    die(f, s + name_of(r, a));
}

void copy(const Copy& c) {
    memcpy(c.dst, c.src, c.bytes);
    memset(c.dst + c.bytes, 0, c.zeros);
}

}  // namespace

// ---- What kernels call.

extern "C" {

void emu_point(const char* op, const void* p, unsigned bytes) {
    Fiber* f = self();
    Inside inside(f);
    Worker* w = f->block->worker;
    const EmuRun* cfg = w->run->cfg;
    // A load of a word that was just loaded, by the real clock: a poll. Waits look at two words in
    // turn, or at one.
    const bool polls = cfg->tick_ns == 0 && p != nullptr && (p == f->at || p == f->before) && strncmp(op, "ld.", 3) == 0;
    f->op = op;
    if (f->at != p) f->before = f->at, f->at = p;
    if (p != nullptr) check(f, op, p, bytes);
    if (polls) {
        poll(f);
    } else {
        w->polls = 0;
        if (random(w) % 1000 < cfg->yield_permille) yield(f);
    }
    step(f);
    if (cfg->hook == nullptr) return;
    const EmuEvent e = {op, f->block->launch->kernel, (u64)p, f->block->rank, f->block->number, f->index, 0};
    if (!cfg->hook(cfg->hook_ctx, &e)) die(f, "the hook ends the run");
}

const EmuWatch* emu_watch;

void emu_site(const char* function, unsigned line) {
    Fiber* f = self();
    f->site = function, f->site_line = line;
}

bool emu_signal(const void* p, u64 value, bool adds) {
    if (emu_watch == nullptr || emu_watch->signal == nullptr) return true;
    Fiber* f = self();
    Inside inside(f);
    const EmuSignal s = {f->block->launch->kernel, f->site, (u64)p, value, f->block->rank, f->site_line, adds};
    return emu_watch->signal(&s);
}

unsigned emu_rank() {
    return self()->block->rank;
}
unsigned emu_warp_number() {
    const Fiber* f = self();
    return f->block->number << 8 | f->index / 32;
}

void emu_acquired_at(const void* p) {
    emu_acquired();
    if (emu_watch == nullptr || emu_watch->acquired == nullptr) return;
    Fiber* f = self();
    Inside inside(f);
    while (emu_watch->acquired(f->block->rank, (u64)p)) {
        sched_yield();
        yield(f);
        step(f);
    }
}

unsigned emu_sync(unsigned line, bool vote) {
    Fiber* f = self();
    Inside inside(f);
    Block* b = f->block;
    step(f);
    std::string s;
    if (b->done > 0) {
        append(s, "comes to __syncthreads @%u@, but %u threads of its block have ended", line, b->done);
        die(f, s);
    }
    if (b->at_sync > 0 && b->sync_line != line) {
        append(s, "comes to __syncthreads @%u@, but other threads wait in that @%u@", line, b->sync_line);
        die(f, s);
    }
    b->sync_line = line;
    b->votes += vote;
    if (++b->at_sync < b->fibers.size()) {
        f->state = SYNC;
        f->line = line;
        leave(f);
        return b->voted;
    }
    if (b->acquires + b->fences > 0) {
        Known all = {};
        for (const Fiber& other : b->fibers) all.join(other.known);
        for (Fiber& other : b->fibers) other.known = all;
    }
    // Nobody can overwrite the result before all have read it: the next meeting needs all.
    b->voted = b->votes;
    b->at_sync = b->votes = 0;
    for (Fiber& other : b->fibers)
        if (other.state == SYNC) wake(b, other.index);
    return b->voted;
}

void emu_bar(unsigned id, unsigned threads, bool wait, unsigned line) {
    Fiber* f = self();
    Inside inside(f);
    Block* b = f->block;
    step(f);
    std::string s;
    if (id == 0 || id > 15 || threads == 0 || threads % 32 != 0 || threads > b->fibers.size()) {
        append(s, "comes to barrier %u of %u threads @%u@", id, threads, line);
        die(f, s);
    }
    Barrier* bar = &b->barriers[id];
    if (bar->come > 0 && bar->threads != threads) {
        append(s, "comes to barrier %u of %u threads @%u@, where others wait for %u", id, threads, line, bar->threads);
        die(f, s);
    }
    bar->threads = threads;
    bar->known.join(f->known);
    if (++bar->come < threads) {
        if (!wait) return;
        f->state = NAMED;
        f->barrier = id, f->line = line;
        leave(f);
        return;
    }
    f->known = bar->known;
    for (Fiber& other : b->fibers) {
        if (other.state != NAMED || other.barrier != id) continue;
        other.known.join(bar->known);
        wake(b, other.index);
    }
    *bar = {};
}

void emu_warp(unsigned mask, const char* op, unsigned line, const void* in, void* out, EmuWarpFn fn, const void* ctx) {
    Fiber* f = self();
    Inside inside(f);
    Block* b = f->block;
    step(f);
    const unsigned warp = f->index / 32;
    std::string s;
    if (!(mask >> f->lane & 1)) {
        append(s, "%s @%u@ of lanes %08x, without its own", op, line, mask);
        die(f, s);
    }
    size_t i = 0;
    while (i < b->gathers.size() && !(b->gathers[i]->warp == warp && b->gathers[i]->lanes.mask == mask)) i++;
    if (i == b->gathers.size()) {
        if (b->spare.empty()) b->spare.emplace_back(new Gather());
        *b->spare.back() = {warp, op, fn, ctx, {mask, 0, {}, {}}};
        b->gathers.push_back(std::move(b->spare.back()));
        b->spare.pop_back();
    }
    Gather* g = b->gathers[i].get();
    if (g->fn != fn || (g->op != op && strcmp(g->op, op) != 0)) {
        append(s, "comes to %s @%u@, but other lanes of %08x wait in %s", op, line, mask, g->op);
        die(f, s);
    }
    g->lanes.active |= 1u << f->lane;
    g->lanes.in[f->lane] = in;
    g->lanes.out[f->lane] = out;
    f->op = op, f->line = line, f->mask = mask;
    if (is_complete(b, g->lanes, warp)) return carry_out(b, i, f->index);
    f->state = WARP;
    leave(f);
}

void emu_copy_async(void* dst, const void* src, unsigned bytes, unsigned zeros) {
    // The whole copy is aligned, also where only its beginning is read.
    emu_point("cp.async", bytes == 0 ? nullptr : src, bytes + zeros);
    Fiber* f = self();
    Inside inside(f);
    const Copy c = {(char*)dst, src, bytes, zeros, f->groups};
    if (random(f->block->worker) % 2 == 0) copy(c);
    else f->copies.push_back(c);
}

void emu_copy_commit() {
    self()->groups++;
}

void emu_copy_wait(unsigned groups) {
    Fiber* f = self();
    Inside inside(f);
    std::vector<Copy> rest;
    for (const Copy& c : f->copies) {
        if (c.group + groups < f->groups) copy(c);
        else rest.push_back(c);
    }
    f->copies.swap(rest);
}

void emu_sleep(unsigned ns) {
    Fiber* f = self();
    Inside inside(f);
    Run* r = f->block->worker->run;
    f->op = "nanosleep";
    if (r->cfg->tick_ns != 0) {
        advance(r, ns);
        f->at = nullptr;
        yield(f);
    } else {
        poll(f);
    }
    step(f);
}

u64 emu_now() {
    Fiber* f = self();
    Inside inside(f);
    step(f);
    const Run* r = f->block->worker->run;
    return r->cfg->tick_ns == 0 ? real_ns() : load(&r->clock);
}

void emu_fail(const char* what) {
    die(self(), what);
}

// ---- What the harness calls.

// Sizes of the structures above, for the harness's mirror of them.
void emu_abi(unsigned* sizes) {
    const unsigned all[] = {sizeof(EmuEvent), sizeof(EmuRegion), sizeof(EmuLaunch), sizeof(EmuStream), sizeof(EmuRun)};
    memcpy(sizes, all, sizeof all);
}

// `num` pieces of `len` bytes (whole pages), each followed by `stride - len` bytes that cannot be
// touched: new memory, or the files `fds`. Null if the system refuses.
void* emu_map(const int* fds, unsigned num, u64 len, u64 stride) {
    const int nothing = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char* base = (char*)mmap(nullptr, num * stride + PAGE, PROT_NONE, nothing, -1, 0);
    if (base == MAP_FAILED) return nullptr;
    base += PAGE;
    for (unsigned i = 0; i < num; i++) {
        const int flags = fds == nullptr ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED : MAP_SHARED | MAP_FIXED;
        const int fd = fds == nullptr ? -1 : fds[i];
        if (mmap(base + i * stride, len, PROT_READ | PROT_WRITE, flags, fd, 0) == MAP_FAILED) return nullptr;
    }
    return base;
}

void emu_unmap(void* base, unsigned num, u64 stride) {
    munmap((char*)base - PAGE, num * stride + PAGE);
}

int emu_memory(u64 len) {
    const int fd = memfd_create("tw-emu", MFD_CLOEXEC);
    return fd >= 0 && ftruncate(fd, (off_t)len) == 0 ? fd : -1;
}

void emu_close(int fd) {
    close(fd);
}

// Runs all streams to their ends: on threads of its own, or, with one worker and nobody who watches, on this one. True if
// nothing was wrong.
static bool run_all(EmuRun* cfg, bool here) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, install);
    Run r = {};
    r.cfg = cfg;
    pthread_mutex_init(&r.lock, nullptr);
    pthread_condattr_t by_clock;
    pthread_condattr_init(&by_clock);
    pthread_condattr_setclock(&by_clock, CLOCK_MONOTONIC);
    pthread_cond_init(&r.ended, &by_clock);
    pthread_condattr_destroy(&by_clock);
    r.streams.resize(cfg->num_streams);
    for (unsigned i = 0; i < cfg->num_streams; i++) r.open += cfg->streams[i].len > 0;
    r.version = 1;
    r.clock = 1000000;
    r.active = cfg->workers;
    std::vector<Worker> workers(cfg->workers);
    for (unsigned i = 0; i < cfg->workers; i++) {
        workers[i].run = &r;
        workers[i].id = i;
        workers[i].rng = (cfg->seed * 2 + 1) * 0x9e3779b97f4a7c15ull + i * 0x2545f4914f6cdd1dull;
        if (!here && pthread_create(&workers[i].thread, nullptr, work, &workers[i]) != 0) abort();
    }
    if (here) work(&workers[0]);
    else watch(&r, workers);
    for (Worker& w : workers)
        if (!here) pthread_join(w.thread, nullptr);
    snprintf(cfg->message, cfg->message_len, "%s", r.message.c_str());
    cfg->stats.now_ns = r.clock;
    return !r.failed;
}
bool emu_run(EmuRun* cfg) {
    return run_all(cfg, false);
}
bool emu_run_here(EmuRun* cfg) {
    return cfg->workers == 1 && run_all(cfg, true);
}

}  // extern "C"
