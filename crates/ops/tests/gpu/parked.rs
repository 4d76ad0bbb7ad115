//! A rank that stops inside an operation: between its launches, or with its copies on the way. The
//! others are told who it is, what they have made no sense of is poison, and a new team on new
//! memory computes.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use tilewire_core::{ErrorKind, Rank, Result};
use tilewire_device::Stream;
use tilewire_symm::{Heap, LinkProbe, World, WorldCfg};

use crate::team_ops::{Make, Op, by_copies, heap, in_steps, ranks};
use crate::{DEVICES, all_poison, begins, computes_again};

/// Longer than the first launch of an operation takes, which loads code.
const TIMEOUT: Duration = Duration::from_millis(1500);
/// The victim's copies hang so long, and a test is over by then.
const HANG: Duration = Duration::from_millis(4500);
const OVER: Duration = Duration::from_secs(8);

/// What the victim (the last rank) does instead of a launch.
type Stop<'a> = &'a dyn Fn(&Op, &Heap, &Stream) -> Result<()>;

fn parked(world: &World, make: &Make, stop: Stop<'_>) -> Result<()> {
    let (heap, stream) = heap(world, "parked")?;
    let op = make(&heap, &stream)?;
    begins(0, &op, &heap);
    let team = heap.team().clone();
    op.refill(5)?;
    // All that a first launch loads is there then: it would count as waiting.
    team.agree(true)?;
    (op.launch)(&stream)?;
    stream.synchronize()?;
    team.check()?;
    op.poison()?;
    let victim = Rank::new(team.size() as u32 - 1);
    team.agree(true)?;
    let start = Instant::now();
    let queued = match team.rank() == victim {
        true => stop(&op, &heap, &stream),
        false => (op.launch)(&stream),
    };
    // The victim waits until the others have told it.
    while team.check().is_ok() && start.elapsed() < OVER {
        std::thread::sleep(Duration::from_millis(1));
    }
    let e = queued.and_then(|()| team.check()).expect_err(op.name);
    assert!(start.elapsed() < OVER, "{}: {:?}", op.name, start.elapsed());
    assert!(matches!(e.kind(), ErrorKind::Timeout | ErrorKind::Aborted), "{}: {e}", op.name);
    // The victim waits for those who wait for it, and cannot know that it is the cause.
    if e.is_timeout() && team.rank() != victim {
        assert_eq!(e.get_peer(), Some(victim), "{}: {e}", op.name);
    }
    stream.synchronize()?;
    heap.copy_stream()?.synchronize()?;
    let last = op.outs.last().expect("an operation with an output");
    assert!(all_poison(last), "{}: rank {} has what looks like a result", op.name, team.rank());
    computes_again(world, make)
}

fn on_all_ranks(f: impl Fn(&World) -> Result<()> + Sync) {
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let cfg = WorldCfg { timeout: TIMEOUT, ..WorldCfg::default() };
    World::run_threads(n, cfg, |world| f(&world)).unwrap();
}

#[test]
fn a_rank_that_stops_between_its_launches_is_named() {
    on_all_ranks(|world| {
        for make in in_steps() {
            let steps = {
                let (heap, stream) = heap(world, "steps")?;
                make(&heap, &stream)?.steps.map_or(0, |s| s.0)
            };
            assert!(steps > 1, "nothing to stop between");
            for done in 1..steps {
                let stop = |op: &Op, _: &Heap, s: &Stream| {
                    op.steps.as_ref().map_or(Ok(()), |steps| steps.1(s, done))
                };
                parked(world, &make, &stop)?;
            }
        }
        Ok(())
    });
}

#[test]
fn a_rank_whose_copies_hang_is_named() {
    on_all_ranks(|world| {
        for make in by_copies() {
            let stop = |op: &Op, heap: &Heap, s: &Stream| {
                let probe = LinkProbe::new(heap, 1 << 20)?;
                // Longer than the others wait; the launch goes on behind it.
                probe.delay(heap.copy_stream()?.cuda()?, HANG.as_nanos() as u64)?;
                (op.launch)(s)?;
                s.synchronize()
            };
            parked(world, &make, &stop)?;
        }
        Ok(())
    });
}
