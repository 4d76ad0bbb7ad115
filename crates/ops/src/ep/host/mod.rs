//! Expert parallelism on the host: the protocol that the kernels run, by the worker of a stream.
//!
//! The schedule defines the layout; a rank writes to its peers, never reads from them. Each launch
//! begins by storing its fingerprint at all peers, which covers the receive buffer as well, and
//! ends by its credit: what arrived has been read, and the area is the peers' for the next launch.
//! A rank that has nothing to send, or to read, does both all the same. Nothing is waited for
//! before everything has been sent, but credits of the launch before and, where rows go straight to
//! receive buffers, the beginning of this launch.

mod lay;
mod run;
mod sum;

pub(super) use lay::Straight;
pub(super) use run::{HostPart, Run};
