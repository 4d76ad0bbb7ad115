//! `ep/sm80_ep.cu` and `ep/sm90_ep.cu` on four ranks: routing against the oracle, rows and sums against the
//! arithmetic of the host operation, to the bit; launch after launch in one memory; a rank that stays away.

use std::sync::LazyLock;

use bytemuck::Pod;
use tilewire_kernels::portable::{EP, EP_BACK, EP_BULK, EP_THREADS, ep_defines};
use tilewire_kernels::{SIGNAL, Source};

use crate::compile::Unit;
use crate::ep_batch::{Batch, batch, batch_of};
use crate::ep_params::{Back, Layer, Meet, Recv, Routing, Send, poison};
use crate::host::{Kernel, Launch, Lib, RUNTIME};
use crate::memory::{ANY, Memory, Pages};
use crate::run::Run;
use crate::team::{self, RankMemory, Team};
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    tokens_go_to_their_experts_and_back,
    tokens_go_by_bulk_copies,
    tokens_come_back_by_bulk_loads,
];

pub const RANKS: usize = 4;
pub const TOKENS: usize = 24;
pub const K: usize = 3;
pub const SCALES: usize = 2;
pub const ALIGN: usize = 8;
pub const EXPERTS: [usize; RANKS] = [2, 0, 2, 1];
pub const NUM: usize = 5;
const META: usize = 64;
const ROW: usize = 160;
const BACK: usize = 176;
/// Elements of a row: more words than a warp has lanes, and a whole number of pieces.
pub const ODD: usize = 38;
pub const WHOLE: usize = 8;
const PIECE: usize = 16;
const ENTRIES: usize = 4;
const THREADS: u32 = 64;
/// More tokens than a warp has at a time.
const CHUNK: usize = 11;
const SLICES: usize = 2;
const CHUNKS: usize = TOKENS.div_ceil(CHUNK);
pub const RECORDS: usize = RANKS * TOKENS;
/// Where the areas of a rank lie.
const AT_META: usize = 512;
const AT_TOKENS: usize = AT_META + RECORDS * META;
const AT_BACK: usize = AT_TOKENS + RECORDS * ROW;
const AT_FLAGS: usize = AT_BACK + RECORDS * BACK;
const FLAGS: usize = (2 * RANKS + RANKS * CHUNKS) * 8;
/// Receive buffers, each with room for the most rows of the longest.
pub const AT_ROWS: usize = AT_FLAGS + 2 * FLAGS;
pub const MOST_ROWS: usize = 150;
pub const BUFFER: usize = MOST_ROWS * ROW;
pub const BUFFERS: usize = 2;
/// What a kernel says of receive buffers that differ.
const DIFFER: u32 = 9;
/// Blocks of the routing, and of what moves rows.
const ROUTERS: u32 = 2;
const BLOCKS: u32 = 3;
/// Fewer than there are chunks: each takes several.
const BULK_BLOCKS: u32 = 2;
const SMEM: u32 = 2048;

pub fn unit(source: &Source, text: String, pieces: u64) -> &'static Lib {
    let value = |d: &&'static str| {
        let own = match *d {
            "TW_OUT_MANTISSA" => ep_defines(23)[0].1,
            "TW_EP_BULK_SEND" | "TW_EP_BULK_LAY" | "TW_EP_BACK_RETURN" => 2,
            "TW_EP_BACK_SUM" => 1,
            "TW_EP_BACK_STAGES" => 3,
            "TW_EP_BACK_SLICE" => PIECE as u64,
            "TW_EP_BACK_TOKENS" => CHUNK as u64,
            "TW_EP_BACK_ENTRIES" => ENTRIES as u64,
            "TW_EP_BULK_PIECES" => pieces,
            // Two stores a row.
            "TW_EP_BULK_ZERO" => PIECE as u64,
            // Two pieces a row.
            "TW_EP_BULK_PIECE" => PIECE as u64,
            // Small blocks: several of them with few choices.
            _ => u64::from(THREADS),
        };
        (*d, own)
    };
    assert!(EP_THREADS.is_multiple_of(u64::from(THREADS)));
    RUNTIME.load(&Unit {
        name: source.name,
        text,
        defines: source.defines.iter().map(value).collect(),
        kernels: source.kernels.to_vec(),
        smem: SMEM as usize,
    })
}

pub fn load(text: String) -> &'static Lib {
    unit(&EP, text, 1)
}

