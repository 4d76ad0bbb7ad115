//! Streams of a CUDA device.

use std::any::Any;
use std::mem::take;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUgraph, CUresult, CUstream, CUstreamCaptureStatus};
use tilewire_core::{Deadline, Error, Result};

use super::context::{CudaContext, Thing};
use super::current::{in_launch, launch};
use super::ended::Ended;
use super::error::check;
use super::event::{CudaEvent, Last};
use super::flight::{BATCH, Flight, Open};
use super::graph::{CudaGraph, Held};
use super::memory::CudaMemory;
use super::nvtx;
use crate::pending::timed_out;
use crate::queue::check_len;
use crate::{Buffer, Point, Queue, Tracer};

/// A queue of work on a CUDA device. Clones are the same stream.
#[derive(Clone)]
pub struct CudaStream(Arc<Inner>);

pub(super) struct Inner {
    pub ctx: CudaContext,
    pub raw: CUstream,
    pub id: StreamId,
    pub capture: Mutex<Capture>,
    pub flight: Mutex<Flight>,
    /// Number of objects that it has been given to hold: that of a record and those of a thread are
    /// in the thread's order.
    given: AtomicU64,
    /// A graph was launched here, of which nothing is in flight.
    replays: AtomicBool,
    /// Its end.
    pub ended: Arc<OnceLock<Ended>>,
    /// The lane of its spans, and who collects them.
    trace: Option<Trace>,
}

type Trace = (Arc<str>, Arc<Tracer>);

/// The order that work is in: that of a stream, or of a stream in a capture, by whichever clone or
/// borrow of it the work was queued.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StreamKey(Order);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Order {
    Stream(StreamId),
    /// The number of the capture, and the driver's handle: while a stream is captured it tells no
    /// number.
    Captured(u64, usize),
}

impl StreamKey {
    /// True if the work becomes part of a graph.
    pub fn is_captured(&self) -> bool {
        matches!(self.0, Order::Captured(..))
    }
}

/// A stream unlike any other of the process.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub(super) enum StreamId {
    #[default]
    None,
    Own(u64),
    /// Made and destroyed by somebody else, who may capture it, too: the driver's number.
    Theirs(u64),
}

#[derive(Default)]
pub(super) struct Capture {
    /// Everything that the capture in progress refers to; shared by all streams that joined it.
    pub held: Option<Arc<Held>>,
    /// The launch that has asked the driver for it last.
    asked: Option<u64>,
}

