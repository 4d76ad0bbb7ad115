// What all drivers have that stand in for CUDA's where there is no GPU: devices, contexts, and memory. C and C++; stands before
// the rest of such a driver, which defines `wait_for_device` and `tell_memory`.
//
// Memory is memory of this process. What ranks map of each other is a file (memfd), so that it is shared by processes as well.
// TW_DEVICES: how many devices there are (2). CUDA_VISIBLE_DEVICES: which of them, by their numbers.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef uint64_t u64;
typedef u64 Ptr;
enum { OK, NO_VALUE = 1, NO_MEMORY = 2, NO_DEVICE = 100, NO_CAPTURE = 401, NOT_READY = 600, IN_CAPTURE = 900, OS_CALL = 304 };
enum { MAX_DEVICES = 16, MAX_MEMORY = 4096, PAGE_BYTES = 4096, GRAIN = 2 << 20 };
static const u64 TOTAL = 64ull << 30;

static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
#define ALONE for (int once = (pthread_mutex_lock(&one), 1); once; once = (pthread_mutex_unlock(&one), 0))

// A context is the address of its device's bytes in use.
static u64 used[MAX_DEVICES];
static __thread u64* current;
static int device(void) { return current ? (int)(current - used) : 0; }

// Until nothing runs on a device.
static void wait_for_device(int d);
// OK, or the code of what devices have failed by.
static int state_of_devices(void);
// Memory that is there from now on, or is gone. Device -1: all devices reach it.
static void tell_memory(Ptr at, size_t len, int d, int is_there);

static u64 now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

// Devices
static int visible[MAX_DEVICES], num_visible;
int cuInit(unsigned flags) {
    const char *num = getenv("TW_DEVICES"), *which = getenv("CUDA_VISIBLE_DEVICES");
    const int all = num ? atoi(num) : 2;

    ALONE {
        num_visible = 0;
        for (int i = 0; i < all && i < MAX_DEVICES && !which; i++) visible[num_visible++] = i;
        // The first that there is not ends the list.
        for (char* end; which && num_visible < MAX_DEVICES; which = *end == ',' ? end + 1 : NULL) {
            const long i = strtol(which, &end, 10);
            if (end == which || i < 0 || i >= all) break;
            visible[num_visible++] = (int)i;
        }
    }
    return flags ? NO_VALUE : num_visible ? (int)OK : (int)NO_DEVICE;
}
int cuDriverGetVersion(int* out) { return *out = 13000, OK; }
int cuDeviceGetCount(int* out) { return *out = num_visible, OK; }
int cuDeviceGet(int* out, int ordinal) { return *out = visible[ordinal], OK; }
int cuDeviceTotalMem_v2(size_t* out, int d) { return (void)d, *out = TOTAL, OK; }
int cuDeviceGetPCIBusId(char* out, int len, int d) { return snprintf(out, len, "0000:%02X:00.0", d + 1), OK; }
int cuDeviceCanAccessPeer(int* out, int a, int b) { return *out = a != b, OK; }
int cuDeviceGetP2PAttribute(int* out, int what, int a, int b) { return (void)what, *out = a != b, OK; }

// Contexts
int cuDevicePrimaryCtxRetain(void** out, int d) { return *out = &used[d], OK; }
int cuDevicePrimaryCtxRelease_v2(int d) { return (void)d, OK; }
int cuCtxGetCurrent(void** out) { return *out = current, OK; }
int cuCtxSetCurrent(void* context) { return current = (u64*)context, OK; }
int cuCtxSynchronize(void) { return wait_for_device(device()), state_of_devices(); }
int cuThreadExchangeStreamCaptureMode(int* mode) {
    static __thread int mine;
    int before = mine;
    return mine = *mode, *mode = before, OK;
}

// What a graph keeps.
typedef struct {
    void (*let_go)(void*);
    void* thing;
    int count;
} Kept;

int cuUserObjectCreate(void** out, void* thing, void (*let_go)(void*), unsigned num, unsigned flags) {
    Kept* k = (Kept*)malloc(sizeof *k);
    (void)flags;
    if (!k) return NO_MEMORY;
    k->let_go = let_go, k->thing = thing, k->count = num;
    return *out = k, OK;
}
int cuUserObjectRelease(Kept* k, unsigned num) {
    int left;
    ALONE left = k->count -= num;
    if (left == 0) k->let_go(k->thing), free(k);
    return OK;
}

