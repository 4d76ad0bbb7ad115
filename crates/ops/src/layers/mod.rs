//! `layers`: what a transformer does between its products, and its optimizer.
//!
//! All of it is bound by memory, so that neighbours are one function: the residual sum with the
//! norm behind it, the norm's gradient with the residual's, the rotation of heads with taking rows
//! apart. Nothing here communicates; a [`LayersPlan`] takes no team. Each work is a struct of
//! tensors that [`LayersPlan::run`] queues; what follows on the same stream sees its results.
//!
//! | work | computes |
//! |---|---|
//! | [`Embed`], [`EmbedBwd`] | rows of a table by token; sums of rows by token |
//! | [`AddNorm`] | `sum = x + y`, `out = sum * w / rms(sum)` |
//! | [`NormBwd`] | its gradient plus that of the residual |
//! | [`Heads`] | rows `[q \| k \| v]` taken apart with rotary positions, or joined with them undone |
//! | [`Router`], [`RouterBwd`] | softmax, top-k, weights, how often each expert was chosen |
//! | [`CrossEntropy`] | the loss of rows and the gradient of their logits |
//! | [`SquareSum`], [`AdamStep`], [`CountStep`] | gradient norm; AdamW; the count of steps |
//! | [`Init`] | first values |
//!
//! Activations and weights have the plan's type (f32 or bf16); the residual stream and its
//! gradient, logits, probabilities and gradients of weights are f32. Sums have a fixed order.
//! Definitions are those of `tilewire_oracle::nn`.
//!
//! # Where
//! | | |
//! |---|---|
//! | kernel | `kernels/src/layers/sm80_layers.cu` |
//! |  | `kernels/src/layers/sm80_optimizer.cu` |
//! | oracle | `crates/oracle/src/nn/mod.rs` |
//! | cases | `kernels/tests/emu/layers.rs` |
//! | page | `docs/protocols/layers.md` |

mod adamw;
mod desc;
mod device;
mod host;
pub mod math;
mod plan;
#[cfg(test)]
mod tests;

pub use adamw::{AdamParam, AdamW};
pub use desc::{
    AdamStep, AddNorm, CountStep, CrossEntropy, Embed, EmbedBwd, Heads, Init, LayersDesc, NormBwd,
    Router, RouterBwd, SquareSum,
};
pub use plan::{LayersPlan, Work};
