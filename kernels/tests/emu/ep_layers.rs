//! Ranks of a layer of expert parallelism with their memory, and the launches of its phases as the
//! host queues them.

use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use tilewire_kernels::SIGNAL;

use crate::ep::{BUFFERS, FEW, PIECE, Room, THREADS};
use crate::ep_batch::{Batch, Rows, Sum};
use crate::ep_world::World;
use crate::host::{Kernel, Launch, Lib};
use crate::memory::{ANY, Memory, Pages};
use crate::run::Run;
use crate::team::{self, RankMemory, Team};
use tilewire_kernels::abi::{TwEp, TwMeet, TwPoison, TwPush, TwRecv, TwReturn, TwRouting};

/// What a kernel says of receive buffers that differ.
const DIFFER: u32 = 9;

static SIGNALS: LazyLock<&'static Lib> = LazyLock::new(|| team::load(SIGNAL.emu_text()));

pub fn filled<T: Pod>(v: &[T]) -> Memory {
    let m = Memory::new("input", ANY, size_of_val(v));
    if !v.is_empty() {
        m.write(v);
    }
    m
}

pub fn poisoned(len: usize) -> Memory {
    let m = Memory::new("output", ANY, len);
    m.write(&vec![0x77u8; len]);
    m
}

/// The portable kernels, and those of dispatch and combine by bulk copies.
#[derive(Clone, Copy)]
pub struct Libs {
    pub plain: &'static Lib,
    pub push: Option<&'static Lib>,
    pub returns: Option<&'static Lib>,
    /// What the last one is compiled for.
    pub room: Room,
}

impl Libs {
    pub fn plain(plain: &'static Lib) -> Self {
        Self { plain, push: None, returns: None, room: FEW }
    }
}

/// A team with its areas, for one launch after the other.
pub struct Layers {
    pub world: World,
    pub team: Team,
    pub views: Vec<Arc<Memory>>,
    /// Launches of three areas, and their tickets.
    pub states: Vec<Memory>,
    pub first: Memory,
    /// How far each rank's page is behind rank 0's.
    steps: Memory,
    blocks: Vec<Memory>,
    pub libs: Libs,
}

/// One rank's own memory for a routing: the handle's eleven arrays, inputs and outputs.
pub struct Side {
    pub handle: Vec<Memory>,
    pub idx: Memory,
    pub x: Memory,
    pub w: Memory,
    pub recv: Memory,
    pub recv_w: Memory,
    pub scales: Memory,
    pub recv_scales: Memory,
    pub index: Memory,
    /// Record of each row without gaps.
    pub row_source: Memory,
    /// What a combine and the backward of a dispatch return, and gradients of received weights.
    pub y: Memory,
    pub d_recv: Memory,
    pub d_recv_w: Memory,
    pub out: Memory,
    pub dx: Memory,
    pub dw: Memory,
    /// The backward of a combine, without weights and with them.
    pub d_out: Memory,
    pub dy: [Memory; 2],
    pub d_y_w: Memory,
    pub tokens: usize,
}

impl Side {
    fn handle(&self) -> [u64; 11] {
        self.handle.iter().map(Memory::addr).collect::<Vec<_>>().try_into().unwrap()
    }

    fn all(&self) -> impl Iterator<Item = &Memory> {
        let ins = [&self.idx, &self.x, &self.w, &self.scales, &self.y, &self.d_recv];
        let outs = [&self.recv, &self.recv_w, &self.recv_scales, &self.index, &self.row_source];
        let sums = [&self.d_recv_w, &self.out, &self.dx, &self.dw, &self.d_out, &self.d_y_w];
        self.handle.iter().chain(ins).chain(outs).chain(sums).chain(&self.dy)
    }
}

