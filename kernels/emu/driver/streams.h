// The driver whose devices are emulated, second part: streams, events and graphs.
//
// A stream is a thread that does what is queued, in order. A graph is what streams were given while they were captured, with
// who waits for whom; its launch runs each of its streams on a thread of its own, as a device runs branches side by side: work
// that waits for other branches comes to its end. Before one piece of work in sixteen a stream stands still for a while, so
// that an edge that is missing between two streams shows.
//
// Where the process lacks memory for a device, all its devices have failed, as a context has behind
// a fault of a kernel: calls that queue work or wait for it return the code, and what is queued by
// then does nothing. A process under a limit meets it.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace {

// OK, or the code that calls return since a device has failed.
std::atomic<int> fault{OK};

// The first `new` that fails gets memory of ours, and the devices have failed. The next throws.
constexpr size_t SPARE = 16 << 20;
std::atomic<void*> spare{nullptr};
void lacks_memory() {
    fault = NO_MEMORY;
    void* s = spare.exchange(nullptr);
    if (!s) throw std::bad_alloc();
    munmap(s, SPARE);
}
__attribute__((constructor)) void keep_spare() {
    void* s = mmap(nullptr, SPARE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (s != MAP_FAILED) spare = s;
    std::set_new_handler(lacks_memory);
}

enum : int { IN_OTHER_CAPTURE = 905, NOT_JOINED = 904, CAPTURED_EVENT = 907 };
typedef std::function<void()> Work;

// A number that differs from thread to thread and from call to call.
u64 draw() {
    static std::atomic<u64> begun{1};
    static thread_local u64 state = 0;
    if (state == 0) state = begun.fetch_add(1) * 0x9e3779b97f4a7c15ull + now();
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return state * 2685821657736338717ull >> 16;
}
void stand_still() {
    if (draw() % 16 == 0) usleep(draw() % 300);
}

// What an event tells: how often it was recorded, and how many of these have come.
struct Told {
    std::mutex lock;
    std::condition_variable changed;
    u64 recorded = 0, done = 0, at_ns = 0;

    void come(u64 number) {
        std::lock_guard<std::mutex> g(lock);
        if (number > done) done = number, at_ns = now();
        changed.notify_all();
    }
    void wait(u64 number) {
        std::unique_lock<std::mutex> g(lock);
        changed.wait(g, [&] { return done >= number; });
    }
};

// A piece of captured work: on which of the graph's streams, and behind which others.
struct Node {
    Work work;
    unsigned lane;
    std::vector<size_t> behind;
};

struct Body {
    u64 id;
    std::vector<Node> nodes;
    std::vector<size_t> last;  // of each lane, counted from 1; 0: none
    std::vector<Kept*> kept;
    std::mutex running;        // launches of one graph follow each other
    ~Body() {
        for (Kept* k : kept) cuUserObjectRelease(k, 1);
    }
};
typedef std::shared_ptr<Body> Graph;

// What a graph's lanes know of each other in one launch.
struct Progress {
    std::mutex lock;
    std::condition_variable changed;
    std::vector<bool> done;
};

void run_lane(const Body& g, Progress& p, unsigned lane) {
    for (size_t i = 0; i < g.nodes.size(); i++) {
        const Node& n = g.nodes[i];
        if (n.lane != lane) continue;
        {
            std::unique_lock<std::mutex> hold(p.lock);
            p.changed.wait(hold, [&] {
                for (size_t b : n.behind)
                    if (!p.done[b]) return false;
                return true;
            });
        }
        stand_still();
        n.work();
        std::lock_guard<std::mutex> hold(p.lock);
        p.done[i] = true;
        p.changed.notify_all();
    }
}

void run_graph(const Graph& g) {
    std::lock_guard<std::mutex> alone(g->running);
    Progress p;
    p.done.assign(g->nodes.size(), false);
    std::vector<std::thread> others;
    try {
        for (unsigned lane = 1; lane < g->last.size(); lane++)
            others.emplace_back([&, lane] { run_lane(*g, p, lane); });
    } catch (const std::system_error&) {
        // No thread for a branch: nobody waits for it.
        fault = NO_MEMORY;
        std::lock_guard<std::mutex> hold(p.lock);
        p.done.assign(g->nodes.size(), true);
        p.changed.notify_all();
    }
    run_lane(*g, p, 0);
    for (std::thread& t : others) t.join();
}

struct Queue {
    int device;
    u64 id;
    std::mutex lock;
    std::condition_variable changed;
    std::deque<Work> work;
    u64 queued = 0, done = 0;
    bool ends = false;
    // The capture that it is part of, its lane there, and what its next work is behind.
    u64 capture_id = 0;
    unsigned lane = 0;
    std::vector<size_t> behind;
};
typedef std::shared_ptr<Queue> Stream;

// All streams that there are, or that have work. Never destroyed, as threads outlast `main`.
struct All {
    std::mutex lock;
    std::vector<Stream> streams;
    std::vector<Graph> capturing;
    u64 captures = 0, begun = 0;
    Stream legacy[MAX_DEVICES];
};
All& all() {
    static All* a = new All();
    return *a;
}

// What is queued on a stream that was destroyed is done, too.
void serve(Stream s) {
    for (;;) {
        Work next;
        {
            std::unique_lock<std::mutex> g(s->lock);
            s->changed.wait(g, [&] { return s->ends || !s->work.empty(); });
            if (s->work.empty()) break;
            next = std::move(s->work.front());
            s->work.pop_front();
        }
        stand_still();
        next();
        next = nullptr;
        std::lock_guard<std::mutex> g(s->lock);
        s->done++;
        s->changed.notify_all();
    }
    std::lock_guard<std::mutex> g(all().lock);
    std::vector<Stream>& there = all().streams;
    there.erase(std::remove(there.begin(), there.end(), s), there.end());
}

// Null if there is no thread for it.
Stream* begin_stream(int d) {
    Stream s = std::make_shared<Queue>();
    s->device = d;
    {
        std::lock_guard<std::mutex> g(all().lock);
        s->id = ++all().begun;
        all().streams.push_back(s);
    }
    try {
        std::thread(serve, s).detach();
    } catch (const std::system_error&) {
        std::lock_guard<std::mutex> g(all().lock);
        std::vector<Stream>& there = all().streams;
        there.erase(std::remove(there.begin(), there.end(), s), there.end());
        return nullptr;
    }
    return new Stream(s);
}

Stream& stream(Stream* s) {
    if ((uintptr_t)s > 2) return *s;
    const int d = device();
    All& a = all();
    {
        std::lock_guard<std::mutex> g(a.lock);
        if (a.legacy[d]) return a.legacy[d];
    }
    Stream* made = begin_stream(d);
    // Nothing is queued on a device that has failed.
    if (!made) fault = NO_MEMORY, made = new Stream(std::make_shared<Queue>());
    std::lock_guard<std::mutex> g(a.lock);
    if (!a.legacy[d]) a.legacy[d] = *made, a.legacy[d]->device = d;
    return a.legacy[d];
}

// The graph that a stream is captured into. The capture that it had joined may have ended on its first stream.
Graph graph_of(const Stream& s) {
    std::lock_guard<std::mutex> g(all().lock);
    for (const Graph& c : all().capturing)
        if (c->id == s->capture_id) return c;
    s->capture_id = 0;
    return nullptr;
}

void add_node(const Stream& s, const Graph& g, Work w) {
    if (g->last[s->lane] != 0) s->behind.push_back(g->last[s->lane] - 1);
    g->nodes.push_back({std::move(w), s->lane, s->behind});
    s->behind.clear();
    g->last[s->lane] = g->nodes.size();
}

int queue(Stream* raw, Work w) {
    Stream& s = stream(raw);
    if (fault != OK) return fault;
    if (Graph g = graph_of(s)) {
        std::lock_guard<std::mutex> hold(all().lock);
        return add_node(s, g, std::move(w)), OK;
    }
    std::lock_guard<std::mutex> hold(s->lock);
    s->work.push_back(std::move(w));
    s->queued++;
    s->changed.notify_all();
    return OK;
}

void drain(const Stream& s) {
    std::unique_lock<std::mutex> g(s->lock);
    const u64 until = s->queued;
    s->changed.wait(g, [&] { return s->done >= until; });
}

}  // namespace

