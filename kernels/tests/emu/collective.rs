//! `collective/sm90_collective.cu`: gathers, exchanges and sums of several ranks against the host's
//! bits, launch after launch in one memory without meetings between; a rank that stays away.

use std::sync::{Arc, LazyLock};

use bytemuck::Zeroable;
use tilewire_core::{DType, Rng, convert_from_f32, convert_to_f32};
use tilewire_kernels::SIGNAL;
use tilewire_kernels::abi::{TwCollective, TwPart, TwTotal};
use tilewire_kernels::portable::{COLLECTIVE, COLLECTIVE_RANKS};

use crate::compile::Unit;
use crate::ep_layers::poison;
use crate::host::{Kernel, Launch, Lib, RUNTIME};
use crate::memory::{Memory, Pages};
use crate::run::Run;
use crate::team::{self, RankMemory, Team};
use crate::{Test, tests};

pub const TESTS: &[Test] = tests![
    parts_and_sums_have_the_hosts_bits,
    parts_and_sums_of_two_to_sixteen_ranks,
    a_rank_that_stays_away_is_named,
];

const MOST: usize = COLLECTIVE_RANKS;
const WARPS: u32 = 4;
const PIECE: usize = 32;
/// Warps that send, and the most chunks of their rings.
const SEND: usize = 2;
const STAGES: usize = 4;
/// Bytes behind a flag: two bulk copies, and two sums.
const FLAGGED: usize = 2 * PIECE;
const FLAGS: usize = 12;
/// Bytes of an area, and where those of a rank lie.
const AREA: usize = 8192;
const AT_FLAGS: usize = 2 * AREA;

static SIGNALS: LazyLock<&'static Lib> = LazyLock::new(|| team::load(SIGNAL.emu_text()));

fn unit(text: String, mantissa: u64, stages: u64) -> &'static Lib {
    let value = |d: &&'static str| {
        let own = match *d {
            "TW_OUT_MANTISSA" => mantissa,
            "TW_COLLECTIVE_WARPS" => u64::from(WARPS),
            "TW_COLLECTIVE_STAGES" => stages,
            "TW_COLLECTIVE_SEND" => SEND as u64,
            "TW_COLLECTIVE_PIECE" | "TW_COLLECTIVE_CHUNK" => PIECE as u64,
            _ => MOST as u64,
        };
        (*d, own)
    };
    RUNTIME.load(&Unit {
        name: COLLECTIVE.name,
        text,
        defines: COLLECTIVE.defines.iter().map(value).collect(),
        kernels: COLLECTIVE.kernels.to_vec(),
        smem: (WARPS as usize + SEND * STAGES) * PIECE,
    })
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    Gather,
    Exchange,
    Scatter,
    Reduce,
    /// A sum of whole vectors, which all ranks have sent to all.
    Whole,
}

pub const OPS: [Op; 5] = [Op::Gather, Op::Exchange, Op::Scatter, Op::Reduce, Op::Whole];

/// A team with its areas.
pub struct Ranks {
    size: usize,
    pub team: Team,
    views: Vec<Arc<Memory>>,
    states: Vec<Memory>,
    lib: &'static Lib,
    /// Bytes behind a flag.
    flagged: usize,
}

/// One collective with its data: bytes from each rank to each.
pub struct Batch {
    pub op: Op,
    split: Vec<Vec<usize>>,
    x: Vec<Memory>,
    out: Vec<Memory>,
    want: Vec<Vec<u8>>,
    scale: f32,
}

/// Bytes from an aligned address where tensors begin: of some ranks they are views.
fn shift(rank: usize) -> usize {
    [0, 2, 0, 8][rank % 4]
}

fn bytes(dtype: DType, v: &[f32]) -> Vec<u8> {
    let mut out = vec![0; v.len() * dtype.size()];
    convert_from_f32(dtype, v, &mut out);
    out
}

fn wide(dtype: DType, b: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; b.len() / dtype.size()];
    convert_to_f32(dtype, b, &mut out);
    out
}

/// `len` bytes of 0x77 from the rank's shift on, with some around.
fn tensor(rank: usize, data: &[u8]) -> Memory {
    let m = Memory::new("tensor", rank as u32, data.len() + 32);
    let mut all = vec![0x77u8; m.len_bytes()];
    all[shift(rank)..][..data.len()].copy_from_slice(data);
    m.write(&all);
    m
}

/// Where the part of each begins.
fn starts(lens: impl Iterator<Item = usize>) -> Vec<usize> {
    lens.scan(0, |at, len| {
        *at += len;
        Some(*at - len)
    })
    .collect()
}

