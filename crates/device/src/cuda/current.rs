//! The current context of a thread, and the facts that a launch asks the driver for once.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{self, CUcontext};
use tilewire_core::Result;

use super::error::check;

thread_local! {
    /// The context that a [`Current`] of this thread has made current, or null.
    static BOUND: Cell<CUcontext> = const { Cell::new(null_mut()) };
    /// The number of the launch that this thread is queuing, or 0.
    static LAUNCH: Cell<u64> = const { Cell::new(0) };
}

/// Some of our calls to the driver. At their end the calling thread has the context that it had
/// before, or none: the runtime API of CUDA, in the caller's code, takes the current context for
/// the device that was chosen.
///
/// Inside of one, another one of the same context costs no call. They end in reverse order, on
/// their thread: whoever calls code of others meanwhile does so in [`apart`].
#[must_use = "the caller's context is current again once this is dropped"]
pub(crate) struct Current {
    _outer: Option<Outer>,
    _of_this_thread: PhantomData<*const ()>,
}

/// The state of the driver before this binding, to be restored at its end.
struct Outer {
    bound: CUcontext,
    before: Option<CUcontext>,
    _mode: Option<Uncaptured>,
}

/// Calls of this thread that no capture is to see: without it, one that CUDA calls potentially
/// unsafe (an allocation, a look at an event) ends captures in `global` mode of all threads, and of
/// others those of its own. What belongs to a capture is queued on its stream, and is seen whatever
/// the mode.
#[must_use = "the thread's mode is as before once this is dropped"]
struct Uncaptured(sys::CUstreamCaptureMode);

impl Uncaptured {
    fn new() -> Self {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: valid in- and output. It fails only for another mode than there are.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        Self(mode)
    }
}

impl Drop for Uncaptured {
    fn drop(&mut self) {
        // SAFETY: as above; what the thread had before.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.0) };
    }
}

impl Current {
    /// Makes `context`, which must stay alive, current on the calling thread.
    pub(super) fn new(context: CUcontext) -> Result<Self> {
        let (bound, _of_this_thread) = (BOUND.get(), PhantomData);
        if bound == context {
            return Ok(Self { _outer: None, _of_this_thread });
        }
        let mut now = null_mut();
        // SAFETY: the driver is initialised; valid output.
        check(unsafe { sys::cuCtxGetCurrent(&mut now) }, "cuCtxGetCurrent")?;
        let _mode = bound.is_null().then(Uncaptured::new);
        let before = (now != context).then_some(now);
        if before.is_some() {
            // SAFETY: the caller keeps the context.
            check(unsafe { sys::cuCtxSetCurrent(context) }, "cuCtxSetCurrent")?;
        }
        BOUND.set(context);
        Ok(Self { _outer: Some(Outer { bound, before, _mode }), _of_this_thread })
    }
}

impl Drop for Outer {
    fn drop(&mut self) {
        BOUND.set(self.bound);
        if let Some(before) = self.before {
            // SAFETY: it was current on this thread. If somebody has destroyed it meanwhile, the
            // driver says so.
            unsafe { sys::cuCtxSetCurrent(before) };
        }
    }
}

/// Sets a value of this thread back when it is dropped, also by a panic.
struct Back<T: Copy + 'static>(&'static std::thread::LocalKey<Cell<T>>, T);

impl<T: Copy + 'static> Drop for Back<T> {
    fn drop(&mut self) {
        self.0.set(self.1);
    }
}

/// Runs code of others, which may do with the current context as it likes: what it calls of ours
/// relies on none.
pub(super) fn apart<T>(f: impl FnOnce() -> T) -> T {
    let _launch = Back(&LAUNCH, LAUNCH.replace(0));
    let _bound = Back(&BOUND, BOUND.replace(null_mut()));
    f()
}

/// Runs `f` as one launch, or as part of the one that this thread is queuing: see [`launch`].
pub(super) fn in_launch<T>(context: CUcontext, f: impl FnOnce() -> Result<T>) -> Result<T> {
    static NUM: AtomicU64 = AtomicU64::new(1);
    let _current = Current::new(context)?;
    let outer = LAUNCH.get();
    let new = if outer == 0 { NUM.fetch_add(1, Ordering::Relaxed) } else { outer };
    LAUNCH.set(new);
    let _launch = Back(&LAUNCH, outer);
    f()
}

/// The number of the launch that this thread is queuing, unlike that of any other: what was asked
/// for in it need not be asked for again.
pub(super) fn launch() -> Option<u64> {
    Some(LAUNCH.get()).filter(|n| *n != 0)
}
