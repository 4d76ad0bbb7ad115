// Preloaded: cuMulticastCreate fails, and says so in the file that TW_MULTICAST_LOG names. And calls of the
// driver that allocate, load or wait for the device are noted in the file of the thread that makes
// them, if there is one: TW_CALLS_DIR/<thread id>. The launch of an operation makes none.
// It also makes a machine look worse than it is, to see what is said of that:
//   TW_DRIVER_VERSION=12000      the driver is for CUDA 12.0
//   TW_COMPUTE_CAPABILITY=75     its devices are of sm_75
//   TW_SHARED_BYTES=101376       their blocks have so much shared memory
//   TW_NO_PEERS=217              devices do not reach each other: mapping a peer's memory fails so
//   TW_FAIL=cuMemCreate=2,...    calls of these fail so: sharing memory or making it
//   TW_CALLS_DIR/<thread id>.memory  there is no memory behind as many allocations of the thread as it says
// However a function is looked up: by the linker (cuMulticastCreate only), by dlsym, or by cuGetProcAddress.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void note(const char* path, int flags, const char* name) {
    int fd = path ? open(path, O_WRONLY | O_APPEND | flags, 0600) : -1;
    if (fd < 0) return;
    char line[80];
    int len = snprintf(line, sizeof line, "%s\n", name);
    if (write(fd, line, len) < 0) abort();
    close(fd);
}

// Loaded: without this line a log without calls would mean nothing.
__attribute__((constructor)) static void loaded(void) { note(getenv("TW_MULTICAST_LOG"), O_CREAT, "loaded"); }

int cuMulticastCreate(void* handle, const void* prop) {
    (void)handle;
    (void)prop;
    note(getenv("TW_MULTICAST_LOG"), O_CREAT, "cuMulticastCreate");
    return 801;  // CUDA_ERROR_NOT_SUPPORTED
}

static void called(const char* name) {
    const char* dir = getenv("TW_CALLS_DIR");
    char path[512];
    if (!dir || snprintf(path, sizeof path, "%s/%d", dir, gettid()) >= (int)sizeof path) return;
    note(path, 0, name);
}

// Each has a function of its own that counts and calls the driver's. None takes a float, and none more than
// eight words: what a function does not take is not read.
#define COUNTED(X)                                                                                             \
    X(cuMemAlloc) X(cuMemAllocPitch_v2) X(cuMemAllocManaged) X(cuMemAllocHost_v2)             \
    X(cuMemHostAlloc) X(cuMemHostRegister_v2) X(cuMemAllocAsync) X(cuMemAllocFromPoolAsync)                    \
    X(cuMemAddressReserve) X(cuMemFree_v2) X(cuMemFreeHost) X(cuMemFreeAsync)    \
    X(cuMemHostUnregister) X(cuMemUnmap) X(cuMemRelease) X(cuMemAddressFree) X(cuCtxSynchronize)               \
    X(cuCtxSynchronize_v2) X(cuStreamSynchronize) X(cuStreamSynchronize_ptsz) X(cuEventSynchronize)            \
    X(cuMemcpy) X(cuMemcpyDtoH_v2) X(cuMemcpyHtoD_v2) X(cuMemcpyDtoD_v2) X(cuMemcpyPeer) X(cuMemcpy2D_v2)      \
    X(cuMemcpy2DUnaligned_v2) X(cuMemcpy3D_v2) X(cuMemsetD8_v2) X(cuMemsetD16_v2) X(cuMemsetD32_v2)            \
    X(cuModuleLoad) X(cuModuleLoadData) X(cuModuleLoadDataEx) X(cuModuleLoadFatBinary) X(cuModuleUnload)       \
    X(cuLibraryLoadData) X(cuLibraryLoadFromFile) X(cuLibraryUnload) X(cuFuncLoad) X(cuStreamCreate)           \
    X(cuStreamCreateWithPriority) X(cuStreamDestroy_v2) X(cuGraphInstantiateWithFlags)                         \
    X(cuGraphInstantiateWithParams)

typedef unsigned long long Word;
typedef int (*Call)(Word, Word, Word, Word, Word, Word, Word, Word);

