//! The traits that streams, events and buffers of every device implement, so that one source drives
//! the host and CUDA.

use tilewire_core::{Deadline, Result};

use crate::{Device, Tensor};

/// A point in a queue of work.
pub trait Point {
    /// True if the work before the last record is complete.
    fn is_done(&self) -> bool;

    /// Blocks until the last record is reached.
    ///
    /// # Errors
    /// `Timeout` at `deadline`; `InvalidArgument` if the last record was captured into a graph.
    fn synchronize(&self, deadline: Option<Deadline>) -> Result<()>;
}

/// A queue of work that runs in order: [`Stream`](crate::Stream) on any device,
/// `CudaStream` on a GPU.
pub trait Queue: Clone + Send + Sync {
    /// A point in the queue.
    type Event: Point;
    /// A captured piece of work, ready to be replayed.
    type Graph;

    /// An event that nothing has recorded.
    ///
    /// # Errors
    /// `Exhausted` if the device has not enough memory.
    fn event(&self) -> Result<Self::Event>;

    /// Records `event` behind what is queued now.
    ///
    /// # Errors
    /// If the queue has ended.
    fn record(&self, event: &Self::Event) -> Result<()>;

    /// Makes later work wait for the last record of `event`; joins its capture if it was captured.
    ///
    /// # Errors
    /// `InvalidArgument` if the event lies outside of the capture in progress.
    fn wait(&self, event: &Self::Event) -> Result<()>;

    /// Starts capturing.
    ///
    /// # Errors
    /// `InvalidArgument` if a capture is in progress.
    fn begin_capture(&self) -> Result<()>;

    /// Ends the capture and makes the graph ready for replay.
    ///
    /// # Errors
    /// `InvalidArgument` if no capture was begun here, or a stream was not joined back.
    fn end_capture(&self) -> Result<Self::Graph>;

    /// Replays a graph in queue order.
    ///
    /// # Errors
    /// `InvalidArgument` during a capture.
    fn replay(&self, graph: &Self::Graph) -> Result<()>;

    /// Raises what went wrong in work that belongs to no team, as far as it is known.
    ///
    /// # Errors
    /// That error.
    fn check(&self) -> Result<()>;

    /// Blocks until the last record of `event`, which was made here, and lets go of what is kept
    /// for what the thread that made it had queued here before: that work has run.
    ///
    /// # Errors
    /// As [`Point::synchronize`].
    fn synchronize_at(&self, event: &Self::Event, deadline: Option<Deadline>) -> Result<()>;

    /// Blocks until everything queued so far has run.
    ///
    /// # Errors
    /// `Timeout` at `deadline`; otherwise what the device reports.
    fn synchronize_until(&self, deadline: Option<Deadline>) -> Result<()>;
}

/// Bytes on a device that a transfer reads or writes: [`Tensor`] on the host, `CudaMemory` on a
/// GPU. Clones share the bytes.
pub trait Buffer: Clone + Send + Sync {
    /// Length in bytes.
    fn len_bytes(&self) -> usize;

    /// Copies `bytes` in, at once. No work in flight may use the buffer.
    ///
    /// # Errors
    /// `InvalidArgument` if the lengths differ; what the device reports.
    fn upload(&self, bytes: &[u8]) -> Result<()>;

    /// Copies the bytes out into `out`, at once. No work in flight may write the buffer.
    ///
    /// # Errors
    /// `InvalidArgument` if the lengths differ; what the device reports.
    fn download_into(&self, out: &mut [u8]) -> Result<()>;

    /// Copies the bytes out, at once. No work in flight may write the buffer.
    ///
    /// # Errors
    /// `Exhausted` if the host's memory lacks; what the device reports.
    fn download(&self) -> Result<Vec<u8>> {
        let mut out = tilewire_core::memory::filled(0, self.len_bytes())?;
        self.download_into(&mut out)?;
        Ok(out)
    }
}

impl Buffer for Tensor {
    fn len_bytes(&self) -> usize {
        Tensor::len_bytes(self)
    }

    fn upload(&self, bytes: &[u8]) -> Result<()> {
        check_len(Tensor::len_bytes(self), bytes.len())?;
        match self.device() {
            Device::Host => self.write(|b| b.copy_from_slice(bytes)),
            // Not by way of a copy on the host.
            Device::Cuda(_) => self.cuda()?.upload(bytes),
        }
    }

    fn download_into(&self, out: &mut [u8]) -> Result<()> {
        check_len(Tensor::len_bytes(self), out.len())?;
        match self.device() {
            Device::Host => self.read(|b| out.copy_from_slice(b)),
            Device::Cuda(_) => self.cuda()?.download_into(out),
        }
    }
}

pub(crate) fn check_len(have: usize, given: usize) -> Result<()> {
    if have == given {
        return Ok(());
    }
    Err(tilewire_core::Error::invalid("the number of bytes differs from the buffer's")
        .expected(have)
        .seen(given))
}