// SAFETY: the driver allows calls on a stream from any thread; the rest is behind a lock.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl CudaStream {
    /// A new stream that does not wait for the legacy default stream.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn new(ctx: &CudaContext) -> Result<Self> {
        Self::make(ctx, None)
    }

    pub(super) fn make(ctx: &CudaContext, trace: Option<Trace>) -> Result<Self> {
        nvtx::load();
        let _current = ctx.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current, the output is valid.
        check(unsafe { sys::cuStreamCreate(&mut raw, flags) }, "cuStreamCreate")?;
        static NUM: AtomicU64 = AtomicU64::new(0);
        let id = StreamId::Own(NUM.fetch_add(1, Ordering::Relaxed));
        Ok(Self::of(ctx, (raw, id), trace))
    }

    pub(super) fn of(
        ctx: &CudaContext,
        (raw, id): (CUstream, StreamId),
        trace: Option<Trace>,
    ) -> Self {
        Self(Arc::new(Inner {
            ctx: ctx.clone(),
            raw,
            id,
            capture: Mutex::default(),
            flight: Mutex::default(),
            given: AtomicU64::new(0),
            replays: AtomicBool::new(false),
            ended: Arc::default(),
            trace,
        }))
    }

    /// The context.
    pub fn context(&self) -> &CudaContext {
        &self.0.ctx
    }

    pub(super) fn trace(&self) -> Option<&Trace> {
        self.0.trace.as_ref()
    }

    pub(crate) fn raw(&self) -> CUstream {
        self.0.raw
    }

    pub(super) fn inner(&self) -> &Arc<Inner> {
        &self.0
    }

    /// Runs `f`, which queues work here, as one launch: the context is made current once, and
    /// whether a stream is captured is asked once. Until `f` returns nobody else may begin or end a
    /// capture of its streams, and `f` calls no code that is not this library's.
    ///
    /// # Errors
    /// Those of `f`; what the driver reports.
    pub fn in_launch<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        in_launch(self.0.ctx.raw(), f)
    }

    fn flight(&self) -> MutexGuard<'_, Flight> {
        self.0.flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn capture(&self) -> MutexGuard<'_, Capture> {
        let mut c = self.0.capture.lock().unwrap_or_else(PoisonError::into_inner);
        // The capture that this stream had joined may have ended on its first stream.
        if c.held.as_ref().is_some_and(|h| h.has_ended()) {
            c.held = None;
        }
        let is_foreign = c.held.as_ref().is_some_and(|h| h.foreign().is_some());
        if is_foreign || (c.held.is_none() && self.0.is_borrowed()) {
            let launch = launch();
            if launch.is_none() || c.asked != launch {
                // A stream that the driver cannot say it of takes no work, either.
                c.held = self.foreign().ok().flatten();
                c.asked = launch;
            }
        }
        c
    }

    /// The capture in progress that somebody else has begun: its graph is given what our work
    /// refers to.
    fn foreign(&self) -> Result<Option<Arc<Held>>> {
        let _current = self.0.ctx.bind()?;
        let Some((id, graph)) = capture_info(self.0.raw)? else { return Ok(None) };
        // SAFETY: the graph that the stream is being captured into.
        Ok(Some(unsafe { Held::of_graph(&self.0.ctx, id, graph) }))
    }

    pub(super) fn held(&self) -> Option<Arc<Held>> {
        self.capture().held.clone()
    }

    /// True while the stream collects work for a graph.
    pub fn is_capturing(&self) -> bool {
        self.capture().held.is_some()
    }

    /// Returns the order that its work is in now.
    pub fn key(&self) -> StreamKey {
        StreamKey(match self.held() {
            Some(h) => Order::Captured(h.num(), self.0.raw.addr()),
            None => Order::Stream(self.0.id),
        })
    }

    /// True unless one of the two streams is part of a capture of which the other is not.
    pub fn same_capture(&self, other: &CudaStream) -> bool {
        match (self.held(), other.held()) {
            (None, None) => true,
            // Two threads that ask first at once make a keeper each.
            (Some(a), Some(b)) => {
                Arc::ptr_eq(&a, &b) || a.foreign().is_some() && a.foreign() == b.foreign()
            }
            _ => false,
        }
    }

    /// Keeps `thing`, which the work that is queued next refers to by address: until that work has
    /// run, or during a capture as long as the graph. The same thread must queue that work before
    /// it waits for the stream, which ends what is held for work before.
    pub fn hold(&self, thing: impl FnOnce() -> Arc<dyn Any + Send + Sync>) {
        if let Some(h) = &self.capture().held {
            h.push(thing());
            return;
        }
        let mut f = self.flight();
        for (event, things) in f.reached_by(launch()) {
            // Before the lock of what is retired, which the driver may hold up when it lets a graph
            // go.
            drop(event);
            self.0.ctx.retire(things);
        }
        if f.open.len() >= BATCH {
            // Without an event they stay: memory is held longer, nothing worse.
            if let Ok(e) = CudaEvent::new(&self.0.ctx, false)
                && self.record(&e).is_ok()
            {
                let old = f.queued();
                f.closed.push_back((e, old));
            }
        }
        f.open.push(self.open(thing()));
    }

    fn open(&self, thing: Thing) -> Open {
        let num = self.0.given.fetch_add(1, Ordering::Relaxed);
        Open { by: std::thread::current().id(), num, thing }
    }

    /// Keeps `thing` until what is queued now has run: not longer, as `hold` may.
    pub(super) fn keep(&self, thing: &Thing) {
        if self.is_capturing() {
            // No event can be had. The first one behind the capture is behind what is queued now,
            // too.
            let thing = self.open(thing.clone());
            self.flight().open.push(thing);
            return;
        }
        match CudaEvent::new(&self.0.ctx, false).and_then(|e| self.record(&e).map(|()| e)) {
            Ok(e) if e.is_done() => {}
            Ok(e) => self.0.ctx.retire_behind(Arc::new(e), thing.clone()),
            // Longer, then.
            Err(_) => self.hold(|| thing.clone()),
        }
    }

    /// Keeps what `other` keeps for the work that this thread has queued there, and behind which
    /// this stream has been put. A stream that belongs to what its work uses would otherwise keep
    /// itself.
    pub fn take_over(&self, other: &CudaStream) {
        if self.is_capturing() {
            // Only what is captured is behind what is captured there, and the graph keeps that.
            return;
        }
        let me = std::thread::current().id();
        let (mine, closed) = {
            let mut f = other.flight();
            let (mine, rest): (Vec<_>, _) = take(&mut f.open).into_iter().partition(|o| o.by == me);
            f.open = rest;
            (mine, take(&mut f.closed))
        };
        let mut f = self.flight();
        let from = self.0.given.fetch_add(mine.len() as u64, Ordering::Relaxed);
        let renamed = mine.into_iter().zip(from..).map(|(o, num)| Open { num, ..o });
        // Before what is held for work that is not queued yet, which is the newest: the next event
        // is behind these.
        f.open.splice(0..0, renamed);
        // These have events of that stream.
        f.closed.extend(closed);
    }

    /// Queues a copy of one piece of device memory to another, and keeps both until it has run.
    /// That nothing else uses them meanwhile is the caller's business: what it would see are other
    /// bytes, not other memory.
    ///
    /// # Errors
    /// `InvalidArgument` if the lengths differ; what the driver reports.
    pub fn copy_memory(&self, dst: &CudaMemory, src: &CudaMemory) -> Result<()> {
        check_len(dst.len_bytes(), src.len_bytes())?;
        self.hold(|| Arc::new((dst.clone(), src.clone())));
        // SAFETY: both ranges are as long as said, and held.
        unsafe { self.copy(dst.addr(), src.addr(), src.len_bytes()) }
    }

    /// Queues the writing of `byte` to a piece of device memory, and keeps it until that has run.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn fill_memory(&self, dst: &CudaMemory, byte: u8) -> Result<()> {
        self.hold(|| Arc::new(dst.clone()));
        // SAFETY: the range is as long as said, and held.
        unsafe { self.fill(dst.addr(), byte, dst.len_bytes()) }
    }

    /// Queues the writing of `byte` to `len` bytes at a device address.
    ///
    /// # Safety
    /// As [`CudaStream::copy`], of the one range.
    ///
    /// # Errors
    /// What the driver reports.
    pub unsafe fn fill(&self, dst: u64, byte: u8, len: usize) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let _current = self.0.ctx.bind()?;
        // SAFETY: the caller's contract.
        check(unsafe { sys::cuMemsetD8Async(dst, byte, len, self.0.raw) }, "cuMemsetD8Async")
    }

    /// Queues a copy of `len` bytes between device addresses: a copy engine's work between GPUs.
    ///
    /// # Safety
    /// Both ranges must be mapped on this device until the copy has run (and be held by the graph
    /// if captured), and no other work may write the source or use the destination meanwhile.
    ///
    /// # Errors
    /// What the driver reports.
    pub unsafe fn copy(&self, dst: u64, src: u64, len: usize) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let _current = self.0.ctx.bind()?;
        // SAFETY: the caller's contract.
        check(unsafe { sys::cuMemcpyAsync(dst, src, len, self.0.raw) }, "cuMemcpyAsync")
    }

    /// Queues a copy of `rows` rows of `width` bytes; `dst` and `src` are a device address and the
    /// bytes from a row to the next.
    ///
    /// # Safety
    /// As [`CudaStream::copy`], of all rows.
    ///
    /// # Errors
    /// What the driver reports; it refuses rows that overlap.
    pub unsafe fn copy_rows(
        &self,
        dst: (u64, usize),
        src: (u64, usize),
        (width, rows): (usize, usize),
    ) -> Result<()> {
        if rows <= 1 || (dst.1 == width && src.1 == width) {
            // SAFETY: the caller's contract; the rows follow each other.
            return unsafe { self.copy(dst.0, src.0, width * rows) };
        }
        if width == 0 {
            return Ok(());
        }
        let _current = self.0.ctx.bind()?;
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED,
            srcHost: std::ptr::null(),
            srcDevice: src.0,
            srcArray: std::ptr::null_mut(),
            srcPitch: src.1,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED,
            dstHost: std::ptr::null_mut(),
            dstDevice: dst.0,
            dstArray: std::ptr::null_mut(),
            dstPitch: dst.1,
            WidthInBytes: width,
            Height: rows,
        };
        // SAFETY: the caller's contract; the description lives for the call.
        check(unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.0.raw) }, "cuMemcpy2DAsync")
    }
}

