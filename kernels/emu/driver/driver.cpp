// A driver of CUDA whose devices are emulated, and an NVRTC that compiles for them: programs run on "GPUs" with the real text of
// every kernel, on any number of devices, where there is none. Third part: devices, kernels, and the compiler.
//
// The compiler is g++, and machine code is a shared library, so that caches of kernels work as they do with NVRTC. A kernel
// that the emulator finds something wrong with ends the process with the emulator's words.
//
// TW_EMU_TEXTS: folder with the texts that are known, NAME.cu, beside each NAME.emu, the same for
// the emulator, and NAME.kernels, names of its kernels. Other texts must do without inline PTX.
// TW_EMU_SMS: multiprocessors of a device (4). TW_EMU_SM: compute capability (90). TW_EMU_YIELD:
// chance in a thousand that a thread gives way at a memory operation (20). TW_EMU_PATH: where g++
// is looked for (PATH). TW_EMU_WATCH: kernels tell of their plain stores (attacks.h); machine code
// is another.

#include <dirent.h>
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <string>

extern char** environ;
extern "C" bool emu_run_here(EmuRun* run);

namespace {

unsigned setting(const char* name, unsigned otherwise) {
    const char* text = getenv(name);
    return text ? (unsigned)atoi(text) : otherwise;
}

// ---- Memory that kernels may touch, by its address.

typedef std::shared_ptr<const std::vector<EmuRegion>> Regions;
struct Memory {
    std::mutex lock;
    std::map<Ptr, EmuRegion> there;
    Regions list;
};
Memory& memory() {
    static Memory* m = new Memory();
    return *m;
}

}  // namespace

static void tell_memory(Ptr at, size_t len, int d, int is_there) {
    Memory& m = memory();
    std::lock_guard<std::mutex> g(m.lock);
    const char* name = d < 0 ? "memory of all devices" : "memory of a device";
    if (is_there) m.there[at] = {name, at, len, d < 0 ? EMU_ANY : (unsigned)d, 0};
    else m.there.erase(at);
    m.list = nullptr;
    forget_owners();
}

