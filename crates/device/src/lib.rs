//! Devices: where work runs and memory lies.
//!
//! A [`Stream`] is a queue of work that runs in order; an [`Event`] is a point in it; a [`Graph`]
//! is a captured piece of it that can be replayed; [`Memory`] is bytes on the device; a
//! [`Pending`] is the token of work in flight. The `host` device runs each stream on a worker
//! thread (or on one that waits for it), so that ordering bugs of GPUs show there; [`cuda`] is
//! the other device. [`Stream`], [`Event`], [`Graph`] and [`Tensor`] are of any device, so that an
//! operation and its caller are written once; [`Queue`], [`Point`] and [`Buffer`] are what one
//! source needs that is compiled for each device.
//!
//! # Rules
//! - Work is a [`Node`]: a closure that can run many times (a graph replays it), and a second one
//!   that poisons its outputs, run instead of it once its [`Fault`] is set.
//! - A node that fails sets its fault; later nodes of the same fault domain poison their outputs.
//! - Host memory is guarded dynamically: reading a buffer while another node writes it is an
//!   error that names the buffer, because it means that a stream edge is missing.

pub mod cuda;
mod fault;
mod host;
pub mod jit;
mod loan;
mod memory;
mod pending;
mod process;
mod queue;
mod stream;
mod tensor;
mod trace;

pub use fault::{Fault, Probe};
pub use host::{Held, HostEvent, HostGraph, HostGraphExec, HostStream, Node};
pub use memory::{Memory, MemoryRead, MemoryWrite};
pub use pending::{OnEnd, Pending};
#[doc(hidden)]
pub use process::Process;
pub use queue::{Buffer, Point, Queue};
pub use stream::{Event, Graph, GraphExec, Stream};
pub use tensor::{Device, Tensor};
pub use trace::{Span, Tracer};
