//! Attention on the host: f32 arithmetic, block by block.

mod core;
mod grad;
mod run;

pub(crate) use self::core::{Core, Dims, Operands, State, store};
pub(crate) use grad::{Grads, Upstream, rows_first};
pub(super) use run::Run;