namespace {

Regions regions() {
    Memory& m = memory();
    std::lock_guard<std::mutex> g(m.lock);
    if (!m.list) {
        auto list = std::make_shared<std::vector<EmuRegion>>();
        for (const auto& r : m.there) list->push_back(r.second);
        m.list = list;
    }
    return m.list;
}

// ---- Machine code.

struct Module {
    void* library;
};
struct Function {
    std::string name;
    void (*entry)(void**);
    unsigned char* (*smem_of)(unsigned*);
    std::vector<unsigned> args;
    unsigned allowed = 48 << 10;  // bytes of dynamic shared memory
};

// As far as its headers say.
size_t size_of(const char* image) {
    const Elf64_Ehdr* h = (const Elf64_Ehdr*)image;
    return h->e_shoff + (size_t)h->e_shnum * h->e_shentsize;
}

// A library is opened once, whatever the number of modules, and stays.
void* open_library(const char* image, size_t len) {
    static std::mutex* lock = new std::mutex();
    static auto* known = new std::map<std::string, void*>();
    std::lock_guard<std::mutex> g(*lock);
    void*& library = (*known)[std::string(image, len)];
    if (library) return library;
    const int fd = memfd_create("kernels", MFD_CLOEXEC);
    if (fd < 0 || write(fd, image, len) != (ssize_t)len) return nullptr;
    library = dlopen(("/proc/self/fd/" + std::to_string(fd)).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) fprintf(stderr, "emulated driver: %s\n", dlerror());
    return library;
}

// ---- Launches.

// Bytes of an argument: a tensor map is aligned to 64.
struct alignas(64) Piece {
    char bytes[64];
};
struct Launch {
    const Function* f;
    EmuLaunch shape;
    std::vector<std::vector<Piece>> args;
};

void run_kernel(const Launch& l, int d) {
    if (fault != OK) return;
    std::vector<void*> args;
    for (const auto& a : l.args) args.push_back((void*)a.data());
    EmuLaunch launch = l.shape;
    launch.args = args.data();
    EmuStream s = {&launch, 1, (unsigned)d, 0, 0};
    const Regions there = regions();
    std::vector<char> message(8192);
    EmuRun run = {};
    run.streams = &s, run.num_streams = 1;
    run.regions = there->data(), run.num_regions = (unsigned)there->size();
    run.message = message.data(), run.message_len = message.size();
    run.seed = draw();
    run.max_steps = ~0ull;
    run.workers = 1;
    // Clusters are alive as a whole.
    const unsigned cluster = std::max(launch.cluster, 1u);
    run.resident = std::max(setting("TW_EMU_SMS", 4) * 2 / cluster, 1u) * cluster;
    run.yield_permille = setting("TW_EMU_YIELD", 20);
    // The emulator's own tests look for fences that are missing: here it would take half of the time.
    run.no_views = 1;
    if (emu_run_here(&run)) return;
    if (strcmp(message.data(), EMU_NO_MEMORY) == 0) {
        fault = NO_MEMORY;
        return;
    }
    fprintf(stderr, "emulated device %d: %s\n", d, message.data());
    abort();
}

int launch(const Function* f, const unsigned* grid, const unsigned* block, unsigned smem, unsigned cluster, Stream* s, void** args) {
    const unsigned threads = block[0] * block[1] * block[2];
    if (threads == 0 || threads > 1024 || grid[0] == 0 || grid[1] == 0 || grid[2] == 0) return NO_VALUE;
    unsigned capacity = 0;
    f->smem_of(&capacity);
    if (smem > f->allowed || smem > capacity) return NO_VALUE;
    Launch l;
    l.f = f;
    l.shape = {f->entry, f->smem_of, nullptr, f->name.c_str(), {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, smem, cluster};
    for (size_t i = 0; i < f->args.size(); i++) {
        l.args.emplace_back((f->args[i] + sizeof(Piece) - 1) / sizeof(Piece));
        memcpy((void*)l.args.back().data(), args[i], f->args[i]);
    }
    const int d = stream(s)->device;
    return queue(s, [l, d] {
        for (int times = times_to_run(d, l.f->name); times > 0; times--) run_kernel(l, d);
    });
}

// ---- Tensor maps: types of elements by the driver's numbers.

enum { UNSUPPORTED = 801, NO_CLUSTER = 912 };
constexpr struct {
    unsigned char size;
    EmuElement adds;
} ELEMENTS[] = {
    {1, EMU_BYTES}, {2, EMU_BYTES}, {4, EMU_BYTES}, {4, EMU_BYTES}, {8, EMU_BYTES},  // u8, u16, u32, i32, u64
    {8, EMU_BYTES}, {2, EMU_F16},   {4, EMU_F32},   {8, EMU_BYTES}, {2, EMU_BF16},   // i64, f16, f32, f64, bf16
    {4, EMU_BYTES}, {4, EMU_BYTES}, {4, EMU_BYTES},  // f32 and tf32 whose subnormals are zero, tf32
};

// ---- The compiler.

struct Program {
    std::string text, log, code;
};

bool read_file(const std::string& path, std::string* out) {
    std::ifstream in(path, std::ios::binary);
    std::stringstream all;
    all << in.rdbuf();
    *out = all.str();
    return in.good() || in.eof();
}

struct Text {
    std::string cuda, emu;
    std::vector<std::string> kernels;
};

const std::vector<Text>& texts() {
    static const std::vector<Text>* known = [] {
        auto* all = new std::vector<Text>();
        const char* folder = getenv("TW_EMU_TEXTS");
        DIR* dir = folder ? opendir(folder) : nullptr;
        while (dirent* e = dir ? readdir(dir) : nullptr) {
            const std::string name = e->d_name;
            if (name.size() < 3 || name.substr(name.size() - 3) != ".cu") continue;
            const std::string base = std::string(folder) + "/" + name.substr(0, name.size() - 3);
            Text t;
            std::string kernels;
            if (!read_file(base + ".cu", &t.cuda) || !read_file(base + ".emu", &t.emu) || !read_file(base + ".kernels", &kernels))
                continue;
            std::stringstream words(kernels);
            for (std::string k; words >> k;) t.kernels.push_back(k);
            all->push_back(t);
        }
        if (dir) closedir(dir);
        return all;
    }();
    return *known;
}

// Names that stand in `text` as kernels do that no macro makes.
void find_kernels(const std::string& text, std::vector<std::string>* out) {
    for (size_t at = text.find("__global__ "); at != std::string::npos; at = text.find("__global__ ", at + 1)) {
        const std::string line = text.substr(at, text.find('\n', at) - at);
        const size_t name = line.find(" tw_"), end = line.find('(', name);
        if (name != std::string::npos && end != std::string::npos) out->push_back(line.substr(name + 1, end - name - 1));
    }
}

// The text for the emulator, and names that its kernels may have.
bool translate(const std::string& cuda, Text* out) {
    out->emu = cuda;
    bool known = cuda.find("asm") == std::string::npos;
    for (const Text& t : texts())
        if (t.cuda == cuda) *out = t, known = true;
    find_kernels(cuda, &out->kernels);
    std::sort(out->kernels.begin(), out->kernels.end());
    out->kernels.erase(std::unique(out->kernels.begin(), out->kernels.end()), out->kernels.end());
    return known;
}

// The folder that this library lies in, where the emulator's headers are, too.
std::string home() {
    Dl_info me;
    dladdr((void*)home, &me);
    const std::string path = me.dli_fname;
    return path.substr(0, path.rfind('/'));
}

// Runs the compiler; its words are in `log`.
bool spawn(const std::vector<std::string>& words, const std::string& log) {
    std::vector<char*> argv = {(char*)"env"};
    for (const std::string& w : words) argv.push_back((char*)w.c_str());
    argv.push_back(nullptr);
    // What this program preloads, and where it looks for libraries, is not for the compiler.
    const char* paths = getenv("TW_EMU_PATH");
    const std::string path = std::string("PATH=") + (paths ? paths : "");
    std::vector<char*> env;
    for (char** e = environ; *e; e++)
        if (strncmp(*e, "LD_", 3) != 0 && (!paths || strncmp(*e, "PATH=", 5) != 0)) env.push_back(*e);
    if (paths) env.push_back((char*)path.c_str());
    env.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, 2, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    pid_t child;
    int status = 1;
    const bool begun = posix_spawn(&child, "/usr/bin/env", &files, nullptr, argv.data(), env.data()) == 0;
    posix_spawn_file_actions_destroy(&files);
    while (begun && waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    return begun && status == 0;
}

}  // namespace

extern "C" {

int cuDeviceGetName(char* out, int len, int d) { return snprintf(out, len, "emulated %d", d), OK; }
int cuDeviceGetAttribute(int* out, int what, int d) {
    (void)d;
    const int sm = (int)setting("TW_EMU_SM", 90);
    switch (what) {
        case 16: return *out = (int)setting("TW_EMU_SMS", 4), OK;  // multiprocessors
        case 75: return *out = sm / 10, OK;                        // compute capability
        case 76: return *out = sm % 10, OK;
        case 97: return *out = sm == 90 ? 232448 : 166912, OK;     // shared memory of a block
        case 128: return *out = 0, OK;                             // fabric handles
        default: return *out = 1, OK;
    }
}

int cuMemcpyDtoH_v2(void* to, Ptr from, size_t len) { return memcpy(to, (void*)from, len), OK; }
int cuMemsetD8Async(Ptr at, unsigned char byte, size_t len, Stream* s) {
    return queue(s, [=] { memset((void*)at, byte, len); });
}
int cuMemcpyAsync(Ptr to, Ptr from, size_t len, Stream* s) {
    if (watching) {
        const int d = stream(s)->device;
        return queue(s, [=] { begin_piece(), copy_watched(d, to, from, len); });
    }
    // A word comes whole: flags are copied.
    if (len == 8 && to % 8 == 0 && from % 8 == 0)
        return queue(s, [=] { __atomic_store_n((u64*)to, __atomic_load_n((u64*)from, __ATOMIC_ACQUIRE), __ATOMIC_RELEASE); });
    return queue(s, [=] { memcpy((void*)to, (void*)from, len); });
}
struct Copy2D {
    size_t from_x, from_y;
    int from_type;
    const void* from_host;
    Ptr from;
    void* from_array;
    size_t from_pitch, to_x, to_y;
    int to_type;
    void* to_host;
    Ptr to;
    void* to_array;
    size_t to_pitch, width, height;
};
int cuMemcpy2DAsync_v2(const Copy2D* what, Stream* s) {
    const Copy2D c = *what;
    if (c.width > c.from_pitch || c.width > c.to_pitch) return NO_VALUE;
    const int d = stream(s)->device;
    return queue(s, [c, d] {
        begin_piece();
        if (owner_of(c.from)) read_slowly(d);
        for (size_t y = 0; y < c.height; y++) {
            const Ptr to = c.to + y * c.to_pitch;
            note_write(d, to, c.width);
            memcpy((void*)to, (void*)(c.from + y * c.from_pitch), c.width);
        }
    });
}

int cuModuleLoadData(Module** out, const char* image) {
    void* library = open_library(image, size_of(image));
    if (!library) return NO_VALUE;
    return *out = new Module{library}, OK;
}
int cuModuleUnload(Module* m) { return delete m, OK; }
int cuModuleGetFunction(Function** out, Module* m, const char* name) {
    // One for each library and name: a launch may be queued when its module goes.
    static std::mutex* lock = new std::mutex();
    static auto* known = new std::map<std::pair<void*, std::string>, Function*>();
    std::lock_guard<std::mutex> g(*lock);
    Function*& f = (*known)[{m->library, name}];
    if (!f) {
        const std::string n = name;
        auto entry = (void (*)(void**))dlsym(m->library, ("emu_entry_" + n).c_str());
        auto sizes = (unsigned (*)(unsigned*))dlsym(m->library, ("emu_args_" + n).c_str());
        if (!entry || !sizes) return 500;
        f = new Function{n, entry, (unsigned char* (*)(unsigned*))dlsym(m->library, "emu_smem"), std::vector<unsigned>(64)};
        f->args.resize(sizes(f->args.data()));
    }
    return *out = f, OK;
}
int cuFuncLoad(Function* f) { return (void)f, OK; }
enum { MAX_DYNAMIC_SHARED = 8 };
int cuFuncSetAttribute(Function* f, int what, int value) {
    if (what == MAX_DYNAMIC_SHARED) f->allowed = (unsigned)value;
    return OK;
}
int cuFuncGetAttribute(int* out, int what, Function* f) { return *out = what == MAX_DYNAMIC_SHARED ? (int)f->allowed : 1024, OK; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, Function* f, int threads, size_t shared) {
    (void)f;
    const int by_threads = 2048 / threads, by_shared = (int)(233472 / (shared + 1024));
    const int both = by_threads < by_shared ? by_threads : by_shared;
    return *out = both < 2 ? both : 2, OK;
}
int cuLaunchKernel(Function* f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned shared, Stream* s,
                   void** args, void** extra) {
    (void)extra;
    const unsigned grid[] = {x, y, z}, block[] = {a, b, c};
    return launch(f, grid, block, shared, 1, s, args);
}
struct Attribute {
    int id;
    char pad[4];
    unsigned value[16];
};
struct Config {
    unsigned grid[3], block[3], shared;
    Stream* stream;
    Attribute* attributes;
    unsigned num;
};
int cuLaunchKernelEx(const Config* how, Function* f, void** args, void** extra) {
    (void)extra;
    enum { CLUSTER = 4, MOST = 8 };
    unsigned cluster = 1;
    for (unsigned i = 0; i < how->num; i++) {
        const unsigned* c = how->attributes[i].value;
        if (how->attributes[i].id != CLUSTER) continue;
        // No kernel here asks for more than any device takes.
        if (c[0] == 0 || c[1] == 0 || c[2] == 0 || (u64)c[0] * c[1] > MOST || (u64)c[0] * c[1] * c[2] > MOST) return NO_CLUSTER;
        if (c[1] != 1 || c[2] != 1) return UNSUPPORTED;
        if (how->grid[0] % c[0] != 0) return NO_VALUE;
        cluster = c[0];
    }
    return launch(f, how->grid, how->block, how->shared, cluster, how->stream, args);
}
// Numbers from the innermost dimension on; strides are of the others.
int cuTensorMapEncodeTiled(EmuTensorMap* out, unsigned type, unsigned rank, void* base, const u64* dims, const u64* strides,
                           const unsigned* box, const unsigned* steps, unsigned interleave, unsigned swizzle, unsigned promotion,
                           unsigned fill) {
    const unsigned spans[] = {0, 32, 64, 128};
    if ((u64)out % 64 != 0 || (u64)base % 16 != 0 || rank == 0 || rank > 5) return NO_VALUE;
    if (type > 15 || interleave > 2 || swizzle > 6 || promotion > 3 || fill > 1) return NO_VALUE;
    // Elements of 4 and 6 bits; slices of channels; swizzles of larger pieces; NaN outside.
    if (type >= sizeof ELEMENTS / sizeof *ELEMENTS || interleave != 0 || swizzle > 3 || fill != 0) return UNSUPPORTED;
    EmuTensorMap m = {};
    m.mark = EMU_TENSOR_MAP, m.base = (u64)base, m.rank = (unsigned char)rank;
    m.size = ELEMENTS[type].size, m.element = ELEMENTS[type].adds, m.swizzle = (unsigned char)spans[swizzle];
    bool every_element = true;
    for (unsigned i = 0; i < rank; i++) {
        if (dims[i] == 0 || dims[i] > 1ull << 32 || box[i] == 0 || box[i] > 256 || steps[i] == 0 || steps[i] > 8) return NO_VALUE;
        m.dims[i] = dims[i], m.box[i] = (unsigned short)box[i];
        every_element &= steps[i] == 1;
        if (i + 1 == rank) break;
        // As devices do, it asks for no order of strides: addresses may wrap around.
        if (strides[i] % 16 != 0 || strides[i] >= 1ull << 40) return NO_VALUE;
        m.strides[i] = strides[i];
    }
    const unsigned row = box[0] * m.size;
    if (row % 16 != 0 || (m.swizzle != 0 && row > m.swizzle)) return NO_VALUE;
    if (!every_element) return UNSUPPORTED;
    return *out = m, OK;
}
int cuGetErrorName(int code, const char** out) { return (void)code, *out = "EMULATED", OK; }
int cuGetErrorString(int code, const char** out) {
    static thread_local char text[64];
    return snprintf(text, sizeof text, "the emulated driver says %d", code), *out = text, OK;
}

int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, OK; }
int nvrtcCreateProgram(Program** out, const char* text, const char* name, int num, const char** headers, const char** names) {
    (void)name, (void)num, (void)headers, (void)names;
    Program* p = new Program();
    p->text = text;
    return *out = p, OK;
}
int nvrtcCompileProgram(Program* p, int num, const char** options) {
    enum { FAILED = 6 };
    Text t;
    if (!translate(p->text, &t)) return p->log = "a text with inline PTX that the emulator does not know", FAILED;
    char folder[] = "/tmp/tw-emu-XXXXXX";
    if (!mkdtemp(folder)) return p->log = "no folder", FAILED;
    const std::string at = folder, here = home(), head = "#include \"" + here + "/abi.h\"\n#include \"" + here + "/emu.h\"\n";
    std::vector<std::string> defines = {"-DTW_EMU_SMEM=232448"};
    // Who watches learns of plain stores as well (attacks.h).
    if (setting("TW_EMU_WATCH", 0))
        for (const char* w : {"-fsanitize=kernel-address", "--param=asan-instrumentation-with-call-threshold=0",
                              "--param=asan-instrument-reads=0", "--param=asan-stack=0", "--param=asan-globals=0",
                              "-fno-tree-loop-distribute-patterns"})
            defines.push_back(w);
    for (int i = 0; i < num; i++)
        if (strncmp(options[i], "-D", 2) == 0) defines.push_back(options[i]);
    const auto compile = [&](std::vector<std::string> words) {
        words.insert(words.begin(), {"g++", "-std=c++17"});
        words.insert(words.end(), defines.begin(), defines.end());
        words.push_back(at + "/text.cpp");
        // Symbols of the runtime are this library's.
        words.push_back(here + "/libcuda.so.1");
        return spawn(words, at + "/log");
    };
    const auto write = [&](const std::string& text) { std::ofstream(at + "/text.cpp") << head << "#line 1 \"text.cu\"\n" << text << "\n"; };
    // Which kernels there are with these definitions, the preprocessor knows.
    write(t.emu);
    std::string there, entries;
    bool good = compile({"-E", "-P", "-o", at + "/there"}) && read_file(at + "/there", &there);
    for (const std::string& k : t.kernels)
        if (there.find(" " + k + "(") != std::string::npos || there.find("\n" + k + "(") != std::string::npos) entries += "EMU_ENTRY(" + k + ")\n";
    write(t.emu + "\n" + entries);
    // For code that is run more often than in the tests of the emulator. With -O2 the compiler
    // takes twice as long, and programs no less: most of their time goes into threads that take
    // turns.
    good = good && compile({"-O1", "-shared", "-fPIC", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-fvisibility=hidden", "-o",
                            at + "/code.so"}) && read_file(at + "/code.so", &p->code);
    read_file(at + "/log", &p->log);
    for (const char* name : {"/text.cpp", "/there", "/code.so", "/log"}) unlink((at + name).c_str());
    rmdir(folder);
    return good ? (int)OK : (int)FAILED;
}
int nvrtcGetCUBINSize(Program* p, size_t* out) { return *out = p->code.size(), OK; }
int nvrtcGetCUBIN(Program* p, char* out) { return memcpy(out, p->code.data(), p->code.size()), OK; }
int nvrtcGetProgramLogSize(Program* p, size_t* out) { return *out = p->log.size() + 1, OK; }
int nvrtcGetProgramLog(Program* p, char* out) { return memcpy(out, p->log.c_str(), p->log.size() + 1), OK; }
const char* nvrtcGetErrorString(int code) { return (void)code, "the emulated compiler says no"; }
int nvrtcDestroyProgram(Program** p) { return delete *p, *p = nullptr, OK; }

}  // extern "C"
