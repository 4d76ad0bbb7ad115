//! Events of a CUDA device.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::ThreadId;

use cudarc::driver::sys::{self, CUevent, CUresult};
use tilewire_core::{Deadline, Error, Result};

use super::context::CudaContext;
use super::error::check;
use super::graph::Held;
use super::stream::{Inner, StreamId, poll};
use crate::Point;

/// A point in a CUDA stream.
pub struct CudaEvent {
    ctx: CudaContext,
    raw: CUevent,
    timing: bool,
    last: Mutex<Last>,
}

/// The last record of an event.
#[derive(Clone, Default)]
pub(super) struct Last {
    /// The capture that it was part of.
    pub capture: Option<Arc<Held>>,
    /// The stream, and whose thread made it: none if nothing has recorded the event.
    pub on: Weak<Inner>,
    pub id: StreamId,
    pub by: Option<ThreadId>,
    /// Things that this stream had been given to hold until then.
    pub num: u64,
}

impl Last {
    /// An event that was used before has an older record, which does not count.
    pub fn is_recorded(&self) -> bool {
        self.by.is_some()
    }
}

// SAFETY: the driver allows calls on an event from any thread; the rest is behind a lock.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// A new event; only one with `timing` can measure time.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn new(ctx: &CudaContext, timing: bool) -> Result<Self> {
        let spare = if timing { None } else { ctx.spare_event() };
        if let Some(raw) = spare {
            return Ok(Self { ctx: ctx.clone(), raw, timing, last: Mutex::default() });
        }
        let _current = ctx.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = if timing { 0 } else { sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32 };
        // SAFETY: a context is current, the output is valid.
        check(unsafe { sys::cuEventCreate(&mut raw, flags) }, "cuEventCreate")?;
        Ok(Self { ctx: ctx.clone(), raw, timing, last: Mutex::default() })
    }

    /// Microseconds from `earlier` to this event; both must have timing and be reached.
    ///
    /// # Errors
    /// `InvalidArgument` otherwise.
    pub fn us_since(&self, earlier: &CudaEvent) -> Result<f64> {
        let _current = self.ctx.bind()?;
        let mut ms = 0.0;
        // SAFETY: both are alive, the output is valid.
        let code = unsafe { sys::cuEventElapsedTime_v2(&mut ms, earlier.raw, self.raw) };
        check(code, "cuEventElapsedTime")?;
        Ok(f64::from(ms) * 1e3)
    }

    /// The device whose streams can record it; those of any can wait for it.
    pub(crate) fn context(&self) -> &CudaContext {
        &self.ctx
    }

    pub(super) fn raw(&self) -> CUevent {
        self.raw
    }

    pub(super) fn set_last(&self, last: Last) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = last;
    }

    pub(super) fn last(&self) -> Last {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn query(&self) -> CUresult {
        // SAFETY: the event is alive.
        unsafe { sys::cuEventQuery(self.raw) }
    }
}

impl Point for CudaEvent {
    fn is_done(&self) -> bool {
        // The driver would invalidate a capture in progress if it were asked. An error ends the
        // waiting, too: `synchronize` raises it.
        let last = self.last();
        if last.capture.is_some() || !last.is_recorded() {
            return last.capture.is_none();
        }
        let Ok(_current) = self.ctx.bind() else { return false };
        self.query() != CUresult::CUDA_ERROR_NOT_READY
    }

    fn synchronize(&self, deadline: Option<Deadline>) -> Result<()> {
        if self.last().capture.is_some() {
            return Err(Error::invalid(
                "this event was captured into a graph: it never happens by itself",
            )
            .hint("use `Pending::join` during capture, and wait for the graph's launch instead"));
        }
        if self.last().is_recorded() {
            let _current = self.ctx.bind()?;
            poll(deadline, || self.query(), |from, to| self.ctx.tell_waiting(from, to))?;
        }
        // Who waits can free, too: a loop that only launches and waits would keep all that it has
        // used.
        self.ctx.free_retired();
        Ok(())
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        let last = self.last.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !self.timing && last.capture.is_none() && self.ctx.keep_event(self.raw) {
            return;
        }
        if let Ok(_current) = self.ctx.bind() {
            // SAFETY: created by us, destroyed once.
            unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
