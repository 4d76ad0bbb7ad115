//! `attention/hopper_gates.cuh` against an f64 reference: keys of ranks that come one after the
//! other, in any order, while the kernel attends, and ranks whose keys do not come.
#![expect(clippy::single_range_in_vec_init, reason = "spans that happen to be one")]

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{LazyLock, Mutex};

use bytemuck::Zeroable;
use tilewire_kernels::SIGNAL;
use tilewire_kernels::abi::{TwAttn, TwAttnOrder, TwGates, TwSeg};
use tilewire_kernels::attention::Tile;
use tilewire_kernels::attention::hopper::{FEW, HopperVariant, STORE_ROWS, THREADS, TILE_M};
use tilewire_kernels::attention::hopper_gates::{GATES, HopperGated, SM90_ATTENTION_GATED};

use crate::attention::{Build, Case, Tiles, case};
use crate::attention_hopper::{D64, D128, E64, How};
use crate::compile::Unit;
use crate::gemm::Type;
use crate::hopper::ragged;
use crate::host::{Lib, RUNTIME};
use crate::memory::{ANY, Memory};
use crate::run::Run;
use crate::team::{LAYOUT, RankMemory, Team};
use crate::{Test, team, tests};

pub const TESTS: &[Test] = tests![
    gated_attention_of_late_keys,
    gated_attention_masks_and_documents,
    gated_attention_heads_and_extras,
    gated_attention_without_rows,
    gated_attention_bits_do_not_depend_on_arrivals,
    gated_attention_bits_do_not_depend_on_ranks,
    gated_attention_ends_by_every_fault,
];

pub fn load(text: String, v: &HopperGated) -> &'static Lib {
    let defines = v.defines().into_iter().map(|(name, value)| (&*name.leak(), value)).collect();
    RUNTIME.load(&Unit {
        name: SM90_ATTENTION_GATED.name,
        text,
        defines,
        kernels: SM90_ATTENTION_GATED.kernels.to_vec(),
        smem: v.shared_bytes() as usize,
    })
}

/// Libraries of the text as it is, by their definitions.
static LIBS: LazyLock<Mutex<HashMap<String, &'static Lib>>> = LazyLock::new(Mutex::default);
static SIGNALS: LazyLock<&'static Lib> = LazyLock::new(|| team::load(SIGNAL.emu_text()));

pub fn lib(v: HopperVariant) -> &'static Lib {
    let mut libs = LIBS.lock().unwrap();
    libs.entry(format!("{v:?}")).or_insert_with(|| {
        load(SM90_ATTENTION_GATED.emu_text(), &HopperGated { base: v, whole: false })
    })
}

/// The slot of the flags.
const SLOT: usize = 5;
/// What the counts of flags were before this launch: they wrap around in some tests.
const BEFORE: u64 = 3;

/// An attention of rank `me` over the keys of all ranks: `case.kv` is what the ranks have, one
/// behind the other, and `kv` how many of those spans each has.
#[derive(Clone, Debug)]
pub struct Gated {
    pub case: Case,
    pub kv: Vec<usize>,
    pub me: usize,
    pub before: u64,
    /// Ranks whose flags do not come.
    pub silent: Vec<usize>,
    /// Nanoseconds of a step of the emulator.
    pub tick_ns: u64,
    /// Tables name the ranks from mine up, not down.
    pub up: bool,
    /// Tables name keys in their global order, and tiles of them divide 128.
    pub whole: bool,
}

impl Gated {
    /// Keys of each rank; queries as `case` has them.
    pub fn new(case: Case, ranks: &[Vec<Range<usize>>], me: usize) -> Self {
        let kv = ranks.iter().map(Vec::len).collect();
        let case = Case { kv: ranks.concat(), ..case };
        Self {
            case,
            kv,
            me,
            before: BEFORE,
            silent: Vec::new(),
            tick_ns: 10,
            up: false,
            whole: false,
        }
    }