impl From<Arc<Inner>> for CudaStream {
    fn from(inner: Arc<Inner>) -> Self {
        Self(inner)
    }
}

impl Queue for CudaStream {
    type Event = CudaEvent;
    type Graph = CudaGraph;

    fn event(&self) -> Result<CudaEvent> {
        CudaEvent::new(&self.0.ctx, false)
    }

    fn record(&self, event: &CudaEvent) -> Result<()> {
        let _current = self.0.ctx.bind()?;
        // SAFETY: both are alive.
        check(unsafe { sys::cuEventRecord(event.raw(), self.0.raw) }, "cuEventRecord")?;
        let num = self.0.given.load(Ordering::Relaxed);
        let by = Some(std::thread::current().id());
        let (on, id) = (Arc::downgrade(&self.0), self.0.id);
        event.set_last(Last { capture: self.held(), on, id, by, num });
        Ok(())
    }

    fn wait(&self, event: &CudaEvent) -> Result<()> {
        let last = event.last();
        if !last.is_recorded() {
            return Ok(());
        }
        let _current = self.0.ctx.bind()?;
        if last.id == self.0.id && last.capture.is_none() && !self.is_capturing() {
            // What is queued here later is behind it anyway.
            return Ok(());
        }
        // SAFETY: both are alive; 0 is the default flag.
        check(unsafe { sys::cuStreamWaitEvent(self.0.raw, event.raw(), 0) }, "cuStreamWaitEvent")?;
        if let Some(h) = last.capture {
            self.capture().held = Some(h);
        }
        Ok(())
    }