pub fn load_bulk(text: String) -> &'static Lib {
    unit(&EP_BULK, text, 2)
}

pub fn load_back(text: String) -> &'static Lib {
    unit(&EP_BACK, text, 1)
}

/// Kernels of the portable unit, for tests of the other.
pub static PORTABLE: LazyLock<&'static Lib> = LazyLock::new(|| load(EP.emu_text()));
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
    pub send: Option<&'static Lib>,
    pub back: Option<&'static Lib>,
}

impl Libs {
    pub fn plain(plain: &'static Lib) -> Self {
        Self { plain, send: None, back: None }
    }
}

/// A team with its areas, for one launch after the other.
pub struct Layers {
    pub team: Team,
    pub views: Vec<Memory>,
    /// Launches of three areas, and their tickets.
    pub states: Vec<Memory>,
    pub first: Memory,
    blocks: Vec<Memory>,
    pub libs: Libs,
    pub hidden: usize,
}

impl Layers {
    pub fn new(libs: Libs, hidden: usize) -> Self {
        let pages = Pages::new(RANKS, AT_ROWS + BUFFERS * BUFFER);
        let first: Vec<u32> =
            (0..=RANKS).map(|r| EXPERTS[..r].iter().sum::<usize>() as u32).collect();
        let own = |len: usize| (0..RANKS).map(|_| Memory::new("own", ANY, len)).collect();
        Self {
            team: Team::new(*SIGNALS, RANKS),
            views: (0..RANKS).map(|r| pages.map("symmetric", r as u32)).collect(),
            states: own(24 + 3 * 16),
            first: filled(&first),
            blocks: own(4 * ROUTERS as usize * NUM),
            libs,
            hidden,
        }
    }

    pub fn layer(&self, me: usize, capacity: usize) -> Layer {
        let base = self.views[me].addr();
        Layer {
            areas: [0, AT_META, AT_TOKENS, AT_BACK].map(|at| base + at as u64),
            stride: self.views[me].stride(),
            first: self.first.addr(),
            strides: [META as u64, ROW as u64, BACK as u64],
            size: RANKS as u32,
            me: me as u32,
            max_tokens: TOKENS as u32,
            top_k: K as u32,
            experts: NUM as u32,
            capacity: capacity as u32,
            align: ALIGN as u32,
            scales: SCALES as u32,
        }
    }

    /// Area 0 counts, 1 tokens, 2 what comes back.
    fn meet(&self, me: usize, area: usize, senders: u32) -> Meet {
        let at = self.states[me].addr();
        let flags = AT_FLAGS + if area == 2 { FLAGS } else { 0 };
        Meet {
            flags: self.views[me].addr() + flags as u64,
            stride: self.views[me].stride(),
            epoch: at + 8 * area as u64,
            ticket: at + 24 + 16 * area as u64,
            slot: 4,
            chunk: CHUNK as u32,
            slices: SLICES as u32,
            chunks: CHUNKS as u32,
            senders,
            leave: 1,
        }
    }

    /// Address of receive buffer `n`, from 1 on, of rank `r` as it sees it.
    pub fn buffer(&self, r: usize, n: usize) -> u64 {
        self.views[r].addr_of(r) + (AT_ROWS + (n - 1) * BUFFER) as u64
    }

    /// Runs one launch or more of each of `ranks`, at once.
    pub fn run(
        &self,
        at: (u64, usize),
        batch: &Batch,
        make: &dyn Fn(usize, &Side) -> Vec<Launch<'static>>,
    ) {
        self.run_all(at, &[batch], &|r| make(r, &batch.sides[r]));
    }

    pub fn run_all(
        &self,
        (seed, ranks): (u64, usize),
        batches: &[&Batch],
        make: &dyn Fn(usize) -> Vec<Launch<'static>>,
    ) {
        let mut run = Run::new(seed);
        run.max_steps = 50_000_000;
        for r in 0..ranks {
            run = run.stream(r as u32, make(r));
            run = run.memory([&self.views[r], &self.states[r], &self.blocks[r]]);
            for s in batches.iter().map(|b| &b.sides[r]) {
                run = run.memory(&s.handle);
                run = run.memory([&s.idx, &s.x, &s.w, &s.recv, &s.recv_w, &s.index, &s.y, &s.out]);
                run = run.memory([&s.scales, &s.recv_scales]);
            }
        }
        let team = self.team.ranks.iter().flat_map(RankMemory::all);
        run.memory(team).memory([&self.first]).go().unwrap();
    }
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
    pub y: Memory,
    pub out: Memory,
    pub tokens: usize,
}