    /// The first row of each rank among all keys, and the end.
    fn first(&self) -> Vec<usize> {
        let mut spans = self.case.kv.iter();
        let rows = self.kv.iter().map(|n| spans.by_ref().take(*n).map(Range::len).sum::<usize>());
        let ends = rows.scan(0, |at, n| {
            *at += n;
            Some(*at)
        });
        [0].into_iter().chain(ends).collect()
    }

    /// Tables in which each sequence's segments of keys are in the order of ranks from mine down,
    /// or up.
    fn tables(&self, tile: u64) -> (Vec<TwSeg>, Vec<TwSeg>, u32) {
        let (own, other, tiles) = self.case.tables(true, tile);
        let (first, size) = (self.first(), self.kv.len());
        let seqs: Vec<Option<usize>> =
            self.case.segs(false).into_iter().map(|(_, seq)| seq).collect();
        let mut other: Vec<(TwSeg, Option<usize>)> = other.into_iter().zip(seqs).collect();
        other.sort_by_key(|(s, seq)| {
            let rank = first.partition_point(|f| *f <= s.row as usize) - 1;
            let down = (self.me + size - rank) % size;
            let turn = if self.up { (size - down) % size } else { down };
            (*seq, if self.whole { 0 } else { turn }, s.global)
        });
        let mut own = own;
        for (s, (_, seq)) in own.iter_mut().zip(self.case.segs(true)) {
            let of = |(_, o): &(TwSeg, Option<usize>)| seq.is_some() && *o == seq;
            s.first = other.iter().position(of).unwrap_or(0) as u32;
            s.end = s.first + other.iter().filter(|o| of(o)).count() as u32;
        }
        (own, other.into_iter().map(|(s, _)| s).collect(), tiles)
    }
}

/// When the keys of a rank come.
struct Arrival {
    rank: usize,
    /// Events of the run before it.
    after: u64,
}

/// When the keys of the other ranks come: in any order, some at once, some late.
fn arrivals(g: &Gated, seed: u64) -> Vec<Arrival> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut random = |n: u64| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 20) % n
    };
    let others = (0..g.kv.len()).filter(|r| *r != g.me && !g.silent.contains(r));
    let mut all: Vec<Arrival> = others
        .map(|rank| {
            let most = [1, 2000, 30000][random(3) as usize];
            Arrival { rank, after: random(most) }
        })
        .collect();
    all.sort_by_key(|a| a.after);
    all
}

/// Writes `bytes` at byte `at`: multiples of 8.
fn write_at(m: &Memory, at: usize, bytes: &[u8]) {
    for (i, w) in bytes.chunks_exact(8).enumerate() {
        m.set(0, at + 8 * i, u64::from_ne_bytes(w.try_into().unwrap()));
    }
}

fn build(lib: &'static Lib, v: &HopperGated) -> Build {
    let fwd = Tile { m: TILE_M as u64, n: v.keys() as u64, warps: 12 };
    Build {
        lib: Some(lib),
        input: if v.base.f16 { Type::F16 } else { Type::Bf16 },
        plain: false,
        dqk: v.base.dqk,
        dv: v.base.dv,
        tiles: Tiles { fwd, dq: fwd, dkv: fwd, split: false, pairs: false },
    }
}

/// What a run left: the output's bytes and lse, and the team.
pub struct Left {
    pub out: Vec<u8>,
    pub lse: Vec<f32>,
    pub team: Team,
}

