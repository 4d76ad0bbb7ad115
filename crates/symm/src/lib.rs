//! Symmetric memory: worlds, teams, heaps, signals and one-sided transfers.
//!
//! A [`World`] is all ranks of a job; a [`LiveTeam`] is an ordered subset that has met and shares
//! a control page per rank; a [`Heap`] is one chunk of memory per rank, mapped by all; a
//! [`SymBuf`] is a piece of it at the same offset everywhere; a [`Signals`] range is a set of
//! monotonic counters. Data moves only by put and get, and is published only by a later signal.
//!
//! # Invariants
//! 1. A signal slot has one producer per (slot, source) and only ever grows; nothing resets it.
//! 2. The count that a wait expects is in the waiter's own memory and grows with each wait, so
//!    replays of a captured graph need no new values.
//! 3. A data word is read only after an acquire of a signal that its writer released later.
//! 4. No collective hides in an allocation, a `Drop` or a destructor: collectives are
//!    [`World::team`], [`World::everyone`], [`LiveTeam::heap`], [`Heap::collect`], [`Heap::grow`],
//!    [`LiveTeam::prepare_agree`], [`LiveTeam::agree`], [`LiveTeam::settle`],
//!    [`LiveTeam::exchange`], [`LiveTeam::exchange_large`] and [`Heap::nccl`].
//! 5. Every wait ends: by its signal, by the abort of the team, by a death, or at its deadline.
//!
//! The protocol itself is in `protocol`, generic over the atomic words, so that loom can check the
//! very code that runs. `docs/protocols/signals.md` describes it.

mod agree;
mod alloc;
mod broadcast_status;
mod buf;
mod control;
mod heap;
mod hook;
mod map;
mod nccl;
mod nvshmem;
pub mod protocol;
mod recorder;
mod signals;
mod silence;
mod sink;
mod team;
mod traffic;
pub mod transport;
mod vmm;
mod wait;
mod world;

pub use buf::{AllRanks, SymBuf};
pub use control::NUM_SIGNALS;
pub use heap::{Heap, HeapCfg};
pub use hook::{HookAction, HookPoint, StepKind};
pub use nccl::NcclTeam;
pub use recorder::{Entry, EntryKind, EntryState, Fingerprint};
pub use signals::Signals;
pub use team::LiveTeam;
pub use traffic::{LinkTraffic, Traffic};
pub use transport::{
    Caps, Enter, HostTransport, OneSided, OpCtx, Permit, Rows, SignalSlot, StreamTransport,
    Transport,
};
pub use vmm::{BadInput, DeviceHeap, DeviceTeam, DeviceTransport, LinkProbe, Piece, kernel_specs};
pub use world::{BackendStatus, ReturnedNccl, World, WorldCfg, backends};
