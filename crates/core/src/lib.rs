//! Vocabulary of tilewire: the nouns that every other crate speaks in.
//!
//! No CUDA, no I/O, no threads: everything here is plain data that validates itself.
//!
//! - [`Rank`], [`Team`]: who takes part, in which order.
//! - [`DType`], [`Shape`], [`View`], [`QTensor`]: what is computed on.
//! - [`Error`], [`ErrorKind`]: the one error type of the workspace.
//! - [`memory`]: code that expects an allocation to fail.
//! - [`Deadline`], [`Config`]: how long a wait may last, and the `TILEWIRE_` variables.
#![forbid(unsafe_code)]

mod config;
mod deadline;
mod dtype;
mod error;
#[doc(hidden)]
pub mod inject;
pub mod memory;
pub mod numerics;
mod qtensor;
mod rank;
mod rng;
mod shape;
mod view;

pub use config::{BackendKind, Config, JitMode, LogLevel};
pub use deadline::Deadline;
pub use dtype::{DType, Element, F8E4M3, F8E5M2, convert_from_f32, convert_to_f32};
pub use error::{Error, ErrorKind, Result};
pub use qtensor::{QTensor, ScaleLayout};
pub use rank::{Rank, Team};
pub use rng::Rng;
pub use shape::{MAX_DIMS, Shape};
pub use view::{View, ViewMut};
