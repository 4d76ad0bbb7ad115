//! Plans that are dropped while a graph or queued work uses their symmetric memory: nobody else
//! gets it before that ends.

#![expect(clippy::print_stdout, reason = "how much was seen while the device was busy")]

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use tilewire_core::Result;
use tilewire_symm::{Heap, LinkProbe, World, WorldCfg};

use crate::team_ops::{FAMILIES, Op, asked, by_puts, heap, ranks};
use crate::{DEVICES, rounds, told};

/// How long the device is kept busy in front of work whose plan goes.
const BUSY_NS: u64 = 300_000_000;

/// Collective: whether all ranks have the space of dropped plans back before long.
fn comes_back(heap: &Heap, base: usize) -> Result<bool> {
    let start = Instant::now();
    loop {
        heap.collect()?;
        if heap.team().agree(heap.usage().0 == base)? {
            return Ok(true);
        }
        if !heap.team().agree(start.elapsed() < Duration::from_secs(5))? {
            return Ok(false);
        }
    }
}

/// Its inputs are those of `seed`, its outputs poison, and its plan is gone.
fn without_plan(op: Op, seed: u64) -> Result<Op> {
    op.refill(seed)?;
    op.poison()?;
    Ok(Op { launch: Box::new(|_| panic!("its plan is gone")), steps: None, ..op })
}

#[test]
fn dropped_plans_leave_their_memory_to_graphs_and_queued_work() {
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let cfg = WorldCfg { timeout: Duration::from_secs(20), ..WorldCfg::default() };
    World::run_threads(n, cfg, |world| {
        let all = world.everyone("all")?;
        let (mut first, mut num_early) = (None, 0);
        let families: Vec<_> =
            asked(by_puts()).into_iter().filter(|o| FAMILIES.contains(&o.0)).collect();
        for (_, make) in &families {
            let (heap, stream) = heap(&world, "dropped")?;
            let ctx = stream.cuda()?.context().clone();
            let base = heap.usage().0;
            let seed = 9 + 64 * u64::from(heap.team().rank().get());
            let op = make(&heap, &stream)?;
            let name = op.name;
            op.refill(seed)?;
            // Some rows of some outputs are nobody's.
            op.poison()?;
            heap.team().agree(true)?;
            (op.launch)(&stream)?;
            stream.synchronize()?;
            let right = op.bits()?;
            let free = heap.usage().0;
            assert!(free < base, "{name} takes no symmetric memory");

            stream.begin_capture()?;
            told(&op, (op.launch)(&stream))?;
            let graph = stream.end_capture()?.instantiate()?;
            let old = without_plan(op, seed)?;
            heap.collect()?;
            assert_eq!(heap.usage().0, free, "{name}: a graph uses what was collected");
            // Another plan beside it, in turns.
            let new = make(&heap, &stream)?;
            for round in 0..rounds(1, 3) {
                new.refill(seed)?;
                old.poison()?;
                new.poison()?;
                heap.team().agree(true)?;
                told(&old, stream.replay(&graph))?;
                told(&new, (new.launch)(&stream))?;
                stream.synchronize()?;
                told(&new, heap.team().check())?;
                assert!(old.bits()? == right, "{name}: the graph, round {round}");
                assert!(new.bits()? == right, "{name}: the new plan, round {round}");
            }
            // Dropped at once behind its last replay, as the new plan is behind its launch; both
            // while the device is busy.
            old.poison()?;
            new.poison()?;
            let probe = LinkProbe::new(&heap, 16)?;
            let free = heap.usage().0;
            heap.team().agree(true)?;
            let start = Instant::now();
            probe.delay(stream.cuda()?, BUSY_NS)?;
            told(&old, stream.replay(&graph))?;
            told(&new, (new.launch)(&stream))?;
            drop(graph);
            let outs = new.outs.clone();
            drop(new);
            heap.collect()?;
            let early = start.elapsed() < Duration::from_nanos(BUSY_NS);
            num_early += usize::from(early);
            let kept = heap.usage().0 == free;
            assert!(kept || !early, "{name}: queued work uses what was collected");
            let third = make(&heap, &stream)?;
            stream.synchronize()?;
            assert!(old.bits()? == right, "{name}: a replay whose graph was dropped");
            let seen: Result<Vec<_>> = outs.iter().map(|t| t.read(<[u8]>::to_vec)).collect();
            assert!(seen? == right, "{name}: queued work whose plan was dropped");
            drop(third);
            assert!(
                comes_back(&heap, base)?,
                "{name}: {} of {base} bytes are free",
                heap.usage().0
            );
            // Nothing keeps the heap itself, of 600 MiB, not even a stream that lives on; the peers
            // have it, too.
            drop((probe, old, heap));
            stream.synchronize()?;
            all.agree(true)?;
            let free = ctx.memory_info()?.0;
            let before = *first.get_or_insert(free);
            assert!(free + (512 << 20) > before, "{name}: {free} bytes are free, before {before}");
            all.agree(true)?;
        }
        println!("{num_early} of {} looked while the device was busy", families.len());
        assert!(num_early > 0, "the device was never busy");
        Ok(())
    })
    .unwrap();
}
