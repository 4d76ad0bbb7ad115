//! Operations of a team on CUDA devices, a rank to a device: captured and replayed with inputs that
//! change, against eager launches, to the bit; and what a rank that never launches does to the
//! others.
//!
//! Values are held against the oracle by `tilewire verify --backend vmm`. Where there are fewer
//! than two devices, each test says that it did not run.

#![expect(clippy::print_stdout, reason = "which operation it was must be seen")]

#[path = "gpu/attack_ops.rs"]
mod attack_ops;
#[path = "gpu/attacks.rs"]
mod attacks;
#[path = "gpu/biases.rs"]
mod biases;
#[path = "gpu/borrowed.rs"]
mod borrowed;
#[path = "gpu/calls.rs"]
mod calls;
#[path = "gpu/checks.rs"]
mod checks;
#[path = "gpu/deadlines.rs"]
mod deadlines;
#[path = "gpu/documents.rs"]
mod documents;
#[path = "gpu/driver.rs"]
mod driver;
#[path = "gpu/dropped.rs"]
mod dropped;
#[path = "gpu/emulated.rs"]
mod emulated;
#[path = "gpu/expected.rs"]
mod expected;
#[path = "gpu/far.rs"]
mod far;
#[path = "gpu/heaps.rs"]
mod heaps;
#[path = "gpu/idle.rs"]
mod idle;
#[path = "gpu/inputs.rs"]
mod inputs;
#[path = "gpu/kernels.rs"]
mod kernels;
#[path = "gpu/lacking.rs"]
mod lacking;
#[path = "gpu/launches.rs"]
mod launches;
#[path = "gpu/layouts.rs"]
mod layouts;
#[path = "gpu/little.rs"]
mod little;
#[path = "gpu/orders.rs"]
mod orders;
#[path = "gpu/parked.rs"]
mod parked;
#[path = "gpu/processes.rs"]
mod processes;
#[path = "gpu/team_ops.rs"]
mod team_ops;
#[path = "gpu/watch.rs"]
mod watch;
#[path = "gpu/whole.rs"]
mod whole;

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use team_ops::{Make, Op, asked, by_nccl, by_puts, heap, ranks};
use tilewire_core::{DType, Error, ErrorKind, Rank, Result};
use tilewire_device::Tensor;
use tilewire_symm::{Heap, World, WorldCfg};
use tilewire_testing::{Lack, did_not_run};

/// Says which operation is next: an error of the device names none, and the output of a test that
/// fails is shown.
fn begins(i: usize, op: &Op, heap: &Heap) {
    if heap.team().rank().get() == 0 {
        println!("operation {i}: {}", op.name);
    }
}

/// A panic shows the error of the rank that met it; what the others say of it shows nothing.
fn told(op: &Op, r: Result<()>) -> Result<()> {
    match r {
        Err(e) if e.kind() != ErrorKind::Aborted => panic!("{}: {e}", op.name),
        r => r,
    }
}

/// One test at a time: each counts on its devices doing nothing else.
static DEVICES: Mutex<()> = Mutex::new(());

#[test]
fn replays_with_changed_inputs_equal_eager_launches() {
    replays(by_puts());
}

#[test]
fn replays_by_nccl_equal_eager_launches() {
    replays(by_nccl());
}

