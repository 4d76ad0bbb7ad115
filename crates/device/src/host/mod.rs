//! The host device: a stream is a queue of nodes, and a thread that runs them.

mod event;
mod graph;
mod line;
mod stream;
#[cfg(test)]
mod tests;

use std::sync;

pub use event::HostEvent;
pub use graph::{HostGraph, HostGraphExec};
pub use stream::{Held, HostStream, Node};