static int state_of_devices(void) { return fault; }
static void wait_for_device(int d) {
    std::vector<Stream> there;
    {
        std::lock_guard<std::mutex> g(all().lock);
        there = all().streams;
    }
    for (const Stream& s : there)
        if (s->device == d) drain(s);
}

namespace {

struct Event {
    std::shared_ptr<Told> told = std::make_shared<Told>();
    u64 capture = 0;  // the capture that its last record is part of, and behind which of its nodes
    std::vector<size_t> behind;
};

// Whether what stream 0 of a capture is behind is behind all that the others did.
bool all_joined(const Body& g, const std::vector<size_t>& behind) {
    std::vector<bool> reached(g.nodes.size(), false);
    std::vector<size_t> open = behind;
    if (g.last[0] != 0) open.push_back(g.last[0] - 1);
    while (!open.empty()) {
        const size_t i = open.back();
        open.pop_back();
        if (reached[i]) continue;
        reached[i] = true;
        open.insert(open.end(), g.nodes[i].behind.begin(), g.nodes[i].behind.end());
    }
    for (bool r : reached)
        if (!r) return false;
    return true;
}

}  // namespace

extern "C" {

int cuStreamCreate(Stream** out, unsigned flags) {
    (void)flags;
    *out = begin_stream(device());
    return *out ? OK : NO_MEMORY;
}
int cuStreamDestroy_v2(Stream* s) {
    {
        std::lock_guard<std::mutex> g((*s)->lock);
        (*s)->ends = true;
        (*s)->changed.notify_all();
    }
    return delete s, OK;
}
// As the driver, which refuses a stream that is captured.
int cuStreamGetId(Stream* s, u64* out) { return graph_of(stream(s)) ? IN_CAPTURE : (*out = stream(s)->id, OK); }
int cuStreamIsCapturing(Stream* s, int* out) { return *out = graph_of(stream(s)) != nullptr, OK; }
int cuStreamGetCtx(Stream* s, void** out) { return *out = &used[stream(s)->device], OK; }
int cuStreamQuery(Stream* raw) {
    Stream& s = stream(raw);
    if (graph_of(s)) return IN_CAPTURE;
    std::lock_guard<std::mutex> g(s->lock);
    return s->done < s->queued ? (int)NOT_READY : fault.load();
}
int cuStreamSynchronize(Stream* raw) {
    Stream& s = stream(raw);
    if (graph_of(s)) return IN_CAPTURE;
    return drain(s), fault.load();
}

int cuEventCreate(Event** out, unsigned flags) { return (void)flags, *out = new Event(), OK; }
int cuEventDestroy_v2(Event* e) { return delete e, OK; }
int cuEventRecord(Event* e, Stream* raw) {
    Stream& s = stream(raw);
    if (Graph g = graph_of(s)) {
        std::lock_guard<std::mutex> hold(all().lock);
        e->capture = g->id;
        e->behind = s->behind;
        if (g->last[s->lane] != 0) e->behind.push_back(g->last[s->lane] - 1);
        return OK;
    }
    // What is not recorded is not waited for.
    if (fault != OK) return fault;
    e->capture = 0;
    std::shared_ptr<Told> t = e->told;
    u64 number;
    {
        std::lock_guard<std::mutex> g(t->lock);
        number = ++t->recorded;
    }
    const int code = queue(raw, [t, number] { t->come(number); });
    // Refused since the look above.
    if (code != OK) t->come(number);
    return code;
}
int cuEventQuery(Event* e) {
    if (e->capture) return CAPTURED_EVENT;
    std::lock_guard<std::mutex> g(e->told->lock);
    return e->told->done < e->told->recorded ? (int)NOT_READY : fault.load();
}
int cuEventElapsedTime_v2(float* ms, Event* a, Event* b) {
    if (cuEventQuery(a) != OK || cuEventQuery(b) != OK) return NOT_READY;
    return *ms = (float)((double)(b->told->at_ns - a->told->at_ns) / 1e6), OK;
}
int cuStreamWaitEvent(Stream* raw, Event* e, unsigned flags) {
    (void)flags;
    Stream& s = stream(raw);
    Graph mine = graph_of(s);
    if (e->capture) {
        std::lock_guard<std::mutex> hold(all().lock);
        for (const Graph& g : all().capturing) {
            if (g->id != e->capture) continue;
            if (mine && mine != g) return IN_OTHER_CAPTURE;
            if (!mine) {
                s->capture_id = g->id, s->lane = (unsigned)g->last.size(), s->behind.clear();
                g->last.push_back(0);
            }
            s->behind.insert(s->behind.end(), e->behind.begin(), e->behind.end());
            return OK;
        }
        return IN_OTHER_CAPTURE;
    }
    std::shared_ptr<Told> t = e->told;
    u64 number;
    {
        std::lock_guard<std::mutex> g(t->lock);
        number = t->recorded;
    }
    if (number == 0) return OK;
    if (mine) return IN_OTHER_CAPTURE;
    return queue(raw, [t, number] { t->wait(number); });
}

int cuStreamGetCaptureInfo_v3(Stream* raw, int* status, u64* id, Graph** graph, void* a, void* b, void* c) {
    (void)a, (void)b, (void)c;
    Stream& s = stream(raw);
    // What is kept is given to the body, which the caller names by the stream's graph.
    static thread_local Graph seen;
    seen = graph_of(s);
    return *status = seen != nullptr, *id = s->capture_id, *graph = &seen, OK;
}
int cuStreamBeginCapture_v2(Stream* raw, int mode) {
    (void)mode;
    Stream& s = stream(raw);
    if (graph_of(s)) return NO_VALUE;
    Graph g = std::make_shared<Body>();
    std::lock_guard<std::mutex> hold(all().lock);
    g->id = ++all().captures;
    g->last.push_back(0);
    s->capture_id = g->id, s->lane = 0, s->behind.clear();
    all().capturing.push_back(g);
    return OK;
}
int cuStreamEndCapture(Stream* raw, Graph** out) {
    Stream& s = stream(raw);
    Graph g = graph_of(s);
    *out = nullptr;
    if (!g) return NO_CAPTURE;
    if (s->lane != 0) return NO_CAPTURE;
    std::lock_guard<std::mutex> hold(all().lock);
    for (size_t i = 0; i < all().capturing.size(); i++)
        if (all().capturing[i] == g) all().capturing[i] = all().capturing.back(), all().capturing.pop_back();
    s->capture_id = 0;
    if (!all_joined(*g, s->behind)) return NOT_JOINED;
    return *out = new Graph(g), OK;
}
int cuGraphRetainUserObject(Graph* g, Kept* k, unsigned num, unsigned flags) {
    enum { MOVE = 1 };
    ALONE k->count += flags & MOVE ? 0 : num;
    return (*g)->kept.push_back(k), OK;
}
int cuGraphDestroy(Graph* g) { return delete g, OK; }
int cuGraphGetNodes(Graph* g, void* nodes, size_t* num) { return (void)nodes, *num = (*g)->nodes.size(), OK; }
int cuGraphInstantiateWithFlags(Graph** out, Graph* g, u64 flags) { return (void)flags, *out = new Graph(*g), OK; }
int cuGraphExecDestroy(Graph* exec) { return delete exec, OK; }
int cuGraphLaunch(Graph* exec, Stream* s) {
    Graph g = *exec;
    return queue(s, [g] { run_graph(g); });
}

}  // extern "C"
