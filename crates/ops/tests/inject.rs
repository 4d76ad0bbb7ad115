//! A fault at every step: whatever a rank asks the system for while it makes a team, a heap and
//! an operation fails once. Nothing hangs, leaks or is freed twice, and the next try succeeds.
//!
//! Alone in its process, whose descriptors, mappings and threads it counts.

mod table;

use std::time::{Duration, Instant};

use table::*;
use tilewire_core::{BackendKind, Error, ErrorKind, Rank, Result, inject};
use tilewire_device::Stream;
use tilewire_symm::{HeapCfg, LiveTeam, World, WorldCfg};

/// Descriptors, mappings of shared memory, threads.
fn held() -> [usize; 3] {
    let count = |dir: &str| std::fs::read_dir(dir).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    [count("/proc/self/fd"), maps.matches("tilewire").count(), count("/proc/self/task")]
}

/// From nothing to a result. `team` is left behind for a caller that has to tell the others.
fn attempt(world: &World, make: Make, team: &mut Option<LiveTeam>) -> Result<()> {
    let team = team.insert(world.everyone("try")?);
    let heap = team.heap(BackendKind::Host, HeapCfg::new(1 << 14))?;
    heap.grow(1 << 16)?;
    let stream = Stream::new("s")?;
    let op = make(&heap, &stream, true)?;
    fill(&op, 7)?;
    (op.launch)(&stream)?;
    finish(&stream, team)?;
    let out = op.out.to_f32()?;
    assert!(out.iter().all(|v| v.is_finite()), "poison in the result");
    drop(op);
    heap.collect()
}

/// One try in which the `nth` step of rank 0 fails. What it said, and how often it had to be met.
fn with_fault(world: &World, make: Make, nth: u64) -> (Result<()>, bool) {
    let mut team = None;
    let chosen = world.rank() == Rank::new(0);
    if chosen {
        inject::arm(nth);
    }
    let done = attempt(world, make, &mut team);
    let met = chosen && inject::disarm();
    if let (Err(_), Some(team)) = (&done, &team) {
        // A rank that gives up says so. Where the call was collective the others know already.
        team.abort("its set-up failed");
    }
    (done, met)
}

fn every_step(world: &World, name: &str, make: Make) -> Result<u64> {
    let outer = world.everyone("outer")?;
    attempt(world, make, &mut None)?;
    let mut baseline = None;
    for nth in 0.. {
        let at = format!("{name}, step {nth}");
        let start = Instant::now();
        let (done, met) = with_fault(world, make, nth);
        let took = start.elapsed();
        assert!(took < Duration::from_millis(1500), "{at}: {took:?} is a wait for a deadline");
        let met = outer.exchange("met", &[u8::from(met)])?[0] == [1];
        match &done {
            Ok(()) => assert!(!met, "{at}: the fault was swallowed"),
            Err(e) => {
                assert!(met, "{at}: {e}");
                let own = world.rank() == Rank::new(0);
                assert!(!own || e.message().contains("injected fault"), "{at}: {e}");
                let kinds = [ErrorKind::Exhausted, ErrorKind::Aborted, ErrorKind::Mismatch];
                assert!(kinds.contains(&e.kind()), "{at}: {e}");
            }
        }
        drop::<Result<(), Error>>(done);
        attempt(world, make, &mut None)
            .map_err(|e| Error::internal(format!("{at}, again: {e}")))?;
        // Threads leave the table a moment after they are joined.
        outer.agree(true)?;
        if world.rank() == Rank::new(0) {
            let first = *baseline.get_or_insert_with(settled);
            let now = settled();
            assert!((0..3).all(|i| now[i] <= first[i]), "{at}: {first:?} -> {now:?}");
        }
        outer.agree(true)?;
        if !met {
            return Ok(nth);
        }
    }
    unreachable!("steps end");
}

/// What is held once threads that were joined have left the table.
fn settled() -> [usize; 3] {
    let mut best = held();
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(2));
        let now = held();
        best = [0, 1, 2].map(|i| best[i].min(now[i]));
    }
    best
}

#[test]
#[cfg_attr(
    not(debug_assertions),
    ignore = "faults are injected only in builds with debug assertions"
)]
fn a_fault_at_any_step_is_told_leaks_nothing_and_can_be_tried_again() {
    for (name, make) in all_ops().filter(|(n, _)| !n.ends_with("hybrid")) {
        let steps = World::run_threads(2, WorldCfg::for_tests(), |w| every_step(&w, name, make))
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(steps[0] >= 20 && steps[0] == steps[1], "{name}: {steps:?} steps");
    }
}
