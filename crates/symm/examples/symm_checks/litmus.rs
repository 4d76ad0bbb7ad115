//! Litmus tests of what the protocol expects of GPUs and of the links between them: a round is
//! data, a flag and a credit, every word of every round is checked, and nothing may be wrong.
//! Beside each stand mistakes that must show, or may: what a GPU forgives says nothing, so those
//! are only reported.
//!
//! `symm_checks litmus [part of a name]` prints a line of JSON for each test; exit code 1 if one
//! failed. All GPUs of the machine (at most 8) push in a ring at the same time. Needs two that
//! reach each other's memory, sm_90 or newer, and NVRTC or the kernels beside the program.
use std::time::Duration;

use tilewire_core::{Deadline, Error, ErrorKind, Result};
use tilewire_device::cuda::{CudaMemory, CudaStream, Grid, Kernel, LaunchArgs, device_count};
use tilewire_device::jit::KernelSpec;
use tilewire_device::{Buffer, Queue};
use tilewire_kernels::LITMUS;
use tilewire_kernels::abi::TwLitmus;
use tilewire_symm::{Transport, World, WorldCfg};

use crate::cases::{Setup, Vmm, setup};

/// Of a launch, and so of everything that spins.
const LIMIT_NS: u64 = 25_000_000_000;
const LINE: usize = 64;
/// Of a block, without asking for more.
const MOST_SHARED: u32 = 48 << 10;
/// How much later than the others the last block of `counter_flag` stores, in the tests that say
/// so.
fn late_ns(name: &str) -> u32 {
    match (name.contains("late"), name.contains("first block signals")) {
        // So late that eight ranks that keep each other busy see it.
        (true, true) => 20_000,
        (true, false) => 2000,
        _ => 0,
    }
}
const THREADS: u32 = 256;
/// Rounds of a graph of pushes.
const BATCH: u64 = 100;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Expect {
    /// No wrong word.
    Good,
    /// A planted mistake that must be seen.
    Wrong,
    /// A planted mistake that the hardware may forgive.
    Any,
}

#[derive(Clone, Copy)]
struct Test {
    name: &'static str,
    kernel: &'static str,
    lanes: usize,
    bytes: usize,
    reads: u32,
    /// As in `bench/litmus.cu`; of pushes: the flag is copied first.
    broken: u32,
    expect: Expect,
    rounds: u64,
}

const MILLION: u64 = 1_000_000;

/// Name, kernel, lanes, bytes of a lane, reads, mistake, what is expected of it, rounds of a lane.
const fn test(
    name: &'static str,
    kernel: &'static str,
    (lanes, bytes, reads): (usize, usize, u32),
    (broken, expect): (u32, Expect),
    rounds: u64,
) -> Test {
    Test { name, kernel, lanes, bytes, reads, broken, expect, rounds }
}

const BULK: &str = "tw_litmus_bulk";
const COUNT: &str = "tw_litmus_count";
const PUSH: &str = "tw_litmus_fill";

const TESTS: [Test; 12] = [
    test("bulk_store_flag", BULK, (8, 8192, 1), (0, Expect::Good), MILLION),
    test("bulk_store_flag, flag first", BULK, (8, 8192, 1), (1, Expect::Wrong), 20_000),
    test("bulk_store_flag, stores not complete", BULK, (8, 32768, 1), (2, Expect::Any), 100_000),
    test("copy_push_flag", PUSH, (1, 32768, 1), (0, Expect::Good), 100_000),
    test("copy_push_flag, flag first", PUSH, (1, 32768, 1), (1, Expect::Wrong), 5_000),
    test("counter_flag", COUNT, (8, 8192, 1), (0, Expect::Good), MILLION),
    test("counter_flag, one block late", COUNT, (8, 8192, 1), (0, Expect::Good), 100_000),
    test(
        "counter_flag, one block late, first block signals",
        COUNT,
        (8, 8192, 1),
        (4, Expect::Wrong),
        20_000,
    ),
    test("counter_flag, relaxed", COUNT, (8, 131_072, 1), (5, Expect::Any), 20_000),
    test("credit", BULK, (4, 8192, 4), (0, Expect::Good), MILLION),
    test("credit, overwritten before it", BULK, (4, 8192, 4), (3, Expect::Wrong), 20_000),
    test("credit, small", BULK, (16, 16, 2), (0, Expect::Good), MILLION),
];

