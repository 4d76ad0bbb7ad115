//! One call from Python: its world, its stream, its tensors, and how it ends.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use tilewire::core::memory::error_of_panic;
use tilewire::device::cuda::{CudaContext, CudaStream};
use tilewire::device::{Device, Held};
use tilewire::prelude::*;

use crate::dlpack;
use crate::errors::OrRaise;
use crate::quick;
use crate::world::{Member, check_fork, member};

/// The place of a call: the device of its tensors, and a stream there.
pub struct Place {
    pub op: &'static str,
    pub device: Device,
    stream: Stream,
    /// The number of the framework's stream: 0 on the CPU.
    pub stream_id: u64,
}

/// A call on a world.
pub struct Call {
    pub op: &'static str,
    pub member: Arc<Member>,
    place: Place,
}

/// A stream of the framework that stays borrowed between calls: the end of a borrow records an
/// event and looks at those before it, which takes longer than all else that a call does beside its
/// launch.
struct Kept {
    ordinal: u32,
    raw: usize,
    stream: CudaStream,
}

/// The streams that were used last, at most [`MOST_KEPT`].
static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());
const MOST_KEPT: usize = 8;

fn kept() -> MutexGuard<'static, Vec<Kept>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends the borrows between calls, so that what earlier calls have used can be freed. A call that
/// takes memory does so first; its own stream `now` is waited for instead.
pub fn let_go(now: Option<&Stream>) -> Result<()> {
    let gone = std::mem::take(&mut *kept());
    let is_kept = match now {
        Some(Stream::Cuda(now)) => gone.iter().any(|k| k.stream.key() == now.key()),
        _ => false,
    };
    // Not under the lock: the end of a stream frees what others have used.
    drop(gone);
    match now {
        Some(stream) if is_kept && !stream.is_capturing() => stream.synchronize(),
        _ => Ok(()),
    }
}

/// The framework's current stream of a device, and which one it is.
fn current(py: Python<'_>, op: &'static str, ctx: &CudaContext) -> PyResult<(Stream, u64)> {
    let (ordinal, raw) = (ctx.ordinal(), dlpack::current_stream(py, ctx.ordinal())?);
    let known = |k: &&Kept| k.raw == raw.addr() && k.ordinal == ordinal;
    let now = kept().iter().find(known).map(|k| k.stream.clone());
    // It lives as long as the process, so that its handle is no other stream's.
    if let Some(stream) = now {
        return Ok((Stream::Cuda(stream), raw.addr() as u64));
    }
    // SAFETY: the framework's streams live as long as the process, and those of others, which it
    // was given, as long as this call.
    let borrowed = unsafe { CudaStream::borrow(ctx, raw) };
    let stream = borrowed.map_err(|e| e.op(op)).or_raise(py)?;
    let raw = raw.addr();
    if quick::lives_on(py, ordinal, raw)? && !stream.is_capturing() {
        let mut kept = kept();
        let oldest = (kept.len() >= MOST_KEPT).then(|| kept.remove(0));
        // Two threads may come here with the same stream, which does no harm.
        kept.push(Kept { ordinal, raw, stream: stream.clone() });
        drop(kept);
        drop(oldest);
    }
    Ok((Stream::Cuda(stream), raw as u64))
}

/// Returns the stream of calls without a world on the CPU: one stream, whose calls wait before they
/// return. One that keeps the error of a call, as where memory lacked, serves no other: the next
/// call gets a new one.
fn host_stream() -> Result<Stream> {
    static LOCAL: Mutex<Option<Stream>> = Mutex::new(None);
    let mut local = LOCAL.lock().unwrap_or_else(PoisonError::into_inner);
    if local.as_ref().is_none_or(|s| s.check().is_err()) {
        *local = Some(Stream::new("python local")?);
    }
    local.clone().ok_or_else(|| Error::internal("a stream was just made"))
}

/// Holds a stream of the host, as [`tilewire::device::HostStream::hold`] does.
pub fn held(stream: &Stream) -> Option<Held<'_>> {
    match stream {
        Stream::Host(own) => Some(own.hold()),
        Stream::Cuda(_) => None,
    }
}

impl Place {
    /// A call of `op` without a world, where `obj` lies.
    pub fn of(op: &'static str, obj: &Bound<'_, PyAny>, what: &str) -> PyResult<Self> {
        let py = obj.py();
        check_fork().map_err(|e| e.op(op)).or_raise(py)?;
        let device = dlpack::device_of(obj, what)?;
        let (stream, stream_id) = match &device {
            Device::Host => (host_stream().or_raise(py)?, 0),
            Device::Cuda(ctx) => current(py, op, ctx)?,
        };
        Ok(Self { op, device, stream, stream_id })
    }

    /// A tensor of the framework's, used where it lies.
    pub fn tensor(&self, what: &str, obj: &Bound<'_, PyAny>) -> PyResult<Tensor> {
        dlpack::tensor(obj, what, &self.device)
    }

    /// As [`Place::tensor`], of one that may be absent.
    pub fn optional(&self, what: &str, obj: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Tensor>> {
        obj.map(|o| self.tensor(what, o)).transpose()
    }

    /// Runs `f` without the GIL. On the CPU what it queues has run when this returns: this thread
    /// runs it, and wakes no other for it. What `f` waits for is the stream's.
    pub fn run<T: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&Stream) -> Result<Pending<T>> + Send,
    ) -> PyResult<()> {
        let _held = held(&self.stream);
        self.prepare(py, |stream| {
            let pending = f(stream).inspect_err(|_| {
                // What was queued before the error uses tensors that the caller may let go of. That
                // it failed, too, is the smaller news.
                if matches!(self.device, Device::Host) {
                    stream.synchronize().ok();
                }
            })?;
            match &self.device {
                Device::Host => pending.wait().map(drop),
                // The stream's order is the caller's: nothing to wait for, here or in the drop.
                Device::Cuda(_) => Ok(()),
            }
        })
    }

    /// Runs `f` without the GIL.
    pub fn prepare<T: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&Stream) -> Result<T> + Send,
    ) -> PyResult<T> {
        let (op, stream) = (self.op, &self.stream);
        let guarded = || {
            let run = AssertUnwindSafe(|| f(stream));
            let done = catch_unwind(run).unwrap_or_else(|p| Err(error_of_panic("the call", p)));
            done.map_err(|e| e.op(op))
        };
        py.detach(guarded).or_raise(py)
    }
}

impl std::ops::Deref for Call {
    type Target = Place;

    fn deref(&self) -> &Place {
        &self.place
    }
}

impl Call {
    /// A call of `op` on world `id`, on the framework's current stream of the world's device.
    pub fn new(py: Python<'_>, op: &'static str, id: u64) -> PyResult<Self> {
        let member = member(id).map_err(|e| e.op(op)).or_raise(py)?;
        let (stream, stream_id) = match (&member.stream, &member.device) {
            (Some(s), _) => (s.clone(), 0),
            (None, Device::Cuda(ctx)) => current(py, op, ctx)?,
            (None, Device::Host) => {
                return Err(Error::internal("the world on the CPU has no stream")).or_raise(py);
            }
        };
        let device = member.device.clone();
        Ok(Self { op, member, place: Place { op, device, stream, stream_id } })
    }

    pub fn size(&self) -> usize {
        self.member.team.size()
    }
}