/// Runs `g` by the library, and calls `at_start` with the team before. Keys come at times that the
/// seed decides. Nothing is compared.
pub fn run(
    lib: &'static Lib,
    g: &Gated,
    v: HopperVariant,
    (how, seed): (How, u64),
    at_start: impl FnOnce(&Team),
) -> Left {
    let (v, c) = (HopperGated { base: v, whole: g.whole }, &g.case);
    let on = build(lib, &v);
    let (hq, hkv) = c.heads;
    let [q, k, v_values] = c.inputs(&on);
    let tensor = |name, of_q, mut x: Vec<f32>, width| {
        c.poison(of_q, &mut x, width);
        Case::memory(name, on.input, &x, width, 0)
    };
    let q = tensor("q", true, q, hq * on.dqk);
    // What comes, what is there, and what is mine: each row is in one of these.
    let first = g.first();
    let widths = [hkv * on.dqk * 2, hkv * on.dv * 2];
    let whole = [
        tensor("all k", false, k, hkv * on.dqk).read::<u8>(),
        tensor("all v", false, v_values, hkv * on.dv).read::<u8>(),
    ];
    let there = [0, 1].map(|i| {
        let m = Memory::new("keys of all", ANY, whole[i].len().max(16));
        m.write(&vec![0xffu8; whole[i].len()]);
        m
    });
    let rows = |r: usize, i: usize| first[r] * widths[i]..first[r + 1] * widths[i];
    let own = [0, 1].map(|i| {
        let mine = &whole[i][rows(g.me, i)];
        let m = Memory::new("own keys", ANY, mine.len().max(16));
        m.write(mine);
        m
    });
    let num = Case::rows(&c.q);
    let out = Case::memory("out", c.out, &vec![f32::NAN; num * hq * on.dv], hq * on.dv, 0);
    let lse = Case::memory("lse", Type::F32, &vec![f32::NAN; num * hq], 1, 0);
    let sinks: Vec<f32> = (0..hq).map(Case::sink_of).collect();
    let (bias, sink) = (c.bias_memory(), Case::memory("sink", Type::F32, &sinks, 1, 0));
    let (segs_q, segs_kv, tiles) = g.tables(on.tiles.fwd.m);
    let (own_m, other_m) = (Case::table("own", &segs_q), Case::table("other", &segs_kv));
    let counter = Memory::new("counter", ANY, 4);
    let mut team = Team::new(*SIGNALS, g.kv.len());
    team.timeout_ns *= g.tick_ns / 10;
    let set = |r: usize, count: u64| team.set_count(g.me, SLOT, r, count);
    for r in 0..g.kv.len() {
        set(r, g.before);
        team.ranks[g.me].expected.set(0, 8 * (SLOT * g.kv.len() + r), g.before);
    }
    at_start(&team);
    let mut p = TwAttn {
        q: q.addr(),
        k: there[0].addr(),
        v: there[1].addr(),
        out: out.addr(),
        lse: lse.addr(),
        bias: if c.bias > 0 { bias.addr() } else { 0 },
        sink: if c.sink { sink.addr() } else { 0 },
        own: own_m.addr(),
        other: other_m.addr(),
        num_own: segs_q.len() as u32,
        tiles,
        ..c.param(&on)
    };
    let counted = if how.counted { counter.addr() } else { 0 };
    let mut order = TwAttnOrder { counter: counted, heads: how.heads, ..TwAttnOrder::zeroed() };
    if seed % 4 < 2 && [&segs_q, &segs_kv].iter().all(|s| s.len() <= FEW) {
        (order.few, p.own, p.other) = (1, 0, 0);
        order.own[..segs_q.len()].copy_from_slice(&segs_q);
        order.other[..segs_kv.len()].copy_from_slice(&segs_kv);
    }
    let mut gates = TwGates {
        team: team.param(g.me),
        flags: team.ranks[g.me].control.addr_of(g.me) + team.count_offset(SLOT, 0) as u64,
        slot: SLOT as u32,
        own: first[g.me] as u32,
        end: [u32::MAX; GATES],
    };
    for (to, from) in gates.end.iter_mut().zip(&first[1..]) {
        *to = *from as u32;
    }
    let kernel = on.kernel("tw_hopper_attn_gated");
    let boxes = |m: &[Memory; 2]| {
        [
            ragged(m[0].addr(), hkv * on.dqk, p.ld_k, v.keys()),
            ragged(m[1].addr(), hkv * on.dv, p.ld_v, v.keys()),
        ]
    };
    let ([of_k, of_v], [of_own_k, of_own_v]) = (boxes(&there), boxes(&own));
    let launch = kernel.grid([how.blocks, 1, 1], [THREADS, 1, 1]).smem(v.shared_bytes());
    let launch = launch.arg(&p).arg(&order).arg(&ragged(p.q, hq * on.dqk, p.ld_q, TILE_M));
    let launch = launch.arg(&of_k).arg(&of_v).arg(&ragged(p.out, hq * on.dv, p.ld_o, STORE_ROWS));
    let launch = launch.arg(&of_own_k).arg(&of_own_v).arg(&gates);
    let [to_k, to_v] = &there;
    let memory = [&q, to_k, to_v, &own[0], &own[1], &out, &lse, &bias, &sink, &own_m, &other_m];
    let memory = memory.into_iter().chain([&counter]);
    let memory = memory.chain(team.ranks.iter().flat_map(RankMemory::all));
    let (mut due, mut events) = (arrivals(g, seed).into_iter().peekable(), 0);
    let hook = |_: &crate::run::Event<'_>| {
        events += 1;
        while let Some(a) = due.next_if(|a| a.after < events) {
            for (i, to) in [to_k, to_v].into_iter().enumerate() {
                let at = rows(a.rank, i);
                write_at(to, at.start, &whole[i][at]);
            }
            set(a.rank, g.before.wrapping_add(1));
        }
    };
    let mut run = Run::new(seed).memory(memory).stream(g.me as u32, vec![launch]).hook(hook);
    run.tick_ns = g.tick_ns;
    run.warp_pauses = seed % 4 > 1;
    run.yield_permille = if seed.is_multiple_of(2) { 200 } else { 5 };
    run.go().unwrap_or_else(|e| panic!("{g:?}: {e}"));
    assert_eq!(counter.read::<u32>(), [0], "{g:?}: the counter of tiles");
    Left { out: out.read(), lse: lse.read(), team }
}

