//! `ep`: expert parallelism. Tokens travel to the ranks of their experts and back.
//!
//! - **route** ([`EpPlan::route`]): each rank counts its tokens per expert, pushes the counts to
//!   all ranks, and computes the row of each copy from all counts: deterministic, without atomics
//!   or sorting. The result is kept in an [`EpHandle`].
//! - **dispatch**: each token is sent once to each rank that has an expert of it, with the list of
//!   its rows there; the receiver writes the copies to these rows. With a buffer of
//!   [`EpPlan::zero_copy_recv`] the sender puts the first copy to its row directly, and the
//!   receiver makes the other copies.
//! - **combine**: each rank adds the expert outputs of a token in the order of its choices and
//!   returns one row; the token's rank adds the rows in rank order.
//! - **dispatch_bwd** is a combine with a weight gradient per copy; **combine_bwd** is a dispatch
//!   of the output's gradient. Same handle, no new routing.
//!
//! Several handles may be in flight (1F1B): a handle is routing only, and every phase copies out
//! of the shared receive areas before it grants them again.
//!
//! A handle's routing may be kept as bytes of the caller's: [`EpHandle::save`], [`EpHandle::load`].
//!
//! A token that names an expert twice gets two copies at it.
//!
//! # Where
//! | | |
//! |---|---|
//! | kernel | `kernels/src/ep/sm80_ep.cu` |
//! |  | `kernels/src/ep/sm90_ep.cu` |
//! |  | `kernels/src/ep/sm90_return.cu` |
//! | oracle | `crates/oracle/src/ep/mod.rs` |
//! | cases | `crates/cli/src/verify/ep.rs` |
//! | page | `docs/protocols/ep.md` |

mod desc;
mod device;
mod direct;
mod handle;
mod host;
mod launch;
mod left;
mod plan;
mod prepare;
mod recv;
mod routing;
mod schedule;
mod state;
mod traffic;

pub use desc::{EpDesc, EpLayout, Overflow};
pub use handle::{EpHandle, EpTotals};
pub use launch::EpDispatch;
#[doc(hidden)]
pub use left::EpLeft;
pub use plan::{EpMemory, EpPlan};
pub use traffic::EpTraffic;
