//! Captured graphs.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use cudarc::driver::sys::{self, CUgraph, CUgraphExec};
use tilewire_core::Result;

use super::context::{CudaContext, Thing};
use super::ended::Ended;
use super::error::check;
use super::stream::{CudaStream, StreamId};

/// Objects that a capture refers to by address: kept as long as its graph.
pub(super) struct Held {
    /// Unlike that of any other capture of the process.
    num: u64,
    things: Mutex<Vec<Thing>>,
    ended: AtomicBool,
    /// The number of the capture, if it was begun elsewhere.
    foreign: Option<u64>,
}

impl Default for Held {
    fn default() -> Self {
        static NUM: AtomicU64 = AtomicU64::new(0);
        let num = NUM.fetch_add(1, Ordering::Relaxed);
        Self { num, things: Mutex::default(), ended: AtomicBool::new(false), foreign: None }
    }
}

/// Objects that a graph of another owner refers to.
struct Kept {
    ctx: CudaContext,
    held: Arc<Held>,
}

/// Makes `graph` the owner of `kept`.
///
/// # Safety
/// The graph must be alive.
unsafe fn give(graph: CUgraph, kept: Box<Kept>) -> Result<()> {
    let (kept, mut object) = (Box::into_raw(kept).cast(), std::ptr::null_mut());
    let no_sync = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
    // SAFETY: valid output; a destructor for what it is given.
    let code = unsafe { sys::cuUserObjectCreate(&mut object, kept, Some(let_go), 1, no_sync) };
    check(code, "cuUserObjectCreate").inspect_err(|_| {
        // SAFETY: the driver did not take it.
        drop(unsafe { Box::from_raw(kept.cast::<Kept>()) });
    })?;
    let to_graph = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32;
    // SAFETY: both are alive; the one reference goes to the graph.
    let code = unsafe { sys::cuGraphRetainUserObject(graph, object, 1, to_graph) };
    check(code, "cuGraphRetainUserObject").inspect_err(|_| {
        // SAFETY: the reference is still ours.
        unsafe { sys::cuUserObjectRelease(object, 1) };
    })
}

/// The driver calls it when the graph, and all that was made of it, is gone.
unsafe extern "C" fn let_go(kept: *mut c_void) {
    // SAFETY: `Held::of_graph` made it with `Box::into_raw`, and it comes back once.
    let kept = unsafe { Box::from_raw(kept.cast::<Kept>()) };
    // It must not call the driver, as freeing memory does.
    kept.ctx.retire(kept.held.take());
}

impl Held {
    /// For capture `id`, begun elsewhere, into `graph`: the graph keeps it. If it cannot, it is
    /// kept for ever. All streams of the capture have the same.
    ///
    /// # Safety
    /// The graph must be alive.
    pub unsafe fn of_graph(ctx: &CudaContext, id: u64, graph: CUgraph) -> Arc<Self> {
        let all = || ctx.0.captures.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all().iter().find(|(known, _)| *known == id).and_then(|(_, h)| h.upgrade());
        if let Some(held) = known {
            return held;
        }
        let held = Arc::new(Self { foreign: Some(id), ..Self::default() });
        let kept = Box::new(Kept { ctx: ctx.clone(), held: held.clone() });
        // SAFETY: the caller's contract.
        if let Err(e) = unsafe { give(graph, kept) } {
            log::warn!(
                "a captured graph cannot own the memory that it refers to, which is leaked: {e}"
            );
            std::mem::forget(held.clone());
        }
        let mut all = all();
        all.retain(|(_, h)| h.strong_count() > 0);
        all.push((id, Arc::downgrade(&held)));
        held
    }

    /// The number of the capture. Threads that ask first at once for one that was begun elsewhere
    /// may get two.
    pub fn num(&self) -> u64 {
        self.num
    }

    /// The number of a capture that was begun elsewhere.
    pub fn foreign(&self) -> Option<u64> {
        self.foreign
    }