    fn begin_capture(&self) -> Result<()> {
        let _current = self.0.ctx.bind()?;
        if self.held().is_some() {
            return Err(Error::invalid("the stream is already captured"));
        }
        // Other ranks of the process must be free to allocate meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        check(unsafe { sys::cuStreamBeginCapture_v2(self.0.raw, mode) }, "cuStreamBeginCapture")?;
        self.capture().held = Some(Arc::default());
        Ok(())
    }

    fn end_capture(&self) -> Result<CudaGraph> {
        let _current = self.0.ctx.bind()?;
        if self.held().is_some_and(|h| h.foreign().is_some()) {
            return Err(Error::invalid("this capture was begun elsewhere")
                .hint("the code that began it must end it; its graph contains this work"));
        }
        let mut raw = std::ptr::null_mut();
        // SAFETY: valid output; the driver refuses a stream that is not captured.
        let code = unsafe { sys::cuStreamEndCapture(self.0.raw, &mut raw) };
        let ended = check(code, "cuStreamEndCapture");
        if let (Err(e), Ok(Some(_))) = (&ended, capture_info(self.0.raw)) {
            // It goes on: another thread has begun it, or another stream.
            return Err(e.clone());
        }
        // Streams that had joined the capture have what it held, too, until they are asked again:
        // without what is in it. One of them may belong to what the graph uses.
        let held = self.capture().held.take();
        let things = held.map_or(Vec::new(), |h| {
            h.end();
            h.take()
        });
        ended?;
        CudaGraph::instantiate(&self.0.ctx, raw, things)
    }

