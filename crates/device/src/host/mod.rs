//! The host device: a stream is a worker thread that takes nodes from a queue.

mod event;
mod graph;
mod stream;
#[cfg(test)]
mod tests;

pub use event::HostEvent;
pub use graph::{HostGraph, HostGraphExec};
pub use stream::{HostStream, Node};