// Plain memory: a page that says how long it is and whose, its bytes, and a page that nobody may touch.
typedef struct {
    size_t len;
    int device;
} Head;
static size_t with_head(size_t len) { return (len + 3 * PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES; }

int cuMemAlloc_v2(Ptr* out, size_t len) {
    int code = OK, d = device();
    ALONE {
        code = used[d] + len > TOTAL ? NO_MEMORY : OK;
        if (code == OK) used[d] += len;
    }
    if (code != OK) return code;
    void* p = mmap(NULL, with_head(len), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return NO_MEMORY;
    mprotect((char*)p + with_head(len) - PAGE_BYTES, PAGE_BYTES, PROT_NONE);
    Head* h = (Head*)p;
    h->len = len, h->device = d;
    *out = (Ptr)p + PAGE_BYTES;
    return tell_memory(*out, len, d, 1), OK;
}
int cuMemFree_v2(Ptr at) {
    Head* h = (Head*)(at - PAGE_BYTES);
    wait_for_device(h->device);
    tell_memory(at, h->len, h->device, 0);
    ALONE used[h->device] -= h->len;
    return munmap(h, with_head(h->len)), OK;
}
int cuMemGetInfo_v2(size_t* unused, size_t* total) {
    ALONE *unused = TOTAL - used[device()];
    return *total = TOTAL, OK;
}

// Memory that is mapped: a file, whose bytes are in use as long as a handle or a mapping has it.
typedef struct {
    int fd;
    ino_t file;
} Handle;
static struct {
    ino_t file;
    size_t len;
    int device, count;
} files[MAX_MEMORY];
static struct {
    Ptr at;
    size_t len;
    ino_t file;
    int fd;
} maps[MAX_MEMORY];

static int by_symmetric_memory(Ptr at) {
    int found = 0;
    ALONE for (int i = 0; i < MAX_MEMORY; i++) found |= maps[i].len && at >= maps[i].at && at < maps[i].at + maps[i].len;
    return found;
}

static void count(ino_t file, int by) {
    for (int i = 0; i < MAX_MEMORY; i++) {
        if (!files[i].count || files[i].file != file) continue;
        files[i].count += by;
        if (!files[i].count) used[files[i].device] -= files[i].len;
        return;
    }
}

static int handle_of(Ptr* out, int fd, int is_new) {
    struct stat s;
    int code = NO_MEMORY;
    if (fd < 0 || fstat(fd, &s)) return OS_CALL;
    ALONE {
        int at = 0, known = 0;
        for (int i = 0; i < MAX_MEMORY; i++) known |= files[i].count && files[i].file == s.st_ino;
        // That of another process counts there.
        while (at < MAX_MEMORY && files[at].count) at++;
        if (known) count(s.st_ino, 1), code = OK;
        else if (at < MAX_MEMORY) {
            files[at].file = s.st_ino, files[at].len = is_new ? s.st_size : 0, files[at].device = device(), files[at].count = 1;
            used[device()] += files[at].len;
            code = OK;
        }
    }
    Handle* h = (Handle*)malloc(sizeof *h);
    if (!h) return close(fd), NO_MEMORY;
    h->fd = fd, h->file = s.st_ino;
    return *out = (Ptr)h, code;
}

int cuMemGetAllocationGranularity(size_t* out, const void* what, int how) { return (void)what, (void)how, *out = GRAIN, OK; }
int cuMemAddressReserve(Ptr* out, size_t len, size_t align, Ptr at, u64 flags) {
    (void)align, (void)at, (void)flags;
    void* p = mmap(NULL, len + GRAIN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return *out = ((Ptr)p + GRAIN - 1) / GRAIN * GRAIN, p == MAP_FAILED ? NO_MEMORY : OK;
}
int cuMemAddressFree(Ptr at, size_t len) { return munmap((void*)at, len), OK; }
int cuMemCreate(Ptr* out, size_t len, const void* what, u64 flags) {
    int has_room = 0;
    (void)what, (void)flags;
    ALONE has_room = used[device()] + len <= TOTAL;
    if (!has_room) return NO_MEMORY;
    int fd = memfd_create("device", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, len)) return OS_CALL;
    return handle_of(out, fd, 1);
}
int cuMemImportFromShareableHandle(Ptr* out, void* fd, int kind) { return (void)kind, handle_of(out, dup((int)(intptr_t)fd), 0); }
int cuMemExportToShareableHandle(int* out, Handle* h, int kind, u64 flags) {
    (void)kind, (void)flags;
    return *out = dup(h->fd), *out < 0 ? OS_CALL : OK;
}
int cuMemRelease(Handle* h) {
    ALONE count(h->file, -1);
    return close(h->fd), free(h), OK;
}
int cuMemMap(Ptr at, size_t len, size_t offset, Handle* h, u64 flags) {
    int code = NO_MEMORY;
    (void)flags;
    if (mmap((void*)at, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, h->fd, offset) == MAP_FAILED) return NO_VALUE;
    ALONE for (int i = 0; i < MAX_MEMORY && code != OK; i++) {
        if (maps[i].len) continue;
        maps[i].at = at, maps[i].len = len, maps[i].file = h->file, maps[i].fd = dup(h->fd);
        count(h->file, 1);
        code = OK;
    }
    return tell_memory(at, len, -1, 1), code;
}
int cuMemUnmap(Ptr at, size_t len) {
    mmap((void*)at, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    tell_memory(at, len, -1, 0);
    ALONE for (int i = 0; i < MAX_MEMORY; i++) {
        if (!maps[i].len || maps[i].at < at || maps[i].at >= at + len) continue;
        count(maps[i].file, -1);
        close(maps[i].fd);
        maps[i].len = 0;
    }
    return OK;
}
int cuMemRetainAllocationHandle(Ptr* out, void* of) {
    int fd = -1;
    ALONE for (int i = 0; i < MAX_MEMORY; i++)
        if (maps[i].len && (Ptr)of >= maps[i].at && (Ptr)of < maps[i].at + maps[i].len) fd = dup(maps[i].fd);
    return fd < 0 ? NO_VALUE : handle_of(out, fd, 0);
}
// The base (19) and the length (18) of the mapping to which an address belongs.
int cuPointerGetAttribute(void* out, int what, Ptr of) {
    int code = NO_VALUE;
    ALONE for (int i = 0; i < MAX_MEMORY; i++) {
        if (!maps[i].len || of < maps[i].at || of >= maps[i].at + maps[i].len || (what != 18 && what != 19)) continue;
        *(u64*)out = what == 19 ? (u64)maps[i].at : (u64)maps[i].len;
        code = OK;
    }
    return code;
}
int cuMemSetAccess(Ptr at, size_t len, const void* who, size_t num) { return (void)at, (void)len, (void)who, (void)num, OK; }

int cuMemsetD8_v2(Ptr at, unsigned char byte, size_t len) {
    // Pages that a file has lost are zeros that nobody had to write.
    if (byte || at % PAGE_BYTES || len % PAGE_BYTES || !by_symmetric_memory(at) || madvise((void*)at, len, MADV_REMOVE))
        memset((void*)at, byte, len);
    return OK;
}
int cuMemcpyHtoD_v2(Ptr to, const void* from, size_t len) { return memcpy((void*)to, from, len), OK; }

// Pinned memory: before its bytes, how many there are.
int cuMemHostAlloc(void** out, size_t len, unsigned flags) {
    char* p;
    (void)flags;
    if (posix_memalign((void**)&p, PAGE_BYTES, len + PAGE_BYTES)) return NO_MEMORY;
    *(size_t*)p = len, *out = p + PAGE_BYTES;
    return tell_memory((Ptr)*out, len, -1, 1), OK;
}
int cuMemFreeHost(void* at) {
    char* p = (char*)at - PAGE_BYTES;
    return tell_memory((Ptr)at, *(size_t*)p, -1, 0), free(p), OK;
}
int cuMemHostRegister_v2(void* at, size_t len, unsigned flags) { return (void)flags, tell_memory((Ptr)at, len, -1, 1), OK; }
int cuMemHostUnregister(void* at) { return tell_memory((Ptr)at, 0, -1, 0), OK; }
int cuMemHostGetDevicePointer_v2(Ptr* out, void* at, unsigned flags) { return (void)flags, *out = (Ptr)at, OK; }

#ifdef __cplusplus
}
#endif
