//! `bench/litmus.cu`: rounds in good order show nothing wrong, each planted mistake that this
//! machine can show shows, and a peer that is not there costs one deadline.

use tilewire_kernels::LITMUS;
use tilewire_kernels::abi::TwLitmus;

use crate::compile::Unit;
use crate::host::{Lib, RUNTIME, Stats};
use crate::memory::{ANY, Memory};
use crate::planted::all_are_killed;
use crate::run::Run;
use crate::{Test, scenarios, tests};

pub const TESTS: &[Test] = tests![
    rounds_in_good_order_show_nothing,
    mistakes_of_the_litmus_tests_show,
    a_silent_peer_costs_one_deadline,
    mutants_of_the_litmus_tests_are_killed,
];

const FLAG_FIRST: u32 = 1;
const NO_WAIT: u32 = 2;
const NO_CREDIT: u32 = 3;
const NO_COUNTER: u32 = 4;

/// What a copy engine does.
const COPY: &str = r#"
extern "C" __global__ void t_push(u64* dst, const u64* src, u64 n) {
    for (u64 i = 0; i + 1 < n; i++) dst[i] = src[i];
    st_release_sys_u64(dst + n - 1, src[n - 1]);
}
"#;

fn load(text: String) -> &'static Lib {
    RUNTIME.load(&Unit {
        name: LITMUS.name,
        text: text + COPY,
        defines: Vec::new(),
        kernels: LITMUS.kernels.iter().copied().chain(["t_push"]).collect(),
        smem: BYTES,
    })
}

const BYTES: usize = 256;
const LINE: usize = 64;
const TIMEOUT_NS: u64 = 50_000_000;

/// A ring of ranks, each with what its peers write and what is its own.
struct Ring {
    lib: &'static Lib,
    lanes: usize,
    ranks: Vec<[Memory; 3]>,
    rounds: u64,
    reads: u32,
    broken: u32,
    tick_ns: u64,
}

/// Of all blocks: wrong words, those of earlier rounds, and the fewest rounds.
#[derive(PartialEq, Eq, Debug)]
struct Found {
    wrong: u64,
    stale: u64,
    rounds: u64,
}

impl Ring {
    fn new(lib: &'static Lib, size: usize, lanes: usize) -> Self {
        let lines = lanes * LINE;
        let ranks = (0..size)
            .map(|_| {
                [
                    ("area", lanes * BYTES + 2 * lines),
                    ("own", LINE + BYTES),
                    ("out", 32 * 2 * lanes),
                ]
                .map(|(name, len)| Memory::new(name, ANY, len))
            })
            .collect();
        Self { lib, lanes, ranks, rounds: 25, reads: 1, broken: 0, tick_ns: 10 }
    }

    fn param(&self, rank: usize) -> TwLitmus {
        let n = self.ranks.len();
        let area = |r: usize| self.ranks[r % n][0].addr();
        let (flags, credits) = ((self.lanes * BYTES) as u64, (self.lanes * (BYTES + LINE)) as u64);
        TwLitmus {
            put: area(rank + 1),
            flag: area(rank + 1) + flags,
            credit: area(rank) + credits,
            got: area(rank),
            seen: area(rank) + flags,
            grant: area(rank + n - 1) + credits,
            own: self.ranks[rank][1].addr(),
            out: self.ranks[rank][2].addr(),
            rounds: self.rounds,
            timeout_ns: TIMEOUT_NS,
            bytes: BYTES as u32,
            lanes: self.lanes as u32,
            reads: self.reads,
            broken: self.broken,
            late_ns: 500 * (self.reads - 1),
            pad: 0,
        }
    }

    fn run(&self, seed: u64) -> Run<'_> {
        let mut run = Run::new(seed).memory(self.ranks.iter().flatten());
        // Seeds that stop a thread at every other point, and seeds that hardly do.
        run.yield_permille = [200, 500, 30][seed as usize % 3];
        (run.max_steps, run.tick_ns) = (10_000_000, self.tick_ns);
        run
    }

    /// Producers and consumers of all ranks in one launch of each.
    fn meet(&self, name: &str, seed: u64) -> Found {
        let kernel = self.lib.kernel(name);
        let params: Vec<TwLitmus> = (0..self.ranks.len()).map(|r| self.param(r)).collect();
        let mut run = self.run(seed);
        for (r, p) in params.iter().enumerate() {
            let launch = kernel.grid([2 * self.lanes as u32, 1, 1], [32, 1, 1]);
            run = run.stream(r as u32, vec![launch.smem(BYTES as u32).arg(p)]);
        }
        run.go().unwrap();
        self.found(0)
    }

    /// What blocks from `first` on have written.
    fn found(&self, first: usize) -> Found {
        let rows: Vec<u64> =
            self.ranks.iter().flat_map(|m| m[2].read::<u64>()[4 * first..].to_vec()).collect();
        let column = |i: usize| rows.chunks(4).map(move |r| r[i]);
        let rounds = column(2).min().unwrap_or(0);
        Found { wrong: column(0).sum(), stale: column(1).sum(), rounds }
    }

    /// Pushes by copies; the flag before the data if `broken`. Without consumers if `silent`.
    fn push(&self, seed: u64, silent: bool) -> (Found, Stats) {
        let kernels = ["tw_litmus_fill", "t_push", "tw_litmus_bulk"].map(|k| self.lib.kernel(k));
        // The fill kernel has the first row of the results, the consumer the second.
        let params: Vec<[TwLitmus; 2]> = (0..self.ranks.len())
            .map(|r| {
                [self.param(r), TwLitmus { out: self.ranks[r][2].addr() + 32, ..self.param(r) }]
            })
            .collect();
        let args: Vec<[u64; 4]> =
            params.iter().map(|[p, _]| [p.put, p.own + LINE as u64, p.flag, p.own]).collect();
        let (data, word) = (BYTES as u64 / 8, 1u64);
        let mut run = self.run(seed);
        for (r, ([fill, consume], a)) in params.iter().zip(&args).enumerate() {
            let mut all = Vec::new();
            for _ in 0..self.rounds {
                all.push(kernels[0].launch(32).arg(fill));
                let mut copies = [
                    kernels[1].launch(1).arg(&a[0]).arg(&a[1]).arg(&data),
                    kernels[1].launch(1).arg(&a[2]).arg(&a[3]).arg(&word),
                ];
                if self.broken == FLAG_FIRST {
                    copies.swap(0, 1);
                }
                all.extend(copies);
            }
            run = run.stream(r as u32, all);
            if !silent {
                let launch = kernels[2].launch(32).smem(BYTES as u32).arg(consume);
                run = run.stream(r as u32, vec![launch]);
            }
        }
        let stats = run.go().unwrap();
        (self.found(0), stats)
    }
}