impl Batch {
    pub fn new((op, dtype): (Op, DType), size: usize, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        // Some ranks have nothing, but where all must own some.
        let mut own: Vec<usize> = (0..size)
            .map(|r| match (op, r) {
                (Op::Gather | Op::Scatter, r) if r % 5 == 1 => 0,
                _ => 16 * (1 + rng.below(20) as usize),
            })
            .collect();
        if op == Op::Whole {
            own = vec![own[0]; size];
        }
        let split: Vec<Vec<usize>> = (0..size)
            .map(|src| match op {
                Op::Gather | Op::Whole => vec![own[src]; size],
                // One of many neither sends nor receives.
                Op::Exchange => (0..size)
                    .map(|dst| 16 * rng.below(12) as usize * usize::from(src != 5 && dst != 5))
                    .collect(),
                _ => own.clone(),
            })
            .collect();
        let rows = |r: usize| match op {
            Op::Gather | Op::Whole => own[r],
            _ => split[r].iter().sum(),
        };
        let data: Vec<Vec<u8>> = (0..size)
            .map(|r| {
                let mut v: Vec<f32> =
                    (0..rows(r) / dtype.size()).map(|_| rng.normal() * 8.0).collect();
                // A sum of these alone is what it was.
                v.iter_mut().step_by(5).for_each(|v| *v = -0.0);
                bytes(dtype, &v)
            })
            .collect();
        let scale = if seed.is_multiple_of(2) { 1.0 } else { 1.0 / size as f32 };
        let sum = || {
            let parts: Vec<Vec<f32>> = data.iter().map(|d| wide(dtype, d)).collect();
            let one = |i| parts[1..].iter().fold(parts[0][i], |s, p| s + p[i]) * scale;
            bytes(dtype, &(0..parts[0].len()).map(one).collect::<Vec<_>>())
        };
        let part = |src: usize, dst: usize| {
            let at = starts(split[src].iter().copied())[dst];
            &data[src][at..][..split[src][dst]]
        };
        let want: Vec<Vec<u8>> = (0..size)
            .map(|r| match op {
                Op::Gather => data.concat(),
                Op::Exchange => (0..size).flat_map(|src| part(src, r).to_vec()).collect(),
                Op::Scatter => sum()[starts(own.iter().copied())[r]..][..own[r]].to_vec(),
                Op::Reduce | Op::Whole => sum(),
            })
            .collect();
        let x = data.iter().enumerate().map(|(r, d)| tensor(r, d)).collect();
        let out = want.iter().enumerate().map(|(r, w)| tensor(r, &vec![0x77; w.len()])).collect();
        Self { op, split, x, out, want, scale }
    }

    pub fn check(&self) {
        for (r, want) in self.want.iter().enumerate() {
            let (got, at) = (self.out[r].read::<u8>(), shift(r));
            assert!(got[at..][..want.len()] == want[..], "{:?} on rank {r}", self.op);
            let mut around = got[..at].iter().chain(&got[at + want.len()..]);
            assert!(around.all(|b| *b == 0x77), "{:?}: bytes around the output of {r}", self.op);
        }
    }
}

impl Ranks {
    pub fn new(lib: &'static Lib, size: usize) -> Self {
        let pages = Pages::new(size, AT_FLAGS + 8 * size * (1 + 2 * FLAGS));
        Self {
            size,
            team: Team::new(*SIGNALS, size),
            views: pages.views("symmetric"),
            states: (0..size).map(|r| Memory::new("state", r as u32, 24)).collect(),
            lib,
            flagged: FLAGGED,
        }
    }

    /// Byte `at` of rank `r`'s memory, as `me` sees it.
    fn at(&self, me: usize, r: usize, at: usize) -> u64 {
        self.views[me].addr() + r as u64 * self.views[me].stride() + at as u64
    }