#define WRAPPER(name)                                                                             \
    static Call real_##name;                                                                      \
    static int my_##name(Word a, Word b, Word c, Word d, Word e, Word f, Word g, Word h) {        \
        called(#name);                                                                            \
        return real_##name(a, b, c, d, e, f, g, h);                                               \
    }
COUNTED(WRAPPER)
#undef WRAPPER

// What follows looks at its environment once for each call: none of it is made in a loop that is measured.
static int number(const char* name) {
    const char* text = getenv(name);
    return text ? atoi(text) : 0;
}

// The code that TW_FAIL has for a call, or 0.
static int planned(const char* name) {
    const char* at = getenv("TW_FAIL");
    size_t len = strlen(name);
    for (; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (strncmp(at, name, len) == 0 && at[len] == '=') return atoi(at + len + 1);
    return 0;
}

// Handles and addresses of memory that was imported: a peer's.
enum { MOST = 4096 };
static Word peers[MOST];
static char busy;

static int peer(Word word, char what) {
    while (__atomic_test_and_set(&busy, __ATOMIC_ACQUIRE)) {}
    int at = 0, found;
    while (at < MOST && peers[at] != word) at++;
    found = at < MOST;
    if (what == '-' && found) peers[at] = 0;
    if (what == '+' && !found)
        for (at = 0; at < MOST; at++)
            if (!peers[at]) {
                peers[at] = word;
                break;
            }
    __atomic_clear(&busy, __ATOMIC_RELEASE);
    return found;
}

#define BROKEN(X)                                                                                            \
    X(cuDriverGetVersion) X(cuDeviceGetAttribute) X(cuDeviceCanAccessPeer) X(cuDeviceGetP2PAttribute)        \
    X(cuMemAlloc_v2) X(cuMemCreate) X(cuMemMap) X(cuMemSetAccess) X(cuMemExportToShareableHandle) X(cuMemImportFromShareableHandle)

#define REAL(name) static Call real_##name;
BROKEN(REAL)
#undef REAL

static int my_cuDriverGetVersion(Word out, Word b, Word c, Word d, Word e, Word f, Word g, Word h) {
    int code = real_cuDriverGetVersion(out, b, c, d, e, f, g, h), version = number("TW_DRIVER_VERSION");
    if (code == 0 && version) *(int*)out = version;
    return code;
}

static int my_cuDeviceGetAttribute(Word out, Word what, Word c, Word d, Word e, Word f, Word g, Word h) {
    int code = real_cuDeviceGetAttribute(out, what, c, d, e, f, g, h), sm = number("TW_COMPUTE_CAPABILITY");
    if (code == 0 && sm && (int)what == 75) *(int*)out = sm / 10;
    if (code == 0 && sm && (int)what == 76) *(int*)out = sm % 10;
    if (code == 0 && (int)what == 97 && number("TW_SHARED_BYTES")) *(int*)out = number("TW_SHARED_BYTES");
    return code;
}

static int my_cuDeviceCanAccessPeer(Word out, Word b, Word c, Word d, Word e, Word f, Word g, Word h) {
    int code = real_cuDeviceCanAccessPeer(out, b, c, d, e, f, g, h);
    if (code == 0 && number("TW_NO_PEERS")) *(int*)out = 0;
    return code;
}

// The second attribute of a pair is whether one reaches the other.
static int my_cuDeviceGetP2PAttribute(Word out, Word what, Word c, Word d, Word e, Word f, Word g, Word h) {
    int code = real_cuDeviceGetP2PAttribute(out, what, c, d, e, f, g, h);
    if (code == 0 && (int)what == 2 && number("TW_NO_PEERS")) *(int*)out = 0;
    return code;
}

// Whether this thread is to have no more memory. Its file says how many allocations pass, and has a line for each since.
static int no_room(void) {
    const char* dir = getenv("TW_CALLS_DIR");
    char path[512], text[4096];
    if (!dir || snprintf(path, sizeof path, "%s/%d.memory", dir, gettid()) >= (int)sizeof path) return 0;
    int fd = open(path, O_RDONLY);
    if (fd < 0) return 0;
    ssize_t len = read(fd, text, sizeof text - 1);
    close(fd);
    int lines = 0;
    for (ssize_t i = 0; i < len; i++) lines += text[i] == '\n';
    text[len < 0 ? 0 : len] = 0;
    int over = lines > atoi(text);
    note(path, 0, over ? "refused" : "passed");
    return over;
}

static int my_cuMemAlloc_v2(Word out, Word b, Word c, Word d, Word e, Word f, Word g, Word h) {
    called("cuMemAlloc_v2");
    return no_room() ? 2 : real_cuMemAlloc_v2(out, b, c, d, e, f, g, h);
}

static int my_cuMemCreate(Word out, Word b, Word c, Word d, Word e, Word f, Word g, Word h) {
    called("cuMemCreate");
    int code = planned("cuMemCreate");
    code = code ? code : real_cuMemCreate(out, b, c, d, e, f, g, h);
    if (code == 0 && number("TW_NO_PEERS")) peer(*(Word*)out, '-');
    return code;
}

static int my_cuMemMap(Word at, Word len, Word offset, Word handle, Word e, Word f, Word g, Word h) {
    called("cuMemMap");
    int code = real_cuMemMap(at, len, offset, handle, e, f, g, h);
    if (code == 0 && number("TW_NO_PEERS")) peer(at, peer(handle, '?') ? '+' : '-');
    return code;
}

static int my_cuMemSetAccess(Word at, Word b, Word c, Word d, Word e, Word f, Word g, Word h) {
    called("cuMemSetAccess");
    int code = number("TW_NO_PEERS");
    return code && peer(at, '?') ? code : real_cuMemSetAccess(at, b, c, d, e, f, g, h);
}

static int my_cuMemExportToShareableHandle(Word a, Word b, Word c, Word d, Word e, Word f, Word g, Word h) {
    int code = planned("cuMemExportToShareableHandle");
    return code ? code : real_cuMemExportToShareableHandle(a, b, c, d, e, f, g, h);
}

static int my_cuMemImportFromShareableHandle(Word out, Word b, Word c, Word d, Word e, Word f, Word g, Word h) {
    int code = planned("cuMemImportFromShareableHandle");
    code = code ? code : real_cuMemImportFromShareableHandle(out, b, c, d, e, f, g, h);
    if (code == 0 && number("TW_NO_PEERS")) peer(*(Word*)out, '+');
    return code;
}

static const struct {
    const char* name;
    Call* real;
    Call mine;
} COUNTERS[] = {
#define ROW(name) {#name, &real_##name, my_##name},
    COUNTED(ROW) BROKEN(ROW)
#undef ROW
};

// What a caller gets who looked up `name` and found `found`.
static void* counted(const char* name, void* found) {
    for (size_t i = 0; found && i < sizeof COUNTERS / sizeof *COUNTERS; i++) {
        if (strcmp(name, COUNTERS[i].name) != 0) continue;
        // cuGetProcAddress gives other versions of a function to others: only the first is counted.
        if (*COUNTERS[i].real && *COUNTERS[i].real != (Call)found) return found;
        *COUNTERS[i].real = (Call)found;
        return (void*)COUNTERS[i].mine;
    }
    return found;
}

typedef void* (*Dlsym)(void*, const char*);
typedef int (*Get)(const char*, void**, int, unsigned long long, void*);
static Get real_get, real_get_v2;

static int get(Get real, const char* name, void** out, int version, unsigned long long flags, void* status) {
    int code = real(name, out, version, flags, status);
    if (code == 0 && name && out && strcmp(name, "cuMulticastCreate") == 0) *out = (void*)cuMulticastCreate;
    if (code == 0 && name && out) *out = counted(name, *out);
    return code;
}
static int get_v1(const char* n, void** o, int v, unsigned long long f) { return get(real_get, n, o, v, f, NULL); }
static int get_v2(const char* n, void** o, int v, unsigned long long f, void* s) { return get(real_get_v2, n, o, v, f, s); }

void* dlsym(void* handle, const char* name) {
    static Dlsym real;
    if (!real) real = (Dlsym)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!real) real = (Dlsym)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (!real) abort();
    if (strcmp(name, "cuMulticastCreate") == 0) return (void*)cuMulticastCreate;
    void* found = real(handle, name);
    if (found && strcmp(name, "cuGetProcAddress") == 0) {
        real_get = (Get)found;
        return (void*)get_v1;
    }
    if (found && strcmp(name, "cuGetProcAddress_v2") == 0) {
        real_get_v2 = (Get)found;
        return (void*)get_v2;
    }
    return counted(name, found);
}
