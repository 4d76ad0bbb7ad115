//! Streams of the host device.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use tilewire_core::memory::error_of_panic;
use tilewire_core::{Error, ErrorKind, Result, inject};

use super::event::{HostEvent, Target};
use super::graph::{CaptureMark, HostGraph, HostGraphExec, LaneOp, Session};
use super::line::Line;
use crate::{Fault, Process, Tracer};

type Run = Arc<dyn Fn() -> Result<()> + Send + Sync>;
type Poison = Arc<dyn Fn() + Send + Sync>;

/// A piece of work: what to run, what to do instead after a fault, and whose fault that is.
#[derive(Clone)]
pub struct Node {
    pub(super) name: Cow<'static, str>,
    pub(super) run: Run,
    pub(super) poison: Option<Poison>,
    pub(super) fault: Option<Arc<Fault>>,
}

impl Node {
    /// A node that runs `run` each time it is launched or replayed.
    pub fn new(
        name: impl Into<Cow<'static, str>>,
        run: impl Fn() -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), run: Arc::new(run), poison: None, fault: None }
    }

    /// Makes the node part of a fault domain: its error sets `fault`, and once `fault` is set,
    /// `poison` runs instead of the work.
    pub fn in_domain(
        mut self,
        fault: Arc<Fault>,
        poison: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        self.fault = Some(fault);
        self.poison = Some(Arc::new(poison));
        self
    }

    /// Runs the node now, on this thread. Returns the error of a node without fault domain.
    pub(super) fn execute(&self) -> Result<()> {
        if let Some(f) = &self.fault
            && f.is_set()
        {
            self.run_poison();
            return Ok(());
        }
        // A panic must not end the worker: later nodes and waiters would hang.
        let result = catch_unwind(AssertUnwindSafe(|| (self.run)()))
            .unwrap_or_else(|p| Err(error_of_panic(&format!("`{}`", self.name), p)));
        let result = result.map_err(|e| e.op(self.name.clone()));
        match (&self.fault, result) {
            (_, Ok(())) => Ok(()),
            (Some(f), Err(e)) => {
                f.set(e);
                self.run_poison();
                Ok(())
            }
            (None, Err(e)) => Err(e),
        }
    }

    fn run_poison(&self) {
        if let Some(p) = &self.poison
            && catch_unwind(AssertUnwindSafe(|| p())).is_err()
        {
            // The team's fault is already set, so the caller learns of the failure anyway, and
            // the panic hook has said what happened here.
            log::error!("the outputs of `{}` could not be poisoned", self.name);
        }
    }
}

pub(super) enum Job {
    Node(Node),
    Record(HostEvent, u64),
    Wait(Target),
    Graph(Arc<HostGraph>, Arc<Vec<HostStream>>),
}

/// The queue of a stream, its name, and where spans and errors of its jobs go.
pub(super) struct Lane {
    name: String,
    line: Line<Job>,
    tracer: Option<Arc<Tracer>>,
    /// Errors of nodes without fault domain.
    error: Arc<Fault>,
}

impl Lane {
    /// Runs jobs on this thread until `done`: see [`Line::help`].
    pub fn help(&self, done: impl Fn() -> bool) {
        self.line.help(done, |job| self.run(job));
    }

    /// Ends [`HostStream::hold`] of this thread, which is about to sleep.
    pub fn let_go(&self) {
        self.line.let_go();
    }

    fn run(&self, job: Job) {
        match job {
            Job::Node(node) => self.timed(&node.name, || node.execute()),
            Job::Graph(graph, lanes) => self.timed("graph", || graph.run(&lanes)),
            Job::Record(e, number) => e.reach(number),
            Job::Wait(target) => target.wait(),
        }
    }

    fn timed(&self, name: &str, run: impl FnOnce() -> Result<()>) {
        let start = Instant::now();
        if let Err(e) = run() {
            self.error.set(e);
        }
        if let Some(t) = &self.tracer {
            t.add(name, &self.name, start);
        }
    }
}

/// A queue of work that runs in order, on its own thread or on one that waits for it. Clones are
/// the same stream.
#[derive(Clone)]
pub struct HostStream(Arc<Inner>);

/// See [`HostStream::hold`].
pub struct Held<'a>(&'a HostStream);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.let_go();
    }
}

/// A capture and the lane in it.
type Capture = Option<(Arc<Session>, usize)>;

/// Ends a capture and lets the streams go that had joined it.
fn release(session: &Session) {
    for s in session.end() {
        *lock(&s.0.capture) = None;
    }
}