/// Runs `g` and compares every element; the bytes of the output.
pub fn check_on(lib: &'static Lib, g: &Gated, v: HopperVariant, how: How, seed: u64) -> Vec<u8> {
    let left = run(lib, g, v, (how, seed), |_| ());
    let v = HopperGated { base: v, whole: g.whole };
    g.case.compare(&build(lib, &v), &left.out, &left.lse);
    assert_eq!((left.team.fault(g.me), left.team.report(g.me)), (0, None), "{g:?}");
    left.out
}

/// By one block or two, with and without a counter, as the seed says.
fn check(g: &Gated, v: HopperVariant, seed: u64) -> Vec<u8> {
    let how = How {
        blocks: 1 + (seed / 2 % 2) as u32,
        heads: 1 + (seed % 3) as u32,
        counted: seed % 2 == 1,
    };
    check_on(lib(v), g, v, how, seed)
}

/// The chunks of `n` rows that each of `size` ranks has by the zigzag.
pub fn zigzag(n: usize, size: usize) -> Vec<Vec<Range<usize>>> {
    let chunk = |i: usize| n * i / (2 * size)..n * (i + 1) / (2 * size);
    (0..size).map(|r| vec![chunk(r), chunk(2 * size - 1 - r)]).collect()
}

/// One causal sequence of `n` rows on `size` ranks.
pub fn causal(n: usize, size: usize, me: usize) -> Gated {
    let ranks = zigzag(n, size);
    let whole = Case { heads: (2, 1), out: Type::Bf16, ..case(n, n) }.causal();
    Gated::new(Case { q: ranks[me].clone(), ..whole }, &ranks, me)
}

fn gated_attention_of_late_keys() {
    for seed in 0..6 {
        let size = 2 + seed as usize % 3;
        let g = causal(700, size, seed as usize % size);
        check(&Gated { up: seed > 2, ..g }, D64, seed);
    }
    check(&causal(1100, 3, 1), D128, 1);
    // Counts wrap around.
    check(&Gated { before: u64::MAX, ..causal(300, 2, 0) }, D64, 3);
}

