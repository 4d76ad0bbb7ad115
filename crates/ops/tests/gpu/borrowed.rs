//! The end of a borrowed stream: nobody waits for it, and what its work uses is kept behind that
//! work.

use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use tilewire_core::Result;
use tilewire_device::cuda::{CudaContext, CudaMemory, CudaStream};
use tilewire_device::{Device, Queue};
use tilewire_symm::{LinkProbe, World, WorldCfg};

use crate::DEVICES;
use crate::team_ops::{heap, ranks};

/// How long the stream is busy.
const BUSY: Duration = Duration::from_millis(1500);

/// Until `what` is gone, for whoever frees meanwhile as an allocation does.
fn gone(ctx: &CudaContext, what: &Weak<u8>) -> bool {
    let start = Instant::now();
    while what.upgrade().is_some() && start.elapsed() < 4 * BUSY {
        ctx.free_retired();
        std::thread::sleep(Duration::from_millis(5));
    }
    what.upgrade().is_none()
}

fn borrow(ctx: &CudaContext) -> Result<CudaStream> {
    // SAFETY: null is the legacy stream, which lives as long as the context.
    unsafe { CudaStream::borrow(ctx, std::ptr::null_mut()) }
}

#[test]
fn a_borrow_ends_at_once_and_what_it_used_behind_its_work() {
    let Some(n) = ranks() else { return };
    let _turn = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    World::run_threads(n, WorldCfg::default(), |world| {
        let (heap, own) = heap(&world, "borrowed")?;
        let Device::Cuda(ctx) = heap.device() else { panic!("a heap of the host") };
        let probe = LinkProbe::new(&heap, 16)?;
        let memory = CudaMemory::zeroed(&ctx, 64)?;
        let (eager, replayed) = (Arc::new(1u8), Arc::new(2u8));
        let weak = [Arc::downgrade(&eager), Arc::downgrade(&replayed)];
        own.begin_capture()?;
        own.cuda()?.hold(|| replayed);
        own.cuda()?.fill_memory(&memory, 1)?;
        let graph = own.cuda()?.end_capture()?;
        // What a first launch loads is there then.
        probe.delay(&borrow(&ctx)?, 1000)?;
        ctx.synchronize()?;
        let stream = borrow(&ctx)?;
        let start = Instant::now();
        probe.delay(&stream, BUSY.as_nanos() as u64)?;
        stream.hold(|| eager);
        stream.replay(&graph)?;
        drop(stream);
        drop(graph);
        ctx.free_retired();
        let kept = weak.each_ref().map(|w| w.upgrade().is_some());
        let took = start.elapsed();
        assert!(took < BUSY / 2, "the end of the borrow has waited: {took:?}");
        assert_eq!(kept, [true; 2], "let go before its work");
        // The next borrow is the same stream.
        borrow(&ctx)?.fill_memory(&memory, 2)?;
        assert!(weak.iter().all(|w| gone(&ctx, w)), "kept for ever");
        assert!(start.elapsed() >= BUSY, "let go before its work");
        Ok(())
    })
    .unwrap();
}
