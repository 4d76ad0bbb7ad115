// The emulator's runtime, second part: barriers in shared memory, and bulk copies, which complete late.
//
// A copy reads its source some steps of its block after it was issued, and writes some steps after that: at once,
// or thousands of steps later, as the seed decides. Waits bring about what they promise and nothing more. What
// bulk copies see of a block's shared memory is kept beside it: it follows at proxy fences.

namespace {

Module* module_of(Block* b);
void check(Fiber* f, const char* op, const void* p, unsigned bytes);

// Steps until a copy goes on. Of the last kind are those that only a wait brings about.
u64 delay(Worker* w) {
    constexpr unsigned most[5] = {1, 32, 512, 8192, 1u << 30};
    const unsigned kind = random(w) % 5;
    return random(w) % most[kind];
}

bool has_views(Block* b) {
    return b->worker->run->cfg->no_views == 0;
}

View& view_of(Block* b) {
    View& v = b->view;
    const size_t len = module_of(b)->shared_len;
    if (v.now.empty()) v.now.assign(len, (char)0xff), v.before = v.now, v.fence.assign(len / 16 + 1, 0);
    return v;
}

// What copies of a thread that knows of `fence` see of the 16 bytes from byte `at` on.
const char* seen(const View& v, size_t at, u64 fence) {
    return (v.fence[at / 16] <= fence ? v.now : v.before).data() + at;
}

// Behind `fence` copies see what is in `shared`.
void show(View& v, const char* shared, size_t len, u64 fence) {
    if (memcmp(v.now.data(), shared, len) == 0) return;
    for (size_t at = 0; at < len; at += 16) {
        const size_t n = len - at < 16 ? len - at : 16;
        if (memcmp(&v.now[at], shared + at, n) == 0) continue;
        memcpy(&v.before[at], &v.now[at], n);
        memcpy(&v.now[at], shared + at, n);
        v.fence[at / 16] = fence;
    }
}

bool in_shared(Block* b, const void* p, unsigned bytes) {
    Module* m = module_of(b);
    const u64 a = (u64)p, shared = (u64)m->shared;
    return a >= shared && a + bytes <= shared + m->shared_len;
}

// In a barrier's word: arrivals of a phase, those that are missing, its parity, bytes that are missing.
unsigned parity_of(u64 word) {
    return word >> 16 & 1;
}

// The word at `bar` of this block's shared memory, which is its own or a peer's: `word` is where it
// lies now.
void check_word(Fiber* f, const u64* bar, const u64* word) {
    if (!in_shared(f->block, bar, 8) || (u64)bar % 8 != 0) die(f, "a barrier that is not in shared memory");
    // Zero, or what shared memory begins as.
    if (*word == 0 || *word == ~0ull) die(f, "a barrier that was not made");
}
void check_barrier(Fiber* f, const u64* bar) {
    check_word(f, bar, bar);
}

void come_to(Fiber* f, u64* bar, u64* word, unsigned arrivals, long long bytes) {
    check_word(f, bar, word);
    u64 count = *word & 0xff, missing = *word >> 8 & 0xff, parity = parity_of(*word);
    if (arrivals > missing) die(f, "more arrivals at a barrier than its phase has");
    const long long tx = ((long long)*word >> 17) + bytes;
    missing -= arrivals;
    if (missing == 0 && tx == 0) missing = count, parity ^= 1;
    *word = (u64)tx << 17 | parity << 16 | missing << 8 | count;
}
void come(Fiber* f, u64* bar, unsigned arrivals, long long bytes) {
    come_to(f, bar, bar, arrivals, bytes);
}

Told* told_at(Block* b, u64* bar) {
    for (Told& t : b->told)
        if (t.bar == bar) return &t;
    b->told.push_back({bar, {}});
    return &b->told.back();
}

void tell_piece(Block* b, const Bulk& c, const char* to, unsigned bytes) {
    if (emu_watch != nullptr && emu_watch->write != nullptr) emu_watch->write(b->rank, b->number << 8 | c.thread / 32, (u64)to, bytes);
}

// Boxes of tensors (hopper.h).
void gather(Block* b, Bulk* c);
void scatter(Block* b, const Bulk& c);

void read_source(Block* b, Bulk* c) {
    if (!c->read && c->from == nullptr) gather(b, c);
    else if (!c->read) c->data.assign(c->from, c->from + c->bytes);
    c->read = true;
}

// Sums of floats alone are modelled.
void add_floats(char* to, const char* from, unsigned bytes) {
    for (unsigned i = 0; i < bytes; i += 4) {
        float sum, part;
        memcpy(&sum, to + i, 4);
        memcpy(&part, from + i, 4);
        sum += part;
        memcpy(to + i, &sum, 4);
    }
}

// A store, which has read its source.
void write_global(Block* b, const Bulk& c) {
    if (c.to == nullptr) return scatter(b, c);
    tell_piece(b, c, c.to, c.bytes);
    if (c.box.adds) add_floats(c.to, c.data.data(), c.bytes);
    else memcpy(c.to, c.data.data(), c.bytes);
}

void write_target(Fiber* f, Bulk* c) {
    if (c->bar == nullptr) return write_global(f->block, *c);
    memcpy(c->to, c->data.data(), c->bytes);
    // What a copy has written, all copies see.
    if (has_views(f->block)) {
        View& v = view_of(f->block);
        const size_t at = c->to - module_of(f->block)->shared;
        memcpy(&v.now[at], c->to, c->bytes);
        memcpy(&v.before[at], c->to, c->bytes);
        for (unsigned i = 0; i < c->bytes / 16; i++) v.fence[at / 16 + i] = 0;
    }
    f->block->unseen.push_back({c->bar, c->parity});
    come(f, c->bar, 0, -(long long)c->bytes);
}

void drop(Block* b, size_t i) {
    if (i + 1 < b->bulks.size()) b->bulks[i] = std::move(b->bulks.back());
    b->bulks.pop_back();
}

// What is due of the block's copies. Its shared memory is in place: `f` is running.
void progress(Fiber* f) {
    Block* b = f->block;
    b->due = ~0ull;
    for (size_t i = 0; i < b->bulks.size();) {
        Bulk* c = &b->bulks[i];
        if (b->ticks >= c->read_at) read_source(b, c);
        if (c->read && b->ticks >= c->write_at) {
            write_target(f, c);
            drop(b, i);
            continue;
        }
        const u64 next = c->read ? c->write_at : c->read_at;
        if (next < b->due) b->due = next;
        i++;
    }
}

// Shared memory that a bulk copy is of.
void check_copy(Fiber* f, const void* shared, unsigned bytes) {
    if ((u64)shared % 16 != 0 || bytes % 16 != 0) die(f, "a bulk copy not in units of 16 bytes");
    if (!in_shared(f->block, shared, bytes)) die(f, "a bulk copy of shared memory that is not there");
    if (f->known.acquired > f->known.fenced)
        die(f, "a bulk copy behind an acquire, without fence.proxy.async between");
}

// What a copy needs beside what it copies; where it goes on.
void begin_copy(Fiber* f, Block* at, Bulk* c) {
    Worker* w = f->block->worker;
    c->thread = f->index, c->group = f->groups;
    c->read_at = at->ticks + delay(w);
    c->write_at = c->read_at + delay(w);
}

// A copy of this block that was checked.
void issue_checked(Fiber* f, Worker* w, Block* b, Bulk c) {
    begin_copy(f, b, &c);
    const bool other = random(w) % 2 == 0;
    if (other && c.bar != nullptr) {
        // Nobody may look there until it has come.
        memset(c.to, 0xa7, c.bytes);
    } else if (other && !has_views(b)) {
        read_source(b, &c);
    } else if (other) {
        // As early as can be, and only what fences have told of.
        const size_t at = c.from - module_of(b)->shared;
        for (unsigned i = 0; i < c.bytes; i += 16) {
            const char* unit = seen(view_of(b), at + i, f->known.fence);
            c.data.insert(c.data.end(), unit, unit + 16);
        }
        c.read = true;
    }
    b->bulks.push_back(std::move(c));
    progress(f);
}

void issue(Fiber* f, const char* op, Bulk c, const void* shared, const void* global) {
    Block* b = f->block;
    Worker* w = b->worker;
    check_copy(f, shared, c.bytes);
    if ((u64)global % 16 != 0) die(f, "a bulk copy not in units of 16 bytes");
    // The beginning was checked: the end must be there, too.
    if (c.bytes > 16) check(f, op, (const char*)global + c.bytes - 16, 16);
    issue_checked(f, w, b, std::move(c));
}


// One of the thread's stores, of all its groups but the latest.
bool is_of(const Fiber* f, const Bulk& c, unsigned groups) {
    return c.bar == nullptr && c.thread == f->index && c.group + groups < f->groups;
}

// A wait for them has to wait.
bool waits(const Fiber* f, unsigned groups, bool written) {
    for (const Bulk& c : f->block->bulks)
        if (is_of(f, c, groups) && (written || !c.read)) return true;
    return false;
}

// What a wait for all groups but the latest promises.
void complete(Fiber* f, unsigned groups, bool written) {
    Block* b = f->block;
    if (f->groups > groups && f->read_groups < f->groups - groups) f->read_groups = f->groups - groups;
    for (size_t i = 0; i < b->bulks.size();) {
        Bulk* c = &b->bulks[i];
        const bool mine = is_of(f, *c, groups);
        if (mine) read_source(b, c);
        if (mine && written) {
            write_target(f, c);
            drop(b, i);
        } else {
            i++;
        }
    }
}

// A thread that ends: nobody else can wait for its groups, and shared memory ends with the block.
void check_stores(Fiber* f) {
    if (f->stored_groups > f->read_groups) die(f, "ends with a bulk store whose shared memory may not have been read");
}

// A block that ends: a load would write memory of another block.
void check_loads(Block* b) {
    bool loads = !b->unseen.empty();
    for (const Bulk& c : b->bulks) loads |= c.bar != nullptr;
    if (!loads) return;
    std::string s;
    append(s, "rank %u %s block %u: ends with a bulk load that nobody has waited for", b->rank, b->launch->kernel,
           b->number);
    end_run(b->worker->run, s, false);
}

}  // namespace