    fn replay(&self, graph: &CudaGraph) -> Result<()> {
        if self.held().is_some() {
            return Err(Error::invalid("a graph cannot be launched into a capture"));
        }
        let _current = self.0.ctx.bind()?;
        // SAFETY: both are alive.
        check(unsafe { sys::cuGraphLaunch(graph.raw(), self.0.raw) }, "cuGraphLaunch")?;
        self.0.replays.store(true, Ordering::Release);
        graph.runs_on(&self.0);
        Ok(())
    }

    fn check(&self) -> Result<()> {
        // A kernel that failed makes every later call of its context fail: there is no error of a
        // single stream, and whoever has waited for an event has met it.
        Ok(())
    }

    fn synchronize_at(&self, event: &CudaEvent, deadline: Option<Deadline>) -> Result<()> {
        let last = event.last();
        event.synchronize(deadline)?;
        if last.on.ptr_eq(&Arc::downgrade(&self.0)) {
            let (closed, open) = {
                let mut f = self.flight();
                let of = |o: &mut Open| Some(o.by) == last.by && o.num < last.num;
                let gone: Vec<_> = f.open.extract_if(.., of).collect();
                (f.reached(), gone)
            };
            // Not under the lock, as a thing may have this very stream.
            drop((closed, open));
            self.0.ctx.free_retired();
        }
        Ok(())
    }

    fn synchronize_until(&self, deadline: Option<Deadline>) -> Result<()> {
        let e = self.event()?;
        self.record(&e)?;
        self.synchronize_at(&e, deadline)
    }
}

/// Number and graph of the capture that a stream is part of.
pub(super) fn capture_info(raw: CUstream) -> Result<Option<(u64, CUgraph)>> {
    let (mut status, mut id, mut graph) =
        (CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0, std::ptr::null_mut());
    let none = std::ptr::null_mut;
    // SAFETY: a live stream and valid outputs; the other three are not asked for.
    let code = unsafe {
        let (edges, nodes) = (none(), none());
        sys::cuStreamGetCaptureInfo_v3(
            raw,
            &mut status,
            &mut id,
            &mut graph,
            nodes,
            edges.cast(),
            none().cast(),
        )
    };
    if code == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
        // The legacy stream, while another one is captured: it is no part of that.
        return Ok(None);
    }
    check(code, "cuStreamGetCaptureInfo")?;
    let active = status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
    Ok(active.then_some((id, graph)))
}

/// Polls `query` until it is done or `deadline` passes. `tell` is called every 20 ms with the time
/// from which until when that has lasted.
pub(super) fn poll(
    deadline: Option<Deadline>,
    query: impl Fn() -> CUresult,
    tell: impl Fn(Duration, Duration),
) -> Result<()> {
    const TURN: Duration = Duration::from_millis(20);
    let (began, mut reported) = (Instant::now(), Duration::ZERO);
    for polls in 0u64.. {
        match query() {
            CUresult::CUDA_SUCCESS => return Ok(()),
            CUresult::CUDA_ERROR_NOT_READY => {}
            code => return check(code, "waiting for the device"),
        }
        if let Some(d) = deadline.filter(Deadline::expired) {
            return Err(timed_out("the stream", d));
        }
        if polls > 2000 {
            let waited = began.elapsed();
            if waited - reported > TURN {
                tell(reported, waited);
                reported = waited;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }
    Err(Error::internal("unreachable: 2^64 polls"))
}

impl Inner {
    pub(super) fn is_borrowed(&self) -> bool {
        matches!(self.id, StreamId::Theirs(_))
    }

    /// Returns whether a graph was launched here.
    pub(super) fn has_replays(&self) -> bool {
        self.replays.load(Ordering::Acquire)
    }
}