fn good(lib: &'static Lib) {
    for seed in 0..9 {
        let (size, lanes) = [(2, 2), (3, 1), (2, 3)][seed as usize / 3];
        let want = || Found { wrong: 0, stale: 0, rounds: 25 };
        for reads in [1, 3] {
            let ring = Ring { reads, ..Ring::new(lib, size, lanes) };
            assert_eq!(ring.meet("tw_litmus_bulk", seed), want(), "bulk {seed}");
            let ring = Ring { reads, ..Ring::new(lib, size, lanes) };
            assert_eq!(ring.meet("tw_litmus_count", seed), want(), "count {seed}");
        }
        let ring = Ring::new(lib, size, 1);
        assert_eq!(ring.push(seed, false).0, want(), "push {seed}");
    }
}

fn rounds_in_good_order_show_nothing() {
    good(load(LITMUS.emu_text()));
}

/// A mistake whose words are of an earlier round, or of a later one.
fn mistakes(lib: &'static Lib) {
    let ring = |broken| Ring { broken, reads: 4, ..Ring::new(lib, 2, 2) };
    for (broken, old) in [(FLAG_FIRST, true), (NO_WAIT, true), (NO_CREDIT, false)] {
        let found = ring(broken).meet("tw_litmus_bulk", 1);
        assert!(found.wrong > 0 && (found.stale > 0) == old, "{broken}: {found:?}");
        assert_eq!(found.rounds, 25, "the rounds go on");
    }
    let found = ring(NO_COUNTER).meet("tw_litmus_count", 1);
    assert!(found.stale > 0 && found.wrong >= found.stale, "{found:?}");
    let found = Ring { broken: FLAG_FIRST, ..Ring::new(lib, 2, 1) }.push(1, false).0;
    assert!(found.stale > 0 && found.wrong >= found.stale, "{found:?}");
}

fn mistakes_of_the_litmus_tests_show() {
    mistakes(load(LITMUS.emu_text()));
}

/// Nobody consumes: a deadline for the whole launch, or for the first of many.
fn silent(lib: &'static Lib) {
    let ring = Ring { tick_ns: 10_000, ..Ring::new(lib, 2, 1) };
    let (found, stats) = ring.push(0, true);
    assert_eq!((found.wrong, ring.ranks[0][1].get(0, 0)), (2, 1), "one round, and late");
    assert!((TIMEOUT_NS..2 * TIMEOUT_NS).contains(&stats.now_ns), "{} ns", stats.now_ns);
    for name in ["tw_litmus_bulk", "tw_litmus_count"] {
        let ring = Ring { tick_ns: 10_000, ..Ring::new(lib, 2, 1) };
        let (kernel, p) = (ring.lib.kernel(name), ring.param(0));
        let launch = kernel.grid([2, 1, 1], [32, 1, 1]).smem(BYTES as u32).arg(&p);
        let stats = ring.run(0).stream(0, vec![launch]).go().unwrap();
        let rounds: Vec<u64> = ring.ranks[0][2].read::<u64>().chunks(4).map(|r| r[2]).collect();
        assert_eq!(rounds, [1, 0], "{name}: the producer's first round needs no credit");
        assert!((TIMEOUT_NS..2 * TIMEOUT_NS).contains(&stats.now_ns), "{} ns", stats.now_ns);
    }
}

fn a_silent_peer_costs_one_deadline() {
    silent(load(LITMUS.emu_text()));
}

/// The words of a round differ, and none is that of another round.
fn good_words(lib: &'static Lib) {
    let ring = Ring::new(lib, 2, 2);
    ring.meet("tw_litmus_bulk", 1);
    let words = ring.ranks[0][0].read::<u64>();
    for (i, w) in words[..2 * BYTES / 8].iter().enumerate() {
        assert_eq!(*w, 25 << 20 | (i % (BYTES / 8)) as u64);
    }
}

fn mutants_of_the_litmus_tests_are_killed() {
    good_words(load(LITMUS.emu_text()));
    all_are_killed(
        &LITMUS.emu_text(),
        load,
        ("bench/litmus", "litmus"),
        scenarios![good, good_words, mistakes, silent],
    );
}