impl Side {
    fn handle(&self) -> [u64; 11] {
        self.handle.iter().map(Memory::addr).collect::<Vec<_>>().try_into().unwrap()
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

impl Layers {
    pub fn route(&self, r: usize, s: &Side, capacity: usize) -> Launch<'static> {
        let a = Routing {
            idx: s.idx.addr(),
            blocks: self.blocks[r].addr(),
            choices: (s.tokens * K) as u32,
            wide: 1,
            span: 32,
            bad: 1,
            part: 0,
            pad: 0,
        };
        let outs = poison(&[(&s.index, 255), (&s.handle[7], 0), (&s.handle[8], 0)]);
        let k = go(self.libs.plain, "tw_ep_route", ROUTERS).smem(SMEM).arg(&self.team.param(r));
        let k = k.arg(&self.layer(r, capacity)).arg(&self.meet(r, 0, 0)).arg(&a);
        k.arg(&s.handle()).arg(&outs)
    }

    /// As the batch says, in one kernel, or with the rows left to a second one; there is none of rank-major rows.
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
        let (s, capacity) = (&b.sides[r], b.capacity);
        let row_bytes = 4 * self.hidden as u64;
        let (layer, team) = (self.layer(r, capacity), self.team.param(r));
        let also = |m: &Memory| if b.rows_only { 0 } else { m.addr() };
        let send = Send {
            x: s.x.addr(),
            weights: also(&s.w),
            scales: also(&s.scales),
            row_bytes,
            tokens: s.tokens as u32,
            pad: 0,
        };
        let one = |p: u64| if whole { p } else { 0 };
        let x = if buffer > 0 { self.buffer(r, buffer) } else { s.recv.addr() };
        let recv = Recv {
            x: one(x),
            weights: also(&s.recv_w),
            scales: one(also(&s.recv_scales)),
            index: one(also(&s.index)),
            row_bytes,
            buffer: buffer as u32,
            bad_input: DIFFER,
            rank_major: u32::from(b.rank_major),
            pad: 0,
        };
        let meet = Meet { leave: u32::from(whole || b.rank_major), ..self.meet(r, 1, 1) };
        let mut outs = poison(&[(&s.recv, 255), (&s.recv_w, 255), (&s.index, 255)]);
        outs.out[0] = x;
        let k = match self.libs.send {
            Some(lib) => {
                go_with(lib, "tw_ep_send_bulk", BULK_BLOCKS, 5 * 32).smem(9 * PIECE as u32)
            }
            None => go(self.libs.plain, "tw_ep_send", BLOCKS),
        };
        let k = k.arg(&team).arg(&layer).arg(&meet).arg(&s.handle()).arg(&send).arg(&recv);
        let mut list = vec![k.arg(&outs)];
        if !whole && !b.rank_major {
            assert!(self.libs.send.is_none(), "a run is of one unit");
            let index = go(self.libs.plain, "tw_ep_row_index", capacity.div_ceil(64) as u32);
            list.push(index.arg(&layer).arg(&s.handle()).arg(&0u64).arg(&s.index.addr()));
            let gather = go(self.libs.plain, "tw_ep_gather", capacity as u32).arg(&layer);
            let gather = gather.arg(&s.handle[4].addr()).arg(&s.recv.addr());
            list.push(gather.arg(&row_bytes).arg(&s.recv_scales.addr()));
            list.push(go(self.libs.plain, "tw_ep_leave", 1).arg(&team).arg(&layer).arg(&meet));
        }
        list
    }

    pub fn combine(&self, r: usize, b: &Batch) -> Launch<'static> {
        let (s, capacity) = (&b.sides[r], b.capacity);
        let back = Back {
            y: s.y.addr(),
            weights: s.recv_w.addr(),
            dw: 0,
            out: s.out.addr(),
            dw_out: 0,
            hidden: self.hidden as u32,
            expert_major: u32::from(!b.rank_major),
            tokens: s.tokens as u32,
            pad: 0,
        };
        let outs = poison(&[(&s.out, 255)]);
        let list = CHUNK * (4 + 8 * ENTRIES);
        let k = match self.libs.back {
            Some(lib) => go_with(lib, "tw_ep_back_bulk", BLOCKS, 3 * 32)
                .smem((3 * (4 * PIECE + list)) as u32),
            None => go(self.libs.plain, "tw_ep_back", BLOCKS),
        };
        let k = k
            .arg(&self.team.param(r))
            .arg(&self.layer(r, capacity))
            .arg(&self.meet(r, 2, 2))
            .arg(&s.handle());
        k.arg(&back).arg(&outs)
    }
}

