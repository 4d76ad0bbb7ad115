//! Streams of somebody else's.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};

use cudarc::driver::sys::{self, CUstream};
use tilewire_core::{Error, Result};

use super::context::CudaContext;
use super::error::check;
use super::nvtx;
use super::stream::{CudaStream, Inner, StreamId};

/// Streams that were borrowed last, by the numbers that the driver gives each only once, and what
/// borrows them now. What is known of one is that it is of this context: that need not be asked
/// again.
#[derive(Default)]
pub(super) struct Known(Vec<(u64, Weak<Inner>)>);

/// So many streams are known, and those that are borrowed.
const MOST: usize = 64;

impl Known {
    /// Returns whether the stream is known, and who borrows it.
    fn find(&self, id: u64) -> (bool, Option<Arc<Inner>>) {
        let found = self.0.iter().find(|(known, _)| *known == id);
        (found.is_some(), found.and_then(|(_, s)| s.upgrade()))
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    fn add(&mut self, id: u64, stream: &Arc<Inner>) {
        self.0.retain(|(known, _)| *known != id);
        if self.0.len() >= MOST
            && let Some(oldest) = self.0.iter().position(|(_, s)| s.strong_count() == 0)
        {
            self.0.remove(oldest);
        }
        self.0.push((id, Arc::downgrade(stream)));
    }
}

/// The legacy default stream: null, or the handle that names it.
const LEGACY: usize = 1;

/// The number of a stream that is alive; none while it is captured, when to ask for it would end
/// the capture. A context must be current, for which null is the legacy stream.
fn id_of(raw: CUstream) -> Result<Option<u64>> {
    if raw.addr() <= LEGACY {
        // The driver does not answer for it while any stream is captured. There is one.
        return Ok(Some(u64::MAX));
    }
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the caller's stream; valid output.
    check(unsafe { sys::cuStreamIsCapturing(raw, &mut status) }, "cuStreamIsCapturing")?;
    if status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
        return Ok(None);
    }
    let mut id = 0;
    // SAFETY: the caller's stream; valid output.
    check(unsafe { sys::cuStreamGetId(raw, &mut id) }, "cuStreamGetId")?;
    Ok(Some(id))
}

fn check_context(ctx: &CudaContext, raw: CUstream) -> Result<()> {
    let mut of = std::ptr::null_mut();
    // SAFETY: the caller's stream; a context is current, as null needs it; valid output.
    check(unsafe { sys::cuStreamGetCtx(raw, &mut of) }, "cuStreamGetCtx")?;
    if of == ctx.raw() {
        return Ok(());
    }
    Err(Error::invalid("the stream belongs to another context")
        .expected(format_args!("the primary context of device {}", ctx.ordinal()))
        .seen("another context")
        .hint("make it with this device's primary context current, as the runtime API does"))
}

impl CudaStream {
    /// A stream that somebody else has made (a `CUstream` or `cudaStream_t`; null is the legacy
    /// default stream), and will destroy. If it is captured there, our work becomes part of that
    /// graph, which keeps what the work refers to until the graph and all that was made of it are
    /// destroyed.
    ///
    /// To borrow a stream for each call is cheap. The end of a borrow does not wait: what is queued
    /// goes on, and what it uses is kept until an event behind it is reached, or by the graph that
    /// the owner captures.
    ///
    /// # Safety
    /// The handle must be of a stream that is alive until the last clone of the result is gone.
    /// Operations keep clones until their [`Pending`](crate::Pending) is gone.
    ///
    /// # Errors
    /// `InvalidArgument` for a stream of another context, or the default stream of the calling
    /// thread, which is another one on each thread.
    pub unsafe fn borrow(ctx: &CudaContext, raw: *mut c_void) -> Result<Self> {
        const PER_THREAD: usize = 2;
        if raw.addr() == PER_THREAD {
            return Err(Error::invalid("the default stream of a thread cannot be borrowed").hint(
                "its handle means another stream on every thread: pass one that was created",
            ));
        }
        nvtx::load();
        let _current = ctx.bind()?;
        let raw = raw.cast();
        let Some(id) = id_of(raw)? else {
            // A handle may have been another stream's before, so what is known of it is not taken.
            // Numbers of the driver's count up from zero.
            static CAPTURED: AtomicU64 = AtomicU64::new(u64::MAX / 2);
            check_context(ctx, raw)?;
            let id = StreamId::Theirs(CAPTURED.fetch_add(1, Ordering::Relaxed));
            return Ok(Self::of(ctx, (raw, id), None));
        };
        let known = || ctx.0.borrowed.lock().unwrap_or_else(PoisonError::into_inner);
        let (is_known, now) = known().find(id);
        if let Some(stream) = now {
            return Ok(stream.into());
        }
        if !is_known {
            check_context(ctx, raw)?;
        }
        let new = Self::of(ctx, (raw, StreamId::Theirs(id)), None);
        known().add(id, new.inner());
        Ok(new)
    }
}
