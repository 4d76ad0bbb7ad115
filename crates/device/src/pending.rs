//! The token of work in flight.

use std::sync::Arc;

use tilewire_core::{Deadline, Error, ErrorKind, Result};

use crate::{Fault, Point, Queue, Stream};

/// Work in flight that will produce `T`. The output is reachable only through [`Pending::wait`]
/// or [`Pending::join`].
///
/// The queued work itself holds its inputs and outputs by reference count, so dropping a
/// `Pending` frees nothing early.
#[must_use = "the output is reachable only through `wait` or `join`"]
pub struct Pending<T, Q: Queue = Stream> {
    out: T,
    stream: Q,
    done: Q::Event,
    fault: Option<Arc<Fault>>,
    on_end: Option<OnEnd>,
}

/// A callback that takes whether the work ended well.
pub type OnEnd = Box<dyn FnOnce(bool) + Send + Sync>;

impl<T, Q: Queue> Pending<T, Q> {
    /// Work that is complete when `stream` gets past what is queued on it now.
    ///
    /// # Errors
    /// If the stream has ended.
    pub fn new(out: T, stream: &Q, fault: Option<Arc<Fault>>) -> Result<Self> {
        let done = stream.event()?;
        stream.record(&done)?;
        Ok(Self { out, stream: stream.clone(), done, fault, on_end: None })
    }

    /// Calls `f` once [`Pending::wait`] or [`Pending::wait_until`] knows how the work ended, with
    /// whether it went well. After [`Pending::join`] it is not known, and `f` is not called: see
    /// [`Pending::join_with_callback`].
    pub fn on_end(self, f: impl FnOnce(bool) + Send + Sync + 'static) -> Self {
        Self { on_end: Some(Box::new(f)), ..self }
    }

    /// Blocks until the work is complete and hands out the result. On the host this thread runs
    /// what waits on the stream itself, where no other thread has begun it.
    ///
    /// # Errors
    /// The fault of the team, if one is set; its outputs are then poisoned. The first error of
    /// work on the stream that belongs to no team.
    /// `InvalidArgument` during capture: captured work does not run, so it cannot be waited for.
    pub fn wait(self) -> Result<T> {
        self.stream.synchronize_at(&self.done, None)?;
        self.ended()
    }

    /// As [`Pending::wait`], giving up at `deadline`.
    ///
    /// # Errors
    /// As [`Pending::wait`], and `Timeout`.
    pub fn wait_until(self, deadline: Deadline) -> Result<T> {
        self.stream.synchronize_at(&self.done, Some(deadline))?;
        self.ended()
    }

    /// Makes `stream` wait for the work, without blocking the caller, and hands out the result
    /// for use on that stream.
    ///
    /// # Errors
    /// A fault that is already known; later ones are raised by the next call on the team.
    pub fn join(self, stream: &Q) -> Result<T> {
        stream.wait(&self.done)?;
        self.finish()
    }

    /// As [`Pending::join`], and returns the callback of [`Pending::on_end`], so that the token of
    /// later work can run it.
    ///
    /// # Errors
    /// As [`Pending::join`].
    pub fn join_with_callback(mut self, stream: &Q) -> Result<(T, OnEnd)> {
        let on_end = self.on_end.take().unwrap_or_else(|| Box::new(|_| ()));
        Ok((self.join(stream)?, on_end))
    }

    fn ended(mut self) -> Result<T> {
        let on_end = self.on_end.take();
        let result = self.finish();
        if let Some(f) = on_end {
            f(result.is_ok());
        }
        result
    }

    /// The result, unless the team or the work itself is known to have failed.
    fn finish(self) -> Result<T> {
        if let Some(f) = &self.fault {
            f.check()?;
        }
        self.stream.check()?;
        Ok(self.out)
    }

    /// True once the work is complete.
    pub fn is_done(&self) -> bool {
        self.done.is_done()
    }
}

pub(crate) fn timed_out(what: &str, deadline: Deadline) -> Error {
    Error::new(ErrorKind::Timeout, format!("{what} did not complete in time"))
        .elapsed(deadline.elapsed())
}
