//! Attacks on the protocol of devices: each signal that kernels and queued copies send is lost,
//! replaced by that of an earlier launch, made early and doubled, once for each place in the
//! kernels, to the first and to the last peer; puts are dropped and shifted. Somebody must notice:
//! an error, other results, or counters that do not agree.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use tilewire_core::{Error, Result};
use tilewire_kernels::ALL;
use tilewire_symm::{DeviceTransport, Transport, World, WorldCfg};
use tilewire_testing::{Lack, did_not_run};

use crate::DEVICES;
use crate::attack_ops::{MakeAttacked, asked_ops};
use crate::team_ops::{heap, ranks};
use crate::watch::{Kind, Report, Target, Watch};

/// Launches of a run; the attack strikes in the one in the middle. Before them, 0 is `prepare`.
const LAUNCHES: u32 = 3;
const ATTACKED: u32 = 2;
/// Whose signals are attacked.
const SENDER: u32 = 1;

/// What each launch of a rank has left.
type Bits = Vec<Vec<Vec<u8>>>;

/// Whether a fault names the sender.
fn names_sender(e: &Error) -> bool {
    e.get_peer().is_some_and(|p| p.get() == SENDER)
}

fn run(watch: &Watch, n: usize, make: MakeAttacked, timeout: u64) -> Result<Vec<Bits>> {
    let cfg = WorldCfg { timeout: Duration::from_millis(timeout), ..WorldCfg::default() };
    World::run_threads(n, cfg, |world| {
        let (heap, stream) = heap(&world, "attacked")?;
        let made = make(&heap, &stream)?;
        let (op, me) = (&made.op, heap.team().rank().get());
        let mut all = Vec::new();
        for launch in 1..=LAUNCHES {
            op.refill(u64::from(launch * 64 + me))?;
            op.poison()?;
            watch.launch(me, launch);
            (op.launch)(&stream)?;
            stream.synchronize()?;
            watch.read(me);
            heap.team().check()?;
            all.push(op.bits()?);
        }
        heap.team().agree(true)?;
        DeviceTransport::new(&heap)?.check_counters()?;
        Ok(all)
    })
}

/// What plans predict is what devices have written and signalled, from each rank to each peer.
fn compare_with_predicted(report: &Report, n: usize, (name, make): (&'static str, MakeAttacked)) {
    let predicted = World::run_threads(n, WorldCfg::default(), |world| {
        let (heap, stream) = heap(&world, "predicted")?;
        let predicted = make(&heap, &stream)?.predicted;
        heap.team().agree(true)?;
        Ok(predicted)
    });
    for (rank, traffic) in (0u32..).zip(predicted.unwrap()) {
        let Some(traffic) = traffic else { continue };
        for (peer, link) in (0u32..).zip(traffic).filter(|(p, _)| *p != rank) {
            let written = report.wrote.get(&(rank, ATTACKED, peer)).map_or(0, |w| w.0);
            let of = |s: &&(u32, u32, String)| {
                (s.0, s.1) == (rank, ATTACKED) && !s.2.starts_with("run ")
            };
            let sites = report.signals.keys().filter(of);
            let signals: u64 = sites.filter_map(|s| report.signals[s].get(&peer)).sum();
            let (seen, want) = ((written, signals), (link.put_bytes, link.signals));
            assert_eq!(seen, want, "{name}, from {rank} to {peer}: bytes and signals");
        }
    }
}

/// How an attack ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum End {
    /// An error that names the sender.
    Named,
    /// Another error.
    Error,
    /// Results that differ.
    Bits,
    /// Nobody has noticed.
    Nothing,
}

fn end_of(got: &Result<Vec<Bits>>, good: &[Bits]) -> End {
    match got {
        Err(e) if names_sender(e) => End::Named,
        Err(_) => End::Error,
        Ok(bits) if bits != good => End::Bits,
        Ok(_) => End::Nothing,
    }
}