    pub fn param(&self, me: usize, b: &Batch) -> (TwCollective, TwTotal) {
        let (mut p, mut t): (TwCollective, TwTotal) = (Zeroable::zeroed(), Zeroable::zeroed());
        for r in 0..self.size {
            p.flags[r] = self.at(me, r, AT_FLAGS);
        }
        p.epoch = self.states[me].addr();
        (p.ticket, p.slot, p.pieces) = (p.epoch + 8, 4, FLAGS as u32);
        (p.piece, p.slice) = (self.flagged as u32, PIECE as u32);
        let (x, out) = (b.x[me].addr() + shift(me) as u64, b.out[me].addr() + shift(me) as u64);
        let mut from = starts(b.split[me].iter().copied());
        if matches!(b.op, Op::Gather | Op::Whole) {
            from = vec![0; self.size];
        }
        let came = |r: usize| starts(b.split.iter().map(|s| s[r]));
        let reduces = matches!(b.op, Op::Scatter | Op::Reduce | Op::Whole);
        let slot = b.split.iter().flatten().copied().max().unwrap_or(0);
        p.same = u32::from(matches!(b.op, Op::Gather | Op::Whole));
        for (r, at) in from.iter().enumerate() {
            let src = x + *at as u64;
            let (len, own) = (b.split[me][r] as u64, out + came(r)[me] as u64);
            let dst = match (r == me, reduces) {
                (true, true) if b.op == Op::Whole => self.at(me, me, me * slot),
                (true, true) => continue,
                (true, false) => own,
                (false, true) => self.at(me, r, me * slot),
                (false, false) => self.at(me, r, came(r)[me]),
            };
            p.send[r] = TwPart { src, dst, len };
        }
        for r in (0..self.size).filter(|r| *r != me) {
            let (at, len) = (came(me)[r], b.split[r][me]);
            // Of sums: rows of their owners.
            let (at, len, area) = match b.op {
                Op::Reduce => (from[r], b.split[me][r], AREA),
                Op::Scatter | Op::Whole => continue,
                _ => (at, len, 0),
            };
            let (src, dst) = (self.at(me, me, area + at), out + at as u64);
            p.take[r] = TwPart { src, dst, len: len as u64 };
        }
        if reduces {
            t = TwTotal {
                slots: self.at(me, me, 0),
                stride: slot as u64,
                own: x + from[me] as u64,
                len: b.split[me][me] as u64,
                to: [0; MOST],
                scale: b.scale,
                pad: 0,
            };
            t.to[me] = out + if b.op == Op::Reduce { from[me] as u64 } else { 0 };
            for r in (0..self.size).filter(|r| *r != me && b.op == Op::Reduce) {
                t.to[r] = self.at(me, r, AREA + from[me]);
            }
        }
        let most = |parts: &[TwPart], bytes: usize| {
            parts.iter().map(|s| (s.len as usize).div_ceil(bytes) as u32).max().unwrap_or(0)
        };
        p.sends = most(&p.send, self.flagged);
        p.sums = (t.len as usize).div_ceil(PIECE) as u32;
        p.takes = most(&p.take, if reduces { PIECE } else { self.flagged });
        p.summers = if b.op == Op::Reduce { WARPS - 1 } else { WARPS };
        (p, t)
    }

    fn launch(&self, me: usize, b: &Batch, blocks: u32) -> Launch<'static> {
        let (p, t) = self.param(me, b);
        let k = self.kernel("tw_collective").grid([blocks, 1, 1], [32 * WARPS, 1, 1]);
        let k = k.smem(((WARPS as usize + SEND * STAGES) * PIECE) as u32).arg(&self.team.param(me));
        // What looks like a result lies where the tensor begins.
        let mut outs = poison(&[(&b.out[me], 255)]);
        (outs.out[0], outs.len[0]) = (outs.out[0] + shift(me) as u64, b.want[me].len() as u64);
        k.arg(&p).arg(&t).arg(&outs)
    }

    fn leave(&self, me: usize, b: &Batch) -> Launch<'static> {
        let k = self.kernel("tw_collective_leave").grid([1, 1, 1], [64, 1, 1]);
        k.arg(&self.team.param(me)).arg(&self.param(me, b).0)
    }

    fn kernel(&self, name: &str) -> &'static Kernel {
        // A few hundred bytes for each launch of a test.
        Box::leak(Box::new(self.lib.kernel(name)))
    }

    /// Runs what `make` says on each of `ranks`, at once.
    pub fn run<'a>(
        &'a self,
        (seed, ranks): (u64, usize),
        batches: &'a [Batch],
        make: &dyn Fn(usize) -> Vec<Launch<'a>>,
    ) {
        let mut run = Run::new(seed);
        run.max_steps = 50_000_000;
        for r in 0..ranks {
            run = run.stream(r as u32, make(r));
            run = run.memory([&*self.views[r], &self.states[r]]);
            run = run.memory(batches.iter().flat_map(|b| [&b.x[r], &b.out[r]]));
        }
        run.memory(self.team.ranks.iter().flat_map(RankMemory::all)).go().unwrap();
    }
}

/// All operations in turn, on one memory without meetings between: a rank may be one ahead of
/// another. A launch has so many of the `blocks`.
fn in_turn(lib: &'static Lib, dtype: DType, (size, seed): (usize, u64), blocks: [u32; 3]) {
    let ranks = Ranks::new(lib, size);
    let ops = [OPS, OPS].concat();
    let batches: Vec<Batch> =
        ops.iter().zip(seed..).map(|(op, s)| Batch::new((*op, dtype), size, s)).collect();
    // Launches that went another way read nothing here.
    let leaves = |n: usize| n % 3 == 1;
    ranks.run((seed, size), &batches, &|r| {
        let go = |(n, b): (usize, &Batch)| {
            let launch = ranks.launch(r, b, blocks[n % 3]);
            let leave = leaves(n).then(|| ranks.leave(r, b));
            [Some(launch), leave].into_iter().flatten()
        };
        batches.iter().enumerate().flat_map(go).collect()
    });
    batches.iter().for_each(Batch::check);
    let launches = (0..ops.len()).map(|n| 1 + u64::from(leaves(n))).sum::<u64>();
    for r in 0..size {
        assert_eq!((ranks.team.fault(r), ranks.states[r].get(0, 0)), (0, launches));
    }
}

