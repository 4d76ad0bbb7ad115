//! `cp_attention`: attention over a sequence that is divided among ranks, forward and backward.
//!
//! Each rank holds some rows of q, k and v ([`Layout`]) and computes the output of its own queries
//! over the keys of all ranks. Positions, `cu_seqlens`, masks and dropout are global: the result is
//! that of one rank with the whole tensors. A [`Strategy`] says how queries and keys of different
//! ranks meet; all five are one composition:
//!
//! 1. *scatter*: inside groups of `a` ranks each rank trades its rows of all heads for the group's
//!    rows of `1 / a` of the heads (`a = 1`: nothing moves);
//! 2. *keys*: a rank gets the keys of its heads from all ranks;
//! 3. *gather*: the outputs (backward: the gradients) go to the owners of the rows.
//!
//! | strategy | a | keys |
//! |---|---|---|
//! | `get` | 1 | each rank publishes K,V; peers get the chunks that the mask needs from the owner |
//! | `ring` | 1 | store and forward to the next rank, two slots: chunks that a rank ahead needs |
//! | `all_gather` | 1 | push to each rank the chunks that it needs |
//! | `all_to_all` | P | as `get`, of a rank's heads (Ulysses: Jacobs et al., 2023) |
//! | `hybrid` | `a2a_size` | the same |
//!
//! The host and devices carry out the same transfers (`transfers.rs`) of the same rows
//! (`pieces.rs`, `puts.rs`); only the arithmetic differs. The host's running maximum, sum and
//! accumulator stay f32 over all keys, and so do those of the kernel with gates; without gates
//! devices merge f32 results over own keys and over the other ranks' keys, where a rank needs any.
//! Backward: keys and values travel once more. The owner of a row gets the partial dK and dV of the
//! ranks whose queries see it, in f32, and adds them in rank order, so that equal inputs give equal
//! bits. Where K and V travel as e4m3 (`kv_wire`), every rank computes with the quantised values,
//! its own included: the result does not depend on the strategy or the number of ranks.
//!
//! # Where
//! | | |
//! |---|---|
//! | kernel | `kernels/src/attention/sm90_attention_gated.cu` |
//! |  | `kernels/src/attention/sm90_attention.cu` |
//! |  | `kernels/src/attention/sm90_attention_bwd.cu` |
//! |  | `kernels/src/attention/sm80_attention.cu` |
//! |  | `kernels/src/attention/plain_attention.cu` |
//! |  | `kernels/src/collective/sm80_reduce.cu` |
//! |  | `kernels/src/quant/sm80_quant.cu` |
//! |  | `kernels/src/comm/signal.cu` |
//! | oracle | `crates/oracle/src/attention/mod.rs` |
//! | cases | `crates/cli/src/verify/cp_attention.rs` |
//! | page | `docs/protocols/cp_attention.md` |

mod balanced;
mod config;
mod desc;
mod device;
mod explain;
mod forecast;
mod host;
mod launch;
mod pieces;
mod plan;
mod puts;
mod schedule;
mod schedules;
#[cfg(test)]
mod tests;
mod traffic;
mod transfers;
mod tune;
#[cfg(test)]
mod unsent_tests;
mod work;

pub use config::{CpConfig, KeyOrder, Strategy};
pub use desc::{CpAttentionDesc, Layout};
pub use explain::{CpCandidate, CpExplain};
pub use forecast::CpShare;
pub use launch::Pass;
pub use plan::CpAttentionPlan;
