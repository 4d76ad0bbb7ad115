//! Spans of work on a CUDA device: two events around it, and a range for profilers.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tilewire_core::{Deadline, Result};

use super::event::CudaEvent;
use super::nvtx;
use super::stream::CudaStream;
use crate::{Point, Queue, Span, Tracer};

/// Spans whose times are not known yet.
#[derive(Default)]
pub(crate) struct DeviceSpans(Mutex<State>);

#[derive(Default)]
struct State {
    /// An event that was reached, and when that was, in microseconds of the tracer.
    base: Option<(CudaEvent, f64)>,
    open: Vec<Open>,
    /// Events of spans that are known.
    spare: Vec<CudaEvent>,
}

struct Open {
    name: &'static str,
    lane: Arc<str>,
    start: CudaEvent,
    end: CudaEvent,
}

/// So many spans are looked at without being asked for: events are used again, and times are
/// reported from an event that is not long ago (the driver gives 24 bits).
const BATCH: usize = 1024;
/// Limit for the last collection to wait for work that has not ended.
const LAST_LOOK_S: f64 = 10.0;

impl DeviceSpans {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Relates the device's clock to the host's, if nobody has yet: waits for the stream.
    pub fn begin(&self, stream: &CudaStream, origin: Instant) -> Result<()> {
        let mut state = self.state();
        if state.base.is_none() {
            let e = CudaEvent::new(stream.context(), true)?;
            stream.record(&e)?;
            e.synchronize(Some(Deadline::after_s(LAST_LOOK_S)))?;
            state.base = Some((e, origin.elapsed().as_secs_f64() * 1e6));
        }
        Ok(())
    }

    fn record(&self, stream: &CudaStream) -> Result<CudaEvent> {
        let spare = self.state().spare.pop();
        let e = spare.map_or_else(|| CudaEvent::new(stream.context(), true), Ok)?;
        stream.record(&e)?;
        Ok(e)
    }

    /// Keeps a span; returns those that are known by now, if it is time to look.
    fn add(&self, open: Open) -> Vec<Span> {
        let mut state = self.state();
        state.open.push(open);
        if state.open.len() < BATCH { Vec::new() } else { state.resolve(|e| e.is_done()) }
    }

    /// Waits for the work of all spans, and returns them.
    pub fn finish(&self) -> Vec<Span> {
        let limit = Deadline::after_s(LAST_LOOK_S);
        let mut state = self.state();
        let spans = state.resolve(|e| e.synchronize(Some(limit)).is_ok());
        // What has not ended by now never will.
        state.open.clear();
        spans
    }
}

impl State {
    /// Takes the spans whose end `is_done`. One whose times the driver does not tell is dropped.
    fn resolve(&mut self, is_done: impl Fn(&CudaEvent) -> bool) -> Vec<Span> {
        let (done, open) =
            std::mem::take(&mut self.open).into_iter().partition(|o: &Open| is_done(&o.end));
        self.open = open;
        let mut spans = Vec::new();
        let Some((base, base_us)) = &self.base else { return spans };
        let mut last = None;
        for o in done {
            if let (Ok(start), Ok(len_us)) = (o.start.us_since(base), o.end.us_since(&o.start)) {
                let (name, lane, start_us) =
                    (o.name.to_owned(), o.lane.to_string(), base_us + start);
                spans.push(Span { name, lane, start_us, len_us });
                self.spare.push(o.start);
                self.spare.extend(last.replace((o.end, start_us + len_us)).map(|(e, _)| e));
            }
        }
        if let Some(last) = last {
            self.spare.extend(self.base.replace(last).map(|(e, _)| e));
        }
        spans
    }
}

/// The piece of a stream that is queued while this is alive: see [`CudaStream::span`].
#[must_use = "a span ends where it is dropped"]
pub struct CudaSpan<'a> {
    stream: &'a CudaStream,
    name: &'static str,
    start: Option<CudaEvent>,
    _range: Option<nvtx::Range>,
}

impl<'a> CudaSpan<'a> {
    pub(super) fn new(stream: &'a CudaStream, name: &'static str) -> Self {
        let _range = nvtx::range(name);
        // In a graph an event tells no time. And a launch goes on without its span.
        let trace = stream.trace().filter(|_| !stream.is_capturing());
        let start = trace.and_then(|(_, t)| t.device().record(stream).ok());
        Self { stream, name, start, _range }
    }
}

impl Drop for CudaSpan<'_> {
    fn drop(&mut self) {
        let (Some(start), Some((lane, tracer))) = (self.start.take(), self.stream.trace()) else {
            return;
        };
        if let Ok(end) = tracer.device().record(self.stream) {
            let open = Open { name: self.name, lane: lane.clone(), start, end };
            tracer.extend(tracer.device().add(open));
        }
    }
}

impl CudaStream {
    /// Marks what is queued until the span is dropped as `name`: with a tracer by two events (not
    /// during a capture), and for profilers by a range of NVTX around the calls, if there is its
    /// library.
    pub fn span(&self, name: &'static str) -> CudaSpan<'_> {
        CudaSpan::new(self, name)
    }

    /// A new stream, as [`CudaStream::new`]; `tracer` gets the spans of its work in the lane
    /// `name`.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn with_tracer(
        ctx: &super::CudaContext,
        name: impl Into<String>,
        tracer: Option<Arc<Tracer>>,
    ) -> Result<Self> {
        let trace = tracer.map(|t| (Arc::from(name.into()), t));
        let stream = Self::make(ctx, trace)?;
        if let Some((_, t)) = stream.trace() {
            t.device().begin(&stream, t.origin())?;
        }
        Ok(stream)
    }
}
