//! The queue of a stream: jobs run one at a time, in their order, on the stream's own thread or on
//! one that waits for them.
//!
//! Whoever takes a job sets `busy` under the lock, and nobody takes another one until that is
//! cleared; so it does not matter which thread a job runs on. A thread that stops taking jobs wakes
//! the stream's own if some are left: a job is never without a thread that is awake or on its way.
//!
//! A thread that waits for an event runs only jobs in front of its record. One behind it may wait
//! for what this thread does later: the work of a launch waits for its copies, whose stream waits
//! for the event that is recorded just before that work. So [`Line::help`] asks whether the record
//! is reached while no job runs, under the lock.
//!
//! A thread that waits for what it pushes, and at once, may hold the queue: until it lets go, its
//! pushes wake nobody, since the stream's own thread would find the job taken, or take it and be
//! waited for. Jobs that it leaves are those of the stream's own thread from then on. Others that
//! push or wait meanwhile do as ever.
//!
//! `tests/line.rs` runs this file under every interleaving (loom).

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::thread::ThreadId;

use super::sync::{Condvar, Mutex, MutexGuard};

pub(super) struct Line<J> {
    waiting: Mutex<Waiting<J>>,
    changed: Condvar,
}

struct Waiting<J> {
    jobs: VecDeque<J>,
    /// The thread that runs a job.
    busy: Option<ThreadId>,
    /// The stream's own thread sleeps, and nobody has woken it.
    asleep: bool,
    /// The thread that holds the queue.
    held: Option<ThreadId>,
    /// No more jobs come.
    closed: bool,
}

impl<J> Waiting<J> {
    /// True if this thread holds the queue.
    fn is_held(&self) -> bool {
        self.held.is_some_and(|id| id == std::thread::current().id())
    }
}

/// The right to run jobs.
struct Turn<'a, J>(&'a Line<J>);

impl<J> Drop for Turn<'_, J> {
    fn drop(&mut self) {
        let mut w = self.0.lock();
        w.busy = None;
        self.0.wake(w);
    }
}

impl<J> Line<J> {
    pub fn new() -> Self {
        let waiting =
            Waiting { jobs: VecDeque::new(), busy: None, asleep: false, held: None, closed: false };
        Self { waiting: Mutex::new(waiting), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting<J>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the stream's own thread if it sleeps and there is something for it to do.
    fn wake(&self, mut w: MutexGuard<'_, Waiting<J>>) {
        let is_due = w.busy.is_none() && (w.closed || !w.jobs.is_empty());
        // Asked in this order: mostly the stream's thread is awake, or nobody holds the queue.
        if is_due && w.asleep && (w.closed || !w.is_held()) {
            w.asleep = false;
            drop(w);
            self.changed.notify_one();
        }
    }

    pub fn push(&self, job: J) {
        let mut w = self.lock();
        w.jobs.push_back(job);
        self.wake(w);
    }

    /// From now on pushes of this thread wake nobody. It waits for their jobs at once, or calls
    /// [`Line::let_go`].
    pub fn hold(&self) {
        self.lock().held = Some(std::thread::current().id());
    }

    /// Ends [`Line::hold`] of this thread, if it is in force.
    pub fn let_go(&self) {
        let mut w = self.lock();
        if w.is_held() {
            w.held = None;
            self.wake(w);
        }
    }

    /// Ends [`Line::work`] once nothing waits.
    pub fn close(&self) {
        let mut w = self.lock();
        w.closed = true;
        self.wake(w);
    }

    /// Returns whether this thread runs a job.
    pub fn is_mine(&self) -> bool {
        self.lock().busy == Some(std::thread::current().id())
    }

    /// The first job and the right to run it, if it is nobody else's turn.
    fn take(&self, w: &mut Waiting<J>) -> Option<(J, Turn<'_, J>)> {
        let job = if w.busy.is_some() { None } else { w.jobs.pop_front() }?;
        w.busy = Some(std::thread::current().id());
        Some((job, Turn(self)))
    }

    /// Runs jobs as they come, on the stream's own thread.
    pub fn work(&self, run: impl Fn(J)) {
        let mut w = self.lock();
        loop {
            if let Some((job, turn)) = self.take(&mut w) {
                drop(w);
                run(job);
                drop(turn);
                w = self.lock();
            } else if w.closed && w.busy.is_none() {
                return;
            } else {
                w.asleep = true;
                w = self.changed.wait(w).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Runs jobs on this thread until `done`, which a job of this queue makes true, or until none
    /// waits or another thread is at one, which then goes on with the others.
    pub fn help(&self, done: impl Fn() -> bool, run: impl Fn(J)) {
        let mut w = self.lock();
        if w.busy.is_some() || done() {
            return;
        }
        let Some((mut job, _turn)) = self.take(&mut w) else { return };
        drop(w);
        // It stays this thread's turn, so that the other one does not wake in between.
        loop {
            run(job);
            let next = if done() { None } else { self.lock().jobs.pop_front() };
            match next {
                Some(next) => job = next,
                None => return,
            }
        }
    }
}
