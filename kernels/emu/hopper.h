// The emulator's runtime, part two and a half: clusters, boxes of tensors, and products of
// warpgroups, which read their operands and set their sums late.

namespace {

char* image_of(Block* b, const char* at);

// ---- Clusters.

Block* peer(Fiber* f, unsigned rank) {
    const Cluster* c = f->block->cluster;
    if (rank >= c->blocks.size()) die(f, "a block that its cluster does not have");
    if (c->blocks[rank] == nullptr) die(f, "shared memory of a block of the cluster that has ended");
    return c->blocks[rank];
}

// Where `p` of this block's shared memory lies in that of `to`.
void* place(Fiber* f, Block* to, void* p) {
    if (to == f->block) return p;
    char* at = module_of(f->block)->shared;
    return image_of(to, at) + ((char*)p - at);
}

// ---- Boxes.

unsigned char* dynamic_of(Block* b) {
    unsigned capacity;
    return b->launch->smem_of(&capacity);
}

unsigned bytes_of(const EmuTensorMap& m) {
    unsigned n = m.size;
    for (unsigned i = 0; i < m.rank; i++) n *= m.box[i];
    return n;
}

// Calls `f` with each row of a box that has something of the tensor: its place in the tile, where
// the tensor has its first element, and bytes.
template <class F> void each_row(const Box& x, F f) {
    const EmuTensorMap& m = x.map;
    const unsigned len = m.box[0] * m.size;
    const long long first = x.at[0] < 0 ? -(long long)x.at[0] : 0;
    const long long left = (long long)m.dims[0] - x.at[0], last = left < m.box[0] ? left : m.box[0];
    if (first >= last) return;
    for (unsigned row = 0; row < bytes_of(m) / len; row++) {
        u64 addr = m.base + (u64)((x.at[0] + first) * m.size);
        bool inside = true;
        unsigned rest = row;
        for (unsigned i = 1; i < m.rank; i++) {
            const long long c = (long long)x.at[i] + rest % m.box[i];
            rest /= m.box[i];
            inside &= c >= 0 && (u64)c < m.dims[i];
            // Addresses wrap around: ragged maps rest on it.
            addr += (u64)c * m.strides[i - 1];
        }
        if (inside) f(row * len + (unsigned)first * m.size, (char*)addr, (unsigned)(last - first) * m.size);
    }
}

// Where byte `at` of a tile that begins at `offset` lies, from there.
unsigned swizzled(const Box& x, unsigned at) {
    const unsigned mask = x.map.swizzle == 128 ? 7 : x.map.swizzle == 64 ? 3 : x.map.swizzle == 32 ? 1 : 0;
    const unsigned to = x.offset + at;
    return (to ^ ((to >> 7 & mask) << 4)) - x.offset;
}

// Calls `piece` for what lies together of `len` bytes from `at` on: its place among them, that in
// the tile, its length.
template <typename Piece> void each_piece(const Box& x, unsigned at, unsigned len, Piece piece) {
    for (unsigned i = 0; i < len;) {
        const unsigned n = std::min(len - i, 16 - (x.offset + at + i) % 16);
        piece(i, swizzled(x, at + i), n);
        i += n;
    }
}

void gather(Block*, Bulk* c) {
    c->data.assign(c->bytes, 0);
    each_row(c->box, [c](unsigned at, const char* from, unsigned len) {
        each_piece(c->box, at, len, [&](unsigned i, unsigned in, unsigned n) { memcpy(&c->data[in], from + i, n); });
    });
}

float value_of(EmuElement type, const char* p) {
    unsigned bits = 0;
    if (type == EMU_F32) {
        memcpy(&bits, p, 4);
    } else {
        unsigned short h;
        memcpy(&h, p, 2);
        bits = (unsigned)h << 16;
        if (type == EMU_F16) {
            const unsigned exp = h >> 10 & 31, frac = h & 1023;
            // Subnormals are exact as integers; the others keep their fraction.
            if (exp == 0) return (h >> 15 ? -1.0f : 1.0f) * (float)frac * 0x1p-24f;
            bits = (unsigned)(h >> 15) << 31 | (exp == 31 ? 255u : exp + 112) << 23 | frac << 13;
        }
    }
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

void scatter(Block* b, const Bulk& c) {
    each_row(c.box, [&](unsigned at, char* to, unsigned len) {
        tell_piece(b, c, to, len);
        if (!c.box.adds) {
            each_piece(c.box, at, len, [&](unsigned i, unsigned in, unsigned n) { memcpy(to + i, &c.data[in], n); });
            return;
        }
        // Sums of floats alone are modelled.
        for (unsigned i = 0; i < len; i += 4) {
            float sum;
            memcpy(&sum, to + i, 4);
            sum += value_of(EMU_F32, &c.data[swizzled(c.box, at + i)]);
            memcpy(to + i, &sum, 4);
        }
    });
}

// True if `map` lies in memory that the host has made: it is no parameter of the kernel.
bool in_memory(const Run* r, const void* map) {
    const EmuRegion *first = r->cfg->regions, *last = first + r->cfg->num_regions;
    return std::any_of(first, last, [map](const EmuRegion& g) { return (u64)map >= g.base && (u64)map < g.base + g.len; });
}

// The box at `at`, whose tile lies at `tile`.
Box box_of(Fiber* f, const void* map, const int* at, unsigned rank, const void* tile, const char* op) {
    Box x = {};
    memcpy(&x.map, map, sizeof x.map);
    if (x.map.mark != EMU_TENSOR_MAP) die(f, "a tensor map that was not encoded");
    const auto& known = f->block->maps;
    if (in_memory(f->block->worker->run, map) && std::find(known.begin(), known.end(), std::make_pair((const Fiber*)f, map)) == known.end())
        die(f, "a tensor map in memory that this thread has not acquired");
    if (x.map.rank != rank) die(f, "a tensor map of another rank");
    for (unsigned i = 0; i < rank; i++) x.at[i] = at[i];
    const long long offset = (char*)tile - (char*)dynamic_of(f->block);
    if (offset < 0 || offset >= f->block->launch->smem) die(f, "a tile that is not in the dynamic shared memory");
    if (offset % (x.map.swizzle == 128 ? 1024 : 128) != 0) die(f, "a tile at an address that no tensor copy takes");
    x.offset = (unsigned)offset;
    each_row(x, [f, op](unsigned, const char* p, unsigned len) {
        check(f, op, p, 1);
        check(f, op, p + len - 1, 1);
    });
    return x;
}

// ---- Products.

Products& products_of(Fiber* f) {
    return f->block->products[f->index / 32];
}

// What a product sees of shared memory: all that is there, or what fences have told this thread's
// copies and products of.
enum Sight { EMU_ALL_THERE, EMU_FENCED };

// Copies rows `first` to `first + num` of a tile, 32 bytes of k each, to `to`; rows are along m or
// n.
void read_rows(Fiber* f, u64 desc, bool mn, unsigned first, unsigned num, Sight sight, unsigned short* to) {
    const u64 start = (desc & 0x3fff) << 4, chunk = (desc >> 16 & 0x3fff) << 4, eight = (desc >> 32 & 0x3fff) << 4;
    const unsigned char* from = dynamic_of(f->block);
    const u64 len = f->block->launch->smem, shared = (u64)module_of(f->block)->shared;
    const View* view = sight == EMU_FENCED && has_views(f->block) ? &view_of(f->block) : nullptr;
    // Eight elements that lie beside each other: `off` is that of the first, a multiple of 16.
    const auto piece = [&](u64 off, unsigned short* eight) {
        u64 at = start + off;
        at ^= (at >> 7 & 7) << 4;
        if (at + 16 > len) die(f, "a product of what is not in the dynamic shared memory");
        const u64 in = (u64)from - shared + at;
        memcpy(eight, view ? (const void*)seen(*view, in, f->known.fence) : from + at, 16);
    };
    for (unsigned i = first; i < first + num; i += mn ? 8 : 1)
        for (unsigned k = 0; k < 16; k += mn ? 1 : 8) {
            unsigned short* row = to + (i - first) * 16 + k;
            if (!mn) {
                piece(i / 8 * eight + i % 8 * 128 + k * 2, row);
                continue;
            }
            unsigned short rows[8];
            piece(i / 64 * chunk + k / 8 * eight + k % 8 * 128 + i % 64 * 2, rows);
            for (unsigned j = 0; j < 8; j++) row[j * 16] = rows[j];
        }
}

// `warp`: whose rows of A.
void read_tiles(Fiber* f, Product* q, unsigned warp, Sight sight = EMU_ALL_THERE) {
    q->tiles.resize(16 * (16 + q->n));
    unsigned short* a = q->tiles.data();
    if (q->registers[0] == nullptr) {
        read_rows(f, q->a, q->flags & EMU_WG_A_MN, warp % 4 * 16, 16, sight, a);
    } else {
        // Lane, register, half: of pairs of e4m3 as of elements of 16 bits.
        for (unsigned i = 0; i < 16; i++)
            for (unsigned k = 0; k < 16; k++)
                a[i * 16 + k] = (unsigned short)(q->held[i % 8 * 4 + k % 8 / 2][k / 8 * 2 + i / 8] >> k % 2 * 16);
    }
    read_rows(f, q->b, q->flags & EMU_WG_B_MN, 0, q->n, sight, a + 16 * 16);
    q->read = true;
}

Sums* sums_at(Products& p, const float* d) {
    for (Sums& s : p.sums)
        if (s.d == d) return &s;
    return nullptr;
}

// The element of lane `lane` at place `i` of its registers.
unsigned sum_index(unsigned lane, unsigned i, unsigned n) {
    return (lane / 4 + i / 2 % 2 * 8) * n + i / 4 * 8 + lane % 4 * 2 + i % 2;
}

float value_of_e4m3(unsigned char code) {
    const unsigned exp = code >> 3 & 15, frac = code & 7;
    const float sign = code >> 7 ? -1.0f : 1.0f;
    if (exp == 15 && frac == 7) return __builtin_nanf("");
    return sign * (exp == 0 ? (float)frac * 0x1p-9f : __builtin_ldexpf((float)(8 + frac), (int)exp - 10));
}

// A sum as products of e4m3 leave it: with 13 bits behind the first, the others cut off, as those
// of Hopper are seen to be (deepseek-ai/DeepGEMM #37). That terms are cut to the largest one, too,
// is not modelled.
float cut(float sum) {
    unsigned bits;
    memcpy(&bits, &sum, 4);
    bits &= ~((1u << 10) - 1);
    memcpy(&sum, &bits, 4);
    return sum;
}

// The elements of `num` rows of 32 bytes of k.
std::vector<float> elements(const Product& q, unsigned first, unsigned num) {
    const unsigned short* from = &q.tiles[first * 16];
    const bool is_fp8 = q.flags & EMU_WG_E4M3;
    std::vector<float> v(num * (is_fp8 ? 32 : 16));
    const unsigned char* codes = (const unsigned char*)from;
    const EmuElement type = q.flags & EMU_WG_F16 ? EMU_F16 : EMU_BF16;
    for (unsigned i = 0; i < v.size(); i++)
        v[i] = is_fp8 ? value_of_e4m3(codes[i]) : value_of(type, (const char*)(from + i));
    return v;
}

void multiply(Fiber* f, Products& p, Product* q) {
    if (!q->read) read_tiles(f, q, f->index / 32);
    Sums* s = sums_at(p, q->d[0]);
    if (!q->adds) std::fill(s->v.begin(), s->v.end(), 0.0f);
    const unsigned n = q->n, depth = q->flags & EMU_WG_E4M3 ? 32 : 16;
    const std::vector<float> a = elements(*q, 0, 16), rows = elements(*q, 16, n);
    std::vector<float> b(depth * n);
    for (unsigned i = 0; i < n; i++)
        for (unsigned k = 0; k < depth; k++) b[k * n + i] = rows[i * depth + k];
    // Each sum in the order of k. Eight columns at once: n is a multiple of 8.
    typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
    for (unsigned row = 0; row < 16; row++)
        for (unsigned at = 0; at < n; at += 8) {
            Eight sum = *(const Eight*)&s->v[row * n + at];
            for (unsigned k = 0; k < depth; k++) sum += a[row * depth + k] * *(const Eight*)&b[k * n + at];
            *(Eight*)&s->v[row * n + at] = sum;
            if (q->flags & EMU_WG_E4M3)
                for (unsigned i = 0; i < 8; i++) s->v[row * n + at + i] = cut(s->v[row * n + at + i]);
        }
}

// Registers that a product reads must be as they were at the fence before it. Those that no product
// had so far are not known, and not compared.
void check_fence(Fiber* f, Products& p, const void* const* at, unsigned bytes, bool reads) {
    for (Registers& r : p.known) {
        if (r.at[0] != at[0] || r.bytes != bytes) continue;
        for (unsigned lane = 0; lane < 32 && reads && !r.then.empty(); lane++)
            if (memcmp(&r.then[lane * bytes], at[lane], bytes) != 0)
                die(f, "a product in registers that were touched behind the last wgmma.fence");
        return;
    }
    Registers r = {{}, bytes, {}};
    memcpy(r.at, at, sizeof r.at);
    p.known.push_back(std::move(r));
}

// Issues `q`, but for its group.
void issue_product(Fiber* f, Product q) {
    const unsigned n = q.n;
    float* const* d = q.d;
    Products& p = products_of(f);
    if (!p.fenced) die(f, "a product in registers that were touched behind the last wgmma.fence");
    if (q.registers[0] != nullptr) check_fence(f, p, (const void* const*)q.registers, sizeof q.held[0], true);
    if (sums_at(p, d[0]) == nullptr) {
        check_fence(f, p, (const void* const*)d, n / 2 * 4, q.adds);
        p.sums.push_back({d[0], std::vector<float>(16 * n)});
        for (unsigned lane = 0; lane < 32; lane++)
            for (unsigned i = 0; i < n / 2; i++) {
                p.sums.back().v[sum_index(lane, i, n)] = d[lane][i];
                // Nobody may look there until a wait.
                memset(&d[lane][i], 0xff, 4);
            }
    }
    q.group = p.groups;
    // As early as can be, and only what fences have told of; or late.
    if (random(f->block->worker) % 2 == 0) read_tiles(f, &q, f->index / 32, EMU_FENCED);
    p.waiting.push_back(std::move(q));
}

void check_products(Fiber* f) {
    if (!products_of(f).waiting.empty()) die(f, "ends with products that it has not waited for");
}

// Warps of a warpgroup change their registers together. All have no more than the launch gave: a
// block that has a multiprocessor for itself begins with a multiple of 8 for each thread, of 65536.
void check_registers(Block* b) {
    const unsigned threads = (unsigned)b->products.size() * 32;
    unsigned all = 0;
    const char* why = nullptr;
    for (size_t w = 0; w < b->products.size(); w++) {
        const Products &mine = b->products[w], &first = b->products[w / 4 * 4];
        if (mine.changes != first.changes || mine.registers != first.registers) why = "warps of a warpgroup with different registers";
        all += mine.registers * 32;
    }
    if (all > 65536 / threads / 8 * 8 * threads) why = "more registers than the launch gave";
    if (why == nullptr) return;
    std::string s;
    append(s, "rank %u %s block %u: %s", b->rank, b->launch->kernel, b->number, why);
    end_run(b->worker->run, s, false);
}

}  // namespace

extern "C" {

unsigned emu_cluster_rank() {
    return self()->block->cluster_rank;
}

unsigned emu_cluster_size() {
    return (unsigned)self()->block->cluster->blocks.size();
}

void emu_cluster_sync() {
    emu_point("barrier.cluster", nullptr, 0);
    Fiber* f = self();
    Inside inside(f);
    Cluster* c = f->block->cluster;
    const unsigned phase = c->phase;
    if (++c->come == c->threads) c->come = 0, c->phase++;
    while (c->phase == phase) {
        yield(f);
        step(f);
    }
}

void emu_peer_arrive(u64* bar, unsigned rank) {
    emu_point("mbarrier.arrive.cluster", bar, 8);
    Fiber* f = self();
    Inside inside(f);
    Block* to = peer(f, rank);
    come_to(f, bar, (u64*)place(f, to, bar), 1, 0);
    if (to == f->block) told_at(to, bar)->known.join(f->known);
}

void emu_peer_store(unsigned* word, unsigned rank, unsigned value) {
    emu_point("st.cluster", word, 4);
    Fiber* f = self();
    Inside inside(f);
    if (!in_shared(f->block, word, 4)) die(f, "a store to a peer's memory that is not shared");
    *(unsigned*)place(f, peer(f, rank), word) = value;
}

const void* emu_peer_load(const void* p, unsigned rank, unsigned bytes) {
    emu_point("ld.cluster", p, bytes);
    Fiber* f = self();
    Inside inside(f);
    if ((u64)p % bytes != 0) die(f, "a load of a peer's memory that is not aligned");
    if (!in_shared(f->block, p, bytes)) die(f, "a load of a peer's memory that is not shared");
    return place(f, peer(f, rank), (void*)p);
}

void emu_bulk_prefetch(const void* p, unsigned bytes) {
    Fiber* f = self();
    Inside inside(f);
    if (bytes == 0 || bytes % 16 != 0) die(f, "a prefetch of a number of bytes that is no multiple of 16");
    check(f, "bulk.prefetch", p, 16);
    check(f, "bulk.prefetch", (const char*)p + bytes - 16, 16);
}

void emu_tensor_acquire(const void* map) {
    Fiber* f = self();
    Inside inside(f);
    f->block->maps.emplace_back(f, map);
}

void emu_tensor_load(void* shared, const void* map, u64* bar, const int* at, unsigned rank, unsigned blocks) {
    emu_point("tensor.load", nullptr, 0);
    Fiber* f = self();
    Inside inside(f);
    const Box box = box_of(f, map, at, rank, shared, "tensor.load");
    const unsigned bytes = bytes_of(box.map);
    check_copy(f, shared, bytes);
    if (blocks == 0) die(f, "a tensor load into no block");
    for (unsigned r = 0; blocks >> r != 0; r++) {
        if (!(blocks >> r & 1)) continue;
        Block* to = peer(f, r);
        const u64* word = (u64*)place(f, to, bar);
        check_word(f, bar, word);
        for (u64* made : to->made)
            if (made == bar) die(f, "a tensor load to a barrier that no fence has made known");
        Bulk c = {(char*)shared, nullptr, bytes, 0, 0, 0, 0, bar, parity_of(*word), false, {}, box};
        if (to == f->block) {
            issue_checked(f, f->block->worker, to, std::move(c));
            continue;
        }
        begin_copy(f, to, &c);
        if (random(f->block->worker) % 2 == 0) memset(place(f, to, shared), 0xa7, bytes);
        to->bulks.push_back(std::move(c));
        to->due = 0;
    }
}

void emu_tensor_store(const void* map, const void* shared, const int* at, unsigned rank, bool adds) {
    emu_point("tensor.store", nullptr, 0);
    Fiber* f = self();
    Inside inside(f);
    Box box = box_of(f, map, at, rank, shared, "tensor.store");
    box.adds = adds;
    if (adds && box.map.element != EMU_F32) die(f, "a sum by tensor copies that the emulator does not know");
    check_copy(f, shared, bytes_of(box.map));
    f->stored_groups = f->groups + 1;
    issue_checked(f, f->block->worker, f->block,
                  {nullptr, (const char*)shared, bytes_of(box.map), 0, 0, 0, 0, nullptr, 0, false, {}, box});
}

// The code of `x`: nearest even, saturated.
unsigned emu_e4m3(float x) {
    if (__builtin_isnan(x)) return 0x7f;
    const unsigned sign = __builtin_signbit(x) ? 0x80 : 0;
    const float v = __builtin_fabsf(x);
    if (v >= 448.0f) return sign | 0x7e;
    // In units of the last place, of which subnormals have one, too.
    int exp = v < 0x1p-6f ? -6 : __builtin_ilogbf(v);
    const unsigned units = (unsigned)__builtin_nearbyintf(__builtin_ldexpf(v, 3 - exp));
    return sign | (units < 8 ? units : ((unsigned)(exp + 6) << 3) + units);
}

u64 emu_product_desc(const void* tile) {
    Fiber* f = self();
    const long long offset = (char*)tile - (char*)dynamic_of(f->block);
    if (offset < 0 || offset >= f->block->launch->smem) die(f, "a product of a tile that is not in the dynamic shared memory");
    if (offset % 1024 != 0) die(f, "a product of a tile that is not at a multiple of 1024 bytes");
    return (u64)offset >> 4;
}

void emu_product_fence() {
    Products& p = products_of(self());
    p.fenced = true;
    for (Registers& r : p.known) {
        r.then.resize(32 * r.bytes);
        for (unsigned lane = 0; lane < 32; lane++) memcpy(&r.then[lane * r.bytes], r.at[lane], r.bytes);
    }
}

void emu_product(float* const* d, unsigned n, u64 a, u64 b, bool adds, unsigned flags) {
    Product q = {{}, n, 0, a, b, flags, adds, false, {}, {}, {}};
    memcpy(q.d, d, sizeof q.d);
    issue_product(self(), std::move(q));
}

void emu_product_of_registers(float* const* d, unsigned n, const unsigned* const* a, u64 b, bool adds, unsigned flags) {
    Product q = {{}, n, 0, 0, b, flags, adds, false, {}, {}, {}};
    memcpy(q.d, d, sizeof q.d);
    memcpy(q.registers, a, sizeof q.registers);
    for (unsigned lane = 0; lane < 32; lane++) memcpy(q.held[lane], a[lane], sizeof q.held[lane]);
    issue_product(self(), std::move(q));
}

void emu_product_commit() {
    products_of(self()).groups++;
}

void emu_product_meet(unsigned groups) {
    Fiber* f = self();
    Inside inside(f);
    Block* b = f->block;
    const unsigned mine = products_of(f).groups, first = f->index / 128 * 4;
    const unsigned ended = mine > groups ? mine - groups : 0;
    const auto behind = [b, first, ended] {
        bool any = false;
        for (unsigned w = first; w < first + 4 && w < b->products.size(); w++) any |= b->products[w].groups < ended;
        return any;
    };
    while (behind()) {
        yield(f);
        step(f);
    }
}

void emu_product_wait(unsigned groups) {
    Fiber* f = self();
    Products& p = products_of(f);
    // A product is one of all four warps: when it is over for one, it has read the operands for all.
    const unsigned first = f->index / 128 * 4;
    for (unsigned w = first; w < first + 4 && w < f->block->products.size(); w++)
        for (Product& q : f->block->products[w].waiting)
            if (q.group + groups < p.groups && !q.read) read_tiles(f, &q, w);
    size_t done = 0;
    while (done < p.waiting.size() && p.waiting[done].group + groups < p.groups) multiply(f, p, &p.waiting[done++]);
    const std::vector<Product> over(std::make_move_iterator(p.waiting.begin()), std::make_move_iterator(p.waiting.begin() + done));
    p.waiting.erase(p.waiting.begin(), p.waiting.begin() + done);
    for (const Product& q : over) {
        for (unsigned lane = 0; lane < 32 && q.registers[0] != nullptr; lane++)
            if (memcmp(q.held[lane], q.registers[lane], sizeof q.held[lane]) != 0)
                die(f, "registers of a product that changed before it was waited for");
        Sums* s = sums_at(p, q.d[0]);
        bool more = s == nullptr;
        for (const Product& other : p.waiting) more |= other.d[0] == q.d[0];
        if (more) continue;
        for (unsigned lane = 0; lane < 32; lane++)
            for (unsigned i = 0; i < q.n / 2; i++) q.d[lane][i] = s->v[sum_index(lane, i, q.n)];
        p.sums.erase(p.sums.begin() + (s - p.sums.data()));
        p.fenced = false;
    }
}

unsigned emu_elected() {
    return self()->block->worker->run->cfg->seed % 32;
}

void emu_registers(unsigned num, bool) {
    Fiber* f = self();
    if (num < 24 || num > 256 || num % 8 != 0) die(f, "setmaxnreg of a number that no warpgroup can have");
    Products& p = products_of(f);
    p.registers = num, p.changes++;
}

}  // extern "C"