#[test]
fn a_bias_of_the_type_of_the_results_gives_the_bits_of_an_f32_bias() {
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let cfg = WorldCfg { timeout: Duration::from_secs(20), ..WorldCfg::default() };
    World::run_threads(n.min(2), cfg, |world| {
        let (heap, stream) = heap(&world, "biases")?;
        for dtype in [DType::BF16, DType::F16] {
            biases::same_bits(&heap, &stream, dtype)?;
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_rank_that_launches_another_m_is_named_at_once() {
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    World::run_threads(n.min(2), checks::cfg(), |world| {
        let (heap, stream) = heap(&world, "checks")?;
        checks::another_m_is_a_mismatch(&heap, &stream)
    })
    .unwrap();
}

/// `all` rounds, or on emulated devices, where a launch takes seconds, so few: what a round shows
/// that those before it do not is another order of threads, and there each launch has its own. All
/// of them for `cargo xtask test --full`.
fn rounds(few: u64, all: u64) -> u64 {
    let emulated = std::env::var_os("TW_EMU_TEXTS").is_some();
    if emulated && std::env::var_os("TW_FULL").is_none() { few } else { all }
}

fn replays(ops: &[Make]) {
    let Some(n) = ranks() else { return };
    if ops.is_empty() {
        return did_not_run(Lack::Nccl, "it needs NCCL");
    }
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let cfg = WorldCfg { timeout: Duration::from_secs(20), ..WorldCfg::default() };
    World::run_threads(n, cfg, |world| {
        for (i, make) in asked(ops) {
            let (heap, stream) = heap(&world, "replays")?;
            let op = make(&heap, &stream)?;
            begins(i, &op, &heap);
            let me = u64::from(heap.team().rank().get());
            stream.begin_capture()?;
            told(&op, (op.launch)(&stream))?;
            let graph = stream.end_capture()?.instantiate()?;
            let rounds = if op.outs[0].len_bytes() > 1 << 20 { 2 } else { rounds(3, 12) };
            for round in 0..rounds {
                op.refill(1 + round * 64 + me)?;
                let mut seen = Vec::new();
                for replay in [true, false, true] {
                    op.poison()?;
                    heap.team().agree(true)?;
                    if replay {
                        told(&op, stream.replay(&graph))?;
                    } else {
                        told(&op, (op.launch)(&stream))?;
                    }
                    stream.synchronize()?;
                    told(&op, heap.team().check())?;
                    seen.push(op.bits()?);
                }
                assert!(seen[0] == seen[1] && seen[1] == seen[2], "{} round {round}", op.name);
            }
        }
        Ok(())
    })
    .unwrap();
}

/// The last rank never launches: the others are told who is missing, their outputs are poison, and
/// a new team of all works.
#[test]
fn a_rank_that_never_launches_is_named_and_outputs_are_poison() {
    silent(by_puts());
}

#[test]
fn a_rank_that_never_launches_is_named_by_nccl_too() {
    silent(by_nccl());
}

fn silent(ops: &[Make]) {
    let Some(n) = ranks() else { return };
    if ops.is_empty() {
        return did_not_run(Lack::Nccl, "it needs NCCL");
    }
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let cfg = WorldCfg { timeout: Duration::from_millis(700), ..WorldCfg::default() };
    World::run_threads(n, cfg, |world| {
        for (i, make) in asked(ops) {
            let want = results(&world, &make)?;
            let (heap, stream) = heap(&world, "stalled")?;
            let op = make(&heap, &stream)?;
            begins(i, &op, &heap);
            let team = heap.team().clone();
            op.refill(5)?;
            let silent = Rank::new(n as u32 - 1);
            team.agree(true)?;
            let start = Instant::now();
            let e = if team.rank() == silent {
                loop {
                    match team.check() {
                        Ok(()) if start.elapsed() < Duration::from_secs(5) => {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                        Ok(()) => break Error::internal("nobody told the silent rank"),
                        Err(e) => break e,
                    }
                }
            } else {
                // Whoever hears of it while it still queues has its error at once.
                let queued = (op.launch)(&stream);
                stream.synchronize()?;
                let e = queued.and_then(|()| team.check()).expect_err(op.name);
                assert!(op.outs.iter().all(all_poison), "{}: outputs look like results", op.name);
                e
            };
            assert!(start.elapsed() < Duration::from_secs(4), "{}: {:?}", op.name, start.elapsed());
            assert!(
                matches!(e.kind(), ErrorKind::Timeout | ErrorKind::Aborted),
                "{}: {e}",
                op.name
            );
            if e.is_timeout() {
                assert_eq!(e.get_peer(), Some(silent), "{}: {e}", op.name);
            }
            // Those of the oracle, and to the bit what they were before.
            assert!(results(&world, &make)? == want, "{}: the new team computes another", op.name);
        }
        Ok(())
    })
    .unwrap();
}

/// Each operation once: short enough for a sanitizer, which sees what no result shows.
#[test]
fn every_operation_computes() {
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let cfg = WorldCfg { timeout: Duration::from_secs(50), ..WorldCfg::default() };
    World::run_threads(n, cfg, |world| {
        for (i, make) in asked(by_puts()) {
            if world.rank().get() == 0 {
                println!("operation {i}");
            }
            computes_again(&world, &make)?;
        }
        Ok(())
    })
    .unwrap();
}

/// A new team on the same devices computes on new memory what the oracle does.
fn computes_again(world: &World, make: &Make) -> Result<()> {
    results(world, make).map(drop)
}

/// The bits that a new team computes, which are right.
fn results(world: &World, make: &Make) -> Result<Vec<Vec<u8>>> {
    let (heap, stream) = heap(world, "again")?;
    let op = make(&heap, &stream)?;
    op.refill(6)?;
    op.poison()?;
    heap.team().agree(true)?;
    (op.launch)(&stream)?;
    stream.synchronize()?;
    heap.team().check()?;
    assert!(!op.outs.iter().all(all_poison), "{} on the new team", op.name);
    expected::check(&op, 6, &heap)?;
    op.bits()
}

/// Every byte is poison, or a count that is 0.
fn all_poison(t: &Tensor) -> bool {
    let byte = if t.dtype() == DType::I64 { 0 } else { DType::POISON };
    t.read(|b| b.iter().all(|&x| x == byte)).unwrap()
}
