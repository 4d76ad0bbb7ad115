// A driver of CUDA whose devices do nothing, and an NVRTC whose kernels are empty: host code of devices runs where there are none.
// Memory, shared memory of other processes too, streams, events, captures and who owns what are as with a device; what kernels,
// copies and graphs would write is not written, so values mean nothing.
//
// A stream is busy for as long as the kernel of `LinkProbe::delay` says, and whoever waits for it or frees memory waits. Plain
// memory (not symmetric) reads as if its first bit had changed since it was written: tests ask whether anything ran. With
// TW_IDLE_VARIES no two reads are the same.
//
// Every call from outside is noted in TW_CALLS_DIR/<thread id>.all, if there is that file: the compiler's
// `-finstrument-functions` calls these two hooks. Kernels that are launched are noted by name in <thread id>.kernels.
#include <dlfcn.h>
#include <fcntl.h>
enum { MAX_GRAPHS = 4096, MAX_KEPT = 64 };

#define HOOK __attribute__((no_instrument_function, visibility("hidden"))) void
static __thread int depth;
HOOK note(const char* kind, const char* what) {
    const char* dir = getenv("TW_CALLS_DIR");
    char path[512];
    if (!dir || snprintf(path, sizeof path, "%s/%d.%s", dir, gettid(), kind) >= (int)sizeof path) return;
    int fd = open(path, O_WRONLY | O_APPEND);
    if (fd < 0) return;
    dprintf(fd, "%s\n", what);
    close(fd);
}
HOOK __cyg_profile_func_enter(void* function, void* site) {
    Dl_info found;
    (void)site;
    if (depth++) return;
    if (dladdr(function, &found) && found.dli_sname) note("all", found.dli_sname);
}
HOOK __cyg_profile_func_exit(void* function, void* site) { (void)function, (void)site, depth--; }

static u64 busy_until[MAX_DEVICES];
static void wait_until(u64 at) {
    while (now() < at) usleep(500);
}
static void wait_for_device(int d) { wait_until(busy_until[d]); }
static int state_of_devices(void) { return OK; }
static void tell_memory(Ptr at, size_t len, int d, int is_there) { (void)at, (void)len, (void)d, (void)is_there; }

int cuDeviceGetName(char* out, int len, int d) { return snprintf(out, len, "idle %d", d), OK; }
int cuDeviceGetAttribute(int* out, int what, int d) {
    (void)d;
    switch (what) {
        case 16: return *out = 132, OK;                // multiprocessors
        case 75: return *out = 9, OK;                  // compute capability
        case 76: case 128: return *out = 0, OK;        // its second number; fabric handles
        case 97: return *out = 232448, OK;             // shared memory of a block
        default: return *out = 1, OK;
    }
}

// Captures: a graph has no work, and what it keeps.
typedef struct {
    u64 id;
    int num;
    Kept* kept[MAX_KEPT];
} Graph;
static Graph* capturing[MAX_GRAPHS];
static u64 captures;

int cuGraphRetainUserObject(Graph* g, Kept* k, unsigned count, unsigned flags) {
    if (g->num == MAX_KEPT) return NO_MEMORY;
    enum { MOVE = 1 };
    ALONE k->count += flags & MOVE ? 0 : count;
    return g->kept[g->num++] = k, OK;
}
int cuGraphDestroy(Graph* g) {
    for (int i = 0; i < g->num; i++) cuUserObjectRelease(g->kept[i], 1);
    return free(g), OK;
}
int cuGraphGetNodes(Graph* g, void* nodes, size_t* num) { return (void)g, (void)nodes, *num = 1, OK; }
int cuGraphInstantiateWithFlags(void** out, Graph* g, u64 flags) { return (void)g, (void)flags, *out = malloc(8), OK; }
int cuGraphExecDestroy(void* exec) { return free(exec), OK; }
int cuGraphLaunch(void* exec, void* stream) { return (void)exec, (void)stream, OK; }

// Streams and events: until when they are busy, and the capture that they are part of.
typedef struct {
    void* context;
    u64 busy, capture, id;
} Stream;
typedef struct {
    u64 at, capture;
} Event;

