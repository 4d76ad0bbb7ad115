//! Spans of work, for timelines.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::cuda::DeviceSpans;

/// One piece of work on one lane.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Name of the work.
    pub name: String,
    /// The name of the stream that it ran on.
    pub lane: String,
    /// Start, microseconds since the tracer was made.
    pub start_us: f64,
    /// Length in microseconds.
    pub len_us: f64,
}

/// Collects spans of one rank. Streams of the host that are made with a tracer add one span for
/// each node, those of a CUDA device one for each operation: what its events tell is known once it
/// has run.
pub struct Tracer {
    origin: Instant,
    spans: Mutex<Vec<Span>>,
    device: DeviceSpans,
}

impl std::fmt::Debug for Tracer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tracer").field("origin", &self.origin).finish_non_exhaustive()
    }
}

impl Default for Tracer {
    fn default() -> Self {
        Self::new(Instant::now())
    }
}

impl Tracer {
    /// The most spans kept; later ones are dropped, so that a long run cannot fill the memory.
    pub const MAX_SPANS: usize = 1 << 20;

    /// A tracer whose times count from `origin` (give all ranks of a process the same one).
    pub fn new(origin: Instant) -> Self {
        Self { origin, spans: Mutex::default(), device: DeviceSpans::default() }
    }

    /// Adds a span that ran from `start` until now.
    pub fn add(&self, name: &str, lane: &str, start: Instant) {
        let start_us = start.saturating_duration_since(self.origin).as_secs_f64() * 1e6;
        let len_us = start.elapsed().as_secs_f64() * 1e6;
        self.extend([Span { name: name.to_owned(), lane: lane.to_owned(), start_us, len_us }]);
    }

    pub(crate) fn extend(&self, new: impl IntoIterator<Item = Span>) {
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        let left = Self::MAX_SPANS.saturating_sub(spans.len());
        spans.extend(new.into_iter().take(left));
    }

    pub(crate) fn device(&self) -> &DeviceSpans {
        &self.device
    }

    pub(crate) fn origin(&self) -> Instant {
        self.origin
    }

    /// Takes the spans collected so far; waits for the work of those on a CUDA device.
    pub fn take(&self) -> Vec<Span> {
        self.extend(self.device.finish());
        std::mem::take(&mut *self.spans.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