/// What one rank found.
#[derive(Clone, Copy)]
struct Found {
    wrong: u64,
    stale: u64,
    /// The fewest of a block.
    rounds: u64,
    us: f64,
}

/// A rank of a test: its memory outlives all that is queued.
struct Place {
    s: Setup<Vmm>,
    /// The counter or the epoch, and behind it what is pushed.
    own: CudaMemory,
    /// A row for each block; that of `tw_litmus_fill` behind them.
    out: CudaMemory,
    param: TwLitmus,
}

impl Place {
    fn new(world: &World, t: &Test) -> Result<Self> {
        let area = t.lanes * (t.bytes + 2 * LINE);
        let s = setup::<Vmm>(world, area.next_multiple_of(1 << 21))?;
        let own = s.buffer(&vec![0; LINE + t.bytes])?;
        let out = s.buffer(&vec![0; 32 * (2 * t.lanes + 1)])?;
        let at = s.heap.alloc(area, "litmus")?.offset();
        let (me, n) = (s.team.rank(), s.team.size());
        s.os.here().clear(&s.stream, at, area)?;
        Transport::barrier(&s.os, &s.stream, 0, "barrier")?;
        s.finish()?;
        let peers = s.os.device_team().ok_or_else(|| Error::internal("no addresses of peers"))?;
        let base = |steps: usize| peers.addr(me.offset(steps, n), at, area);
        let (flags, credits) = ((t.lanes * t.bytes) as u64, (t.lanes * (t.bytes + LINE)) as u64);
        let (mine, next, previous) = (base(0)?, base(1)?, base(n - 1)?);
        let param = TwLitmus {
            put: next,
            flag: next + flags,
            credit: mine + credits,
            got: mine,
            seen: mine + flags,
            grant: previous + credits,
            own: own.addr(),
            out: out.addr(),
            rounds: t.rounds,
            timeout_ns: LIMIT_NS,
            bytes: t.bytes as u32,
            lanes: t.lanes as u32,
            reads: t.reads,
            broken: t.broken,
            late_ns: late_ns(t.name),
            pad: 0,
        };
        Ok(Self { s, own, out, param })
    }

    fn kernel(&self, name: &'static str) -> Result<Kernel> {
        let ctx = self.s.os.here().context();
        let spec = KernelSpec {
            name: LITMUS.name.to_owned(),
            text: LITMUS.text(),
            defines: Vec::new(),
            arch: ctx.arch()?,
        };
        ctx.module(&spec)?.kernel(name)
    }

    fn launch(
        &self,
        stream: &CudaStream,
        kernel: &Kernel,
        blocks: usize,
        p: &TwLitmus,
    ) -> Result<()> {
        // Plain stores and loads need no stage.
        let shared = if p.bytes > MOST_SHARED { 0 } else { p.bytes };
        let grid = Grid::new(blocks as u32, THREADS).shared(shared);
        // SAFETY: each kernel takes a `TwLitmus`; all memory lives until `rows` has waited, as the
        // kernels end by themselves.
        unsafe { kernel.launch(stream, grid, LaunchArgs::new().arg(p)) }
    }

    /// Fills, pushes and flags of `BATCH` rounds in a graph, replayed beside one kernel that
    /// consumes.
    fn push(&self, t: &Test) -> Result<()> {
        let (fill, consume) = (self.kernel(PUSH)?, self.kernel(BULK)?);
        let stream = CudaStream::new(self.s.os.here().context())?;
        let p = &self.param;
        let filled = TwLitmus { out: p.out + 32 * (2 * t.lanes as u64), broken: 0, ..*p };
        stream.begin_capture()?;
        for _ in 0..BATCH {
            self.launch(&stream, &fill, 1, &filled)?;
            let mut copies =
                [(p.put, self.own.addr() + LINE as u64, t.bytes), (p.flag, self.own.addr(), 8)];
            if t.broken != 0 {
                copies.swap(0, 1);
            }
            for (dst, src, len) in copies {
                // SAFETY: ranges of the heap and of the rank's buffer, which outlive the graph; the
                // credit that `fill` waits for orders them, which is what is tested.
                unsafe { stream.copy(dst, src, len)? };
            }
        }
        let graph = stream.end_capture()?;
        self.s.team.agree(true)?;
        self.launch(&self.s.stream, &consume, t.lanes, &TwLitmus { broken: 0, ..*p })?;
        for _ in 0..t.rounds / BATCH {
            stream.replay(&graph)?;
        }
        stream.synchronize_until(Some(Deadline::after_s(40.0)))
    }