static Stream* stream(Stream* s) {
    static __thread Stream legacy;
    if ((uintptr_t)s > 2) return s;
    return legacy.context = current, &legacy;
}
// The graph that a stream is captured into. The capture of another stream that it had joined may have ended.
static Graph* graph_of(Stream* s) {
    Graph* g;
    ALONE {
        g = capturing[s->capture % MAX_GRAPHS];
        if (!g || g->id != s->capture) s->capture = 0, g = NULL;
    }
    return g;
}
int cuStreamCreate(Stream** out, unsigned flags) {
    (void)flags;
    *out = calloc(1, sizeof **out);
    return (*out)->context = current, OK;
}
int cuStreamDestroy_v2(Stream* s) { return free(s), OK; }
int cuStreamGetId(Stream* s, u64* out) {
    static u64 ids;
    s = stream(s);
    if (graph_of(s)) return IN_CAPTURE;  // as the driver does, which ends the capture as well
    if (!s->id) ALONE s->id = ++ids;
    return *out = s->id, OK;
}
int cuStreamIsCapturing(Stream* s, int* out) { return *out = graph_of(stream(s)) != NULL, OK; }
int cuStreamGetCtx(Stream* s, void** out) { return *out = stream(s)->context, OK; }
int cuStreamQuery(Stream* s) { return graph_of(stream(s)) ? IN_CAPTURE : now() < stream(s)->busy ? NOT_READY : OK; }
int cuStreamSynchronize(Stream* s) { return wait_until(stream(s)->busy), OK; }
int cuStreamWaitEvent(Stream* s, Event* e, unsigned flags) {
    (void)flags;
    s = stream(s);
    if (e->capture) s->capture = e->capture;
    if (e->at > s->busy) s->busy = e->at;
    return OK;
}
int cuStreamGetCaptureInfo_v3(Stream* s, int* status, u64* id, Graph** graph, void* a, void* b, void* c) {
    (void)a, (void)b, (void)c;
    s = stream(s);
    *graph = graph_of(s);
    *status = *graph != NULL, *id = s->capture;
    return OK;
}
int cuStreamBeginCapture_v2(Stream* s, int mode) {
    (void)mode;
    Graph* g = calloc(1, sizeof *g);
    ALONE {
        s->capture = g->id = ++captures;
        capturing[g->id % MAX_GRAPHS] = g;
    }
    return OK;
}
int cuStreamEndCapture(Stream* s, Graph** out) {
    if (!graph_of(s)) return NO_CAPTURE;
    ALONE {
        *out = capturing[s->capture % MAX_GRAPHS];
        capturing[s->capture % MAX_GRAPHS] = NULL;
        s->capture = 0;
    }
    return OK;
}
int cuEventCreate(Event** out, unsigned flags) { return (void)flags, *out = calloc(1, sizeof **out), OK; }
int cuEventDestroy_v2(Event* e) { return free(e), OK; }
int cuEventRecord(Event* e, Stream* s) { return graph_of(stream(s)), *e = (Event){stream(s)->busy, stream(s)->capture}, OK; }
int cuEventQuery(Event* e) { return now() < e->at ? NOT_READY : OK; }
int cuEventElapsedTime_v2(float* ms, Event* a, Event* b) { return (void)a, (void)b, *ms = 1, OK; }

// Copies: those that wait are made.
int cuMemcpyDtoH_v2(void* to, Ptr from, size_t len) {
    static unsigned reads;
    unsigned change = 1;
    memcpy(to, (void*)from, len);
    if (getenv("TW_IDLE_VARIES")) ALONE change = ++reads;
    if (len && !by_symmetric_memory(from)) *(char*)to ^= change;
    return OK;
}
int cuMemsetD8Async(Ptr at, unsigned char byte, size_t len, void* s) { return (void)at, (void)byte, (void)len, (void)s, OK; }
int cuMemcpyAsync(Ptr to, Ptr from, size_t len, void* s) { return (void)to, (void)from, (void)len, (void)s, OK; }
int cuMemcpy2DAsync_v2(const void* what, void* s) { return (void)what, (void)s, OK; }

// Kernels: a function is its name.
int cuModuleLoadData(void** out, const void* image) { return (void)image, *out = malloc(8), OK; }
int cuModuleUnload(void* module) { return free(module), OK; }
int cuModuleGetFunction(char** out, void* module, const char* name) { return (void)module, *out = strdup(name), OK; }
int cuFuncLoad(void* f) { return (void)f, OK; }
int cuFuncSetAttribute(void* f, int what, int value) { return (void)f, (void)what, (void)value, OK; }
int cuFuncGetAttribute(int* out, int what, void* f) { return (void)what, (void)f, *out = 1024, OK; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, void* f, int threads, size_t shared) {
    return (void)f, (void)threads, (void)shared, *out = 2, OK;
}
int cuLaunchKernel(const char* name, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned shared,
                   Stream* s, void** args, void** extra) {
    (void)x, (void)y, (void)z, (void)a, (void)b, (void)c, (void)shared, (void)extra;
    s = stream(s);
    note("kernels", name);
    if (strcmp(name, "tw_link_delay") == 0 && !s->capture) {
        s->busy = now() + *(u64*)args[1];
        busy_until[device()] = s->busy;
    }
    return OK;
}
int cuLaunchKernelEx(const void* how, const char* name, void** args, void** extra) {
    (void)how, (void)args, (void)extra;
    return note("kernels", name), OK;
}
int cuTensorMapEncodeTiled(void* out) { return (void)out, OK; }
int cuGetErrorName(int code, const char** out) { return (void)code, *out = "IDLE", OK; }
int cuGetErrorString(int code, const char** out) { return (void)code, *out = "an idle driver says no", OK; }

// NVRTC: an ELF file of nothing but its header.
int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, OK; }
int nvrtcCreateProgram(void** out, const char* text, const char* name, int num, const char** headers, const char** names) {
    return (void)text, (void)name, (void)num, (void)headers, (void)names, *out = malloc(8), OK;
}
int nvrtcCompileProgram(void* p, int num, const char** options) { return (void)p, (void)num, (void)options, OK; }
int nvrtcGetCUBINSize(void* p, size_t* out) { return (void)p, *out = 64, OK; }
int nvrtcGetCUBIN(void* p, char* out) { return (void)p, memset(out, 0, 64), memcpy(out, "\x7f" "ELF\x02\x01", 6), OK; }
int nvrtcGetProgramLogSize(void* p, size_t* out) { return (void)p, *out = 1, OK; }
int nvrtcGetProgramLog(void* p, char* out) { return (void)p, *out = 0, OK; }
const char* nvrtcGetErrorString(int code) { return (void)code, "an idle compiler says no"; }
int nvrtcDestroyProgram(void** p) { return free(*p), *p = NULL, OK; }
