//! Spans of work, for timelines.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// One piece of work on one lane.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// What ran.
    pub name: String,
    /// Where it ran: a stream's name.
    pub lane: String,
    /// Start, microseconds since the tracer was made.
    pub start_us: f64,
    /// Length in microseconds.
    pub len_us: f64,
}

/// Collects spans of one rank. Streams made with a tracer add one span for each node.
#[derive(Debug)]
pub struct Tracer {
    origin: Instant,
    spans: Mutex<Vec<Span>>,
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
        Self { origin, spans: Mutex::new(Vec::new()) }
    }

    /// Adds a span that ran from `start` until now.
    pub fn add(&self, name: &str, lane: &str, start: Instant) {
        let start_us = start.saturating_duration_since(self.origin).as_secs_f64() * 1e6;
        let len_us = start.elapsed().as_secs_f64() * 1e6;
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        if spans.len() < Self::MAX_SPANS {
            spans.push(Span { name: name.to_owned(), lane: lane.to_owned(), start_us, len_us });
        }
    }

    /// Takes the spans collected so far.
    pub fn take(&self) -> Vec<Span> {
        std::mem::take(&mut *self.spans.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