/// Every third site, and of two one, at its first or its last peer in turn (with one peer, its
/// first or last signal); for `cargo xtask test --full` every site, at both. The code of a site is
/// the same for all of its peers. The text of the kernels says where the count begins, as for their
/// mutants: a change of it tries the other sites, and every run of one text the same.
fn targets(report: &Report) -> Vec<Target> {
    let all = std::env::var_os("TW_FULL").is_some();
    let mut hasher = DefaultHasher::new();
    ALL.iter().for_each(|s| s.text().hash(&mut hasher));
    let begin = hasher.finish() as usize;
    let mut out = Vec::new();
    let attacked = |(device, launch, site): &&(u32, u32, String)| {
        (*device, *launch) == (SENDER, ATTACKED) && !site.starts_with("run ")
    };
    let sites: Vec<_> = report.signals.keys().filter(attacked).collect();
    let part = if all { 1 } else { sites.len().clamp(1, 3) };
    let tried = |(i, _): &(usize, _)| (i + begin).is_multiple_of(part);
    for (i, key) in sites.into_iter().enumerate().filter(tried) {
        let ((device, launch, site), to) = (key, &report.signals[key]);
        let (first, last) = (to.first_key_value().unwrap(), to.last_key_value().unwrap());
        let ends = [(first.0, 0), (last.0, last.1 - 1)];
        for (peer, nth) in if all { &ends[..] } else { &ends[i / part % 2..][..1] } {
            let (site, nth) = (site.clone(), *nth as u32);
            out.push(Target { device: *device, launch: *launch, site, peer: **peer, nth });
        }
    }
    out.dedup();
    out
}

/// A signal that may be lost, old or early without harm.
struct Redundant {
    names: &'static [&'static str],
    /// On at least so many ranks.
    ranks: usize,
    site: &'static str,
    kinds: &'static [Kind],
    /// What keeps what the signal keeps.
    why: &'static str,
}

const EARLY: &[Kind] = &[Kind::Early];

const fn early(names: &'static [&'static str], site: &'static str, why: &'static str) -> Redundant {
    Redundant { names, ranks: 2, site, kinds: EARLY, why }
}

const fn unread(names: &'static [&'static str], site: &'static str) -> Redundant {
    let why = "rows go to no receive buffer: no kernel looks at the word";
    Redundant { names, ranks: 2, site, kinds: &[Kind::Lose, Kind::Stale, Kind::Early], why }
}

const ROUTED: &str = "the next phase that writes there is of the next launch: the peer's routing of that launch waits for this \
     device's, which stands behind all that is read";
const OTHER_AREA: &str = "a phase of the other area is between: the peer's waits for what this device sends in its own, behind \
     all that is read";
const MET_BACK: &str = "the meeting before gradients or results are got (MEET_BACK) stands between: it is behind all that is \
     read of the memory that this credit gives away, and what is read behind it is in other \
     buffers, which are written behind a meeting of the next launch";

/// Each exact site; a mistake in a neighbouring one is noticed.
const REDUNDANT: &[Redundant] = &[
    early(
        &["all_reduce, kernels"],
        "tw_enter.0 tw_enter",
        "the last meeting of a launch is behind the sums, and the first one of the next before what is taken in is written",
    ),
    early(
        &["engines all_reduce"],
        "tw_enter.0 tw_enter",
        "a peer ends its launch with the rows that this device has reduced, and writes reduced rows again behind a sum of the \
         next launch, which waits for what this device sends behind its own meeting",
    ),
    early(
        &["gemm_ar pipelined", "gemm_ar sequential", "gemm_ar ring"],
        "tw_enter.0 tw_enter",
        "a peer ends its launch with the rows that this device has reduced, and writes them again behind a sum of the next \
         launch, which waits for a chunk that this device sends behind its own meeting",
    ),
    // With one chunk it is noticed.
    early(
        &["gemm_rs pipelined"],
        "tw_enter.0 tw_enter",
        "a peer ends its launch with this device's last chunk, which is sent behind the sum of the first one, and writes the \
         last slot behind a sum of the next launch, which waits for what this device sends behind its own meeting",
    ),
    early(
        &[
            "cp_attention all_gather",
            "cp_attention get",
            "cp_attention ring",
            "cp_attention all_to_all",
            "cp_attention hybrid",
        ],
        "tw_enter.0 tw_enter",
        MET_BACK,
    ),
    early(&["cp_attention all_to_all", "cp_attention hybrid"], "tw_enter.3 tw_enter", MET_BACK),
    // On two ranks it is noticed.
    Redundant {
        names: &["cp_attention ring"],
        ranks: 3,
        site: "tw_enter.1 tw_enter",
        kinds: EARLY,
        why: "the peer also waits for the credit of the rank behind this one, which comes when \
              what this device passes on, behind what it reads, has arrived there",
    },
    unread(&["ep expert-major", "ep flat", "ep twice"], "tw_ep_push_bulk.0 tw_announce"),
    unread(
        &["ep expert-major", "ep flat", "ep rank-major", "ep twice"],
        "tw_ep_push_bulk.1 tw_announce",
    ),
    early(
        &["ep zero copy", "ep rank-major", "ep zero copy twice"],
        "tw_ep_push_bulk.0 tw_announce",
        ROUTED,
    ),
    early(&["ep zero copy"], "tw_ep_push_bulk.1 tw_announce", OTHER_AREA),
    early(
        &["ep expert-major", "ep zero copy", "ep rank-major"],
        "tw_ep_push_bulk.0 tw_grant",
        OTHER_AREA,
    ),
    early(
        &["ep zero copy twice"],
        "tw_ep_push_bulk.0 tw_grant",
        "the next dispatch waits for what this device announces behind all that is read",
    ),
    early(
        &["ep zero copy", "ep twice", "ep zero copy twice"],
        "tw_ep_push_bulk.1 tw_grant",
        ROUTED,
    ),
    early(&["ep expert-major", "ep flat", "ep rank-major"], "tw_ep_leave.0 tw_grant", OTHER_AREA),
    early(&["ep flat"], "tw_ep_leave.1 tw_grant", ROUTED),
    early(
        &["ep expert-major", "ep flat", "ep zero copy", "ep rank-major"],
        "tw_ep_return_bulk.0 tw_grant",
        OTHER_AREA,
    ),
    early(
        &["ep expert-major", "ep flat", "ep zero copy", "ep rank-major", "ep twice"],
        "tw_ep_return_bulk.1 tw_grant",
        ROUTED,
    ),
];

