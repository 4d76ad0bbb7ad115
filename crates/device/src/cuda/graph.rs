//! Captured graphs.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{self, CUgraph, CUgraphExec};
use tilewire_core::Result;

use super::context::CudaContext;
use super::error::check;

/// What a capture refers to by address: kept as long as its graph.
#[derive(Default)]
pub(super) struct Held {
    things: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
    ended: AtomicBool,
}

impl Held {
    pub fn push(&self, thing: Arc<dyn Any + Send + Sync>) {
        self.things.lock().unwrap_or_else(PoisonError::into_inner).push(thing);
    }

    pub fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

/// A captured graph, ready to be replayed. Holds all memory that it names.
pub struct CudaGraph {
    ctx: CudaContext,
    raw: CUgraphExec,
    num_nodes: usize,
    _held: Option<Arc<Held>>,
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
        held: Option<Arc<Held>>,
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
        Ok(Self { ctx: ctx.clone(), raw, num_nodes, _held: held })
    }

    /// Number of nodes that one replay runs.
    pub fn num_nodes(&self) -> usize {
        self.num_nodes
    }

    pub(super) fn raw(&self) -> CUgraphExec {
        self.raw
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        if self.ctx.bind().is_ok() {
            // SAFETY: instantiated by us, destroyed once; the driver lets a launch finish.
            unsafe { sys::cuGraphExecDestroy(self.raw) };
        }
    }
}