pub fn go(lib: &'static Lib, name: &str, blocks: u32) -> Launch<'static> {
    go_with(lib, name, blocks, THREADS)
}

fn go_with(lib: &'static Lib, name: &str, blocks: u32, threads: u32) -> Launch<'static> {
    // A few hundred bytes for each launch of a test.
    let kernel: &'static Kernel = Box::leak(Box::new(lib.kernel(name)));
    kernel.grid([blocks, 1, 1], [threads, 1, 1])
}

/// Which page of the symmetric memory is that of rank `r`: in order, or from the middle outwards.
fn page(room: Room, r: usize, size: usize) -> usize {
    let middle = (size - 1) / 2;
    match (room.uneven, r % 2) {
        (false, _) => r,
        (_, 0) => middle - r / 2,
        _ => middle + r.div_ceil(2),
    }
}

impl Layers {
    pub fn new(libs: Libs, hidden: usize) -> Self {
        Self::of(libs, World::usual(hidden))
    }

    pub fn of(libs: Libs, world: World) -> Self {
        let size = world.size();
        let pages = Pages::new(size, world.places()[5] + BUFFERS * world.buffer());
        let views = pages.views("symmetric");
        let first: Vec<u32> =
            (0..=size).map(|r| world.experts[..r].iter().sum::<usize>() as u32).collect();
        let place = |r: usize| page(libs.room, r, size);
        let stride = views[0].stride();
        let step = |r: usize| (place(r) as u64).wrapping_sub(place(0) as u64).wrapping_mul(stride);
        let steps: Vec<u64> = (0..size).map(step).collect();
        let own = |len: usize| (0..size).map(|_| Memory::new("own", ANY, len)).collect();
        Self {
            team: Team::new(*SIGNALS, size),
            views,
            states: own(24 + 3 * 16),
            first: filled(&first),
            steps: filled(&steps),
            blocks: own(4 * world.routers as usize * world.num_experts()),
            libs,
            world,
        }
    }

    pub fn layer(&self, me: usize, capacity: usize) -> TwEp {
        let (w, base) = (&self.world, self.first_page(me));
        let [meta, tokens, back, ..] = w.places();
        let [meta_stride, row_stride, return_stride] = w.strides().map(|s| s as u64);
        let [meta, tokens, back] = [meta, tokens, back].map(|at| base + at as u64);
        TwEp {
            counts: base,
            meta,
            tokens,
            returns: back,
            stride: self.stride(me),
            first: self.first.addr(),
            steps: self.steps.addr(),
            meta_stride,
            row_stride,
            return_stride,
            size: w.size() as u32,
            me: me as u32,
            max_tokens: w.max_tokens as u32,
            top_k: w.k as u32,
            experts: w.num_experts() as u32,
            capacity: capacity as u32,
            align: w.align as u32,
            scales: w.scales as u32,
        }
    }

    /// Area 0 counts, 1 tokens, 2 what returns.
    fn meet(&self, me: usize, area: usize, senders: u32) -> TwMeet {
        let (w, at) = (&self.world, self.states[me].addr());
        let which = usize::from(area == 2);
        TwMeet {
            flags: self.first_page(me) + w.places()[3 + which] as u64,
            stride: self.stride(me),
            epoch: at + 8 * area as u64,
            ticket: at + 24 + 16 * area as u64,
            slot: 4,
            chunk: w.chunk[which] as u32,
            slices: w.slices[which] as u32,
            chunks: w.chunks(which) as u32,
            senders,
            leave: 1,
        }
    }

    /// The page that is a rank's memory.
    pub fn page(&self, r: usize) -> usize {
        page(self.libs.room, r, self.world.size())
    }

    /// Where rank `me` sees rank 0's memory.
    fn first_page(&self, me: usize) -> u64 {
        self.views[me].addr_of(self.page(0))
    }

    fn stride(&self, me: usize) -> u64 {
        // Of uneven steps the lowest bits count: those of what the steps are multiples of.
        self.views[me].stride()
    }

    /// Address of receive buffer `n`, from 1 on, of rank `r` as it sees it.
    pub fn buffer(&self, r: usize, n: usize) -> u64 {
        self.views[r].addr_of(self.page(r)) + self.buffer_at(n) as u64
    }

    /// Where it lies.
    pub fn buffer_at(&self, n: usize) -> usize {
        self.world.places()[5] + (n - 1) * self.world.buffer()
    }

    /// Runs one launch or more of each of `ranks`, at once.
    pub fn run(
        &self,
        at: (u64, usize),
        batch: &Batch,
        make: &dyn Fn(usize) -> Vec<Launch<'static>>,
    ) {
        self.run_all(at, &[batch], make);
    }

    pub fn run_all(
        &self,
        (seed, ranks): (u64, usize),
        batches: &[&Batch],
        make: &dyn Fn(usize) -> Vec<Launch<'static>>,
    ) {
        let mut run = Run::new(seed);
        run.max_steps = 500_000_000;
        for r in 0..ranks {
            run = run.stream(r as u32, make(r));
            run = run.memory([&*self.views[r], &self.states[r], &self.blocks[r]]);
            run = run.memory(batches.iter().flat_map(|b| b.sides[r].all()));
        }
        let team = self.team.ranks.iter().flat_map(RankMemory::all);
        run.memory(team).memory([&self.first]).go().unwrap();
    }

    pub fn route(&self, r: usize, b: &Batch) -> Launch<'static> {
        let (s, w) = (&b.sides[r], &self.world);
        let (choices, warps) = (s.tokens * w.k, (w.routers * THREADS / 32) as usize);
        let a = TwRouting {
            idx: s.idx.addr(),
            blocks: self.blocks[r].addr(),
            choices: choices as u32,
            wide: u32::from(b.wide),
            span: choices.div_ceil(warps).next_multiple_of(32) as u32,
            bad_input: 1,
            part: 0,
            pad: 0,
        };
        let outs = poison(&[(&s.index, 255), (&s.handle[7], 0), (&s.handle[8], 0)]);
        // What `tw_table` takes.
        let smem = w.num_experts() as u32 * (8 + 12 + 4 * THREADS / 32);
        let k = go(self.libs.plain, "tw_ep_route", w.routers).smem(smem).arg(&self.team.param(r));
        let k = k.arg(&self.layer(r, b.limit)).arg(&self.meet(r, 0, 0)).arg(&a);
        k.arg(&s.handle()).arg(&outs)
    }

    /// The kernel that meets the others: rows of `send` to where `recv` says.
    fn send(
        &self,
        (r, b): (usize, &Batch),
        (send, recv): (&TwPush, &TwRecv),
        leave: bool,
        outs: &TwPoison,
    ) -> Launch<'static> {
        let w = &self.world;
        let meet = TwMeet { leave: u32::from(leave), ..self.meet(r, 1, (w.sms / 3).max(1)) };
        let k = match self.libs.push {
            Some(lib) => go_with(lib, "tw_ep_push_bulk", w.bulk, 5 * 32).smem(9 * PIECE as u32),
            None => go(self.libs.plain, "tw_ep_push", w.sms.max(2)),
        };
        let k = k.arg(&self.team.param(r)).arg(&self.layer(r, b.capacity)).arg(&meet);
        k.arg(&b.sides[r].handle()).arg(send).arg(recv).arg(outs)
    }

    /// As the batch says, in one kernel, or with the rows left to a second one; there is none of
    /// rank-major rows.
    pub fn dispatch(&self, r: usize, b: &Batch, whole: bool) -> Vec<Launch<'static>> {
        self.dispatch_to(r, b, (whole, 0))
    }

    /// As `dispatch`, to a receive buffer if it is not 0.
    pub fn dispatch_to(
        &self,
        r: usize,
        b: &Batch,
        (whole, buffer): (bool, usize),
    ) -> Vec<Launch<'static>> {
        let s = &b.sides[r];
        let row_bytes = self.world.payload() as u64;
        let also = |m: &Memory| if b.rows_only { 0 } else { m.addr() };
        let send = TwPush {
            x: s.x.addr(),
            weights: also(&s.w),
            scales: also(&s.scales),
            row_bytes,
            tokens: s.tokens as u32,
            pad: 0,
        };
        let whole = whole && b.rows != Rows::Flat;
        let one = |p: u64| if whole { p } else { 0 };
        let x = if buffer > 0 { self.buffer(r, buffer) } else { s.recv.addr() };
        let recv = TwRecv {
            x: one(x),
            weights: also(&s.recv_w),
            scales: one(also(&s.recv_scales)),
            index: one(also(&s.index)),
            row_bytes,
            buffer: buffer as u32,
            bad_input: DIFFER,
            rank_major: u32::from(b.rows == Rows::RankMajor),
            pad: 0,
        };
        let later = !whole && b.rows != Rows::RankMajor;
        let mut outs = poison(&[(&s.recv, 255), (&s.recv_w, 255), (&s.index, 255)]);
        outs.out[0] = x;
        let mut list = vec![self.send((r, b), (&send, &recv), !later, &outs)];
        if later {
            list.extend(self.spread(r, b));
            list.push(self.leave(r, b));
        }
        list
    }

    /// Rows of the area to where they belong, by kernels behind the one that met the others.
    fn spread(&self, r: usize, b: &Batch) -> Vec<Launch<'static>> {
        let (s, plain, layer) = (&b.sides[r], self.libs.plain, self.layer(r, b.capacity));
        let (place, source) = match b.rows {
            Rows::Flat => (s.handle[5].addr(), &s.row_source),
            _ => (0, &s.handle[4]),
        };
        let flat = b.rows == Rows::Flat;
        let mut list: Vec<_> = flat.then(|| self.flat_places(r, b)).into_iter().collect();
        let index = go(plain, "tw_ep_row_index", (b.capacity as u32).div_ceil(THREADS));
        list.push(index.arg(&layer).arg(&s.handle()).arg(&place).arg(&s.index.addr()));
        let gather = go(plain, "tw_ep_gather", b.received() as u32).arg(&layer);
        let gather = gather.arg(&source.addr()).arg(&s.recv.addr());
        let row_bytes = self.world.payload() as u64;
        list.push(gather.arg(&row_bytes).arg(&s.recv_scales.addr()));
        list
    }

    fn flat_places(&self, r: usize, b: &Batch) -> Launch<'static> {
        let (s, layer) = (&b.sides[r], self.layer(r, b.capacity));
        let flat = go(self.libs.plain, "tw_ep_flat", 1);
        flat.arg(&layer).arg(&s.handle()).arg(&s.row_source.addr())
    }

    /// The area was read.
    fn leave(&self, r: usize, b: &Batch) -> Launch<'static> {
        let (layer, meet) = (self.layer(r, b.capacity), self.meet(r, 1, 0));
        go(self.libs.plain, "tw_ep_leave", 1).arg(&self.team.param(r)).arg(&layer).arg(&meet)
    }

    /// The backward of a combine: without weights a dispatch of rows alone where they are
    /// expert-major, to a receive buffer if that is not 0.
    pub fn combine_bwd(
        &self,
        (r, b): (usize, &Batch),
        weighted: bool,
        buffer: usize,
    ) -> Vec<Launch<'static>> {
        let (s, w) = (&b.sides[r], &self.world);
        let row_bytes = w.result() as u64;
        let send =
            TwPush { x: s.d_out.addr(), row_bytes, tokens: s.tokens as u32, ..Zeroable::zeroed() };
        let dy = &s.dy[usize::from(weighted)];
        if !weighted && b.rows == Rows::ExpertMajor {
            let x = if buffer > 0 { self.buffer(r, buffer) } else { dy.addr() };
            let buffer = buffer as u32;
            let recv = TwRecv { x, row_bytes, buffer, bad_input: DIFFER, ..Zeroable::zeroed() };
            let mut outs = poison(&[(dy, 255)]);
            outs.out[0] = x;
            return vec![self.send((r, b), (&send, &recv), true, &outs)];
        }
        let rank_major = u32::from(b.rows == Rows::RankMajor);
        let recv = TwRecv { rank_major, ..Zeroable::zeroed() };
        let mut list = vec![self.send((r, b), (&send, &recv), false, &poison(&[]))];
        list.extend((b.rows == Rows::Flat).then(|| self.flat_places(r, b)));
        let of = |m: &Memory| if weighted { m.addr() } else { 0 };
        let gather = go(self.libs.plain, "tw_ep_gather_bwd", b.capacity as u32);
        let gather = gather.arg(&self.layer(r, b.capacity)).arg(&s.handle()).arg(&dy.addr());
        let gather = gather.arg(&of(&s.recv_w)).arg(&of(&s.y)).arg(&of(&s.d_y_w));
        list.push(gather.arg(&(w.hidden as u32)));
        list.push(self.leave(r, b));
        list
    }

    pub fn combine(&self, r: usize, b: &Batch) -> Launch<'static> {
        self.return_rows(r, b, Sum::Combine { weighted: true })
    }

    /// Combine, or the backward of dispatch.
    pub fn return_rows(&self, r: usize, b: &Batch, sum: Sum) -> Launch<'static> {
        let (s, w) = (&b.sides[r], &self.world);
        let if_so = |so: bool, m: &Memory| if so { m.addr() } else { 0 };
        let (grads, weighted) = match sum {
            Sum::Combine { weighted } => (false, weighted),
            Sum::DispatchBwd { grads } => (grads, false),
        };
        let (y, out) = match sum {
            Sum::Combine { .. } => (&s.y, &s.out),
            Sum::DispatchBwd { .. } => (&s.d_recv, &s.dx),
        };
        let back = TwReturn {
            y: y.addr(),
            weights: if_so(weighted, &s.recv_w),
            dw: if_so(grads, &s.d_recv_w),
            out: out.addr(),
            dw_out: if_so(grads, &s.dw),
            hidden: w.hidden as u32,
            expert_major: u32::from(b.sums_copies(sum)),
            tokens: s.tokens as u32,
            pad: 0,
        };
        let outs = poison(&[(out, 255), (&s.dw, 255)][..1 + usize::from(grads)]);
        let blocks = w.sms.max(2);
        let senders = (blocks * 7 / 9).min((w.chunks(1) * w.size()) as u32).max(1);
        let k = match self.libs.returns {
            Some(lib) => go_with(lib, "tw_ep_return_bulk", w.sms, 3 * 32)
                .smem(self.libs.room.return_bytes() as u32),
            None => go(self.libs.plain, "tw_ep_return", blocks),
        };
        let k = k.arg(&self.team.param(r)).arg(&self.layer(r, b.capacity));
        k.arg(&self.meet(r, 2, senders)).arg(&s.handle()).arg(&back).arg(&outs)
    }
}

/// The outputs that a team that is over fills, each with its byte.
pub fn poison(outs: &[(&Memory, u8)]) -> TwPoison {
    let mut p = TwPoison { out: [0; 8], len: [0; 8], byte: [0; 8] };
    for (i, (m, byte)) in outs.iter().enumerate() {
        (p.out[i], p.len[i], p.byte[i]) = (m.addr(), m.len_bytes() as u64, *byte);
    }
    p
}