    fn meet(&self, t: &Test) -> Result<()> {
        let kernel = self.kernel(t.kernel)?;
        self.s.team.agree(true)?;
        self.launch(&self.s.stream, &kernel, 2 * t.lanes, &self.param)
    }

    fn found(&self, t: &Test) -> Result<Found> {
        self.s.stream.synchronize_until(Some(Deadline::after_s(40.0)))?;
        let words: Vec<u64> = bytemuck::pod_collect_to_vec(&self.out.download()?);
        let rows: Vec<&[u64]> = words.chunks_exact(4).collect();
        // Of pushes, the consumers' rows come first.
        let used = if t.kernel == PUSH { &rows[..t.lanes] } else { &rows[..2 * t.lanes] };
        let ns = used.iter().map(|r| r[3]).max().unwrap_or(0);
        let rounds = used.iter().map(|r| r[2]).min().unwrap_or(0);
        Ok(Found {
            wrong: used.iter().map(|r| r[0]).sum(),
            stale: used.iter().map(|r| r[1]).sum(),
            rounds,
            us: ns as f64 / 1e3 / rounds.max(1) as f64,
        })
    }
}

/// Runs a test on all ranks and prints its line; true if it is as expected.
fn run(t: &Test, ranks: usize) -> Result<bool> {
    let cfg = WorldCfg { timeout: Duration::from_secs(30), ..WorldCfg::for_tests() };
    let all = World::run_threads(ranks, cfg, |world| {
        let place = Place::new(&world, t)?;
        if t.kernel == PUSH {
            place.push(t)?
        } else {
            place.meet(t)?
        }
        let found = place.found(t)?;
        // Nobody's memory goes while a peer may still write to it.
        place.s.team.agree(true)?;
        Ok(found)
    })?;
    let sum = |f: fn(&Found) -> u64| all.iter().map(f).sum::<u64>();
    let (wrong, stale) = (sum(|f| f.wrong), sum(|f| f.stale));
    let rounds = all.iter().map(|f| f.rounds).min().unwrap_or(0);
    let us = all.iter().map(|f| f.us).fold(0.0, f64::max);
    let (good, expect) = match t.expect {
        Expect::Good => (wrong == 0 && rounds == t.rounds, "none wrong"),
        Expect::Wrong => (wrong > 0, "wrong words"),
        Expect::Any => (true, "may be wrong"),
    };
    println!(
        "{{\"litmus\": \"{}\", \"ranks\": {ranks}, \"lanes\": {}, \"bytes\": {}, \"rounds\": {rounds}, \"wrong\": {wrong}, \
         \"stale\": {stale}, \"us_per_round\": {us:.3}, \"expect\": \"{expect}\", \"ok\": {good}}}",
        t.name, t.lanes, t.bytes
    );
    Ok(good)
}

fn all(part: &str) -> Result<bool> {
    let wanted = || TESTS.iter().filter(|t| t.name.contains(part));
    if wanted().next().is_none() {
        let names: Vec<_> = TESTS.iter().map(|t| t.name).collect();
        return Err(Error::invalid("no test has that in its name")
            .expected(names.join(", "))
            .seen(part));
    }
    let ranks = (device_count()? as usize).min(8);
    if ranks < 2 {
        return Err(Error::new(ErrorKind::Unsupported, "orders between GPUs need two of them")
            .seen(format_args!("{ranks} GPU")));
    }
    let mut good = true;
    for t in wanted() {
        good &= run(t, ranks).map_err(|e| e.phase(t.name))?;
    }
    Ok(good)
}

/// Those whose name contains `part`. Ends the process if one failed.
pub fn run_all(part: &str) {
    match all(part) {
        Ok(true) => println!("all ok"),
        Ok(false) => {
            println!("FAILED");
            std::process::exit(1);
        }
        Err(e) => {
            println!("FAILED: {e}");
            std::process::exit(1);
        }
    }
}
