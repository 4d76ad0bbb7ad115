//! Events: points in a stream that others can wait for.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

use tilewire_core::{Deadline, Error, Result};

use super::graph::CaptureMark;
use super::stream::Lane;
use crate::Process;
use crate::pending::timed_out;

/// A point in a stream. Recording it again moves it; a wait refers to the last record that
/// precedes the wait in the caller's program order.
#[derive(Clone, Default)]
pub struct HostEvent(Arc<Inner>);

#[derive(Default)]
struct Inner {
    state: Mutex<State>,
    done: Condvar,
    process: Process,
}

#[derive(Default)]
struct State {
    /// Number of calls of `record`.
    recorded: u64,
    /// The latest record that a stream has reached.
    reached: u64,
    /// The place of the last record in a capture, if it was captured.
    mark: Option<CaptureMark>,
    /// The stream that the last record is queued on.
    lane: Weak<Lane>,
}

/// A record of an event, and the stream that it is queued on: the event may be recorded elsewhere
/// since, behind work that waits for this.
pub(super) struct Target {
    event: HostEvent,
    number: u64,
    lane: Weak<Lane>,
}

impl Target {
    /// Blocks until the record is reached; until then this thread runs what waits in front of it,
    /// where nobody has begun.
    pub fn wait(&self) {
        if let Some(lane) = self.lane.upgrade() {
            lane.help(|| self.event.state().reached >= self.number);
        }
        let mut s = self.event.state();
        while s.reached < self.number {
            s = self.event.0.done.wait(s).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl HostEvent {
    /// An event that nothing has recorded: waiting for it returns at once.
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a record that `lane` gets; returns its number.
    pub(super) fn issue(&self, lane: &Arc<Lane>) -> u64 {
        let mut s = self.state();
        s.recorded += 1;
        s.mark = None;
        s.lane = Arc::downgrade(lane);
        s.recorded
    }

    /// Notes a record made during capture.
    pub(super) fn issue_captured(&self, mark: CaptureMark) {
        self.state().mark = Some(mark);
    }

    pub(super) fn mark(&self) -> Option<CaptureMark> {
        self.state().mark.clone()
    }

    /// The last record: what a wait issued now must see.
    pub(super) fn target(&self) -> Target {
        let s = self.state();
        Target { event: self.clone(), number: s.recorded, lane: s.lane.clone() }
    }

    pub(super) fn reach(&self, number: u64) {
        let mut s = self.state();
        s.reached = s.reached.max(number);
        drop(s);
        self.0.done.notify_all();
    }

    /// True if every record so far has been reached.
    pub fn is_done(&self) -> bool {
        let s = self.state();
        s.mark.is_none() && s.reached >= s.recorded
    }

    /// Blocks the calling thread until the last record is reached.
    ///
    /// # Errors
    /// `Timeout` at `deadline`; `InvalidArgument` if the last record was captured into a graph;
    /// `Stale` in a forked child.
    pub fn synchronize(&self, deadline: Option<Deadline>) -> Result<()> {
        // A child has no thread that would reach it.
        self.0.process.check()?;
        let mut s = self.state();
        if s.mark.is_some() {
            return Err(Error::invalid(
                "this event was captured into a graph: it never happens by itself",
            )
            .hint("use `Pending::join` during capture, and wait for the graph's launch instead"));
        }
        let number = s.recorded;
        if s.reached < number {
            let lane = s.lane.upgrade();
            drop(s);
            if let Some(lane) = lane {
                lane.let_go();
            }
            s = self.state();
        }
        while s.reached < number {
            let slice = match deadline {
                None => Duration::from_secs(3600),
                Some(d) if d.expired() => return Err(timed_out("the stream", d)),
                Some(d) => d.remaining(),
            };
            s = self.0.done.wait_timeout(s, slice).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}
