// The driver whose devices are emulated, part between streams and kernels: what devices write to
// each other is counted, and one signal or one put is changed, so that tests see whether anybody
// notices.
//
// A *signal* is a word that a kernel stores by a wrapper (`emu_signal`) to symmetric memory of
// another device, or a flag: a queued copy of 8 bytes there. Words of aborts are none. Its *site*
// is the kernel and the function that it stands in, or the word that the flag goes to. Everything
// else that goes to another device is data: queued copies, bulk stores, and plain stores, of which
// the compiler tells if TW_EMU_WATCH is set (driver.cpp). What is attacked is named by device,
// launch, site, peer and number. A program finds the functions below by `dlsym`; without them
// nothing here does anything.

#include <atomic>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <tuple>

namespace {

// ---- Whose memory it is.

struct Owner {
    Ptr base, end;
    int device;
    ino_t file;
};
typedef std::vector<Owner> Owners;
std::atomic<const Owners*> owners_now{nullptr};

// Mappings have changed. Lists that somebody may read stay: tests make few.
void forget_owners() { owners_now = nullptr; }

const Owners& owners() {
    if (const Owners* o = owners_now) return *o;
    auto* made = new Owners();
    ALONE for (int i = 0; i < MAX_MEMORY; i++) {
        if (!maps[i].len) continue;
        int d = -1;
        for (int k = 0; k < MAX_MEMORY; k++)
            if (files[k].count && files[k].file == maps[i].file) d = files[k].device;
        made->push_back({maps[i].at, maps[i].at + maps[i].len, d, maps[i].file});
    }
    std::sort(made->begin(), made->end(), [](const Owner& a, const Owner& b) { return a.base < b.base; });
    owners_now = made;
    return *made;
}

const Owner* owner_of(Ptr at) {
    const Owners& all = owners();
    auto o = std::upper_bound(all.begin(), all.end(), at, [](Ptr a, const Owner& x) { return a < x.base; });
    return o != all.begin() && at < (o - 1)->end ? &*(o - 1) : nullptr;
}

// ---- What is known of the run.

enum Attack : int { NO_ATTACK, LOSE, TWICE, STALE, EARLY, DROP, SHIFT, RAISE_TWICE };
// For how long data stay behind an early flag, at most.
enum : u64 { WITHHELD_NS = 500000000 };
// For how long reads stay behind an early credit, in all; in two slices, since the peer may need
// what this device sends behind them. A quarter of it without another late write is the end, too.
std::atomic<u64> patience_ns{1000000000};

typedef std::tuple<int, int, std::string, int> Key;  // device, launch, site, peer
typedef std::tuple<int, int, int> Link;              // device, launch, peer
typedef std::tuple<int, int, u64, u64> Word;         // device, peer, bytes of the memory, place there
typedef std::tuple<int, std::string, size_t> Nth;    // launch, site, number

// Bytes that the attacked device has written, and what lay there before.
struct Put {
    Ptr to;
    std::vector<char> before;
    u64 piece;
    int owner;
    unsigned warp;  // of a kernel
};

struct Watched {
    std::mutex lock;
    int launch[MAX_DEVICES] = {};
    std::map<Key, std::vector<u64>> seen, good;  // values of signals, in this run, and in the one that was observed
    std::map<Word, std::vector<Nth>> stored, good_stored;         // the signals that each word got, in their order
    std::map<Link, std::vector<std::pair<Ptr, u64>>> wrote;
    std::map<std::pair<ino_t, u64>, std::string> site_of;  // who has written a word
    std::map<std::tuple<int, int, std::string>, u64> runs;
    std::vector<Put> puts;
    // The attack, and whether it has struck.
    Attack kind = NO_ATTACK;
    int device = 0, at_launch = 0, peer = 0;
    std::string site;
    size_t nth = 0;
    u64 by = 0;
    int hits = 0;
    // With which signal to the same word an early credit goes out.
    Word word;
    size_t before = ~(size_t)0;
    // Data behind an early flag: they come when the peer is through with the launch.
    std::vector<Put> late;
    u64 late_until = 0;
    // An early credit is out: once the peer has written, its device reads slowly until it has
    // written there again.
    std::atomic<bool> slow{false};
    u64 slow_until = 0, last_late = 0;
    std::set<Ptr> first_writes, late_writes;
    std::map<std::tuple<Ptr, int, std::string, u64>, u64> held_since;
    std::map<std::pair<int, int>, int> kernels, good_kernels;  // that ran behind a wait: of a device, in a launch
};
std::atomic<bool> watching{false}, keeps_data{false};
Watched& watched() {
    static Watched* w = new Watched();
    return *w;
}

// The piece of work that this thread does; of a kernel, how many of its name came before it in the
// launch.
thread_local u64 this_piece, this_run;
// Whether this stream has waited for others in this launch: what runs then may read what they have
// put.
thread_local int waited_in = -1;
thread_local std::string this_kernel;
void begin_piece() {
    static std::atomic<u64> pieces{0};
    if (watching) this_piece = ++pieces, this_kernel.clear();
}

bool is_credit(const std::string& site) {
    return site.find("tw_grant") != std::string::npos || site.find("tw_announce") != std::string::npos;
}

// ---- Data.

void note_write(int d, Ptr to, u64 len, unsigned warp = 0) {
    if (!watching || len == 0) return;
    const Owner* o = owner_of(to);
    if (!o || o->device < 0) return;
    Watched& w = watched();
    if (w.slow && d == w.peer && o->device == (w.by == 2 ? d : w.device)) {
        std::lock_guard<std::mutex> g(w.lock);
        // Whoever grants behind its reads grants what this kernel writes; at the second time it
        // writes over what was not read.
        const size_t dot = w.site.find(".");
        if (!is_credit(w.site) || this_kernel == w.site.substr(0, dot))
            if (!w.first_writes.insert(to).second) w.late_writes.insert(to), w.last_late = now();
    }
    if (o->device != d && keeps_data) {
        std::lock_guard<std::mutex> g(w.lock);
        // One behind the other are one.
        auto& all = w.wrote[{d, w.launch[d], o->device}];
        if (!all.empty() && all.back().first + all.back().second == to) all.back().second += len;
        else all.push_back({to, len});
    }
    if (w.kind != EARLY && w.kind != DROP && w.kind != SHIFT) return;
    std::lock_guard<std::mutex> g(w.lock);
    if (d != w.device || w.launch[d] != w.at_launch || w.hits || (o->device != w.peer && o->device != d)) return;
    w.puts.push_back({to, std::vector<char>((char*)to, (char*)to + len), this_piece, o->device, warp});
}

// What the signal that comes now publishes: what its warp has put to the peer in this kernel; of a
// kernel that only meets, or a queued flag, what was put there since the last one, or what the
// device has put to its own memory, for others to get. Empty for a credit.
std::vector<Put> published(const Watched& w, const std::string& site) {
    std::vector<Put> out;
    // Signals of `tw_signal` are the credits of a ring; what it passes on carries flags.
    if (is_credit(site) || site.compare(0, 9, "tw_signal") == 0) return out;
    const unsigned warp = emu_self ? emu_warp_number() : 0;
    for (const Put& p : w.puts)
        if (p.owner == w.peer && p.piece == this_piece && p.warp == warp) out.push_back(p);
    if (!out.empty() || site.compare(0, 5, "tw_ep") == 0 || site.compare(0, 13, "tw_collective") == 0) return out;
    for (const Put& p : w.puts)
        if (p.owner == w.peer) out.push_back(p);
    return out.empty() ? w.puts : out;
}

// Puts what lay there before in place of what was written, which is returned.
std::vector<Put> withdraw(const std::vector<Put>& puts) {
    std::vector<Put> out;
    for (const Put& p : puts) out.push_back({p.to, std::vector<char>((char*)p.to, (char*)p.to + p.before.size()), 0, 0, 0});
    for (size_t i = puts.size(); i-- > 0;) memcpy((void*)puts[i].to, puts[i].before.data(), puts[i].before.size());
    return out;
}

void lay(const std::vector<Put>& puts, u64 by) {
    for (const Put& p : puts) memcpy((void*)(p.to + by), p.before.data(), p.before.size());
}

// ---- Signals.

void store(Ptr at, u64 value, bool adds) {
    if (adds) __atomic_fetch_add((u64*)at, value, __ATOMIC_RELEASE);
    else __atomic_store_n((u64*)at, value, __ATOMIC_RELEASE);
}

void pause(u64 ns) { usleep((useconds_t)(ns / 1000)); }

// The value that the observed run had here, in launch `launch`; 0 without.
u64 good_value(const Watched& w, int launch) {
    const auto g = w.good.find({w.device, launch, w.site, w.peer});
    return g != w.good.end() && w.nth < g->second.size() ? g->second[w.nth] : 0;
}

// Carries the attack out at its signal.
void strike(Watched& w, Ptr at, u64 value, bool adds) {
    w.hits++;
    if (w.kind == LOSE) return;
    if (w.kind == STALE) return store(at, good_value(w, w.at_launch - 1), false);
    if (w.kind == TWICE) return store(at, value, adds), store(at, value, adds);
    const std::vector<Put> late = withdraw(published(w, w.site));
    w.puts.clear();
    if (w.kind == SHIFT) lay(late, w.by);
    store(at, value, adds);
    if (w.kind != EARLY) return;
    w.late = late, w.late_until = now() + WITHHELD_NS;
}

// A signal of device `d`. False if it was stored here, or is not to be stored.
bool note_signal(int d, const std::string& site, Ptr at, u64 value, bool adds) {
    const Owner* o = owner_of(at);
    if (!o || o->device < 0 || o->device == d) return true;
    Watched& w = watched();
    std::lock_guard<std::mutex> hold(w.lock);
    const int launch = w.launch[d], peer = o->device;
    auto& seen = w.seen[{d, launch, site, peer}];
    const size_t nth = seen.size();
    seen.push_back(value);
    w.site_of[{o->file, at - o->base}] = site;
    const Word word = {d, peer, o->end - o->base, at - o->base};
    auto& stored = w.stored[word];
    stored.push_back({launch, site, nth});
    const bool of_data = w.kind == DROP || w.kind == SHIFT || (w.kind == EARLY && !w.by);
    const bool site_here = w.kind != NO_ATTACK && d == w.device && peer == w.peer && site == w.site;
    // Which of the signals of a site has data differs from run to run: the first that has.
    const bool here = site_here && launch == w.at_launch && w.hits == 0 &&
                      (of_data ? !published(w, site).empty() : w.kind != EARLY && nth == w.nth);
    if (here) return strike(w, at, value, adds), false;
    store(at, value, adds);
    // A credit publishes nothing: it goes out with the one before it.
    if (w.kind == EARLY && w.by && word == w.word && stored.size() == w.before + 1) {
        w.hits++, w.slow = true, w.slow_until = 0;
        store(at, good_value(w, w.at_launch), false);
    }
    // What a peer writes behind a meeting is not yet too early.
    if (w.slow && w.by == 4 && d == w.device && peer == w.peer && site.compare(0, 8, "tw_enter") == 0)
        w.slow_until = 0, w.first_writes.clear(), w.late_writes.clear();
    // What was put is published, once.
    if (d == w.device && peer == w.peer && launch == w.at_launch && !w.puts.empty()) {
        const std::vector<Put> out = published(w, site);
        std::vector<Put> rest;
        for (Put& p : w.puts)
            if (std::none_of(out.begin(), out.end(), [&](const Put& o) { return o.to == p.to && o.piece == p.piece; }))
                rest.push_back(std::move(p));
        w.puts.swap(rest);
    }
    return false;
}

// True as long as device `d` has to wait before it reads what its early credit gave away; `since`:
// when that began.
bool reads_slowly(int d, u64 since) {
    Watched& w = watched();
    std::lock_guard<std::mutex> g(w.lock);
    // Until all of it is overwritten: what is read last may be what comes last.
    if (!w.late_writes.empty() && (w.late_writes.size() == w.first_writes.size() || now() > w.last_late + patience_ns / 4)) w.slow = false;
    if (!w.slow || d != w.device || w.first_writes.empty()) return false;
    // What the end of a launch grants is read by the next one.
    if (is_credit(w.site) && w.launch[d] < w.at_launch && w.site.find("tw_announce") == std::string::npos) return false;
    if (w.slow_until == 0) w.slow_until = now() + patience_ns;
    return now() < w.slow_until && now() < since + patience_ns / 2;
}

void read_slowly(int d) {
    if (!watching || !watched().slow) return;
    for (const u64 since = now(); reads_slowly(d, since);) pause(500000);
}

bool on_signal(const EmuSignal* s) {
    // Aborts are told whatever happens.
    if (!watching || !strcmp(s->function, "tw_fail")) return true;
    const std::string site = std::string(s->kernel) + "." + std::to_string(this_run) + " " + s->function;
    return note_signal((int)s->rank, site, s->addr, s->value, s->adds);
}

bool on_acquired(unsigned rank, unsigned long long at) {
    Watched& w = watched();
    // These read in the kernel that waits.
    const bool whole = this_kernel.compare(0, 5, "tw_ep") == 0 || this_kernel == "tw_collective";
    const bool reads = w.by != 3 || whole;
    const Owner* o = watching && w.slow && reads ? owner_of(at) : nullptr;
    if (!o || (int)rank != w.device) return false;
    u64 since;
    {
        std::lock_guard<std::mutex> g(w.lock);
        const auto by = w.site_of.find({o->file, at - o->base});
        if (by == w.site_of.end() || by->second == w.site) return false;
        // Of each word in each kernel: threads that wait for several words take turns here.
        since = w.held_since.try_emplace({at, w.launch[rank], this_kernel, this_run}, now()).first->second;
    }
    return reads_slowly((int)rank, since);
}

void on_write(unsigned rank, unsigned warp, unsigned long long at, unsigned long long len) { note_write((int)rank, at, len, warp); }

const EmuWatch watch = {on_signal, on_acquired, on_write};

// ---- Queued copies.

void copy_watched(int d, Ptr to, Ptr from, size_t len) {
    Watched& w = watched();
    const Owner *there = owner_of(to), *here = owner_of(from);
    if (len == 8 && to % 8 == 0 && from % 8 == 0 && there && there->device != d) {
        char site[64];
        snprintf(site, sizeof site, "flag +0x%llx", (unsigned long long)(to - there->base));
        const u64 value = __atomic_load_n((u64*)from, __ATOMIC_ACQUIRE);
        if (note_signal(d, site, to, value, false)) store(to, value, false);
        return;
    }
    if (here && w.by != 3 && (!there || there->device == d)) read_slowly(d);
    note_write(d, to, len);
    memcpy((void*)to, (void*)from, len);
}

// Kernels of the protocol itself read nothing that a credit gives away.
bool is_of_protocol(const std::string& kernel) {
    for (const char* k : {"tw_signal", "tw_bump_epoch", "tw_wait", "tw_barrier", "tw_advance", "tw_enter", "tw_wait_peers", "tw_poison",
                          "tw_fail_if", "tw_collective", "tw_collective_leave"})
        if (kernel == k) return true;
    return kernel.compare(0, 5, "tw_ep") == 0;
}

// How often this kernel runs: those that raise totals are increments, which an attack doubles.
int times_to_run(int d, const std::string& kernel) {
    if (!watching) return 1;
    begin_piece();
    this_kernel = kernel;
    Watched& w = watched();
    std::unique_lock<std::mutex> hold(w.lock);
    const bool reads = !is_of_protocol(kernel) && waited_in == w.launch[d];
    const int before = reads ? w.kernels[{d, w.launch[d]}]++ : 0;
    // Or the last kernel of the launch alone: what the peer needs may be sent behind the others.
    const auto of = w.good_kernels.find({d, w.launch[d]});
    if (reads && (w.by != 3 || (of != w.good_kernels.end() && before + 1 == of->second))) {
        hold.unlock();
        read_slowly(d);
        hold.lock();
    }
    this_run = w.runs[{d, w.launch[d], kernel}]++;
    if (kernel.compare(0, 7, "tw_wait") == 0 || kernel.compare(0, 5, "tw_ep") == 0 || (kernel == "tw_enter" && this_run > 0))
        waited_in = w.launch[d];
    if (kernel != "tw_signal" && kernel != "tw_bump_epoch" && kernel != "tw_advance" && kernel != "tw_enter") return 1;
    auto& seen = w.seen[{d, w.launch[d], "run " + kernel, d}];
    seen.push_back(0);
    const bool here = w.kind == RAISE_TWICE && d == w.device && w.launch[d] == w.at_launch && "run " + kernel == w.site &&
                      seen.size() == w.nth + 1;
    w.hits += here;
    return here ? 2 : 1;
}

}  // namespace

