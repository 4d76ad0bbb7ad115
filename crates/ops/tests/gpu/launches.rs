//! The launch of an operation neither allocates nor loads code nor waits for the device: what it asks of the
//! driver is counted by the preloaded library of the GPU bundle. Operations of one rank are counted
//! by their own tests, with every replay.
#![expect(clippy::print_stdout, reason = "that a test did not run must be seen")]

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::Duration;

use tilewire_core::{DType, Result, Shape};
use tilewire_device::Tensor;
use tilewire_symm::{World, WorldCfg};

use crate::team_ops::{M, asked, by_nccl, by_puts, heap, ranks};
use crate::{DEVICES, begins, calls};

/// The devices have to be there, and the library.
fn ready() -> Option<usize> {
    let n = ranks();
    if n.is_none() || std::env::var_os("TW_CALLS_DIR").is_none() {
        println!("did not run: it needs two devices, and the library of the GPU bundle preloaded");
        return None;
    }
    n
}

#[test]
fn launches_neither_allocate_nor_wait() {
    let Some(n) = ready() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let cfg = WorldCfg { timeout: Duration::from_secs(20), ..WorldCfg::default() };
    let found = World::run_threads(n, cfg, |world| {
        let mut found = BTreeMap::new();
        for (i, make) in asked(&[by_puts(), by_nccl()].concat()) {
            let (heap, stream) = heap(&world, "calls")?;
            let op = make(&heap, &stream)?;
            begins(i, &op, &heap);
            op.refill(3)?;
            op.poison()?;
            let before = op.bits()?;
            heap.team().agree(true)?;
            let mut result: Result<()> = Ok(());
            for _ in 0..2 {
                // Then what a library has to tidy up after its first launches is done, too.
                result = result.and((0..3).try_for_each(|_| (op.launch)(&stream)));
                stream.synchronize()?;
            }
            let mut launches: Vec<_> = (0..4)
                .map(|_| calls::of(|| result = result.clone().and_then(|()| (op.launch)(&stream))))
                .collect();
            launches.sort_by_key(Vec::len);
            // NCCL frees what earlier launches have left now and then: not in each of four.
            let judged =
                if i < by_puts().len() { launches.pop() } else { launches.into_iter().next() };
            if let Some(seen) = judged.filter(|seen| !seen.is_empty()) {
                found.insert((i, op.name), seen);
            }
            stream.synchronize()?;
            result.and(heap.team().check())?;
            assert!(op.bits()? != before, "{}: nothing ran", op.name);
            // Blind, it would find nothing, either.
            let own = heap.device();
            let (t, m) = (Tensor::zeros(DType::F32, Shape::d1(M)), &mut None);
            let seen = calls::of(|| *m = t.to(&own).ok());
            assert!(
                seen.iter().any(|c| c.starts_with("cuMemAlloc")),
                "nothing is counted: {seen:?}"
            );
        }
        Ok(found)
    });
    for (rank, found) in found.unwrap().iter().enumerate() {
        assert!(found.is_empty(), "calls of the launches of rank {rank}: {found:#?}");
    }
}
