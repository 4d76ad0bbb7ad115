//! The model that proves the library: a byte-level mixture-of-experts transformer with explicit
//! backward, trained over any grid of ranks.
//!
//! Per layer: norm, `ag_gemm` over tp (queries, keys, values), `cp_attention` over cp, `gemm_rs`
//! over tp (projection back), residual; norm, router, `ep_dispatch` over all ranks, two
//! `grouped_gemm`s with SwiGLU between, `ep_combine`, residual. The backward pass mirrors it
//! through the same plans. N ranks compute what one rank computes, up to rounding.
//!
//! One model for the host and for GPUs ([`Target`]): it queues operations on one stream, on tensors
//! that are made once, and reads nothing until the step has run. On GPUs a step is one graph.
#![forbid(unsafe_code)]

mod activations;
pub mod attn;
pub mod calibrate;
pub mod checkpoint;
pub mod comm;
pub mod config;
pub mod data;
pub mod experts;
mod fault_propagation;
#[cfg(test)]
mod flips;
mod layer;
mod local;
pub mod model;
pub mod params;
pub mod place;
pub mod train;

pub use checkpoint::Checkpoints;
pub use config::{Grid, ModelCfg};
pub use data::Data;
pub use model::Model;
pub use place::Target;
pub use tilewire_ops::layers::AdamW;
pub use train::{StepReport, TrainCfg, Trainer};
