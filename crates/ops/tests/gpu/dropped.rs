//! Plans that are dropped while a graph or queued work uses their symmetric memory: nobody else gets it before that ends.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use tilewire_core::Result;
use tilewire_symm::{Heap, World, WorldCfg};

use crate::team_ops::{FAMILIES, Op, by_puts, heap, ranks};
use crate::{DEVICES, told};

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
        for make in FAMILIES.map(|i| by_puts()[i]) {
            let (heap, stream) = heap(&world, "dropped")?;
            let base = heap.usage().0;
            let seed = 9 + 64 * u64::from(heap.team().rank().get());
            let op = make(&heap, &stream)?;
            let name = op.name;
            op.refill(seed)?;
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
            for round in 0..3 {
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
            drop(graph);
            // Dropped at once behind its launch.
            new.poison()?;
            heap.team().agree(true)?;
            told(&new, (new.launch)(&stream))?;
            let outs = new.outs.clone();
            drop(new);
            let third = make(&heap, &stream)?;
            stream.synchronize()?;
            let seen: Result<Vec<_>> = outs.iter().map(|t| t.read(<[u8]>::to_vec)).collect();
            assert!(seen? == right, "{name}: queued work whose plan was dropped");
            drop(third);
            assert!(
                comes_back(&heap, base)?,
                "{name}: {} of {base} bytes are free",
                heap.usage().0
            );
        }
        Ok(())
    })
    .unwrap();
}