fn all_in_turn(lib: &'static Lib, dtype: DType) {
    [(4, 1), (4, 2), (5, 3)].into_iter().for_each(|at| in_turn(lib, dtype, at, [1, 2, 3]));
}

/// From the fewest that the host asks this kernel for to the most; also more blocks than there is
/// work.
fn parts_and_sums_of_two_to_sixteen_ranks() {
    let all = [(23, DType::F32), (7, DType::BF16), (10, DType::F16)];
    let all = all.map(|(mantissa, dtype)| (unit(COLLECTIVE.emu_text(), mantissa, 4), dtype));
    for (i, size) in [2, 3, 6, 7, 8, 8, 16].into_iter().enumerate() {
        let (lib, dtype) = all[i % 3];
        in_turn(lib, dtype, (size, 70 + i as u64), if size > 8 { [1, 2, 1] } else { [1, 9, 2] });
    }
}

/// Flags of pieces come behind all that they tell of: more chunks to a piece than a ring has.
pub fn told_early(lib: &'static Lib) {
    for seed in 20..28 {
        let ranks = Ranks { flagged: 12 * PIECE, ..Ranks::new(lib, 4) };
        let batches = [Batch::new((Op::Gather, DType::F32), 4, seed)];
        ranks.run((seed, 4), &batches, &|r| vec![ranks.launch(r, &batches[0], 1)]);
        batches[0].check();
    }
}

/// Launch behind launch of one kind: memory is written again as soon as it is granted.
pub fn one_ahead(lib: &'static Lib) {
    for seed in 40..64 {
        let ranks = Ranks::new(lib, 3);
        let op = OPS[seed as usize % OPS.len()];
        let batches: Vec<Batch> =
            (0..4).map(|n| Batch::new((op, DType::F32), 3, seed + 100 * n)).collect();
        ranks
            .run((seed, 3), &batches, &|r| batches.iter().map(|b| ranks.launch(r, b, 2)).collect());
        batches.iter().for_each(Batch::check);
    }
}

pub fn in_f32(lib: &'static Lib) {
    all_in_turn(lib, DType::F32);
}

fn parts_and_sums_have_the_hosts_bits() {
    for (mantissa, dtype) in [(23, DType::F32), (7, DType::BF16), (10, DType::F16)] {
        all_in_turn(unit(COLLECTIVE.emu_text(), mantissa, 4), dtype);
    }
    all_in_turn(unit(COLLECTIVE.emu_text(), 7, 2), DType::BF16);
    told_early(load(COLLECTIVE.emu_text()));
    one_ahead(load(COLLECTIVE.emu_text()));
}

/// The last rank makes no launch: the others say so, and nothing that they leave looks like a
/// result.
pub fn staying_away(lib: &'static Lib) {
    for (i, op) in OPS.iter().enumerate() {
        stay_away(Ranks::new(lib, 4), *op, 10 + i as u64, true);
        // Who waits for whom first differs.
        for seed in 20..if *op == Op::Reduce { 32 } else { 22 } {
            stay_away(Ranks::new(lib, 4), *op, seed, false);
        }
    }
}

fn stay_away(ranks: Ranks, op: Op, seed: u64, before: bool) {
    let batches = [Batch::new((op, DType::F32), 4, seed)];
    let launches = |r: usize| vec![ranks.launch(r, &batches[0], 2)];
    if before {
        ranks.run((seed, 4), &batches, &launches);
        batches[0].check();
    }
    ranks.run((seed, 3), &batches, &launches);
    let b = &batches[0];
    for r in 0..3 {
        // Who takes nothing from the last rank, and owns no sums, has its result.
        let waits = match op {
            Op::Gather | Op::Exchange => b.split[3][r] > 0,
            Op::Scatter => b.split[r][r] > 0,
            Op::Reduce | Op::Whole => true,
        };
        if !waits {
            continue;
        }
        assert_ne!(ranks.team.fault(r), 0, "{op:?}: rank {r} knows");
        let (got, at) = (b.out[r].read::<u8>(), shift(r));
        assert!(
            got[at..][..b.want[r].len()].iter().all(|b| *b == 255),
            "{op:?} of {r} is a result"
        );
        let about = ranks.team.fault(r) >> 40 & 0xff;
        assert_eq!(about, 3, "{op:?}: rank {r} names who is missing");
    }
}

fn a_rank_that_stays_away_is_named() {
    staying_away(load(COLLECTIVE.emu_text()));
}

pub fn load(text: String) -> &'static Lib {
    unit(text, 23, 4)
}
