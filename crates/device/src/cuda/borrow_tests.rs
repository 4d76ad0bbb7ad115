//! Streams of others that are borrowed again and again, and launches that ask once. Without CUDA
//! nothing runs here.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};

use cudarc::driver::sys;

use super::error::check;
use super::interop_tests::{Theirs, current, device, gone};
use super::*;
use crate::{Point, Queue};

fn begin(theirs: &Theirs, ctx: &CudaContext) {
    let _current = ctx.bind().unwrap();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: a live stream.
    check(unsafe { sys::cuStreamBeginCapture_v2(theirs.0, mode) }, "begin").unwrap();
}

fn end(theirs: &Theirs, ctx: &CudaContext) -> sys::CUgraph {
    let _current = ctx.bind().unwrap();
    let mut graph = std::ptr::null_mut();
    // SAFETY: valid output.
    check(unsafe { sys::cuStreamEndCapture(theirs.0, &mut graph) }, "end").unwrap();
    assert!(!graph.is_null());
    graph
}

fn destroy(graph: sys::CUgraph) {
    // SAFETY: ended above, destroyed once.
    check(unsafe { sys::cuGraphDestroy(graph) }, "destroy").unwrap();
}

#[test]
fn a_stream_that_is_borrowed_twice_is_one_stream() {
    let Some(ctx) = device() else { return };
    let theirs = Theirs::new(&ctx);
    let (a, b) = (theirs.borrow(), theirs.borrow());
    assert!(Arc::ptr_eq(a.inner(), b.inner()));
    let first = Arc::downgrade(a.inner());
    drop((a, b));
    assert!(first.upgrade().is_none(), "nothing of it stays");
    // An event of an earlier borrow is of the same stream, which is behind it anyway.
    let (earlier, e) = (theirs.borrow(), CudaEvent::new(&ctx, false).unwrap());
    earlier.record(&e).unwrap();
    drop(earlier);
    theirs.borrow().wait(&e).unwrap();
    // Streams that are gone are forgotten in time.
    let known = || ctx.0.borrowed.lock().unwrap_or_else(PoisonError::into_inner).len();
    for _ in 0..100 {
        Theirs::new(&ctx).borrow();
    }
    assert!(known() < 80, "{} streams are known", known());
}

#[test]
fn what_is_borrowed_may_end_while_its_owner_captures() {
    let Some(ctx) = device() else { return };
    let theirs = Theirs::new(&ctx);
    let (eager, captured) = (Arc::new(1u8), Arc::new(2u8));
    let weak = [Arc::downgrade(&eager), Arc::downgrade(&captured)];
    let stream = theirs.borrow();
    stream.hold(|| eager);
    begin(&theirs, &ctx);
    stream.hold(|| captured);
    drop(stream);
    // Two borrows of one capture have one keeper.
    let (a, b) = (theirs.borrow().held().unwrap(), theirs.borrow().held().unwrap());
    assert!(Arc::ptr_eq(&a, &b));
    drop((a, b));
    ctx.free_retired();
    assert!(weak.iter().all(|w| w.upgrade().is_some()), "the capture keeps both");
    destroy(end(&theirs, &ctx));
    assert!(!theirs.borrow().is_capturing());
    assert!(weak.iter().all(|w| gone(w, &ctx)));
}

#[test]
fn a_launch_asks_once_whether_its_stream_is_captured() {
    let Some(ctx) = device() else { return };
    let theirs = Theirs::new(&ctx);
    let stream = theirs.borrow();
    let seen = stream.in_launch(|| {
        let before = stream.is_capturing();
        // What no caller may do: it shows that nobody asks again.
        begin(&theirs, &ctx);
        Ok((before, stream.is_capturing()))
    });
    assert_eq!(seen.unwrap(), (false, false));
    assert!(stream.is_capturing(), "the next launch asks again");
    assert!(stream.in_launch(|| Ok(stream.is_capturing())).unwrap());
    destroy(end(&theirs, &ctx));
    assert!(!stream.in_launch(|| Ok(stream.is_capturing())).unwrap());
}

#[test]
fn a_launch_that_panics_leaves_the_callers_context() {
    let Some(ctx) = device() else { return };
    let stream = CudaStream::new(&ctx).unwrap();
    let other = CudaContext::new(device_count().unwrap() - 1).unwrap();
    assert!(current().is_null());
    stream
        .in_launch(|| {
            assert_eq!(current(), ctx.raw());
            let inside = CudaStream::new(&other)?;
            assert_eq!(inside.in_launch(|| Ok(current()))?, other.raw());
            // Code of others finds what we have made current, and may leave another one.
            current::apart(|| drop(CudaStream::new(&other)));
            assert_eq!(current(), ctx.raw());
            Ok(())
        })
        .unwrap();
    assert!(current().is_null());
    let launch = || stream.in_launch(|| -> tilewire_core::Result<()> { panic!("in the middle") });
    assert!(catch_unwind(AssertUnwindSafe(launch)).is_err());
    assert!(current().is_null());
    // The scope has ended with it: the context is made current anew.
    let _current = ctx.bind().unwrap();
    assert_eq!(current(), ctx.raw());
}

#[test]
fn an_event_that_is_used_again_has_no_record() {
    let Some(ctx) = device() else { return };
    let (stream, side) = (CudaStream::new(&ctx).unwrap(), CudaStream::new(&ctx).unwrap());
    let large = CudaMemory::zeroed(&ctx, 1 << 26).unwrap();
    for _ in 0..8 {
        let e = CudaEvent::new(&ctx, false).unwrap();
        stream.fill_memory(&large, 1).unwrap();
        stream.record(&e).unwrap();
        drop(e);
        let again = CudaEvent::new(&ctx, false).unwrap();
        assert!(again.is_done(), "nothing has recorded it");
        again.synchronize(None).unwrap();
        side.wait(&again).unwrap();
        side.begin_capture().unwrap();
        side.wait(&again).unwrap();
        side.end_capture().unwrap();
    }
}
