//! The protocol of every operation: losing, repeating or reordering any one signal is noticed;
//! captured replays equal eager runs; what was not prepared does not run; deaths are named.

#![expect(clippy::print_stdout, reason = "what was tried must be seen")]

mod table;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use table::*;
use tilewire_core::*;
use tilewire_device::{Stream, Tensor};
use tilewire_ops::ag_gemm::*;
use tilewire_ops::common::OverlapConfig;
use tilewire_ops::ep::*;
use tilewire_symm::*;

/// Whether an error that names `op` is of the operation `name` of the table.
fn is_of(op: &str, name: &str) -> bool {
    name.starts_with(op) || op.starts_with(name.split(' ').next().expect("a name"))
}

/// Launches whose steps are attacked. One more follows: a credit of the last of them that nobody
/// waits for any more is missed there.
const ATTACKED: u64 = 2;

/// Three launches of `make` on every rank; the outputs as bits.
fn launches(
    world: &World,
    name: &str,
    make: Make,
    hook: Option<Arc<Tamper>>,
) -> Result<Vec<Vec<u32>>> {
    let (team, heap, stream) = heap_of(world, name)?;
    let op = make(&heap, &stream, true)?;
    if let Some(h) = &hook {
        let h = h.clone();
        team.set_hook(move |p| h.act(p));
    }
    let mut outs = Vec::new();
    for round in 0..=ATTACKED {
        if let Some(h) = hook.as_ref().filter(|_| round == ATTACKED && team.rank().get() == 0) {
            h.over.store(true, Ordering::Release);
        }
        fill(&op, round * 100 + u64::from(team.rank().get()))?;
        (op.launch)(&stream)?;
        finish(&stream, &team)?;
        outs.push(op.out.to_vec::<f32>()?.iter().map(|v| v.to_bits()).collect());
    }
    team.agree(true)?;
    team.check_counters()?;
    Ok(outs)
}

/// A step of rank 0, so that it is the same in each run whatever its lanes do side by side: its
/// phase, its peer, and its number among those.
type Step = (String, Option<Rank>, u64);

/// Changes a step of `kind` of rank 0, and counts the steps of the attacked launches.
struct Tamper {
    kind: StepKind,
    step: Option<Step>,
    action: HookAction,
    hits: AtomicU64,
    seen: Mutex<BTreeMap<(String, Option<Rank>), u64>>,
    over: AtomicBool,
}

impl Tamper {
    fn new(kind: StepKind, step: Option<Step>, action: HookAction) -> Arc<Self> {
        let (hits, seen, over) = Default::default();
        Arc::new(Self { kind, step, action, hits, seen, over })
    }

    fn act(&self, p: &HookPoint<'_>) -> HookAction {
        if p.rank.get() != 0 || p.kind != self.kind || self.over.load(Ordering::Acquire) {
            return HookAction::Proceed;
        }
        let at = (p.phase.to_owned(), p.peer);
        let mut seen = self.seen.lock().unwrap();
        let num = seen.entry(at.clone()).or_default();
        let this = (at.0, at.1, *num);
        *num += 1;
        if self.step.as_ref() != Some(&this) {
            return HookAction::Proceed;
        }
        self.hits.fetch_add(1, Ordering::Relaxed);
        self.action
    }
}

