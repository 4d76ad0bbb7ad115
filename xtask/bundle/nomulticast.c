// Preloaded: cuMulticastCreate fails, and says so in the file that TW_MULTICAST_LOG names. However
// it is looked up: by the linker, by dlsym, or by cuGetProcAddress.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void note(const char* line) {
    const char* path = getenv("TW_MULTICAST_LOG");
    int fd = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;
    if (fd < 0) return;
    if (write(fd, line, strlen(line)) < 0) abort();
    close(fd);
}

// Loaded: without this line a log without calls would mean nothing.
__attribute__((constructor)) static void loaded(void) { note("loaded\n"); }

int cuMulticastCreate(void* handle, const void* prop) {
    (void)handle;
    (void)prop;
    note("cuMulticastCreate\n");
    return 801;  // CUDA_ERROR_NOT_SUPPORTED
}

typedef void* (*Dlsym)(void*, const char*);
typedef int (*Get)(const char*, void**, int, unsigned long long, void*);
static Get real_get, real_get_v2;

static int get(Get real, const char* name, void** out, int version, unsigned long long flags, void* status) {
    int code = real(name, out, version, flags, status);
    if (code == 0 && name && out && strcmp(name, "cuMulticastCreate") == 0) *out = (void*)cuMulticastCreate;
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
    return found;
}
