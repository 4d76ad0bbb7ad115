//! Streams, events and graphs of any device.
//!
//! What an operation calls is the same on every device; what runs is not: a [`Node`] on the host,
//! a kernel or a copy on a GPU.

use std::sync::{Arc, OnceLock};

use tilewire_core::{Deadline, Error, ErrorKind, Result};

use crate::cuda::{CudaContext, CudaEvent, CudaGraph, CudaStream};
use crate::host::{HostEvent, HostGraph, HostGraphExec, HostStream, Node};
use crate::{Point, Queue, Tracer};

/// A queue of work that runs in order. Clones are the same stream.
#[derive(Clone)]
pub enum Stream {
    /// A worker thread.
    Host(HostStream),
    /// A stream of a CUDA device.
    Cuda(CudaStream),
}

impl Stream {
    /// A new stream of the host; `name` labels its lane in traces.
    ///
    /// # Errors
    /// `Exhausted` if the operating system gives no thread.
    pub fn new(name: impl Into<String>) -> Result<Self> {
        Self::with_tracer(name, None)
    }

    /// A new stream of the host that adds a span to `tracer` for each node.
    ///
    /// # Errors
    /// As [`Stream::new`].
    pub fn with_tracer(name: impl Into<String>, tracer: Option<Arc<Tracer>>) -> Result<Self> {
        HostStream::with_tracer(name, tracer).map(Stream::Host)
    }

