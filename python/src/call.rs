//! One call from Python: its world, its stream, its tensors, and how it ends.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use pyo3::prelude::*;
use tilewire::device::Device;
use tilewire::device::cuda::CudaStream;
use tilewire::prelude::*;

use crate::dlpack;
use crate::errors::OrRaise;
use crate::world::{Member, member};

/// A call on a world.
pub struct Call {
    pub op: &'static str,
    pub member: Arc<Member>,
    stream: Stream,
}

impl Call {
    /// A call of `op` on world `id`, on the framework's current stream of the world's device.
    pub fn new(py: Python<'_>, op: &'static str, id: u64) -> PyResult<Self> {
        let member = member(id).map_err(|e| e.op(op)).or_raise(py)?;
        let stream = match (&member.stream, &member.device) {
            (Some(s), _) => s.clone(),
            (None, Device::Cuda(ctx)) => {
                let raw = dlpack::current_stream(py, ctx.ordinal())?;
                // SAFETY: the framework's streams live as long as the process.
                let borrowed = unsafe { CudaStream::borrow(ctx, raw) };
                Stream::Cuda(borrowed.map_err(|e| e.op(op)).or_raise(py)?)
            }
            (None, Device::Host) => {
                return Err(Error::internal("a world on the CPU without a stream")).or_raise(py);
            }
        };
        Ok(Self { op, member, stream })
    }

    /// A tensor of the framework's, used where it lies.
    pub fn tensor(&self, what: &str, obj: &Bound<'_, PyAny>) -> PyResult<Tensor> {
        dlpack::tensor(obj, what, &self.member.device)
    }

    /// As [`Call::tensor`], of one that may be absent.
    pub fn optional(&self, what: &str, obj: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Tensor>> {
        obj.map(|o| self.tensor(what, o)).transpose()
    }

    pub fn size(&self) -> usize {
        self.member.team.size()
    }

    /// Runs `f` without the GIL. On the CPU what it queues has run when this returns.
    pub fn run<T: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&Stream) -> Result<Pending<T>> + Send,
    ) -> PyResult<()> {
        self.prepare(py, |stream| {
            let pending = f(stream)?;
            match &self.member.device {
                Device::Host => pending.wait().map(drop),
                // The stream's order is the caller's: nothing to wait for.
                Device::Cuda(_) => Ok(drop(pending)),
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
            let done = catch_unwind(run).unwrap_or_else(|_| {
                Err(Error::internal("a panic; its text is on the standard error output"))
            });
            done.map_err(|e| e.op(op))
        };
        py.detach(guarded).or_raise(py)
    }
}
