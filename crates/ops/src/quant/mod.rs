//! `quant`: f32, bf16 and f16 matrices to FP8 with scales, and back.
//!
//! `value = data * scale` in every layout. With `max` the largest finite value of the FP8 type and
//! `amax` the largest magnitude of the elements that share a scale (NaN ignored):
//!
//! - `scale = amax / max`, one f32 division, not below `2^-126`; with power-of-two scales (always
//!   for MXFP8) the smallest `2^e` with `amax / 2^e <= max`; 1 if `amax` is 0 or infinite.
//! - `code = fp8(x / scale)`: one f32 division, nearest even, saturating. NaN becomes code `0x7F`.
//!
//! Codes and scales are those of `tilewire_oracle::quant`, bit for bit. The per-tensor scale is
//! that of this call ([`Scaling::Current`]) or of earlier calls ([`Scaling::Delayed`]: history in
//! device memory, replayable), for this rank's tensor or for those of all ranks ([`Scope::Team`]).
//!
//! Column-wise results are the transposed matrix `[cols, rows]` with blocks along its own columns:
//! other data than the row-wise result, which is what the second operand of a wgrad needs.
//!
//! # Where
//! | | |
//! |---|---|
//! | kernel | `kernels/src/quant/sm80_quant.cu` |
//! | oracle | `crates/oracle/src/quant.rs` |
//! | cases | `crates/cli/src/verify/quant.rs` |
//! | page | `docs/protocols/quant.md` |

mod dequant;
mod desc;
pub(crate) mod device;
mod host;
mod launch;
mod plan;
mod recipe;
#[cfg(test)]
mod tests;

pub use dequant::DequantPlan;
pub use desc::{DequantDesc, QuantDesc, Quantized, Scaling, Scope, Sides};
pub use launch::QuantInputs;
pub use plan::QuantPlan;
pub use recipe::Recipe;