fn gated_attention_masks_and_documents() {
    let n = 640;
    for seed in 0..4 {
        let (ranks, me) = (zigzag(n, 4), seed as usize % 4);
        let with =
            |c: Case| Gated::new(Case { q: ranks[me].clone(), heads: (4, 2), ..c }, &ranks, me);
        let docs = [(40, 40), (0, 0), (170, 170), (290, 290), (140, 140)];
        check(&with(Case::packed(&docs)), D64, seed);
        check(
            &with(Case { out: Type::Bf16, sink: true, ..Case::packed(&docs) }.causal()),
            D64,
            seed,
        );
        check(&with(case(n, n).window(70, 10)), D64, seed);
        check(&with(case(n, n)), D64, seed + 1);
    }
}

fn gated_attention_heads_and_extras() {
    let all = HopperVariant::all().into_iter().filter(|v| !(v.extra && v.f16));
    for (i, v) in all.enumerate() {
        let g = causal(300, 2 + i % 2, i % 2);
        let (softcap, bias, drop) = if v.extra { (2.0, 2, 0.2) } else { (0.0, 0, 0.0) };
        let out = [Type::F16, Type::F32][i % 2];
        let out = if v.f16 || out == Type::F32 { out } else { Type::Bf16 };
        let case = Case { out, softcap, bias, drop, sink: i % 3 == 0, ..g.case.clone() };
        check(&Gated { case, ..g }, v, i as u64);
    }
    let g = causal(450, 3, 2);
    check(&Gated { case: Case { softcap: 3.0, drop: 0.3, ..g.case.clone() }, ..g }, E64, 5);
}

/// Ranks without keys, or without queries that see any.
fn gated_attention_without_rows() {
    let none = Vec::new;
    for (seed, ranks) in [
        vec![vec![0..90], none(), vec![90..300]],
        vec![none(), vec![0..150, 150..300], none()],
        vec![none(), none(), vec![0..300]],
    ]
    .into_iter()
    .enumerate()
    {
        for me in 0..3 {
            let c = Case { q: vec![100..260], out: Type::Bf16, ..case(300, 300) };
            check(&Gated::new(c.causal(), &ranks, me), D64, (seed + me) as u64);
        }
    }
    // Queries of a document whose keys nobody has, and of none.
    let c = Case { out: Type::Bf16, ..Case::packed(&[(40, 0), (60, 60)]) };
    check(&Gated::new(c, &[vec![0..30], vec![30..60]], 1), D64, 2);
    check(&Gated::new(Case::packed(&[(40, 0)]), &[none(), none()], 0), D64, 1);
}

/// The order in which keys come changes no bit, nor does the number of blocks.
fn gated_attention_bits_do_not_depend_on_arrivals() {
    let g = causal(700, 4, 1);
    let all: Vec<_> = (0..4).map(|seed| check(&g, D64, seed)).collect();
    assert!(all.iter().all(|o| *o == all[0]), "bits of the output");
}

/// Where chunks are whole tiles, and keys are met in their global order, each row has the same bits
/// on any number of ranks.
fn gated_attention_bits_do_not_depend_on_ranks() {
    let wide = HopperVariant { dqk: 192, ..D128 };
    for (i, (ends, base, whole)) in [
        (vec![1024], D64, true),
        (vec![512, 768, 1024], D64, true),
        (vec![1024], wide, true),
        // Tiles that are cut elsewhere show.
        (vec![515, 1024], D64, false),
    ]
    .into_iter()
    .enumerate()
    {
        let lib = load(SM90_ATTENTION_GATED.emu_text(), &HopperGated { base, whole: true });
        let starts = [0].into_iter().chain(ends.iter().copied());
        let seqs = starts.zip(&ends).map(|(start, end)| (start..*end, start..*end)).collect();
        let all = Case { heads: (2, 1), scale: 9.0, seqs, ..case(1024, 1024) };
        let on = |size: usize| by_rows(lib, &all, base, (size, i as u64));
        let [one, two, four] = [1, 2, 4].map(on);
        assert_eq!(one == two && two == four, whole, "{ends:?}: bits of the output");
    }
}