/// An operation of the table; what the outputs of all launches of all ranks are.
type Row = (&'static str, Make);
type Outs = Vec<Vec<Vec<u32>>>;

/// One row of the table under attack.
struct Attacked {
    name: &'static str,
    make: Make,
    ranks: usize,
    good: Outs,
}

impl Attacked {
    fn new((name, make): (&'static str, Make)) -> Self {
        let ranks = ranks_for(name, 2);
        let go = |w: World| launches(&w, "good", make, None);
        let good = World::run_threads(ranks, WorldCfg::for_tests(), go).unwrap();
        Self { name, make, ranks, good }
    }

    fn run(&self, timeout: u64, tamper: &Arc<Tamper>) -> Result<Outs> {
        let timeout = Duration::from_millis(timeout);
        let cfg = WorldCfg { timeout, ..WorldCfg::default() };
        World::run_threads(self.ranks, cfg, |w| {
            launches(&w, "bad", self.make, Some(tamper.clone()))
        })
    }

    /// The steps of `kind` that rank 0 makes in the attacked launches.
    fn steps(&self, kind: StepKind) -> Vec<Step> {
        let counting = Tamper::new(kind, None, HookAction::Proceed);
        assert!(self.run(20_000, &counting).unwrap() == self.good, "{}", self.name);
        let seen = counting.seen.lock().unwrap();
        let each =
            |(at, num): (&(String, _), &u64)| (0..*num).map(|n| (at.0.clone(), at.1, n)).collect();
        seen.iter().flat_map::<Vec<Step>, _>(each).collect()
    }

    /// The run with this step changed. On a busy machine a short deadline may end the run before
    /// the step.
    fn with(&self, kind: StepKind, step: &Step, action: HookAction) -> Result<Outs> {
        for timeout in [400, 2_000, 10_000] {
            let tamper = Tamper::new(kind, Some(step.clone()), action);
            let got = self.run(timeout, &tamper);
            if tamper.hits.load(Ordering::Relaxed) == 1 {
                return got;
            }
        }
        panic!("{}: {action:?} of {kind:?} {step:?} never struck", self.name);
    }

    /// Each step of `kind` in turn; how many there are, and how many of them are grants: memory of
    /// this rank is free again.
    fn each(&self, kind: StepKind, action: HookAction) -> (usize, usize) {
        let steps = self.steps(kind);
        for step in &steps {
            // What comes late does so after some time: on a busy machine its reader may be later.
            let tries = if action == HookAction::AfterSignal { 8 } else { 1 };
            let bad = |_| self.with(kind, step, action).as_ref().ok() != Some(&self.good);
            let noticed = (0..tries).any(bad);
            // A flag that is stored twice says the same as one.
            let harmless = (kind, action) == (StepKind::Flag, HookAction::Twice);
            assert_eq!(noticed, !harmless, "{}: {action:?} of {kind:?} {step:?}", self.name);
        }
        // `ep` grants an area by leaving it.
        let grants = steps.iter().filter(|s| s.0.contains("credit") || s.0 == "leave");
        (steps.len(), grants.count())
    }
}

/// For each operation, on each single step of rank 0 in turn: signals are left out, doubled, or
/// overtake their data; flags are left out, doubled, or hold an earlier launch's value; and the
/// schedule has a mistake, a put that is missing or goes to another place, or a grant that is
/// missing. The run must fail, or the results must differ: nothing may look right. But a flag that
/// is stored twice says the same as one: it changes no bit.
#[test]
fn any_one_signal_lost_repeated_or_reordered_is_noticed() {
    println!(
        "| operation | signals lost | doubled | flags lost | stale | doubled, no harm | puts \
         dropped | shifted | late | of the lost: grants |"
    );
    side_by_side(OPS.into_iter().chain([QUANT]), tamper_with);
}

#[test]
fn any_one_signal_of_an_exchange_of_keys_is_noticed() {
    side_by_side(CP[..3].iter().copied(), tamper_with);
}

#[test]
fn any_one_signal_of_an_exchange_of_heads_is_noticed() {
    side_by_side(CP[3..].iter().copied(), tamper_with);
}

/// A get that is left out hands over nothing: never what an earlier launch got.
#[test]
fn any_one_get_that_is_lost_is_noticed() {
    side_by_side(CP.iter().copied(), |op| {
        let tried = Attacked::new(op).each(StepKind::Get, HookAction::Skip).0;
        // At least k and v in one direction, parts of dk and dv in the other, in each launch.
        assert!(tried as u64 >= 2 * ATTACKED, "{}: only {tried} gets", op.0);
    });
}

/// Calls `f` for each operation, four at a time: nearly all of their time is waits for what was
/// lost, each as long as its deadline.
fn side_by_side(ops: impl Iterator<Item = Row> + Send, f: fn(Row)) {
    let ops = Mutex::new(ops);
    let next = || ops.lock().unwrap().next();
    let work = || std::iter::from_fn(next).for_each(f);
    std::thread::scope(|t| (0..4).for_each(|_| drop(t.spawn(work))));
}

fn tamper_with(op: (&'static str, Make)) {
    let it = Attacked::new(op);
    let mut row = Vec::new();
    for (kind, action) in [
        (StepKind::Signal, HookAction::Skip),
        (StepKind::Signal, HookAction::Twice),
        (StepKind::Flag, HookAction::Skip),
        (StepKind::Flag, HookAction::Stale),
        (StepKind::Flag, HookAction::Twice),
        (StepKind::Put, HookAction::Skip),
        (StepKind::Put, HookAction::Shift),
        (StepKind::Put, HookAction::AfterSignal),
    ] {
        row.push(it.each(kind, action));
    }
    let cells: Vec<_> = row.iter().map(|r| r.0.to_string()).collect();
    let missing_grants = row[0].1 + row[2].1;
    // At least one for each launch. Only `ep` has flags.
    assert!(
        row[0].0 >= 2 && row[5].0 >= 2 && missing_grants >= ATTACKED as usize,
        "{}: {row:?}",
        it.name
    );
    assert_eq!(row[2].0 > 0, it.name.starts_with("ep"), "{}: {row:?}", it.name);
    println!("| {} | {} | {missing_grants} |", it.name, cells.join(" | "));
}

/// Launch and capture before `prepare` are errors on the host, before anything is queued.
#[test]
fn nothing_runs_before_prepare() {
    for (name, make) in all_ops() {
        World::run_threads(ranks_for(name, 2), WorldCfg::for_tests(), |w| {
            let (team, heap, stream) = heap_of(&w, "raw")?;
            let op = make(&heap, &stream, false)?;
            let e = (op.launch)(&stream).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::NotPrepared, "{name}: {e}");
            stream.begin_capture()?;
            assert_eq!((op.launch)(&stream).unwrap_err().kind(), ErrorKind::NotPrepared);
            let e = make(&heap, &stream, true).err().expect("prepare under capture");
            assert!(e.to_string().contains("captured"), "{name}: {e}");
            assert_eq!(stream.end_capture()?.num_nodes(), 0);
            team.agree(true).map(|_| ())
        })
        .unwrap();
    }
}

/// A rank that dies inside an operation: the others name it, its operation and its phase, their
/// outputs are poisoned, and they form a new team that computes.
#[test]
fn a_death_inside_each_operation_is_named() {
    for (name, make) in all_ops() {
        let start = Instant::now();
        let e = World::run_threads(ranks_for(name, 3), WorldCfg::default(), |w| {
            let (team, heap, stream) = heap_of(&w, "mortal")?;
            let op = make(&heap, &stream, true)?;
            fill(&op, 1)?;
            if w.rank().get() == 2 {
                panic!("victim");
            }
            (op.launch)(&stream)?;
            let e = finish(&stream, &team).unwrap_err();
            assert!(e.is_peer_dead() && e.get_peer() == Some(Rank::new(2)), "{name}: {e}");
            assert!(
                e.get_op().is_some_and(|o| is_of(o, name)) && e.get_phase().is_some(),
                "{name}: {e}"
            );
            // Poisoned where it was not complete; never half a result that looks whole.
            stream.synchronize()?;
            let rest = w.team(&w.alive(), "rest")?.unwrap();
            let heap = rest.heap(BackendKind::Host, HeapCfg::new(1 << 16))?;
            let again = make(&heap, &stream, true)?;
            fill(&again, 2)?;
            (again.launch)(&stream)?;
            finish(&stream, &rest)?;
            assert!(again.out.to_f32()?.iter().all(|v| v.is_finite()), "{name}");
            assert!(op.out.to_f32()?.iter().all(|v| v.is_nan()), "{name}: output not poisoned");
            Ok(())
        })
        .unwrap_err();
        assert_eq!(e.message(), "a rank panicked: victim", "{name}: {e}");
        assert!(start.elapsed() < Duration::from_secs(5), "{name}: {:?}", start.elapsed());
    }
}

/// A death that nobody has waited for yet is met by the next launch, by name: what the launches
/// before it are waited for with says so, too.
#[test]
fn a_launch_behind_a_death_names_its_operation() {
    for (name, make) in all_ops() {
        let e = World::run_threads(ranks_for(name, 2), WorldCfg::default(), |w| {
            let (team, heap, stream) = heap_of(&w, "mortal")?;
            let op = make(&heap, &stream, true)?;
            fill(&op, 1)?;
            if w.rank().get() == 1 {
                panic!("victim");
            }
            while w.alive().contains(&Rank::new(1)) {
                std::thread::yield_now();
            }
            // Those of several launches leave the error to who waits.
            let launched = (op.launch)(&stream).err();
            let told = [finish(&stream, &team).unwrap_err(), team.check().unwrap_err()];
            for e in told.into_iter().chain(launched) {
                assert!(e.is_peer_dead() && e.get_peer() == Some(Rank::new(1)), "{name}: {e}");
                let named = e.get_op().is_some_and(|o| is_of(o, name));
                assert!(named && e.get_phase().is_some(), "{name}: {e}");
            }
            Ok(())
        })
        .unwrap_err();
        assert_eq!(e.message(), "a rank panicked: victim", "{name}: {e}");
    }
}

/// Ranks that launch different things are told so, with both ranks' words.
#[test]
fn launches_that_differ_are_a_mismatch() {
    let e = World::run_threads(2, WorldCfg::default(), |w| {
        let (team, heap, stream) = heap_of(&w, "differ")?;
        let (a, b) = (gather(&heap, &stream, true)?, scatter(&heap, &stream, true)?);
        let op = if team.rank().get() == 0 { &a } else { &b };
        fill(op, 1)?;
        (op.launch)(&stream)?;
        finish(&stream, &team)
    })
    .unwrap_err();
    let t = e.to_string();
    assert!(e.is_mismatch() && t.contains("all_gather") && t.contains("reduce_scatter"), "{t}");
}

/// Also if one of them has said so and left before the other looks.
#[test]
fn a_mismatch_is_told_by_a_rank_that_has_left() {
    let out = World::run_threads(2, WorldCfg::default(), |w| {
        let (team, heap, stream) = heap_of(&w, "differ")?;
        let (a, b) = (gather(&heap, &stream, true)?, scatter(&heap, &stream, true)?);
        let me = team.rank().get();
        let op = if me == 0 { &a } else { &b };
        fill(op, 1)?;
        let w = Arc::new(w);
        if me == 0 {
            let w = w.clone();
            team.set_hook(move |p| {
                // The launch is on record; the wait begins when the other has gone.
                while p.kind == StepKind::Wait && w.alive().len() > 1 {
                    std::thread::yield_now();
                }
                HookAction::Proceed
            });
        }
        (op.launch)(&stream)?;
        if me == 1 {
            let launched = |e: &Entry| e.kind == EntryKind::Launch;
            while !team.flight_recorder(Rank::new(0)).iter().any(launched) {
                std::thread::yield_now();
            }
            // What a wait does that has found the difference.
            team.fail(Error::new(ErrorKind::Mismatch, "found").peer(Rank::new(0)));
            return Ok(String::new());
        }
        Ok(finish(&stream, &team).unwrap_err().to_string())
    });
    let told = out.unwrap().swap_remove(0);
    assert!(told.contains("all_gather") && told.contains("reduce_scatter"), "{told}");
}

/// Wrong tensors are refused with what was expected and what was given.
#[test]
fn wrong_tensors_are_refused() {
    World::run_threads(2, WorldCfg::for_tests(), |w| {
        let (team, heap, stream) = heap_of(&w, "bad")?;
        let plan = AgGemmPlan::new(AgGemmDesc::new(M, N, K, DType::F32), &heap, None)?;
        plan.prepare(&stream)?;
        let rows = mine(&heap);
        let launch = |x: Tensor, w: Tensor, y: Tensor, m: usize| {
            plan.launch(&stream, m, AgGemmInputs::new(x, w, y)).map(|_| ()).unwrap_err().to_string()
        };
        let bf16 = Tensor::zeros(DType::BF16, Shape::d2(rows, K));
        assert!(
            launch(bf16, zeros(N, K), out(M, N), M)
                .contains("expected f32 [6, 6], got bf16 [6, 6]")
        );
        assert!(launch(zeros(rows + 1, K), zeros(N, K), out(M, N), M).contains("`x`"));
        assert!(launch(zeros(rows, K), zeros(K, N), out(M, N), M).contains("`w`"));
        assert!(launch(zeros(rows, K), zeros(N, K), out(M + 1, N), M).contains("`out`"));
        assert!(launch(zeros(rows, K), zeros(N, K), out(M, N), M + 1).contains("at most 12"));
        assert!(AgGemmPlan::new(AgGemmDesc::new(M, N, K, DType::I32), &heap, None).is_err());
        let nccl = Some(OverlapConfig::by_nccl());
        let refused = AgGemmPlan::new(AgGemmDesc::new(M, N, K, DType::F32), &heap, nccl);
        assert!(refused.err().unwrap().is_unsupported());
        let huge = AgGemmDesc::new(1 << 20, N, K, DType::F32);
        assert_eq!(AgGemmPlan::new(huge, &heap, None).err().unwrap().kind(), ErrorKind::Exhausted);
        team.agree(true).map(|_| ())
    })
    .unwrap();
}

/// `rounds` replays with new inputs (new routing for the experts), each beside an eager launch.
fn replays_equal_eager(name: &str, make: Make, ranks: usize, rounds: u64) {
    World::run_threads(ranks, WorldCfg::for_tests(), |w| {
        let (team, heap, stream) = heap_of(&w, "graph")?;
        let (eager, captured) = (make(&heap, &stream, true)?, make(&heap, &stream, true)?);
        stream.begin_capture()?;
        (captured.launch)(&stream)?;
        let graph = stream.end_capture()?.instantiate()?;
        for round in 0..rounds {
            let seed = round << 8 | u64::from(team.rank().get());
            fill(&eager, seed)?;
            fill(&captured, seed)?;
            (eager.launch)(&stream)?;
            stream.replay(&graph)?;
            finish(&stream, &team)?;
            let same = eager.out.read(|a| captured.out.read(|b| a == b))??;
            assert!(same, "{name} round {round}");
        }
        team.agree(true)?;
        team.check_counters()
    })
    .unwrap_or_else(|e| panic!("{name}: {e}"));
}

#[test]
fn captured_replays_equal_eager_launches() {
    for (name, make) in all_ops() {
        replays_equal_eager(name, make, ranks_for(name, 3), 40);
    }
}

/// Nothing wears out or drifts: a thousand replays of each operation, ten thousand under `--full`.
#[test]
fn thousands_of_replays_equal_eager_launches() {
    let rounds = if std::env::var_os("TW_FULL").is_some() { 10_000 } else { 1_000 };
    all_ops().for_each(|(name, make)| replays_equal_eager(name, make, ranks_for(name, 2), rounds));
}

/// Routing that cannot be: an expert that does not exist, another number of tokens, copies beyond
/// the capacity.
#[test]
fn impossible_routing_is_explained() {
    let world = |f: fn(&LiveTeam, &EpPlan, &Stream) -> Result<()>, overflow| {
        World::run_threads(2, WorldCfg::for_tests(), |w| {
            let (team, heap, stream) = heap_of(&w, "ep")?;
            let desc = EpDesc { overflow, capacity: 4, ..EpDesc::new(2, 4, 4, N, 2) };
            let plan = EpPlan::new(desc, &heap)?;
            plan.prepare(&stream)?;
            let done = f(&team, &plan, &stream);
            // Nobody leaves while the other is still in `route`: it would hear of a peer that left,
            // and the world tells the error of its lowest rank. A fault ends this, too.
            team.agree(true).ok();
            done
        })
    };
    let e = world(
        |team, plan, s| {
            let bad = if team.rank().get() == 0 { 4 } else { 3 };
            let idx = Tensor::from_slice(&[0i64, 1, 2, bad], Shape::d2(2, 2))?;
            plan.route(s, &idx, None, &plan.handle().unwrap())?.wait().map(|_| ())
        },
        Overflow::Drop,
    )
    .unwrap_err();
    assert!(e.to_string().contains("names an expert that does not exist"), "{e}");
    let e = world(
        |team, plan, s| {
            let idx = Tensor::from_slice(&[0i64, 1, 2, 3], Shape::d2(2, 2))?;
            let h = plan.route(s, &idx, None, &plan.handle().unwrap())?.wait()?;
            let recv = EpDispatch { x: out(4, N), scales: None, weights: None };
            // One rank alone: whoever comes second hears that the first has ended the team.
            let rows = if team.rank().get() == 0 { 3 } else { 2 };
            plan.dispatch(s, &h, &zeros(rows, N), (None, None), &recv)?.wait().map(|_| ())
        },
        Overflow::Drop,
    )
    .unwrap_err();
    assert!(e.to_string().contains("expected 2 tokens, got 3 tokens"), "{e}");
    // Eight copies for rank 0, which has four rows.
    for (overflow, fails) in [(Overflow::Drop, false), (Overflow::Error, true)] {
        let done = world(
            |_, plan, s| {
                let idx = Tensor::from_slice(&[0i64, 1, 1, 0], Shape::d2(2, 2))?;
                let h = plan.route(s, &idx, None, &plan.handle().unwrap())?.wait()?;
                assert_eq!(h.totals().unwrap().dropped, [4, 0]);
                h.check()
            },
            overflow,
        );
        assert_eq!(done.is_err(), fails);
        if let Err(e) = done {
            let t = e.to_string();
            assert!(t.contains("at most 4 rows") && t.contains("4 copies too many"), "{t}");
        }
    }
}

/// One plan on two streams: its launches share receive areas, so they follow each other.
#[test]
fn launches_of_one_plan_on_two_streams_do_not_mix() {
    for (name, make) in all_ops().filter(|(n, _)| !n.ends_with("hybrid")) {
        World::run_threads(2, WorldCfg::for_tests(), |w| {
            let (team, heap, first) = heap_of(&w, "streams")?;
            let second = Stream::new("second")?;
            let (alone, mixed) = (make(&heap, &first, true)?, make(&heap, &first, true)?);
            for round in 0..50u64 {
                let seed = round << 8 | u64::from(team.rank().get());
                fill(&alone, seed)?;
                fill(&mixed, seed)?;
                (alone.launch)(&first)?;
                finish(&first, &team)?;
                // The same inputs twice, on two streams at once.
                (mixed.launch)(&first)?;
                (mixed.launch)(&second)?;
                finish(&first, &team)?;
                finish(&second, &team)?;
                let same = alone.out.read(|a| mixed.out.read(|b| a == b))??;
                assert!(same, "{name} round {round}");
            }
            team.agree(true)?;
            team.check_counters()
        })
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

/// An error inside a node reaches the peers at once, not at their deadline.
#[test]
fn a_failed_node_ends_the_peers_waits_at_once() {
    let start = Instant::now();
    let e = World::run_threads(2, WorldCfg::default(), |w| {
        let (team, heap, stream) = heap_of(&w, "ep")?;
        let plan = EpPlan::new(EpDesc::new(2, 4, 4, N, 2), &heap)?;
        plan.prepare(&stream)?;
        let bad = if team.rank().get() == 0 { 99 } else { 3 };
        let idx = Tensor::from_slice(&[0i64, 1, 2, bad], Shape::d2(2, 2))?;
        let routed = plan.route(&stream, &idx, None, &plan.handle().unwrap())?.wait();
        let e = routed.map(|_| ()).unwrap_err();
        let want = if bad == 99 { ErrorKind::InvalidArgument } else { ErrorKind::Aborted };
        assert_eq!(e.kind(), want, "{e}");
        Err::<(), _>(e)
    })
    .unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(5), "{e}");
}

/// A launch that is refused halfway ends: nothing of it waits for ever, on this rank or others.
#[test]
fn a_launch_that_is_refused_halfway_ends_everywhere() {
    let start = Instant::now();
    World::run_threads(2, WorldCfg::default(), |w| {
        let (team, heap, stream) = heap_of(&w, "refused")?;
        let op = table::OPS.iter().find(|(n, _)| *n == "gemm_rs pipelined").unwrap().1;
        let op = op(&heap, &stream, true)?;
        fill(&op, 1)?;
        let broken = Stream::new("broken")?;
        let on = if team.rank().get() == 0 {
            broken.launch(tilewire_device::Node::new("bad", || Err(Error::invalid("before"))))?;
            while broken.check().is_ok() {
                std::thread::yield_now();
            }
            &broken
        } else {
            &stream
        };
        let e = (op.launch)(on).and_then(|()| finish(on, &team)).unwrap_err();
        assert!(team.check().is_err(), "{e}");
        // The copy stream of the heap is free again. Copies that had not begun at the abort fail
        // with it.
        match heap.copy_stream()?.synchronize() {
            Err(e) if e.kind() == ErrorKind::Aborted => Ok(()),
            freed => freed,
        }
    })
    .unwrap();
    assert!(start.elapsed() < Duration::from_secs(5));
}

/// Ranks whose outputs differ in type would exchange raw bits.
#[test]
fn output_types_that_differ_are_a_mismatch() {
    let e = World::run_threads(2, WorldCfg::for_tests(), |w| {
        let (team, heap, stream) = heap_of(&w, "types")?;
        let mut desc = tilewire_ops::gemm_rs::GemmRsDesc::new(M, N, K, DType::F32);
        desc.out = if team.rank().get() == 0 { DType::BF16 } else { DType::F16 };
        let plan = tilewire_ops::gemm_ar::GemmArPlan::new(
            tilewire_ops::gemm_ar::GemmArDesc(desc),
            &heap,
            None,
        )?;
        plan.prepare(&stream)
    })
    .unwrap_err();
    assert!(e.is_mismatch() || e.kind() == ErrorKind::Aborted, "{e}");
}