/// Why nobody need notice this; none if somebody must.
fn redundant(
    (name, ranks): (&str, usize),
    kind: Kind,
    t: &Target,
    of: u64,
) -> Option<&'static str> {
    // A flag holds the total: the next one to this word says what the lost one has said.
    if matches!(kind, Kind::Lose | Kind::Stale)
        && t.site.starts_with("flag ")
        && u64::from(t.nth) + 1 < of
    {
        return Some("a later total follows");
    }
    let fits = |r: &&Redundant| {
        r.names.contains(&name) && r.ranks <= ranks && t.site == r.site && r.kinds.contains(&kind)
    };
    REDUNDANT.iter().find(fits).map(|r| r.why)
}

/// What became of the attacks on one operation.
#[derive(Default)]
struct Tally {
    tried: usize,
    ends: BTreeMap<(Kind, End), usize>,
    harmless: usize,
    /// Credits that nothing goes before.
    first: usize,
    wrong: Vec<String>,
}

/// One operation under attack.
struct Attack<'a> {
    watch: &'a Watch,
    n: usize,
    name: &'static str,
    make: MakeAttacked,
    good: Vec<Bits>,
    report: Report,
    /// Milliseconds after which a wait for what was lost ends.
    short: u64,
    tally: Tally,
}

impl<'a> Attack<'a> {
    fn new(watch: &'a Watch, n: usize, (name, make): (&'static str, MakeAttacked)) -> Self {
        // The first run compiles kernels; the second is observed.
        watch.begin(false, false);
        let first = run(watch, n, make, 20_000).unwrap();
        let begun = Instant::now();
        watch.begin(true, false);
        let good = run(watch, n, make, 20_000).unwrap();
        let short = 200.max(begun.elapsed().as_millis() as u64 / 2);
        assert!(good == first, "{name}: two runs of the same inputs differ");
        let report = watch.report();
        compare_with_predicted(&report, n, (name, make));
        // What follows compares with this run.
        watch.begin(false, true);
        Self { watch, n, name, make, good, report, short, tally: Tally::default() }
    }

    /// One run under attack; none if the attack has not struck.
    fn run(&self, kind: Kind, t: &Target, by: u64) -> Option<(End, String)> {
        let mut timeout = match kind {
            Kind::Lose | Kind::Stale | Kind::RaiseTwice => self.short,
            _ => 20_000,
        };
        // On a busy machine a short deadline may end the run before the attack.
        for _ in 0..4 {
            self.watch.begin(false, false);
            self.watch.attack(kind, t, by);
            let got = run(self.watch, self.n, self.make, timeout);
            let hits = self.watch.hits();
            assert!(hits <= 1, "{}: {kind:?} {t:?}", self.name);
            if hits == 1 {
                let end = end_of(&got, &self.good);
                return Some((end, got.err().map_or(String::new(), |e| e.to_string())));
            }
            if got.is_ok() {
                return None;
            }
            timeout *= 3;
        }
        None
    }

    /// Whether the attack has struck.
    fn strikes(&mut self, kind: Kind, t: &Target, ways: &[u64]) -> bool {
        let begun = Instant::now();
        let of = self.report.signals.get(&(t.device, t.launch, t.site.clone()));
        let of = of.and_then(|to| to.get(&t.peer)).copied().unwrap_or(0);
        let writes = self.report.wrote.contains_key(&(t.peer, t.launch, t.device));
        let why = match redundant((self.name, self.n), kind, t, of) {
            None if kind == Kind::Early && ways.contains(&1) && !writes => {
                Some("the peer writes nothing here")
            }
            why => why,
        };
        let mut last = None;
        for (i, by) in ways.iter().enumerate() {
            let before = ways[..i].iter().filter(|w| *w == by).count();
            self.watch.be_patient(1000 << (2 * before));
            let Some(got) = self.run(kind, t, *by) else { return false };
            let noticed = got.0 != End::Nothing;
            last = Some(got);
            if noticed || why.is_some() {
                break;
            }
        }
        let Some((end, words)) = last else { return false };
        self.tally.tried += 1;
        *self.tally.ends.entry((kind, end)).or_default() += 1;
        if std::env::var_os("TW_EACH").is_some() {
            let seconds = begun.elapsed().as_secs_f64();
            println!(
                "  {} | {} | {} | {} | {kind:?} | {end:?} | {seconds:.2} {why:?}",
                self.name, t.site, t.peer, t.nth
            );
        }
        let good = match kind {
            Kind::Twice => end == End::Nothing,
            _ => end != End::Nothing || why.is_some(),
        };
        self.tally.harmless += usize::from(end == End::Nothing && kind != Kind::Twice);
        if !good {
            self.tally.wrong.push(format!("{}: {kind:?} of {t:?}: {end:?} {words}", self.name));
        }
        true
    }

    fn all(mut self) -> Vec<String> {
        let begun = Instant::now();
        let targets = targets(&self.report);
        let mut must = 0;
        for t in &targets {
            for kind in [Kind::Lose, Kind::Stale, Kind::Twice] {
                assert!(
                    self.strikes(kind, t, &[0]),
                    "{}: {kind:?} of {t:?} did not strike",
                    self.name
                );
            }
            must += 3;
            // What publishes data is made early, and its data stay away or go elsewhere.
            if self.strikes(Kind::Early, t, &[0]) {
                let moved = [(Kind::Drop, 0), (Kind::Shift, 64)];
                assert!(moved.into_iter().all(|(kind, by)| self.strikes(kind, t, &[by])), "{t:?}");
                must += 3;
                continue;
            }
            // The first that a word gets has none to go out with.
            self.watch.attack(Kind::Early, t, 1);
            if !self.watch.has_before() {
                self.tally.first += 1;
                continue;
            }
            // What it gives away is memory here, or, of ranks that get, the peer's own.
            let writes = !self.report.wrote.is_empty();
            // Whether the early credit overwrites in time is a matter of time: each way again, more
            // patiently each time, until it does.
            let ways: &[u64] =
                if writes { &[1, 3, 4, 1, 3, 4, 1, 3, 4, 1] } else { &[2, 3, 2, 3, 2, 3, 2] };
            assert!(self.strikes(Kind::Early, t, ways), "{t:?}");
            must += 1;
        }
        for ((device, launch, site), to) in self.report.signals.clone() {
            if (device, launch) != (SENDER, ATTACKED) || !site.starts_with("run ") {
                continue;
            }
            let t = Target { device, launch, site, peer: SENDER, nth: to[&SENDER] as u32 - 1 };
            assert!(self.strikes(Kind::RaiseTwice, &t, &[0]), "{t:?}");
            must += 1;
        }
        assert!(must > 0 && self.tally.tried == must, "{}: not all were tried", self.name);
        let ends = |k| self.tally.ends.iter().filter(move |e| e.0.0 == k);
        let words =
            |k| ends(k).map(|e| format!("{} {:?}", e.1, e.0.1)).collect::<Vec<_>>().join(", ");
        let kinds = [
            Kind::Lose,
            Kind::Stale,
            Kind::Early,
            Kind::Drop,
            Kind::Shift,
            Kind::RaiseTwice,
            Kind::Twice,
        ];
        let row: Vec<_> = kinds.map(words).into_iter().collect();
        println!(
            "| {} | {} | {} | {} | {} | {} | {:.1} s |",
            self.name,
            targets.len(),
            self.tally.tried,
            row.join(" | "),
            self.tally.first,
            self.tally.harmless,
            begun.elapsed().as_secs_f64()
        );
        self.tally.wrong
    }
}

/// Every attack on every operation that `TW_ATTACKED` asks for.
#[test]
fn each_signal_and_put_of_each_operation_is_attacked() {
    let Some(n) = ranks() else { return };
    let Some(watch) = Watch::new() else {
        return did_not_run(Lack::Watch, "it needs the driver whose devices are emulated");
    };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    println!(
        "| operation | sites x peers | tried | lost | stale | early | dropped | shifted | raised twice | stored twice | first of its word | harmless | time |"
    );
    let mut wrong = Vec::new();
    for op in asked_ops() {
        wrong.extend(Attack::new(&watch, n, op).all());
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