extern "C" {

void emu_mbar_init(u64* bar, unsigned count) {
    Fiber* f = self();
    Inside inside(f);
    if (!in_shared(f->block, bar, 8) || (u64)bar % 8 != 0) die(f, "a barrier that is not in shared memory");
    if (count == 0 || count > 255) die(f, "a barrier of no threads, or of more than 255");
    *bar = count << 8 | count;
    told_at(f->block, bar)->known = {};
    f->block->made.push_back(bar);
}

void emu_mbar_arrive(u64* bar, unsigned bytes) {
    Fiber* f = self();
    Inside inside(f);
    if (bytes % 16 != 0 || bytes >= 1u << 20) die(f, "bytes not in units of 16, or 2^20 and more");
    told_at(f->block, bar)->known.join(f->known);
    come(f, bar, 1, bytes);
}

bool emu_mbar_done(u64* bar, unsigned parity) {
    Fiber* f = self();
    Inside inside(f);
    Block* b = f->block;
    check_barrier(f, bar);
    if (parity > 1) die(f, "a wait for a parity that is not 0 or 1");
    const bool done = parity_of(*bar) != parity;
    if (done) f->known.join(told_at(f->block, bar)->known);
    for (size_t i = 0; done && i < b->unseen.size();) {
        if (b->unseen[i].bar != bar || b->unseen[i].parity != parity) {
            i++;
            continue;
        }
        b->unseen[i] = b->unseen.back();
        b->unseen.pop_back();
    }
    // Others may bring what is missing.
    if (!done) yield(f);
    // A wait takes no longer than it must: what is waited for comes soon.
    for (size_t i = 0; !done && i < b->bulks.size(); i++) {
        Bulk* c = &b->bulks[i];
        if (c->bar != bar) continue;
        if (c->read_at > b->ticks) c->read_at = b->ticks + (c->read_at - b->ticks) / 2;
        if (c->write_at > b->ticks) c->write_at = b->ticks + (c->write_at - b->ticks) / 2;
        b->due = 0;
    }
    return done;
}

void emu_bulk_load(void* shared, const void* global, unsigned bytes, u64* bar) {
    emu_point("bulk.load", global, 16);
    Fiber* f = self();
    Inside inside(f);
    check_barrier(f, bar);
    for (u64* made : f->block->made)
        if (made == bar) die(f, "a bulk load to a barrier that no fence has made known");
    issue(f, "bulk.load", {(char*)shared, (const char*)global, bytes, 0, 0, 0, 0, bar, parity_of(*bar), false, {}, {}}, shared,
          global);
}

void emu_bulk_store(void* global, const void* shared, unsigned bytes) {
    emu_point("bulk.store", global, 16);
    Fiber* f = self();
    Inside inside(f);
    f->stored_groups = f->groups + 1;
    issue(f, "bulk.store", {(char*)global, (const char*)shared, bytes, 0, 0, 0, 0, nullptr, 0, false, {}, {}}, shared, global);
}

void emu_bulk_reduce_add(void* global, const void* shared, unsigned bytes) {
    emu_point("bulk.reduce.add", global, 16);
    Fiber* f = self();
    Inside inside(f);
    f->stored_groups = f->groups + 1;
    Bulk c = {(char*)global, (const char*)shared, bytes, 0, 0, 0, 0, nullptr, 0, false, {}, {}};
    c.box.adds = true;
    issue(f, "bulk.reduce.add", c, shared, global);
}

void emu_bulk_commit() {
    self()->groups++;
}

void emu_bulk_wait(unsigned groups, bool written) {
    Fiber* f = self();
    Inside inside(f);
    if (waits(f, groups, written)) {
        f->op = written ? "bulk.wait_group" : "bulk.wait_group.read";
        f->at = nullptr;
        // What others do while this thread waits, they do before the copies.
        for (u64 turns = random(f->block->worker) % 6; turns > 0; turns--) {
            yield(f);
            step(f);
        }
    }
    complete(f, groups, written);
}

void emu_proxy_fence(EmuFence what) {
    Fiber* f = self();
    Inside inside(f);
    Block* b = f->block;
    Module* m = module_of(b);
    b->made.clear();
    if (what == EMU_BARRIERS || m->shared_len == 0) return;
    f->known.fence = ++b->fences;
    if (has_views(b)) show(view_of(b), m->shared, m->shared_len, b->fences);
    if (what == EMU_ALL) f->known.fenced = f->known.acquired;
}

void emu_acquired() {
    Fiber* f = self();
    f->known.acquired = ++f->block->acquires;
    emu_ordered();
}

void emu_ordered() {
    Fiber* f = self();
    f->known.fence = f->block->fences;
}

}  // extern "C"