    pub fn push(&self, thing: Thing) {
        self.things.lock().unwrap_or_else(PoisonError::into_inner).push(thing);
    }

    /// Returns what it has: the graph's from now on.
    pub fn take(&self) -> Vec<Thing> {
        std::mem::take(&mut *self.things.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

/// A stream that a graph was launched on.
struct RunsOn {
    id: StreamId,
    stream: Weak<super::stream::Inner>,
    ended: Arc<OnceLock<Ended>>,
}

/// A captured graph, ready to be replayed. Holds all memory that it names.
pub struct CudaGraph {
    ctx: CudaContext,
    raw: CUgraphExec,
    num_nodes: usize,
    /// Objects that it refers to by address.
    things: Vec<Thing>,
    /// Streams that it has been launched on, and how those that are gone have ended.
    streams: Mutex<Vec<RunsOn>>,
}

// SAFETY: launches of one graph are made from one thread at a time by its owner; the handle
// itself may move between threads.
unsafe impl Send for CudaGraph {}
// SAFETY: a shared handle can only be launched, which the driver allows from any thread; that two
// launches do not overlap is the caller's business, as for every graph.
unsafe impl Sync for CudaGraph {}

impl CudaGraph {
    /// Takes `graph` and destroys it.
    pub(super) fn instantiate(
        ctx: &CudaContext,
        graph: CUgraph,
        things: Vec<Thing>,
    ) -> Result<Self> {
        let (mut raw, mut num_nodes) = (std::ptr::null_mut(), 0);
        // SAFETY: a live graph; without a list only the number is written.
        let count = unsafe { sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut num_nodes) };
        // SAFETY: `graph` has just been captured and is ours; the output is valid.
        let code = unsafe { sys::cuGraphInstantiateWithFlags(&mut raw, graph, 0) };
        // SAFETY: the executable graph is independent of it.
        unsafe { sys::cuGraphDestroy(graph) };
        check(code, "cuGraphInstantiate")?;
        check(count, "cuGraphGetNodes")?;
        Ok(Self { ctx: ctx.clone(), raw, num_nodes, things, streams: Mutex::default() })
    }

    /// Number of nodes that one replay runs.
    pub fn num_nodes(&self) -> usize {
        self.num_nodes
    }

    pub(super) fn raw(&self) -> CUgraphExec {
        self.raw
    }

    /// Notes that it was launched there.
    pub(super) fn runs_on(&self, stream: &Arc<super::stream::Inner>) {
        let mut all = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if all.iter().any(|s| s.stream.as_ptr() == Arc::as_ptr(stream)) {
            return;
        }
        // One that was borrowed before is behind what it was then.
        all.retain(|s| s.id != stream.id && !matches!(s.ended.get(), Some(Ended::Idle)));
        let (id, ended) = (stream.id, stream.ended.clone());
        all.push(RunsOn { id, stream: Arc::downgrade(stream), ended });
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if let Ok(_current) = self.ctx.bind() {
            // SAFETY: instantiated by us, destroyed once; the driver lets a launch finish.
            unsafe { sys::cuGraphExecDestroy(self.raw) };
        }
        let streams =
            std::mem::take(self.streams.get_mut().unwrap_or_else(PoisonError::into_inner));
        let things: Thing = Arc::new(std::mem::take(&mut self.things));
        for s in streams {
            match (s.stream.upgrade(), s.ended.get()) {
                (Some(stream), _) => CudaStream::from(stream).keep(&things),
                (None, Some(Ended::Idle)) => {}
                (None, Some(Ended::Behind(event))) => {
                    self.ctx.retire_behind(event.clone(), things.clone());
                }
                (None, Some(Ended::Unsure)) => self.ctx.retire([self.ctx.unsure(things.clone())]),
                // It gave up, or still waits on another thread: a replay may be running.
                (None, Some(Ended::Busy) | None) => {
                    log::warn!(
                        "a graph was dropped while it may still run on a stream: the memory that \
                         it uses is leaked"
                    );
                    std::mem::forget(things.clone());
                }
            }
        }
    }
}
