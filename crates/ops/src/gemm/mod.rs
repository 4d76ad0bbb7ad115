//! `gemm`: one rank's matrix product with its epilogue; no communication.
//!
//! `D = act(op(A) op(B) + bias)`, optionally with the pre-activation as a second output,
//! optionally times the derivative of an activation, optionally added to what `D` holds.
//! Products are accumulated in f32. The source of the epilogues' definitions is
//! `tilewire_oracle::gemm` (tanh form of GELU; SwiGLU: gate is the first half of the columns).
//!
//! # Where
//! | | |
//! |---|---|
//! | kernel | `kernels/src/gemm/sm80_gemm.cu` |
//! | oracle | `crates/oracle/src/gemm.rs` |
//! | cases | `crates/cli/src/verify/gemm.rs` |
//! | page | `docs/protocols/gemm.md` |

mod backend;
mod desc;
pub(crate) mod device;
pub(crate) mod host;
mod launch;
mod plan;

pub use crate::common::kernel::GemmBackend;
pub use crate::common::operand::Operand;
pub use desc::{AOrder, Activation, BOrder, Epilogue, GemmDesc};
pub use launch::GemmInputs;
pub use plan::GemmPlan;