extern "C" {

// Begins a run: nothing is attacked and nothing is known of it. With `keeps`, what goes to others
// is kept for `tw_emu_report`. What was seen of the run before is what attacks compare with from
// now on, if `observed`.
void tw_emu_watch(int keeps, int observed) {
    Watched& w = watched();
    std::lock_guard<std::mutex> g(w.lock);
    if (observed) w.good.swap(w.seen), w.good_kernels.swap(w.kernels), w.good_stored.swap(w.stored);
    w.seen.clear(), w.wrote.clear(), w.puts.clear(), w.late.clear(), w.first_writes.clear();
    w.kernels.clear(), w.site_of.clear(), w.runs.clear(), w.stored.clear();
    w.kind = NO_ATTACK, w.hits = 0, w.slow = false, w.late_writes.clear(), w.held_since.clear();
    memset(w.launch, 0, sizeof w.launch);
    emu_watch = &watch;
    keeps_data = keeps != 0, watching = true;
}

// What device `d` does from now on belongs to this launch.
void tw_emu_launch(int d, int launch) {
    Watched& w = watched();
    std::unique_lock<std::mutex> g(w.lock);
    w.launch[d] = launch;
    // A credit that went out in the launch before: what it gives away is written and read in
    // this one.
    if (d == w.device && launch == w.at_launch && w.slow) w.slow_until = 0, w.first_writes.clear(), w.late_writes.clear();
    // No launch writes where data of the one before are still to come.
    while (d == w.device && launch > w.at_launch && !w.late.empty() && now() < w.late_until) {
        g.unlock();
        pause(500000);
        g.lock();
    }
    if (d == w.device && launch > w.at_launch) lay(w.late, 0), w.late.clear();
}

// The host of device `d` is about to read results.
void tw_emu_read(int d) {
    for (int slices = 0; slices < 16; slices++) read_slowly(d);
    Watched& w = watched();
    std::lock_guard<std::mutex> g(w.lock);
    if (d == w.peer && w.launch[d] >= w.at_launch) lay(w.late, 0), w.late.clear();
}

// Whether a signal to the same word comes before the one that is attacked, so that it can go out
// early.
int tw_emu_has_before(void) {
    Watched& w = watched();
    std::lock_guard<std::mutex> g(w.lock);
    return w.before != ~(size_t)0;
}

// Attacks one signal, or what it publishes, or one increment. `by`: how far data is shifted; of an
// early signal, 1 if it is a credit, 2 one for memory of the peer itself, which others read, 3 as
// 1, and only the last kernel reads slowly, 4 as 1, and anew behind each meeting.
void tw_emu_attack(int kind, int d, int launch, const char* site, int peer, unsigned nth, u64 by) {
    Watched& w = watched();
    std::lock_guard<std::mutex> g(w.lock);
    w.kind = (Attack)kind, w.device = d, w.at_launch = launch, w.site = site, w.peer = peer, w.nth = nth, w.by = by;
    w.before = ~(size_t)0;
    for (const auto& word : w.good_stored) {
        if (std::get<0>(word.first) != d || std::get<1>(word.first) != peer) continue;
        const auto at = std::find(word.second.begin(), word.second.end(), Nth(launch, site, nth));
        if (at != word.second.end() && at != word.second.begin()) w.word = word.first, w.before = at - word.second.begin() - 1;
    }
}

// For how long a device reads slowly behind an early credit.
void tw_emu_patience(u64 ms) { patience_ns = ms * 1000000; }

// How often the attack has struck.
int tw_emu_hits(void) {
    Watched& w = watched();
    std::lock_guard<std::mutex> g(w.lock);
    return w.hits;
}

// Lines `signal DEVICE LAUNCH PEER NUMBER SITE`, and `wrote DEVICE LAUNCH PEER BYTES
// DIFFERENT-BYTES`; freed by the caller.
char* tw_emu_report(void) {
    Watched& w = watched();
    std::lock_guard<std::mutex> g(w.lock);
    std::ostringstream out;
    for (const auto& s : w.seen)
        out << "signal " << std::get<0>(s.first) << ' ' << std::get<1>(s.first) << ' ' << std::get<3>(s.first) << ' '
            << s.second.size() << ' ' << std::get<2>(s.first) << '\n';
    for (auto& l : w.wrote) {
        auto all = l.second;
        std::sort(all.begin(), all.end());
        u64 bytes = 0, different = 0;
        Ptr end = 0;
        for (const auto& p : all) {
            bytes += p.second;
            if (p.first + p.second > end) different += p.first + p.second - std::max(p.first, end), end = p.first + p.second;
        }
        out << "wrote " << std::get<0>(l.first) << ' ' << std::get<1>(l.first) << ' ' << std::get<2>(l.first) << ' ' << bytes
            << ' ' << different << '\n';
    }
    return strdup(out.str().c_str());
}

// Plain stores of kernels, as the compiler tells of them.
void __asan_store1_noabort(u64 at);
void __asan_store2_noabort(u64 at);
void __asan_store4_noabort(u64 at);
void __asan_store8_noabort(u64 at);
void __asan_store16_noabort(u64 at);
void __asan_storeN_noabort(u64 at, u64 len) {
    // Threads of kernels alone; what they write is looked up only if somebody asks.
    if (watching && emu_self != nullptr) note_write((int)emu_rank(), at, len, emu_warp_number());
}
void __asan_store1_noabort(u64 at) { __asan_storeN_noabort(at, 1); }
void __asan_store2_noabort(u64 at) { __asan_storeN_noabort(at, 2); }
void __asan_store4_noabort(u64 at) { __asan_storeN_noabort(at, 4); }
void __asan_store8_noabort(u64 at) { __asan_storeN_noabort(at, 8); }
void __asan_store16_noabort(u64 at) { __asan_storeN_noabort(at, 16); }
void __asan_handle_no_return(void) {}

}  // extern "C"