struct Inner {
    lane: Arc<Lane>,
    worker: Mutex<Option<JoinHandle<()>>>,
    capture: Mutex<Capture>,
    process: Process,
}

fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HostStream {
    /// A new stream; `name` labels its lane in traces.
    ///
    /// # Errors
    /// `Exhausted` if the operating system gives no thread.
    pub fn new(name: impl Into<String>) -> Result<Self> {
        Self::with_tracer(name, None)
    }

    /// A new stream that adds a span to `tracer` for each node.
    ///
    /// # Errors
    /// As [`HostStream::new`].
    pub fn with_tracer(name: impl Into<String>, tracer: Option<Arc<Tracer>>) -> Result<Self> {
        let (name, error) = (name.into(), Arc::new(Fault::new()));
        let lane = Arc::new(Lane { name: name.clone(), line: Line::new(), tracer, error });
        let mine = lane.clone();
        inject::step("starting a stream")?;
        let worker = std::thread::Builder::new()
            .name(format!("tw-{name}"))
            .spawn(move || mine.line.work(|job| mine.run(job)))
            .map_err(|e| {
                Error::new(
                    ErrorKind::Exhausted,
                    format!("the thread of stream `{name}` cannot be started: {e}"),
                )
                .cause(e)
                .hint("raise the limits of processes (`ulimit -u`) and of the address space (`ulimit -v`)")
            })?;
        Ok(Self(Arc::new(Inner {
            lane,
            worker: Mutex::new(Some(worker)),
            capture: Mutex::new(None),
            process: Process::default(),
        })))
    }

    /// The name given at creation.
    pub fn name(&self) -> &str {
        &self.0.lane.name
    }

    pub(super) fn submit(&self, job: Job) -> Result<()> {
        self.0.process.check()?;
        self.0.lane.line.push(job);
        Ok(())
    }

    /// Until the result is dropped, or this thread sleeps for an event of the stream, what it
    /// queues here does not wake the stream's own thread: this one waits for that at once, and
    /// runs it itself.
    pub fn hold(&self) -> Held<'_> {
        // Another thread of the parent may have had the queue's lock when a child was forked.
        if !self.0.process.is_foreign() {
            self.0.lane.line.hold();
        }
        Held(self)
    }

    /// Ends [`HostStream::hold`] of this thread, if it is in force.
    pub fn let_go(&self) {
        if !self.0.process.is_foreign() {
            self.0.lane.let_go();
        }
    }

    /// Queues `node`, or adds it to the capture in progress.
    ///
    /// # Errors
    /// An error that an earlier node without fault domain left behind; `Stale` in a forked child.
    pub fn launch(&self, node: Node) -> Result<()> {
        self.0.process.check()?;
        self.0.lane.error.check()?;
        if let Some((session, lane)) = &*self.capture() {
            session.push(*lane, LaneOp::Node(node));
            return Ok(());
        }
        self.submit(Job::Node(node))
    }

    /// Raises the error of an earlier node without fault domain.
    ///
    /// # Errors
    /// That error.
    pub fn check(&self) -> Result<()> {
        self.0.lane.error.check()
    }

    /// Records `event` behind what is queued now.
    ///
    /// # Errors
    /// If the stream has ended.
    pub fn record(&self, event: &HostEvent) -> Result<()> {
        if let Some((session, lane)) = &*self.capture() {
            let id = session.push_record(*lane);
            event.issue_captured(CaptureMark { session: session.clone(), id });
            return Ok(());
        }
        self.submit(Job::Record(event.clone(), event.issue(&self.0.lane)))
    }

    /// Makes later work of this stream wait for the last record of `event`. If that record was
    /// captured, this stream joins the capture.
    ///
    /// # Errors
    /// `InvalidArgument` if a capturing stream is to wait for an event outside of its capture, or
    /// this stream is part of another capture.
    pub fn wait(&self, event: &HostEvent) -> Result<()> {
        let mut capture = self.capture();
        match (&*capture, event.mark()) {
            (_, Some(mark)) if mark.session.has_ended() => Err(Error::invalid(format!(
                "stream `{}` cannot wait for an event of a capture that has ended",
                self.name()
            ))
            .hint("replay the graph, and wait for an event recorded behind the replay")),
            (None, None) => self.submit(Job::Wait(event.target())),
            (None, Some(mark)) => {
                let lane = mark.session.add_lane();
                mark.session.push(lane, LaneOp::Wait(mark.id));
                mark.session.enroll(self);
                *capture = Some((mark.session, lane));
                Ok(())
            }
            (Some((session, lane)), Some(mark)) if Arc::ptr_eq(session, &mark.session) => {
                session.push(*lane, LaneOp::Wait(mark.id));
                Ok(())
            }
            // An event from before the capture has happened already or will happen by itself;
            // a replay cannot depend on it.
            (Some(_), None) if event.is_done() => Ok(()),
            (Some(_), _) => Err(Error::invalid(format!(
                "stream `{}` is being captured and cannot wait for an event from outside",
                self.name()
            ))
            .hint("record the event inside the capture, or wait for it before the capture")),
        }
    }

    /// Starts capturing: work launched from now on is collected instead of run.
    ///
    /// # Errors
    /// `InvalidArgument` if a capture is in progress.
    pub fn begin_capture(&self) -> Result<()> {
        let mut capture = self.capture();
        if capture.is_some() {
            return Err(Error::invalid(format!("stream `{}` is already captured", self.name())));
        }
        let session = Session::new();
        let lane = session.add_lane();
        *capture = Some((session, lane));
        Ok(())
    }

    /// Ends the capture begun on this stream and returns the graph.
    ///
    /// # Errors
    /// `InvalidArgument` if no capture was begun here, or a stream that joined it was not joined
    /// back to this one.
    pub fn end_capture(&self) -> Result<HostGraph> {
        let taken = self.capture().take();
        let Some((session, 0)) = taken else {
            *self.capture() = taken;
            return Err(Error::invalid(format!(
                "no capture was begun on stream `{}`",
                self.name()
            )));
        };
        release(&session);
        session.finish()
    }

    /// True while the stream collects work for a graph.
    pub fn is_capturing(&self) -> bool {
        self.capture().is_some()
    }

    /// True unless one of the two streams is part of a capture of which the other is not.
    pub fn same_capture(&self, other: &HostStream) -> bool {
        let session = |s: &HostStream| s.capture().as_ref().map(|(session, _)| session.clone());
        match (session(self), session(other)) {
            (None, None) => true,
            (Some(a), Some(b)) => Arc::ptr_eq(&a, &b),
            _ => false,
        }
    }

    /// The capture that this stream is part of.
    fn capture(&self) -> std::sync::MutexGuard<'_, Capture> {
        let mut c = lock(&self.0.capture);
        if c.as_ref().is_some_and(|(session, _)| session.has_ended()) {
            *c = None;
        }
        c
    }

    /// Replays a graph in stream order.
    ///
    /// # Errors
    /// `InvalidArgument` if this stream is being captured.
    pub fn replay(&self, graph: &HostGraphExec) -> Result<()> {
        if self.is_capturing() {
            return Err(Error::invalid("a graph cannot be launched into a capture"));
        }
        self.0.lane.error.check()?;
        self.submit(Job::Graph(graph.graph.clone(), graph.lanes.clone()))
    }

    /// Blocks until `event`, which was recorded here last, is reached. Until then this thread runs
    /// what waits in the queue, where the stream's own has not begun: two changes of threads cost
    /// more than a small piece of work.
    ///
    /// # Errors
    /// As [`HostEvent::synchronize`].
    pub(crate) fn synchronize_at(&self, event: &HostEvent) -> Result<()> {
        self.0.process.check()?;
        if event.mark().is_none() {
            self.0.lane.help(|| event.is_done());
        }
        event.synchronize(None)
    }

    /// Blocks until everything queued so far has run.
    ///
    /// # Errors
    /// The error of the first node without fault domain that failed.
    pub fn synchronize(&self) -> Result<()> {
        let e = HostEvent::new();
        self.record(&e)?;
        self.synchronize_at(&e)?;
        self.check()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A forked child lacks the thread: its handle and its queue must not be touched.
        if self.process.is_foreign() {
            let worker = self.worker.get_mut().unwrap_or_else(PoisonError::into_inner).take();
            std::mem::forget((worker, self.lane.clone()));
            return;
        }
        // A capture that was begun here and given up: the session and the streams that joined it
        // hold each other.
        if let Some((session, 0)) = lock(&self.capture).take() {
            release(&session);
        }
        // The worker ends once nothing waits.
        self.lane.line.close();
        // A rank that panics must not first wait for what its peers will never do: the worker
        // holds what it uses, and ends when they learn of the death.
        // One of its own jobs may have had the last handle: the worker ends behind it.
        if let Some(w) = lock(&self.worker).take()
            && w.thread().id() != std::thread::current().id()
            && !self.lane.line.is_mine()
            && !std::thread::panicking()
        {
            // A worker never panics (nodes are caught), so there is nothing to report.
            drop(w.join());
        }
    }
}