/// The output of each row of `all`, causal, by the zigzag on so many ranks.
fn by_rows(
    lib: &'static Lib,
    all: &Case,
    base: HopperVariant,
    (size, seed): (usize, u64),
) -> Vec<Vec<u8>> {
    let n = all.q[0].len();
    let (ranks, mut rows) = (zigzag(n, size), vec![Vec::new(); n]);
    for (me, spans) in ranks.iter().enumerate() {
        let case = Case { q: spans.clone(), ..all.clone() }.causal();
        let g = Gated { whole: true, ..Gated::new(case, &ranks, me) };
        let how = How { blocks: 2, heads: 1, counted: true };
        let out = check_on(lib, &g, base, how, seed + me as u64);
        let row = out.len() / spans.iter().map(Range::len).sum::<usize>();
        for (at, bytes) in spans.iter().cloned().flatten().zip(out.chunks(row)) {
            rows[at] = bytes.to_vec();
        }
    }
    rows
}

/// Keys that do not come: the wait ends by the deadline, by the abort of a peer and of the host,
/// and when the peer has left. Here and at the peers stands which rank that is.
fn gated_attention_ends_by_every_fault() {
    faults(lib(D64));
}

const DEADLINE: (u64, u64) = (1, 2);
const GONE: (u64, u64) = (2, 2);

pub fn faults(lib: &'static Lib) {
    let g = Gated { silent: vec![2], ..causal(500, 4, 1) };
    let how = How { blocks: 2, heads: 1, counted: true };
    let of =
        |g: &Gated, seed, at_start: &dyn Fn(&Team)| run(lib, g, D64, (how, seed), at_start).team;
    let go = |seed, at_start: &dyn Fn(&Team)| of(&g, seed, at_start);
    let code = |t: &Team, (reason, about): (u64, u64)| t.code(1, about as usize, reason);
    let aborted = |t: &Team| [0, 2, 3].map(|r| t.abort(r, 1));
    // A deadline: the report names the rank, the slot and the counts.
    let t = go(1, &|_| ());
    let r = t.report(1).expect("a report");
    assert_eq!((r.reason, r.peer, r.slot), (1, 2, SLOT));
    assert_eq!((r.expected, r.seen, r.barrier), (BEFORE + 1, BEFORE, false));
    assert_eq!(t.fault(1), code(&t, DEADLINE));
    assert_eq!(aborted(&t), [t.fault(1); 3]);
    // A peer that has left: its signals may be on their way for a second.
    let slow = Gated { silent: vec![0, 2, 3], tick_ns: 1000, ..g.clone() };
    let t = of(&slow, 2, &|t| t.ranks[1].pinned.set(0, 16, 1 << 2));
    assert_eq!((t.fault(1), t.report(1).unwrap().peer), (code(&t, GONE), 2));
    // The abort of a peer, passed on as it is.
    let t = go(3, &|t| t.set_abort(1, 3, t.code(3, 0, 4)));
    assert_eq!((t.fault(1), aborted(&t)), (t.code(3, 0, 4), [t.code(3, 0, 4); 3]));
    // The host's.
    let t = go(4, &|t| t.ranks[1].pinned.set(0, 0, t.code(1, 1, 6)));
    assert_eq!(t.fault(1), t.code(1, 1, 6));
    // A team that was over before.
    let t = go(5, &|t| t.ranks[1].fault.set(0, 0, t.code(1, 0, 5)));
    assert_eq!((t.fault(1), t.report(1), aborted(&t)), (t.code(1, 0, 5), None, [0; 3]));
    assert_eq!(LAYOUT.report, 64, "words of a report");
}
