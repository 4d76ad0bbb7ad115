//! Expert parallelism on the host: the protocol that the kernels run, by the worker of a stream.
//!
//! The schedule defines the layout; a rank writes to its peers, never reads from them. Each launch
//! begins by storing its fingerprint, which covers the receive buffer as well, at all peers. It
//! ends with its credit: this rank has read all records, and the peers may write to the area for
//! the next launch. A rank with nothing to send or to read does both, too. Before a rank has sent
//! everything it waits only for credits of the launch before and, where peers put rows straight to
//! receive buffers, for the announcement of this launch.

mod lay;
mod run;
mod sum;

pub(super) use lay::Straight;
pub(super) use run::{HostPart, Run};