    /// A new stream of a CUDA device.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn on(ctx: &CudaContext) -> Result<Self> {
        CudaStream::new(ctx).map(Stream::Cuda)
    }

    /// As [`Stream::on`]; `tracer` gets a span for each operation, in the lane `name`. Not of work
    /// that is captured: replays of a graph leave no spans.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn on_with_tracer(
        ctx: &CudaContext,
        name: impl Into<String>,
        tracer: Option<Arc<Tracer>>,
    ) -> Result<Self> {
        CudaStream::with_tracer(ctx, name, tracer).map(Stream::Cuda)
    }

    /// The stream of the host, for work that only runs there.
    ///
    /// # Errors
    /// `Unsupported` on another device.
    pub fn host(&self) -> Result<&HostStream> {
        match self {
            Stream::Host(s) => Ok(s),
            Stream::Cuda(_) => Err(wrong_device("a CUDA stream", "work of the host")),
        }
    }

    /// The stream of a CUDA device, for kernels.
    ///
    /// # Errors
    /// `Unsupported` on another device.
    pub fn cuda(&self) -> Result<&CudaStream> {
        match self {
            Stream::Cuda(s) => Ok(s),
            Stream::Host(_) => Err(wrong_device("a stream of the host", "a kernel")),
        }
    }

    /// Runs `f`, which queues work of one launch here: see [`CudaStream::in_launch`].
    ///
    /// # Errors
    /// Those of `f`; what the driver reports.
    pub fn in_launch<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        match self {
            Stream::Host(_) => f(),
            Stream::Cuda(s) => s.in_launch(f),
        }
    }

    /// Queues `node`, or adds it to the capture in progress.
    ///
    /// # Errors
    /// `Unsupported` on a CUDA stream; an error that an earlier node without fault domain left
    /// behind.
    pub fn launch(&self, node: Node) -> Result<()> {
        self.host()?.launch(node)
    }

    /// Raises the error of earlier work that belongs to no team, as far as it is known.
    ///
    /// # Errors
    /// That error.
    pub fn check(&self) -> Result<()> {
        match self {
            Stream::Host(s) => s.check(),
            Stream::Cuda(s) => s.check(),
        }
    }

    /// Records `event` behind what is queued now.
    ///
    /// # Errors
    /// If the stream has ended; `Unsupported` for an event that another device has recorded.
    pub fn record(&self, event: &Event) -> Result<()> {
        match self {
            Stream::Host(s) => s.record(event.on_host()?),
            Stream::Cuda(s) => s.record(event.on_cuda(s.context())?),
        }
    }

    /// Makes later work of this stream wait for the last record of `event`. If that record was
    /// captured, this stream joins the capture. An event that nothing has recorded is no wait.
    ///
    /// # Errors
    /// `InvalidArgument` if a capturing stream is to wait for an event outside of its capture, or
    /// this stream is part of another capture; `Unsupported` between the host and a CUDA device.
    pub fn wait(&self, event: &Event) -> Result<()> {
        match (self, event.0.get()) {
            (_, None) => Ok(()),
            (Stream::Host(s), Some(Kind::Host(e))) => s.wait(e),
            (Stream::Cuda(s), Some(Kind::Cuda(e))) => s.wait(e),
            _ => Err(wrong_device("an event of one device", "a stream of another")),
        }
    }

    /// Starts capturing: work launched from now on is collected instead of run.
    ///
    /// # Errors
    /// `InvalidArgument` if a capture is in progress.
    pub fn begin_capture(&self) -> Result<()> {
        match self {
            Stream::Host(s) => s.begin_capture(),
            Stream::Cuda(s) => s.begin_capture(),
        }
    }

    /// Ends the capture begun on this stream and returns the graph.
    ///
    /// # Errors
    /// `InvalidArgument` if no capture was begun here, or a stream that joined it was not joined
    /// back to this one.
    pub fn end_capture(&self) -> Result<Graph> {
        match self {
            Stream::Host(s) => s.end_capture().map(Graph::Host),
            Stream::Cuda(s) => s.end_capture().map(Graph::Cuda),
        }
    }

    /// True while the stream collects work for a graph.
    pub fn is_capturing(&self) -> bool {
        match self {
            Stream::Host(s) => s.is_capturing(),
            Stream::Cuda(s) => s.is_capturing(),
        }
    }

    /// True unless one of the two streams is part of a capture of which the other is not.
    pub fn same_capture(&self, other: &Stream) -> bool {
        match (self, other) {
            (Stream::Host(a), Stream::Host(b)) => a.same_capture(b),
            (Stream::Cuda(a), Stream::Cuda(b)) => a.same_capture(b),
            _ => !self.is_capturing() && !other.is_capturing(),
        }
    }

    /// Replays a graph in stream order.
    ///
    /// # Errors
    /// `InvalidArgument` if this stream is being captured, or for a graph of another device.
    pub fn replay(&self, graph: &GraphExec) -> Result<()> {
        match (self, graph) {
            (Stream::Host(s), GraphExec::Host(g)) => s.replay(g),
            (Stream::Cuda(s), GraphExec::Cuda(g)) => s.replay(g),
            _ => Err(wrong_device("a graph of one device", "a stream of another")),
        }
    }

    /// Blocks until everything queued so far has run.
    ///
    /// # Errors
    /// The error of the first node without fault domain that failed; what the device reports.
    pub fn synchronize(&self) -> Result<()> {
        self.synchronize_until(None)
    }
}

fn wrong_device(this: &str, that: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("{this} cannot take {that}"))
        .hint("streams, events, tensors and the heap of one launch must be of one device")
}

enum Kind {
    Host(HostEvent),
    Cuda(CudaEvent),
}

/// A point in a stream. Recording it again moves it; a wait refers to the last record that
/// precedes the wait in the caller's program order. It belongs to the device that records it
/// first.
#[derive(Clone, Default)]
pub struct Event(Arc<OnceLock<Kind>>);

impl Event {
    /// An event that nothing has recorded: waiting for it returns at once.
    pub fn new() -> Self {
        Self::default()
    }

    fn on_host(&self) -> Result<&HostEvent> {
        match self.0.get_or_init(|| Kind::Host(HostEvent::new())) {
            Kind::Host(e) => Ok(e),
            Kind::Cuda(_) => Err(wrong_device("a stream of the host", "an event of a CUDA device")),
        }
    }

