//! Bootstrap: finds this process's rank, the other ranks, and a connection to each of them.
//!
//! - [`detect`]: the place of this process in its job, from flags or the launcher's variables.
//! - [`Store`]: a small key-value store for the first contact: [`LocalStore`] in one process,
//!   [`StoreServer`] and [`StoreClient`] between processes, [`TorchStore`] under `torchrun`.
//! - [`Mesh`]: all-to-all connections of the ranks of one host. They carry descriptors and tell of
//!   deaths: [`ThreadMesh`] for threads, [`LinkMesh`] for processes, [`join_processes`] for either.
//! - [`Launch`]: starts the ranks of a job on this host and cleans up after them.
//!
//! - [`limits`]: what a program does about limits that would end it without a word.
//!
//! Linux only; no library handler for signals is installed outside of [`Launch`] and of
//! [`limits::expect_file_limit`].
#![deny(unsafe_code)]

mod card;
mod claim;
mod env;
mod frame;
mod handshake;
mod inbox;
mod join;
mod launch;
pub mod limits;
mod links;
mod mesh;
mod monitor;
mod parcels;
mod peer;
mod refusals;
mod rejoin;
mod rendezvous;
mod secret;
mod secret_fd;
mod sock;
mod store;
mod stream;
mod tcp_store;
mod threads;
mod torch_store;

pub use env::{Flags, Launcher, Place, Rendezvous, detect};
pub use join::join_processes;
pub use launch::{ExitReport, Failure, Launch, NO_MULTICAST, RankStatus, watch_launcher};
pub use links::LinkMesh;
pub use mesh::{
    MAX_FDS, MAX_PAYLOAD, MAX_RANKS, MAX_TAG, MAX_WHY, Mesh, NOT_SENT, Parcel, PeerExit,
};
pub use rejoin::Rejoin;
pub use secret::Secret;
pub use store::{LocalStore, Store};
pub use tcp_store::{StoreAddr, StoreClient, StoreServer};
pub use threads::ThreadMesh;
pub use torch_store::TorchStore;