/// How rows are ordered, and by whom.
#[derive(Clone, Copy, PartialEq)]
enum Rows {
    ExpertMajor,
    RankMajor,
    /// Expert-major, by kernels behind the dispatch.
    Later,
}

/// Launch after launch: dispatch with weights, then a combine, weighted where rows are expert-major.
fn exchanges(layers: &Layers, cases: &[(u64, usize, Rows)]) {
    let h = layers.hidden;
    for &(seed, capacity, rows) in cases {
        let b = batch_of(seed, capacity, h, rows == Rows::RankMajor);
        let at = (seed, RANKS);
        layers.run(at, &b, &|r, s| vec![layers.route(r, s, capacity)]);
        b.routed();
        layers.run(at, &b, &|r, _| layers.dispatch(r, &b, rows != Rows::Later));
        b.dispatched(h);
        layers.run(at, &b, &|r, _| vec![layers.combine(r, &b)]);
        b.combined(h);
    }
}

use Rows::{ExpertMajor, Later, RankMajor};

pub fn some_routings(lib: &'static Lib) {
    let layers = Layers::new(Libs::plain(lib), ODD);
    let aligned = [(1, 150, ExpertMajor), (2, 150, Later), (3, 20, ExpertMajor)];
    exchanges(&layers, &aligned);
    exchanges(&layers, &[(7, 150, RankMajor), (4, 1, ExpertMajor), (8, 20, RankMajor)]);
    // Two batches in flight, without a meeting between launches: a rank may be one ahead of another.
    let (a, b) = (batch(5, 150, ODD), batch(6, 150, ODD));
    for seed in 0..3 {
        layers.run_all((seed, RANKS), &[&a, &b], &|r| {
            let (a, b) = (&a.sides[r], &b.sides[r]);
            [a, b, a, b].map(|s| layers.route(r, s, 150)).into()
        });
        a.routed();
        b.routed();
    }
    for seed in 5..9 {
        in_flight(&layers, seed, &[&a, &b]);
    }
}

/// Routings, dispatches and combines of two batches, one behind the other.
fn in_flight(layers: &Layers, seed: u64, batches: &[&Batch; 2]) {
    let [a, b] = batches;
    layers.run_all((seed, RANKS), batches, &|r| {
        let (a, b) = (&a.sides[r], &b.sides[r]);
        let mut all: Vec<_> = [a, b, a, b].map(|s| layers.route(r, s, 150)).into();
        for b in *batches {
            all.extend(layers.dispatch(r, b, true));
        }
        all.extend(batches.map(|b| layers.combine(r, b)));
        all
    });
    for batch in batches {
        batch.routed();
        batch.dispatched(ODD);
        batch.combined(ODD);
    }
}

fn tokens_go_to_their_experts_and_back() {
    some_routings(*PORTABLE);
}

const BULK: [(u64, usize, Rows); 5] = [
    (1, 150, ExpertMajor),
    (7, 150, RankMajor),
    (2, 150, ExpertMajor),
    (3, 20, ExpertMajor),
    (8, 20, RankMajor),
];

pub fn some_bulk_routings(lib: &'static Lib) {
    let libs = Libs { send: Some(lib), ..Libs::plain(*PORTABLE) };
    exchanges(&Layers::new(libs, WHOLE), &BULK);
}

pub fn some_bulk_returns(lib: &'static Lib) {
    let libs = Libs { back: Some(lib), ..Libs::plain(*PORTABLE) };
    exchanges(&Layers::new(libs, WHOLE), &BULK);
}

fn tokens_come_back_by_bulk_loads() {
    some_bulk_returns(load_back(EP_BACK.emu_text()));
}

fn tokens_go_by_bulk_copies() {
    some_bulk_routings(load_bulk(EP_BULK.emu_text()));
    some_bulk_routings(unit(&EP_BULK, EP_BULK.emu_text(), 1));
}
