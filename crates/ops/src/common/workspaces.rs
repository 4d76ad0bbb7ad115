//! The workspaces of launches on a CUDA device: one for each stream whose launches are to run
//! beside those of others, and one for each stream of a captured graph.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use tilewire_core::Result;
use tilewire_device::cuda::{CudaContext, CudaEvent, CudaStream, StreamKey};
use tilewire_device::{Point, Queue};

use super::check::not_prepared;
use super::cuda::{hold, holding};

/// Streams that have a workspace of their own, at most. Launches on more are in order with some of
/// them.
const MOST: usize = 4;

/// A workspace of launches that are no part of a graph.
struct Slot<T> {
    /// The stream that has used it last, behind whose work it is free.
    of: Option<StreamKey>,
    last: CudaEvent,
    space: Arc<T>,
}

struct State<T> {
    /// By use, the latest at the end.
    slots: Vec<Slot<T>>,
    /// Those of graphs, which keep them: for the other launches of the same capture.
    captured: Vec<(StreamKey, Weak<T>)>,
}

/// Makes a workspace.
type New<T> = dyn Fn(&CudaContext) -> Result<T> + Send + Sync;

/// The workspaces of a plan.
pub(crate) struct Workspaces<T> {
    ctx: CudaContext,
    new: Box<New<T>>,
    /// Locked while a launch is queued: another thread's would come between its parts.
    state: Mutex<State<T>>,
}

impl<T: Send + Sync + 'static> Workspaces<T> {
    /// None yet; `new` makes one.
    pub fn new(
        ctx: &CudaContext,
        new: impl Fn(&CudaContext) -> Result<T> + Send + Sync + 'static,
    ) -> Self {
        let state = State { slots: Vec::new(), captured: Vec::new() };
        Self { ctx: ctx.clone(), new: Box::new(new), state: Mutex::new(state) }
    }

    fn make(&self) -> Result<Arc<T>> {
        (self.new)(&self.ctx).map(Arc::new)
    }

    /// Makes a workspace for the launches of all streams, which take turns.
    ///
    /// # Errors
    /// Out of memory.
    pub fn prepare_one(&self) -> Result<()> {
        let mut s = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let last = CudaEvent::new(&self.ctx, false)?;
        s.slots.push(Slot { of: None, last, space: self.make()? });
        Ok(())
    }

    /// Gives `stream` a workspace of its own, if there are not enough of them.
    ///
    /// # Errors
    /// Out of memory.
    pub fn prepare(&self, stream: &CudaStream) -> Result<()> {
        let mut s = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let of = Some(stream.key());
        if s.slots.len() < MOST && s.slots.iter().all(|slot| slot.of != of) {
            let last = CudaEvent::new(&self.ctx, false)?;
            s.slots.push(Slot { of, last, space: self.make()? });
        }
        Ok(())
    }

    /// Queues a launch by `queue` with a workspace that nothing else on the device uses meanwhile:
    /// that of the stream; or one that is not in use; or the one that was used first, behind what
    /// uses it. Nothing is allocated and nobody waits but the device. A capture gets one of its
    /// own, once for each of its streams, and its graph keeps it.
    ///
    /// # Errors
    /// Those of `queue`; what the driver reports; out of memory in a capture; `NotPrepared` if
    /// no stream has got a workspace.
    pub fn with<R>(
        &self,
        stream: &CudaStream,
        queue: impl FnOnce(&Arc<T>) -> Result<R>,
    ) -> Result<R> {
        let mut s = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let of = stream.key();
        if of.is_captured() {
            let space = self.of_capture(&mut s, of)?;
            hold(stream, space.clone());
            return queue(&space);
        }
        if s.slots.is_empty() {
            // The plan was made, and its first workspace was not.
            return Err(not_prepared());
        }
        let own = s.slots.iter().position(|slot| slot.of == Some(of));
        let at = own.or_else(|| s.slots.iter().position(|slot| slot.last.is_done())).unwrap_or(0);
        let mut slot = s.slots.remove(at);
        let queued = || -> Result<R> {
            if slot.of != Some(of) {
                stream.wait(&slot.last)?;
                slot.of = Some(of);
            }
            holding(stream, slot.space.clone(), || queue(&slot.space))
        };
        let done = queued();
        // Of a launch that has failed, too, some of whose work may be queued.
        let recorded = stream.record(&slot.last);
        s.slots.push(slot);
        done.and_then(|done| recorded.map(|()| done))
    }

    fn of_capture(&self, s: &mut State<T>, of: StreamKey) -> Result<Arc<T>> {
        s.captured.retain(|(_, space)| space.strong_count() > 0);
        let known = s.captured.iter().find(|(key, _)| *key == of);
        if let Some(space) = known.and_then(|(_, space)| space.upgrade()) {
            return Ok(space);
        }
        let space = self.make()?;
        s.captured.push((of, Arc::downgrade(&space)));
        Ok(space)
    }
}