    fn on_cuda(&self, ctx: &CudaContext) -> Result<&CudaEvent> {
        if self.0.get().is_none() {
            let new = CudaEvent::new(ctx, false)?;
            // Losing a race leaves the event that the other thread made.
            let _first = self.0.set(Kind::Cuda(new));
        }
        match self.0.get() {
            Some(Kind::Cuda(e)) if e.context().ordinal() == ctx.ordinal() => Ok(e),
            _ => Err(wrong_device("a CUDA stream", "an event of another device")),
        }
    }
}

impl Point for Event {
    fn is_done(&self) -> bool {
        match self.0.get() {
            None => true,
            Some(Kind::Host(e)) => e.is_done(),
            Some(Kind::Cuda(e)) => e.is_done(),
        }
    }

    fn synchronize(&self, deadline: Option<Deadline>) -> Result<()> {
        match self.0.get() {
            None => Ok(()),
            Some(Kind::Host(e)) => e.synchronize(deadline),
            Some(Kind::Cuda(e)) => e.synchronize(deadline),
        }
    }
}

/// Captured work that can be made executable and replayed many times.
pub enum Graph {
    /// Nodes in lanes.
    Host(HostGraph),
    /// A graph of the driver.
    Cuda(CudaGraph),
}

impl Graph {
    /// Number of nodes.
    pub fn num_nodes(&self) -> usize {
        match self {
            Graph::Host(g) => g.num_nodes(),
            Graph::Cuda(g) => g.num_nodes(),
        }
    }

    /// Makes the graph executable.
    ///
    /// # Errors
    /// `Exhausted` if there are no resources for it.
    pub fn instantiate(self) -> Result<GraphExec> {
        match self {
            Graph::Host(g) => g.instantiate().map(GraphExec::Host),
            // The driver has done it at the end of the capture.
            Graph::Cuda(g) => Ok(GraphExec::Cuda(Arc::new(g))),
        }
    }
}

/// A graph ready for [`Stream::replay`].
#[derive(Clone)]
pub enum GraphExec {
    /// Nodes in lanes, with their streams.
    Host(HostGraphExec),
    /// A graph of the driver.
    Cuda(Arc<CudaGraph>),
}

impl GraphExec {
    /// Number of nodes that one replay runs.
    pub fn num_nodes(&self) -> usize {
        match self {
            GraphExec::Host(g) => g.num_nodes(),
            GraphExec::Cuda(g) => g.num_nodes(),
        }
    }
}

impl Queue for Stream {
    type Event = Event;
    type Graph = GraphExec;

    fn event(&self) -> Result<Event> {
        Ok(Event::new())
    }

    fn record(&self, event: &Event) -> Result<()> {
        Stream::record(self, event)
    }

    fn wait(&self, event: &Event) -> Result<()> {
        Stream::wait(self, event)
    }

    fn begin_capture(&self) -> Result<()> {
        Stream::begin_capture(self)
    }

    fn end_capture(&self) -> Result<GraphExec> {
        Stream::end_capture(self)?.instantiate()
    }

    fn replay(&self, graph: &GraphExec) -> Result<()> {
        Stream::replay(self, graph)
    }

    fn check(&self) -> Result<()> {
        Stream::check(self)
    }

    fn synchronize_at(&self, event: &Event, deadline: Option<Deadline>) -> Result<()> {
        match (self, event.0.get()) {
            (Stream::Cuda(s), Some(Kind::Cuda(e))) => s.synchronize_at(e, deadline),
            // A node of the host holds what it uses until it has run. One that this thread runs
            // could outlast a deadline.
            (Stream::Host(s), Some(Kind::Host(e))) if deadline.is_none() => s.synchronize_at(e),
            _ => event.synchronize(deadline),
        }
    }

    fn synchronize_until(&self, deadline: Option<Deadline>) -> Result<()> {
        let e = Event::new();
        Stream::record(self, &e)?;
        self.synchronize_at(&e, deadline)?;
        Stream::check(self)
    }
}
